"""Lazy masks against the masks that transformers itself would build in full, and what models do with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from transformers import masking_utils

from regard.compat.transformers.mask import LazyMask
from regard.compat.transformers.mask_interface import lazy_mask
from regard.compat.transformers.written_out import Form
from regard.core.dispatch_mode import DispatchMode
from regard.core.errors import ShapeError, Unsupported
from regard.core.positions import Positions, head, tail
from regard.masks.algebra import Everything, Mask
from regard.masks.between import Between
from regard.masks.dense import Dense
from regard.masks.positional import Causal
from regard.masks.ragged import Lengths
from regard.testing import frame

LEFT = torch.tensor([0, 3])
BLOCKS = torch.tensor([[0, 0, -1, -1, 1, 1, 1, -1, 2, 2, -1], [-1, -1, -1, 0, 0, -1, -1, -1, 1, 1, 1]])
PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]])
STARTS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]])

causal = masking_utils.causal_mask_function
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "window around": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(3, LEFT),
    "blocks": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(BLOCKS)),
    "prefix of the user": masking_utils.or_masks(causal, lambda b, h, i, j: j < 2 + b),
    "packed": masking_utils.packed_sequence_compatibility_function(causal, STARTS, PACKED),
    "packed window": masking_utils.packed_sequence_compatibility_function(
        masking_utils.sliding_window_causal_mask_function(2), STARTS, PACKED
    ),
    "packed chunks": masking_utils.packed_sequence_compatibility_function(
        masking_utils.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64)), STARTS, PACKED
    ),
    "packed, other steps": masking_utils.packed_sequence_compatibility_function(causal, 2 * STARTS, PACKED),
}
# queries, keys, where both begin: whole, prefill of a longer static cache, decoding, a sliding cache
SIZES = {
    **{"whole": (11, 11, 0, 0), "prefill": (4, 11, 0, 0), "decoding": (1, 8, 7, 0), "sliding": (3, 6, 8, 5)},
    **{"static": (1, 11, 7, 0), "chunk": (3, 11, 5, 0), "ahead": (2, 4, 0, 6)},
}
REAL = {
    "none": None,
    "right": torch.arange(11) < torch.tensor([[11], [7]]),
    "left": torch.arange(11) >= torch.tensor([[2], [3]]),
    "both": (torch.arange(11) >= torch.tensor([[1], [0]])) & (torch.arange(11) < torch.tensor([[9], [11]])),
    "holes": torch.arange(11) % 4 != torch.tensor([[1], [2]]),
    "nothing": torch.zeros(2, 11, dtype=torch.bool),
    "shorter": torch.ones(2, 9, dtype=torch.bool),
}


def sized(size: str) -> dict[str, int]:
    return dict(zip(("q_length", "kv_length", "q_offset", "kv_offset"), SIZES[size], strict=True))


def theirs(fn: Callable[..., Any], size: str, real: Tensor | None, mapped: bool = False) -> Tensor:
    mask = masking_utils.sdpa_mask(
        2, **sized(size), mask_function=fn, attention_mask=real, allow_is_causal_skip=False, use_vmap=mapped
    )
    assert mask is not None
    return mask.expand(2, 1, *SIZES[size][:2])


def ours(fn: Callable[..., Any], size: str, real: Tensor | None, mapped: bool = False) -> LazyMask:
    lazy = lazy_mask(2, **sized(size), mask_function=fn, attention_mask=real, use_vmap=mapped)
    assert lazy is not None
    return lazy


def dense(mask: Mask, positions: Positions | None, lazy: LazyMask) -> Tensor:
    _, _, nq, nk = lazy.shape
    return mask.on(nq, nk, positions=positions, batch=(2,)).dense().expand(2, 1, nq, nk)


def briefly(lazy: LazyMask) -> Tensor:
    """What the short form lets through, of all keys."""
    _, _, nq, nk = lazy.shape
    mask, positions, keys = lazy.reduced
    whole = torch.zeros(2, 1, nq, nk, dtype=torch.bool)
    part = whole if keys is None else whole[..., keys]
    part.copy_(mask.on(nq, part.shape[-1], positions=positions, batch=(2,)).dense())
    return whole


# transformers packs whole sequences alone
CASES = [(name, size) for name in FUNCTIONS for size in SIZES if size == "whole" or not name.startswith("packed")]


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize(("name", "size"), CASES)
def test_the_same_pairs_as_transformers(name: str, size: str, real: str) -> None:
    fn = FUNCTIONS[name]
    lazy, expected = ours(fn, size, REAL[real]), theirs(fn, size, REAL[real])
    assert lazy.shape == expected.shape
    assert torch.equal(dense(lazy.mask, lazy.positions, lazy), expected)
    assert torch.equal(briefly(lazy), expected)


INTERVALS = ("causal", "bidirectional", "window", "window around", "chunks", "packed", "packed window")


@pytest.mark.parametrize("real", ["none", "right", "left", "both"])
@pytest.mark.parametrize("name", INTERVALS)
def test_most_are_one_interval_a_query(name: str, real: str) -> None:
    lazy = ours(FUNCTIONS[name], "whole", REAL[real])
    assert "Where" not in repr(lazy.mask)
    assert lazy.reduced[0].on(11, batch=(2,)).rows() is not None
    assert lazy.reduced[1] is None


def test_functions_for_one_pair_are_mapped() -> None:
    """Such a function may index by its numbers, and need not broadcast."""
    picture = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 0])

    def together(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.stack([picture[i] == 1, picture[j] == 1, (i - j).abs() < 3]).all()

    fn = masking_utils.or_masks(causal, together)
    for size in SIZES:
        lazy, expected = ours(fn, size, REAL["left"], mapped=True), theirs(fn, size, REAL["left"], mapped=True)
        assert torch.equal(dense(lazy.mask, lazy.positions, lazy), expected)
    assert not torch.equal(theirs(fn, "whole", None, mapped=True), theirs(causal, "whole", None))


def test_short_forms() -> None:
    """What can be said in few words goes to the kernels in few words."""
    assert ours(causal, "whole", None).reduced == (Causal(), None, None)
    assert ours(causal, "decoding", None).reduced == (Everything(), None, None)
    assert repr(ours(causal, "whole", REAL["right"]).mask).startswith("Causal() & Lengths")
    assert isinstance(ours(causal, "whole", REAL["left"]).reduced[0], Between)
    # of a static cache, the keys that are there
    assert ours(causal, "prefill", None).reduced == (Causal(), None, slice(0, 4))
    one = lazy_mask(2, 1, 11, torch.tensor(7), 0)
    assert one is not None and one.reduced == (Everything(), None, slice(0, 8))
    window = lazy_mask(2, 2, 11, 7, 0, mask_function=FUNCTIONS["window"])
    assert window is not None and window.reduced.keys == slice(4, 9)
    assert window.reduced.positions is not None and window.reduced.positions.span is not None
    padded = lazy_mask(2, 1, 11, 7, 0, attention_mask=REAL["left"])
    assert padded is not None and isinstance(padded.reduced.mask, Between) and padded.reduced.keys == slice(0, 8)
    assert "Dense" in repr(ours(causal, "whole", REAL["holes"]).reduced[0])


@pytest.mark.parametrize("real", ["right", "left", "holes"])
def test_padding_is_never_written_out_by_pairs(real: str) -> None:
    lazy = ours(causal, "whole", REAL[real])
    assert all(t.numel() <= 2 * 11 for t in (*lazy.mask.tensors(), *lazy.reduced[0].tensors()))


@pytest.mark.parametrize("name", ["causal", "window", "chunks", "blocks", "prefix of the user"])
def test_slices_are_lazy_masks_of_fewer(name: str) -> None:
    lazy, whole = ours(FUNCTIONS[name], "whole", REAL["left"]), theirs(FUNCTIONS[name], "whole", REAL["left"])
    for rows, cols in ((slice(None), slice(0, 7)), (slice(-3, None), slice(None)), (slice(2, 6), slice(1, 9))):
        part = lazy[:, :, rows, cols]
        expected = whole[:, :, rows, cols]
        assert part.shape == expected.shape
        assert torch.equal(dense(part.mask, part.positions, part), expected)


def test_it_stands_in_for_a_tensor() -> None:
    lazy = ours(causal, "prefill", None)
    assert lazy.ndim == lazy.dim() == 4
    assert lazy.shape == lazy.size() == (2, 1, 4, 11) and lazy.size(-1) == 11
    assert lazy.contiguous() is lazy
    assert lazy.to("cpu", torch.bool) is lazy.to(dtype=torch.bool) is lazy.to(torch.device("cpu")) is lazy
    assert lazy.dtype == torch.bool
    assert lazy_mask(2, 4, 11, attention_mask=lazy) is lazy
    assert torch.equal(briefly(copy.deepcopy(lazy)), briefly(lazy))


def test_another_device_is_refused() -> None:
    with pytest.raises(Unsupported, match="live on one device"):
        ours(causal, "whole", None).to(torch.device("meta"))


def test_none_where_transformers_wants_none() -> None:
    both_ways = FUNCTIONS["bidirectional"]
    asked: dict[str, Any] = {**sized("whole"), "mask_function": both_ways, "allow_is_bidirectional_skip": True}
    assert lazy_mask(2, **asked) is None
    assert lazy_mask(2, **asked, attention_mask=torch.ones(2, 11)) is None
    assert lazy_mask(2, **asked, attention_mask=REAL["left"]) is not None
    assert lazy_mask(2, **{**asked, "mask_function": FUNCTIONS["window around"]}) is not None

    class Decoder:
        is_causal = False

    assert lazy_mask(2, **asked, config=Decoder()) is not None


def test_positions_of_the_queries_as_before_5_5() -> None:
    lazy = lazy_mask(2, kv_length=8, cache_position=torch.tensor([5, 6, 7]), attention_mask=REAL["left"])
    assert isinstance(lazy, LazyMask)
    assert torch.equal(briefly(lazy), theirs(causal, "whole", REAL["left"])[:, :, 5:8, :8])


def test_a_static_cache_tells_its_offset_as_a_tensor() -> None:
    lazy = lazy_mask(2, 1, 11, torch.tensor(7), 0)
    assert isinstance(lazy, LazyMask)
    assert briefly(lazy)[0, 0, 0].tolist() == [True] * 8 + [False] * 3


def test_real_queries() -> None:
    assert ours(causal, "whole", None).real() is None
    real = ours(causal, "sliding", REAL["right"]).real()
    assert real is not None and real.tolist() == [[True] * 3, [False] * 3]


def test_between_is_a_mask_like_others() -> None:
    at = frame()
    start = torch.arange(at.nq) * 5 % (at.nk + 1)
    mask = Between(start, (start + 3).clamp(max=at.nk))
    full = mask.visible(at.region()).expand(*at.batch, at.heads, at.nq, at.nk)
    for r, c in ((1, 1), (2, 3), (4, 5)):
        tiling = at.tiling(r, c)
        covers = mask.cover(tiling).expand(*at.batch, at.heads, *tiling.shape)
        for n, rows in enumerate(tiling.row_blocks):
            for m, cols in enumerate(tiling.col_blocks):
                tile = full[..., rows, cols].flatten(-2)
                assert bool((covers[..., n, m] != 0).logical_or(~tile.any(-1)).all())
                assert bool((covers[..., n, m] != 2).logical_or(tile.all(-1)).all())
    found = mask.rows(at)
    col = torch.arange(at.nk)
    assert torch.equal(full, ((col >= found.start[..., None]) & (col < found.stop[..., None])).expand(full.shape))
    with pytest.raises(ShapeError, match=r"Between\.start"):
        Between(start[:2], start[:2]).on(at.nq, at.nk)


def test_padding_kinds() -> None:
    kinds = {"right": Lengths, "left": Lengths, "both": Lengths, "holes": Dense}
    for name, kind in kinds.items():
        lazy = ours(FUNCTIONS["bidirectional"], "whole", REAL[name])
        assert isinstance(lazy.mask, kind), name


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("real", ["right", "left", "both", "holes"])
def test_real_tokens_alone_see_what_they_saw(name: str, real: str) -> None:
    """Packed, a token sees of its own sequence what it saw in the padded batch, and nothing of the others."""
    padding = REAL[real]
    assert padding is not None
    lazy = LazyMask(2, head(11, 11), FUNCTIONS[name], Form(), padding)
    by_distance = name in ("causal", "window", "window around")
    if name != "bidirectional" and not (by_distance and real != "holes"):
        assert lazy.packed is None
        return
    assert lazy.packed is not None
    pack, mask = lazy.packed
    sequence, column = pack.documents, pack.index % 11
    assert torch.equal(padding, torch.zeros(2, 11).index_put((sequence, column), torch.tensor(1.0)).bool())
    seen = lazy.dense()[sequence[:, None], 0, column[:, None], column]
    assert torch.equal(mask.dense()[0, 0], seen & (sequence[:, None] == sequence))


def test_only_a_whole_padded_batch_is_packed() -> None:
    real, both = REAL["right"], masking_utils.bidirectional_mask_function
    assert LazyMask(2, head(11, 11), both, Form(), real).packed is not None
    for positions in (head(4, 11), tail(4, 11), Positions(torch.arange(11) + 1, torch.arange(11))):
        assert LazyMask(2, positions, both, Form(), real).packed is None
    for none in (None, REAL["nothing"], torch.ones(2, 11).bool(), torch.arange(9) < torch.tensor([[9], [5]])):
        assert LazyMask(2, head(11, 11), both, Form(), none).packed is None


def test_a_shape_that_is_known_as_numbers_makes_no_tensor() -> None:
    """Each layer of each step asks for it."""
    made = list[object]()

    class Counting(DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made.append(func)
            return func(*args, **(kwargs or {}))

    lazy = lazy_mask(2, 1, 9, 8, 0, device="cpu")
    assert isinstance(lazy, LazyMask)
    with Counting():
        assert lazy.shape == (2, 1, 1, 9)
    assert not made


def test_a_padding_of_other_sequences_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"attention_mask has shape \(3, 4\); expected \(2, tokens\)"):
        lazy_mask(2, 4, 4, attention_mask=torch.ones(3, 4))
