"""Stacks: which layers of a model are its encoder's, its decoder's own and those by which it reads the encoder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_SIDES = ("encoder", "decoder")
# The names of transformers' modules; of encoder_attn those alone that a decoder has.
_CROSS = re.compile(r"cross_?att.*", re.IGNORECASE)
_OF_ENCODER = re.compile(r"enc(oder)?_?(dec(oder)?)?_?att.*", re.IGNORECASE)


def reads_another(name: str) -> bool:
    """Whether a layer is cross-attention, by its path in the model: the queries of one sequence on keys of another.

    >>> reads_another("decoder.block.0.layer.1.EncDecAttention"), reads_another("decoder.layers.0.encoder_attn")
    (True, True)
    >>> reads_another("encoder.layer.0.crossattention.self"), reads_another("encoder.layers.0.self_attn")
    (True, False)
    """
    parts = name.split(".")
    of_encoder = any(map(_OF_ENCODER.fullmatch, parts[parts.index("decoder") :] if "decoder" in parts else ()))
    return of_encoder or any(map(_CROSS.fullmatch, parts))


def stack(name: str) -> str:
    """The side of the model that a path names first, and whether the layer is cross-attention.

    >>> stack("model.encoder.layers.0.self_attn"), stack("model.decoder.layers.0.encoder_attn"), stack("h.0.attn")
    ('encoder', 'decoder cross', '')
    """
    side = next((part for part in name.split(".") if part in _SIDES), "")
    return f"{side} cross".strip() if reads_another(name) else side


def places(names: Sequence[str]) -> list[str]:
    """What each layer is called, counted in its stack: "decoder cross L2"; "L2" where the model has one stack alone.

    >>> places(["encoder.0.attn", "encoder.1.attn", "decoder.0.self_attn", "decoder.0.cross_attn"])
    ['encoder L0', 'encoder L1', 'decoder L0', 'decoder cross L0']
    >>> places(["encoder.layer.0.attention", "encoder.layer.1.attention"])
    ['L0', 'L1']
    """
    stacks = [stack(name) for name in names]
    several = len(set(stacks)) > 1
    count, found = Counter[str](), list[str]()
    for one in stacks:
        found.append(f"{one if several else ''} L{count[one]}".strip())
        count[one] += 1
    return found


def in_order(names: Sequence[str]) -> list[int]:
    """The indices of the names, those of a stack together, stacks in the order in which they begin.

    >>> in_order(["encoder.0", "decoder.0.self_attn", "decoder.0.cross_attn", "decoder.1.self_attn"])
    [0, 1, 3, 2]
    """
    stacks = [stack(name) for name in names]
    return sorted(range(len(names)), key=lambda index: stacks.index(stacks[index]))
