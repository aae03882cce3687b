"""Stacks: what reports call the layers of a model, by their paths: its encoder's, its decoder's, its cross-attention.

The labels are for readers. How a call is read never depends on them: see regard.inspect.kinds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_SIDES = ("encoder", "decoder")
# The names of transformers' modules; of encoder_attn those alone that a decoder has.
_CROSS = re.compile(r"cross_?att.*", re.IGNORECASE)
_OF_ENCODER = re.compile(r"enc(oder)?_?(dec(oder)?)?_?att.*", re.IGNORECASE)


def _is_called_cross(name: str) -> bool:
    """Whether a layer's path in the model calls it cross-attention.

    >>> _is_called_cross("decoder.block.0.layer.1.EncDecAttention"), _is_called_cross("decoder.layers.0.encoder_attn")
    (True, True)
    >>> _is_called_cross("encoder.layer.0.crossattention.self"), _is_called_cross("encoder.layers.0.self_attn")
    (True, False)
    """
    parts = name.split(".")
    of_encoder = any(map(_OF_ENCODER.fullmatch, parts[parts.index("decoder") :] if "decoder" in parts else ()))
    return of_encoder or any(map(_CROSS.fullmatch, parts))


def stack(name: str, cross: bool) -> str:
    """The side of the model that a path names first, and whether the layer is cross-attention.

    >>> stack("encoder.layers.0.self_attn", False), stack("model.decoder.layers.0.attn", True), stack("h.0", False)
    ('encoder', 'decoder cross', '')
    """
    side = next((part for part in name.split(".") if part in _SIDES), "")
    return f"{side} cross".strip() if cross else side


def places(names: Sequence[str], crosses: Sequence[bool] | None = None) -> list[str]:
    """What each layer is called, counted in its stack: "decoder cross L2"; "L2" where the model has one stack alone.

    crosses  whether each is cross-attention, where that is known; None: as their paths call them

    >>> places(["encoder.0.attn", "encoder.1.attn", "decoder.0.self_attn", "decoder.0.cross_attn"])
    ['encoder L0', 'encoder L1', 'decoder L0', 'decoder cross L0']
    >>> places(["encoder.layer.0.attention", "encoder.layer.1.attention"])
    ['L0', 'L1']
    >>> places(["layers.0.self_attn", "layers.0.multihead_attn"], [False, True])
    ['L0', 'cross L0']
    """
    stacks = _stacks(names, crosses)
    several = len(set(stacks)) > 1
    count, found = Counter[str](), list[str]()
    for one in stacks:
        found.append(f"{one if several else ''} L{count[one]}".strip())
        count[one] += 1
    return found


def in_order(names: Sequence[str], crosses: Sequence[bool] | None = None) -> list[int]:
    """The indices of the names, those of a stack together, stacks in the order in which they begin.

    >>> in_order(["encoder.0", "decoder.0.self_attn", "decoder.0.cross_attn", "decoder.1.self_attn"])
    [0, 1, 3, 2]
    """
    stacks = _stacks(names, crosses)
    return sorted(range(len(names)), key=lambda index: stacks.index(stacks[index]))


def _stacks(names: Sequence[str], crosses: Sequence[bool] | None) -> list[str]:
    known = [_is_called_cross(name) for name in names] if crosses is None else crosses
    return [stack(name, cross) for name, cross in zip(names, known, strict=True)]
