"""Reports on long texts of made words, with the queries and keys of a model whose heads go by the word alone."""

from __future__ import annotations

import torch

import regard as rg

FACTS = (*rg.Report.FACTS, rg.facts.Inputs())


def words(stop: int, start: int = 0) -> list[str]:
    """w0, w1, ...: each is another word."""
    return [f"w{n}" for n in range(start, stop)]


class Attends(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, mask: rg.Mask) -> torch.Tensor:
        return rg.attention(q, k, k, mask=mask)


class Model(torch.nn.Module):
    """Attends from queries to keys; the second call, if any, from fewer queries."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attends(), Attends()

    def forward(self, q: torch.Tensor, k: torch.Tensor, mask: rg.Mask, fewer: int = 0) -> None:
        self.first(q, k, mask)
        if fewer:
            self.second(q[..., :fewer, :], k, rg.Everything())


def of_words(
    text: list[str], facts: tuple[rg.facts.Fact, ...] = FACTS, mask: rg.Mask = rg.Causal(), fewer: int = 0
) -> rg.Report:
    """A layer of two heads whose queries and keys depend on the word alone, and another one with fewer queries."""
    table = torch.randn(2, 1, 2, 1000, 8, generator=torch.Generator().manual_seed(1)) * 2
    q, k = table[:, :, :, [int(word[1:]) for word in text]]
    model = Model()
    with torch.no_grad(), rg.record(model, facts) as tape:
        model(q, k, mask, fewer)
    if not fewer:
        return rg.Report.of(tape.calls, title="words", model="Made", tokens=text)
    form = {"tokens": words(fewer), "key_tokens": text, "cross": "second"}
    return rg.Report.of(tape.calls, title="words", model="Made", **form)
