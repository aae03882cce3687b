"""The byte model reads a text, and what its attention did is reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from regard.core.shapes import count_of
from regard.demo.model import ByteTransformer, character
from regard.inspect.facts.algebra import Fact
from regard.inspect.record import record
from regard.inspect.report.report import Report
from regard.nn.multihead import MultiHeadAttention

CONTEXT = 8  # bytes that must repeat before an earlier copy counts as one


def read(
    model: ByteTransformer,
    text: bytes,
    progress: Callable[[int], None] = lambda layers: None,
    facts: tuple[Fact[Any], ...] | None = None,
) -> Report:
    """Runs the model on a text of 2 bytes or more and looks at each layer; `progress` is called with the number done.

    facts: what is recorded of each layer; the default is Report.FACTS and, for texts of up to 2,048 bytes,
    facts.Inputs(), from which Report.row and the weights in .npz are computed.

    Raises ValueError for a shorter text, TypeError for a str.
    """
    if isinstance(text, str):
        raise TypeError("the text is a str; expected bytes: text.encode().")
    if len(text) < 2:
        raise ValueError(f"the text has {count_of(len(text), 'byte')}; expected 2 or more.")
    tokens, start = torch.tensor(list(text), dtype=torch.int64, device="cpu"), time.perf_counter()
    facts = Report.facts_of_text(len(text)) if facts is None else facts
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
