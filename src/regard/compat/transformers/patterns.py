"""The mask functions of transformers as masks: those that it makes itself are recognised, all others stay functions.

A function is recognised by its code, which must be that of one of the factories in transformers.masking_utils, and
only where a small example of that factory lets through the same pairs as the mask that stands for it: both are checked
when this module is imported. So a release of transformers that changes a pattern is met by `Where`, never by a wrong
mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from regard.core.positions import Positions, head
from regard.masks.algebra import And, Everything, Mask, Or
from regard.masks.dense import Where
from regard.masks.positional import Causal, Window
from regard.masks.ragged import Documents

N = 7  # tokens of the examples

# fn(batch, head, query, key) -> whether the query may see the key, by absolute positions
MaskFunction = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class MaskContext:
    """Where the queries (nq,) and the keys (nk,) of a mask stand, and how its functions want to be asked.

    mapped: they take one number each, and are mapped over all pairs by torch.vmap; otherwise they broadcast.
    """

    positions: Positions
    mapped: bool = False


# the mask of a function that captured these names; None where it is not sure
Pattern = Callable[[dict[str, Any], MaskContext], "Mask | None"]


def mask_of(fn: MaskFunction, at: MaskContext) -> Mask:
    """The mask that lets through what `fn` does: of regard's own where that is proven, else Where(fn).

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> from regard.core.positions import head
    >>> mask_of(sliding_window_causal_mask_function(3), MaskContext(head(5, 5)))
    Window(before=2, after=None) & Causal()
    """
    if torch.compiler.is_compiling():
        return _plainly(fn, at)
    code: CodeType | None = getattr(fn, "__code__", None)
    pattern = _PATTERNS.get(code) if code is not None else None
    known = pattern(_captured(fn), at) if pattern is not None else None
    return _where(fn, at) if known is None else known


def _plainly(fn: MaskFunction, at: MaskContext) -> Mask:
    """What a compiler can follow, which may not look into functions."""
    if fn is masking_utils.causal_mask_function:
        return Causal()
    return Everything() if fn is masking_utils.bidirectional_mask_function else _where(fn, at)


def _captured(fn: Any) -> dict[str, Any]:
    cells = fn.__closure__ or ()
    return dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _where(fn: MaskFunction, at: MaskContext) -> Mask:
    """transformers asks about head 0 alone: one answer for all heads."""
    if not at.mapped:
        return Where(lambda b, h, i, j: fn(b, torch.zeros_like(h[:1]), i, j))
    over_keys = torch.vmap(fn, (None, None, None, 0))
    over_queries = torch.vmap(over_keys, (None, None, 0, None))
    each = torch.vmap(over_queries, (0, None, None, None))

    def ask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        # a function written for one pair may index tensors by it, which vmap allows only within this context
        with masking_utils.TransformGetItemToIndex():  # pyright: ignore[reportPrivateImportUsage]
            return each(b.flatten(), torch.zeros_like(h.flatten()[0]), i.flatten(), j.flatten())[:, None]

    return Where(ask)


def _every(captured: dict[str, Any], at: MaskContext) -> Mask:
    return Everything()


def _causal(captured: dict[str, Any], at: MaskContext) -> Mask:
    return Causal()


def _window_behind(captured: dict[str, Any], at: MaskContext) -> Mask | None:
    width = captured["sliding_window"]
    return Window(before=width - 1, after=None) if isinstance(width, int) and width > 0 else None


def _window_around(captured: dict[str, Any], at: MaskContext) -> Mask | None:
    width = captured["sliding_window"]
    return Window(before=width, after=width) if isinstance(width, int) and width >= 0 else None


def _chunks(captured: dict[str, Any], at: MaskContext) -> Mask:
    first = captured["left_padding"].long()[:, None]
    q, k = ((p - first) // captured["chunk_size"] for p in (at.positions.q, at.positions.k))
    return Documents(q, k)


def _blocks(captured: dict[str, Any], at: MaskContext) -> Mask:
    """The number -1 belongs to no block, not to one block."""
    ids: Tensor = captured["block_sequence_ids"].long()
    q, k = ids[:, at.positions.q], ids[:, at.positions.k]
    return Documents(q.masked_fill(q < 0, -2), k.masked_fill(k < 0, -1))


def _documents(captured: dict[str, Any], at: MaskContext) -> Mask:
    ids: Tensor = captured["packed_sequence_mask"].long()
    return Documents(ids[:, at.positions.q], ids[:, at.positions.k])


def _intersection(captured: dict[str, Any], at: MaskContext) -> Mask:
    functions: tuple[MaskFunction, ...] = captured["mask_functions"]
    packed = _packed(functions, at)
    if packed is not None:
        return packed
    mask: Mask = Everything()
    for fn in functions:
        mask = mask & mask_of(fn, at)
    return mask


def _union(captured: dict[str, Any], at: MaskContext) -> Mask:
    first, *rest = captured["mask_functions"]
    mask = mask_of(first, at)
    for fn in rest:
        mask = mask | mask_of(fn, at)
    return mask


def _packed(functions: tuple[MaskFunction, ...], at: MaskContext) -> Mask | None:
    """Documents, and inside each a pattern of differences alone: the documents' own positions need not be known."""
    inner = _inside_documents(functions)
    inside = None if inner is None else mask_of(inner, at)
    if inside is None or not of_differences(inside):
        return None
    ids, position_ids = _captured(functions[0])["packed_sequence_mask"], _captured(functions[1])["position_ids"]
    # one step of a document's own positions must be one step of the row
    unlike = (position_ids.diff(dim=-1) != 1) & (ids.diff(dim=-1) == 0)
    if torch.compiler.is_compiling() or bool(unlike.any()):
        return None
    return Documents(ids[:, at.positions.q].long(), ids[:, at.positions.k].long()) & inside


def _inside_documents(functions: tuple[MaskFunction, ...]) -> MaskFunction | None:
    """The function of the pattern inside each document, where transformers has joined it with their numbers."""
    if len(functions) != 2 or [getattr(fn, "__code__", None) for fn in functions] != _PACKED:
        return None
    return _captured(functions[1])["mask_function"]


def without_documents(fn: MaskFunction) -> tuple[MaskFunction, bool]:
    """The function of the pattern inside each document, and whether transformers has found documents at all."""
    code = getattr(fn, "__code__", None)
    inner = _inside_documents(_captured(fn)["mask_functions"]) if code is not None and code is _JOINED else None
    return (fn, False) if inner is None else (inner, True)


def of_differences(mask: Mask) -> bool:
    """Whether a mask is known to depend on distances alone, not on where a sequence begins."""
    if isinstance(mask, (And, Or)):
        return of_differences(mask.a) and of_differences(mask.b)
    return isinstance(mask, (Causal, Window, Everything))


def _examples() -> dict[str, tuple[MaskFunction, Pattern]]:
    """One function of each factory that this release has, by the factory's name; parts before what joins them."""
    ids = torch.tensor([[0, 0, -1, 1, 1, 1, -1], [-1, -1, 2, 2, -1, 0, 0]], dtype=torch.int64, device="cpu")
    packed = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 2]], dtype=torch.int64, device="cpu")
    causal = masking_utils.causal_mask_function
    given: dict[str, tuple[tuple[Any, ...], Pattern]] = {
        "sliding_window_overlay": ((3,), _window_behind),
        "sliding_window_bidirectional_overlay": ((2,), _window_around),
        "chunked_overlay": ((3, torch.tensor([0, 2], dtype=torch.int64, device="cpu")), _chunks),
        "blockwise_overlay": ((ids,), _blocks),
        "packed_sequence_mask_function": ((packed,), _documents),
        "and_masks": ((causal, lambda b, h, i, j: j > i - 3), _intersection),
        "or_masks": ((causal, lambda b, h, i, j: j < 2), _union),
    }
    found: dict[str, tuple[MaskFunction, Pattern]] = {
        "causal_mask_function": (causal, _causal),
        "bidirectional_mask_function": (masking_utils.bidirectional_mask_function, _every),
    }
    for name, (arguments, pattern) in given.items():
        factory = getattr(masking_utils, name, None)
        if factory is not None:
            found[name] = factory(*arguments), pattern
    return found


def _packed_codes() -> list[CodeType]:
    """The two functions of packed_sequence_compatibility_function, which joins them by and_masks; older: none."""
    ids = torch.zeros(1, N, dtype=torch.int64, device="cpu")
    factory = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if factory is None:
        return []
    joined = factory(masking_utils.causal_mask_function, ids, ids)
    return [fn.__code__ for fn in _captured(joined)["mask_functions"]]


def _says(fn: MaskFunction) -> Tensor:
    n = torch.arange(N, dtype=torch.int64, device="cpu")
    return fn(torch.arange(2, dtype=torch.int64, device="cpu")[:, None, None, None], n[:1], n[:, None], n).expand(
        2, 1, N, N
    )


_PACKED = _packed_codes()
_JOINED = masking_utils.and_masks().__code__
_PATTERNS: dict[CodeType, Pattern] = {}


def _recognise() -> None:
    for fn, pattern in _examples().values():
        try:
            mask = pattern(_captured(fn), MaskContext(head(N, N)))
        except KeyError:  # a release that names what it captures otherwise
            continue
        if mask is not None and torch.equal(mask.on(N, batch=(2,)).dense().expand(2, 1, N, N), _says(fn)):
            _PATTERNS[fn.__code__] = pattern


_recognise()
