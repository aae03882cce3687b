"""score_mod and mask_mod as a score and a mask, kept for other calls with functions that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.compat.torch.captured import captured_by, check_exchange, with_captured
from regard.compat.torch.function_copies import copy_of, template_of
from regard.compat.torch.mask_mods import MaskMod, translate_mask
from regard.compat.torch.pair_functions import NotRecorded, Sizes
from regard.compat.torch.row_products import RowProduct, row_product
from regard.compat.torch.score_mods import LearnedScoreMod, ScoreMod, translate_score
from regard.core.functions import Unknown
from regard.core.shapes import count_of
from regard.core.value import number_key
from regard.core.wrong_calls import check_parameters
from regard.masks.algebra import Everything, Mask
from regard.runtime.outline import transformed
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot

Mod = Callable[..., Tensor]
_MOST, _MOST_BYTES = 256, 1 << 25  # translations that are kept, and their tensors
_PARAMETERS = ("score", "b", "h", "i", "j")  # of a score_mod
_kept: dict[Any, Translation] = {}
_changing = Lock()


class Translation(NamedTuple):
    """The score and the mask that two functions compute, and how each function was read, for `explain`.

    rows: more features of queries and keys
    """

    score: Score
    mask: Mask
    facts: tuple[tuple[str, str], ...]
    rows: RowProduct | None = None

    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.score.tensors(), *self.mask.tensors()))


def translated_call(
    score_mod: Mod | None, mask_mod: Mod | None, scale: float, sizes: Sizes, key: Tensor
) -> Translation:
    """As `translated`; the rows of a score_mod that adds their product become features of queries and keys."""
    rows = None if score_mod is None or transformed() else row_product(score_mod, scale, sizes, key)
    if rows is None:
        return translated(score_mod, mask_mod, scale, sizes)
    score, mask, facts, _ = translated(None, mask_mod, scale, sizes)
    said = f"a product of rows of {count_of(rows.query.shape[-1], 'number')}, as more features of query and key"
    return Translation(score, mask, (("score_mod", said), *facts), rows)


def translated(score_mod: Mod | None, mask_mod: Mod | None, scale: float, sizes: Sizes) -> Translation:
    """What two functions compute in a call of these sizes; scale: of the product of q and k.

    It is kept for functions of the same code that read the same numbers, and made from copies of these: who changes a
    number later, or a tensor in place, gets another one.
    """
    try:
        if transformed() or type(scale) not in (int, float):  # a tensor may change
            raise Unknown
        copies = copy_of(score_mod), copy_of(mask_mod)
    except Unknown:
        learned = None if score_mod is None else _learned(score_mod, sizes)
        if learned is None:
            return _translated(score_mod, mask_mod, scale, sizes)
        score, mask, facts, _ = translated(None, mask_mod, scale, sizes)
        said = f"a function of single pairs, with gradients of {count_of(len(learned.learned), 'tensor')}"
        return Translation(score >> learned, mask, (("score_mod", said), *facts))
    key = *copies, number_key(scale), sizes, torch.get_default_dtype()
    found = _kept.get(key)
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # training may call with what is kept
            found = _translated(*copies, scale, sizes)
        with _changing:
            _kept[key] = found
            while len(_kept) > _MOST or sum(kept.nbytes() for kept in _kept.values()) > _MOST_BYTES:
                del _kept[next(iter(_kept))]
    return found


def _learned(score_mod: Mod, sizes: Sizes) -> LearnedScoreMod | None:
    """A score_mod that reads tensors with gradients; None for others."""
    if not (sizes.pairs and torch.is_grad_enabled()):
        return None
    check_parameters(score_mod, "score_mod", _PARAMETERS)
    try:
        fn, tensors = template_of(score_mod)
    except Unknown:  # what it reads is found while it runs
        score = torch.zeros((), dtype=sizes.dtype, device=sizes.device)
        index = torch.zeros((), dtype=torch.int64, device=sizes.device)
        tensors = captured_by(score_mod, score, index, index, index, index)
        if tensors and not transformed():
            check_exchange(score_mod, tensors, score, index, index, index, index)
        fn = with_captured(score_mod, tensors)
    return LearnedScoreMod(fn, tensors) if tensors else None


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
            check_parameters(score_mod, "score_mod", _PARAMETERS)
            raise
    if mask_mod is not None:
        seen = translate_mask(mask_mod, sizes)
        how = "called for each pair" if isinstance(seen, MaskMod) else "read as regard's own mask"
        facts.append(("mask_mod", how))
        mask = mask & seen
    return Translation(score, mask, tuple(facts))
