"""score_mod and mask_mod as a score and a mask, kept for other calls with functions that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.compat.torch.mask_mods import MaskMod, translate_mask
from regard.compat.torch.pair_functions import NotRecorded, Sizes
from regard.compat.torch.score_mods import ScoreMod, translate_score
from regard.core.functions import Unknown, frozen, function_key, settle
from regard.core.value import number_key
from regard.core.wrong_calls import check_parameters
from regard.masks.algebra import Everything, Mask
from regard.runtime.outline import plain, transformed
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot

Mod = Callable[..., Tensor]
_MOST, _MOST_BYTES = 256, 1 << 25  # translations that are kept, and their tensors
_MOST_OF_A_TENSOR = 1 << 16  # bytes that are part of a key
_kept: dict[Any, Translation] = {}
_functions: dict[Any, FunctionType] = {}  # copies of functions, by what these read
_changing = Lock()


class Translation(NamedTuple):
    """The score and the mask that two functions compute, and how each function was read, for `explain`."""

    score: Score
    mask: Mask
    facts: tuple[tuple[str, str], ...]

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.score.tensors(), *self.mask.tensors()))


def translated(score_mod: Mod | None, mask_mod: Mod | None, scale: float, sizes: Sizes) -> Translation:
    """What two functions compute in a call of these sizes; scale: of the product of q and k.

    It is kept for functions of the same code that read the same numbers, and made from copies of these: who changes a
    number later, or a tensor in place, gets another one.
    """
    try:
        if transformed() or type(scale) not in (int, float):  # a tensor may change
            raise Unknown
        copies = _copy_of(score_mod), _copy_of(mask_mod)
    except Unknown:
        return _translated(score_mod, mask_mod, scale, sizes)
    key = *copies, number_key(scale), sizes, torch.get_default_dtype()
    found = _kept.get(key)
    if found is None:
        found = _translated(*copies, scale, sizes)
        with _changing:
            _kept[key] = found
            while len(_kept) > _MOST or sum(kept.nbytes() for kept in _kept.values()) > _MOST_BYTES:
                del _kept[next(iter(_kept))]
    return found


def may_read_gradients(score_mod: Mod) -> bool:
    """Whether a score_mod may use a tensor that requires a gradient."""
    try:
        _copy_of(score_mod)
    except Unknown:
        return True
    return False


def _copy_of(fn: Mod | None) -> FunctionType | None:
    """The copy that is kept of a function that reads the same; a new one of the first. Raises Unknown."""
    if fn is None:
        return None
    if type(fn) is not FunctionType:
        raise Unknown
    found = _functions.get(function_key(fn, content=_content))
    if found is None:
        made = frozen(fn)
        key = function_key(made, content=_content)  # another thread may have changed what fn reads
        with _changing:
            if len(_functions) >= _MOST:
                _functions.clear()
            found = _functions.setdefault(key, made)
            settle(found)
    return found


def _content(t: Tensor) -> Hashable:
    """A tensor by its numbers. Raises Unknown where they are many, or cannot be read, or have a gradient."""
    if t.requires_grad or not plain(t) or t.is_complex() or t.nbytes > _MOST_OF_A_TENSOR:
        raise Unknown
    return t.dtype, t.shape, t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _translated(score_mod: Mod | None, mask_mod: Mod | None, scale: float, sizes: Sizes) -> Translation:
    score: Score = ScaledDot(scale)
    mask: Mask = Everything()
    facts = list[tuple[str, str]]()
    if score_mod is not None:
        try:
            score, mask = translate_score(score_mod, scale, sizes)
            facts.append(("score_mod", "read as regard's own score and mask"))
        except NotRecorded as why:
            score = score >> ScoreMod(score_mod)
            facts.append(("score_mod", f"a function of single pairs: {why}"))
        except TypeError:
            check_parameters(score_mod, "score_mod", ("score", "b", "h", "i", "j"))
            raise
    if mask_mod is not None:
        seen = translate_mask(mask_mod, sizes)
        how = "called for each pair" if isinstance(seen, MaskMod) else "read as regard's own mask"
        facts.append(("mask_mod", how))
        mask = mask & seen
    return Translation(score, mask, tuple(facts))
