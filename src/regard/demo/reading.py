"""The byte model reads a text, and what its attention did is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from regard.demo.model import ByteTransformer
from regard.inspect.facts.algebra import Fact
from regard.inspect.record import record
from regard.inspect.report.report import Report
from regard.nn.multihead import MultiHeadAttention

CONTEXT = 8  # bytes that must repeat before an earlier copy counts as one


def read(
    model: ByteTransformer,
    text: bytes,
    progress: Callable[[int], None] = lambda layers: None,
    facts: tuple[Fact[Any], ...] = Report.FACTS,
) -> Report:
    """Runs the model on a text of 2 bytes or more and looks at each layer; `progress` is told how many are done.

    facts: what is recorded of each layer, Report.FACTS and, for Report.row, facts.Inputs().

    Raises ValueError for a shorter text.
    """
    if len(text) < 2:
        raise ValueError(f"the text has {len(text)} bytes; expected 2 or more.")
    tokens, start = torch.tensor(list(text)), time.perf_counter()
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    with torch.no_grad(), record(model, facts) as tape:
        hooks = [layer.register_forward_hook(lambda *_: progress(len(tape))) for layer in layers]
        try:
            loss = cross_entropy(model(tokens[None])[0, :-1], tokens[1:])
        finally:
            for hook in hooks:
                hook.remove()
    return Report.of(
        tape.calls,
        title="byte model",
        model=type(model).__name__,
        tokens=[character(byte) for byte in text],
        unit="byte",
        context=CONTEXT,
        seconds=time.perf_counter() - start,
        notes=(f"loss {float(loss):.2f} nats a byte",),
    )


class ByteTokenizer:
    """The bytes of a text as tokens, asked for as of a tokenizer of transformers.

    >>> ByteTokenizer()("as")["input_ids"], ByteTokenizer().convert_ids_to_tokens([97, 200])
    ([97, 115], ['a', '\\\\xc8'])
    """

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """There are no special ones."""
        return {"input_ids": list(text.encode())}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [character(byte) for byte in ids]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(character, token_ids))


def character(byte: int) -> str:
    """A byte as text: its character, where it is one of ASCII.

    >>> character(65), character(200)
    ('A', '\\\\xc8')
    """
    return chr(byte) if byte < 128 else f"\\x{byte:02x}"
