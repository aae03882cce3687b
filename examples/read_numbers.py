"""Bahdanau's alignment, learned: number words become digits, and the additive weights show which word each digit read.

    python examples/read_numbers.py

"forty-two thousand and seven" → 42007. A recurrent encoder reads the words, a recurrent decoder asks for the next digit
with one additive attention a step, all of them in one call while training (teacher forcing). Zeros that no word names
make it more than copying. About a minute on two cores; deterministic by seed.
Source: Bahdanau, Cho and Bengio 2014 (arXiv 1409.0473).
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import regard as rg

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
ONES += ["seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = ["<pad>", *ONES, *TENS, "hundred", "thousand", "and"]
CODE = {word: n for n, word in enumerate(WORDS)}
BEGIN, END, DIGITS = 10, 11, 12  # beside the digits 0 to 9


def say(n: int) -> list[str]:
    """The English words of 0 ≤ n < 1,000,000."""
    if n < 20:
        return [ONES[n]]
    if n < 100:
        return [TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])]
    if n < 1000:
        return [ONES[n // 100], "hundred", *(["and", *say(n % 100)] if n % 100 else [])]
    rest = n % 1000
    return [*say(n // 1000), "thousand", *((["and"] if rest < 100 else []) + say(rest) if rest else [])]


def batch(numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Words (b, n) padded by 0, their lengths (b,), digits with both ends (b, m), padded by END."""
    said, written = [say(n) for n in numbers], [str(n) for n in numbers]
    words = torch.zeros(len(numbers), max(map(len, said)), dtype=torch.long)
    digits = torch.full((len(numbers), max(map(len, written)) + 2), END)
    digits[:, 0] = BEGIN
    for row, (sentence, number) in enumerate(zip(said, written, strict=True)):
        words[row, : len(sentence)] = torch.tensor([CODE[word] for word in sentence])
        digits[row, 1 : len(number) + 1] = torch.tensor([int(d) for d in number])
    return words, torch.tensor([len(s) for s in said]), digits


class Translator(nn.Module):
    """A GRU reads, a GRU asks, additive attention answers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words, self.digits = nn.Embedding(len(WORDS), width), nn.Embedding(DIGITS, width)
        self.reader = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.asker = nn.GRU(width, width, batch_first=True)
        self.look = rg.nn.Attention(
            width, d_k=None, d_v=width, d_context=2 * width, score=rg.nn.AdditiveScore(width, 2 * width, hidden=width)
        )
        self.answer = nn.Sequential(nn.Linear(2 * width, width), nn.Tanh(), nn.Linear(width, DIGITS))

    def read(self, words: Tensor) -> Tensor:
        return self.reader(self.words(words))[0]

    def forward(self, words: Tensor, lengths: Tensor, digits: Tensor) -> Tensor:
        """Logits (b, m, DIGITS) of what follows each of the digits (b, m)."""
        asked = self.asker(self.digits(digits))[0]
        seen = self.look(asked, self.read(words), mask=rg.Lengths(keys=lengths))
        return self.answer(torch.cat([asked, seen], -1))

    @torch.no_grad()
    def translate(self, words: Tensor, lengths: Tensor, most: int = 8) -> tuple[Tensor, Tensor]:
        """Digits (b, ≤ most), chosen one by one, and the weights (b, steps, n) with which each was read."""
        memory, mask = self.read(words), rg.Lengths(keys=lengths)
        digit, state = torch.full((len(words), 1), BEGIN), None
        chosen, weights = [], []
        for _ in range(most):
            asked, state = self.asker(self.digits(digit), state)
            weights.append(self.look.weights(asked, memory, mask=mask))
            seen = self.look(asked, memory, mask=mask)
            digit = self.answer(torch.cat([asked, seen], -1)).argmax(-1)
            chosen.append(digit)
        return torch.cat(chosen, -1), torch.cat(weights, -2)


def train(steps: int, seed: int = 0) -> Translator:
    torch.manual_seed(seed)
    draw, model = random.Random(seed), Translator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for step in range(steps):
        words, lengths, digits = batch([draw.randrange(10 ** draw.randint(1, 6)) for _ in range(128)])
        loss = cross_entropy(model(words, lengths, digits[:, :-1]).flatten(0, 1), digits[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5}  loss {loss.item():.4f}")
    return model.eval()


def right(model: Translator, numbers: list[int]) -> float:
    """The share of the numbers that are translated without a fault."""
    words, lengths, _ = batch(numbers)
    found, _ = model.translate(words, lengths)
    return sum(_number(row) == str(n) for row, n in zip(found.tolist(), numbers, strict=True)) / len(numbers)


def _number(row: list[int]) -> str:
    return "".join(map(str, row[: row.index(END)])) if END in row else "?"


def show(model: Translator, n: int) -> None:
    """What each digit of one number was read from."""
    words, lengths, _ = batch([n])
    found, weights = model.translate(words, lengths)
    print(f"\n{' '.join(say(n))} → {_number(found[0].tolist())}")
    for digit, row in zip(found[0].tolist(), weights[0], strict=True):
        if digit == END:
            break
        best = row.topk(min(2, len(row)))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        print(f"  {digit}  " + ", ".join(f"{say(n)[j]} {share:.0%}" for share, j in pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=400)
    model = train(parser.parse_args().steps)
    draw = random.Random(12345)
    unseen = [draw.randrange(1_000_000) for _ in range(500)]
    print(f"right: {right(model, unseen):.1%} of 500 numbers below a million")
    for n in (42_007, 905_310):
        show(model, n)


if __name__ == "__main__":
    main()
