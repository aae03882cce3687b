"""Scores and masks of a person's, recorded while a graph of torch is made: as the texts that text.py reads.

A score or a mask is described by constants (call/described.py), and a function whose result is a constant to
torch.compile builds another one of these and records it: see examples.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from regard.backends.native.programs.examples import NO, REFUSED, text_of
from regard.backends.native.programs.operations import PROGRAM_OPERANDS
from regard.backends.native.programs.text import RecordedFunction, RecordedMask, RecordedModifier
from regard.call.described import CHANGES, described, described_frame
from regard.core.errors import Unsupported
from regard.core.region import Frame
from regard.core.tracing import constant_in_graphs, loaded
from regard.core.value import Value
from regard.masks.algebra import Mask
from regard.scores.algebra import Modifier
from regard.scores.elementwise import Elementwise


def record_modifiers(stages: Sequence[Modifier], frame: Frame) -> RecordedModifier | str:
    """All modifiers of a score as one that holds their tensors; or why that cannot be, as a clause."""
    tensors = tuple([t for stage in stages for t in stage.tensors()])
    if len(tensors) > PROGRAM_OPERANDS:
        return f"it holds {len(tensors)} tensors; a node of a graph has room for {PROGRAM_OPERANDS}"
    found = _recorded("modifiers", tuple(stages), frame)
    if found.startswith(NO):
        return found.removeprefix(NO)
    if torch.compiler.is_dynamo_compiling():
        at = frame.region(slice(0, 2), slice(0, 2))  # sizes that may change are 2 at least
        few = min(frame.nq, 2), min(frame.nk, 2)
        s = torch.zeros((*frame.batch, frame.heads, *few), dtype=torch.float32, device="cpu")
        for stage in stages:  # torch.compile guards what it reads on the way; nothing reads the result
            s = cast("Modifier", stage.local(at)).modify(s, at)
        if _numbers_change() or _is_changed():
            return CHANGES
    return RecordedModifier(found, tensors)


def record_mask(mask: Mask, frame: Frame) -> RecordedMask | str:
    """A mask as one that holds its tensors; or why that cannot be, as a clause."""
    found = _recorded("mask", (mask,), frame)
    if found.startswith(NO):
        return found.removeprefix(NO)
    if torch.compiler.is_dynamo_compiling():
        mask.visible(frame.region(slice(0, 2), slice(0, 2)))  # as above
        if _numbers_change() or _is_changed():
            return CHANGES
    return RecordedMask(found, mask.tensors())


def record_features(similarity: Elementwise, heads: int, width: int) -> RecordedFunction | str:
    """The function of an Elementwise; or why it cannot be recorded, as a clause."""
    found = _recorded("features", (similarity,), Frame.of(1, width, batch=(heads,), device="cpu"))
    if found.startswith(NO):
        return found.removeprefix(NO)
    if torch.compiler.is_dynamo_compiling():
        q = torch.zeros(1, heads, 1, 1, width, dtype=torch.float32, device="cpu")
        similarity.fn(q, q, *similarity.aligned(similarity.inputs))  # as above
        if _numbers_change() or _is_changed():
            return CHANGES
    return RecordedFunction(found)


def _recorded(kind: str, items: tuple[Value, ...], frame: Frame) -> str:
    """A text, or NO and why there is none. Raises Unsupported."""
    unknown: list[str] = []
    values = tuple([described(item, (frame.nq, frame.nk), unknown) for item in items])
    if not frame.headed and any(t.dim() > 1 for item in items for t in item.tensors()):
        unknown.append("it holds tensors without the axis of heads that a node of a graph has")
    if unknown:
        return NO + unknown[0]
    found = text_of(kind, values, described_frame(frame))
    if found.startswith(REFUSED):
        raise Unsupported(found.removeprefix(REFUSED))
    return found


@constant_in_graphs
def _numbers_change() -> bool:
    """Whether the graph that torch.compile is making serves several values of a number that is no size of a tensor.

    A function that reads such a number has no guard for the value that it had while it was recorded.
    """
    context = loaded("torch._guards").TracingContext.try_get()
    known = None if context is None or context.fake_mode is None else context.fake_mode.shape_env
    if known is None:
        return False
    for symbol, sources in known.var_to_sources.items():
        fixed = known.replacements.get(symbol, symbol).is_number
        if not fixed and any(type(source).__name__ != "TensorPropertySource" for source in sources):
            return True
    return False


@constant_in_graphs
def _is_changed() -> bool:
    """Whether what torch.compile follows has assigned a variable, or written into an object, of the world around it.

    Python sees that only when the graph has run: a function that is recorded meanwhile reads the value from before.
    """
    try:
        effects = loaded("torch._dynamo.symbolic_convert").InstructionTranslator.current_tx().output.side_effects
        changed = effects._get_modified_vars()
    except AttributeError:  # a version of torch that keeps them elsewhere
        return True
    return any(type(var.mutation_type).__name__.endswith("Existing") for var in changed)
