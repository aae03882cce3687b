"""Mask functions of transformers are recognised by their code, and only where an example shows the same pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from transformers import masking_utils

from regard.compat.transformers import patterns
from regard.compat.transformers.patterns import MaskContext, mask_of
from regard.core.positions import Positions, head
from regard.masks.algebra import And, Everything, Mask
from regard.masks.dense import Where
from regard.masks.positional import Causal, Window
from regard.masks.ragged import Documents

AT = MaskContext(head(7, 7))
IDS = torch.tensor([[0, 0, 1, 1, 1, 2, 2]])


def has(mask: Mask, kind: type[Mask]) -> bool:
    return isinstance(mask, kind) or any(has(part, kind) for part in vars(mask).values() if isinstance(part, Mask))


def test_every_factory_of_this_release_is_known() -> None:
    """Whatever transformers.masking_utils makes masks of, but padding, which comes apart from its function."""
    known = {fn.__code__ for fn, _ in patterns._examples().values()}
    assert set(patterns._PATTERNS) == known
    assert len(known) == 9


@pytest.mark.parametrize(
    ("fn", "mask"),
    [
        (masking_utils.causal_mask_function, Causal()),
        (masking_utils.bidirectional_mask_function, Everything()),
        (masking_utils.sliding_window_overlay(3), Window(before=2, after=None)),
        (masking_utils.sliding_window_bidirectional_overlay(3), Window(before=3, after=3)),
        (masking_utils.packed_sequence_mask_function(IDS), Documents(IDS, IDS)),
    ],
)
def test_values(fn: Any, mask: Mask) -> None:
    assert mask_of(fn, AT) == mask


def test_what_looks_like_one_is_asked_itself() -> None:
    def causal_mask_function(b: Any, h: Any, i: Any, j: Any) -> Any:
        return j < i

    assert isinstance(mask_of(causal_mask_function, AT), Where)
    assert not mask_of(causal_mask_function, AT).dense(7)[..., 0, 0].any()


@pytest.mark.parametrize("width", [0, -2])
def test_a_window_of_nothing_is_asked_itself(width: int) -> None:
    mask = mask_of(masking_utils.sliding_window_overlay(width), AT)
    assert isinstance(mask, Where)
    assert not mask.dense(7).diagonal(dim1=-2, dim2=-1).any()


def test_objects_that_are_called_are_asked_themselves() -> None:
    class Never:
        def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i < 0) & (j < 0)

    assert not mask_of(Never(), AT).dense(7).any()


def test_a_pattern_that_changed_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a release counted windows otherwise: the example tells, and the function is asked itself."""

    def sliding_window_overlay(sliding_window: int) -> Any:
        def inner_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return j >= i - sliding_window

        return inner_mask

    def renamed(chunk: int, first: Any) -> Any:
        def inner_mask(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (j - first[b]) // chunk == (i - first[b]) // chunk

        return inner_mask

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", sliding_window_overlay)
    monkeypatch.setattr(masking_utils, "chunked_overlay", renamed)
    monkeypatch.delattr(masking_utils, "blockwise_overlay")
    monkeypatch.setattr(patterns, "_PATTERNS", {})
    patterns._recognise()
    assert len(patterns._PATTERNS) == 6
    window = mask_of(sliding_window_overlay(2), AT)
    assert isinstance(window, Where) and window.dense(7)[0, 6].sum() == 3
    chunks = mask_of(renamed(2, torch.tensor([0])), AT)
    assert isinstance(chunks, Where) and chunks.dense(7)[0, 6].sum() == 1


def test_packed_documents_keep_their_own_steps() -> None:
    fn = masking_utils.packed_sequence_compatibility_function
    steps = torch.tensor([[0, 1, 0, 1, 2, 0, 1]])
    causal = masking_utils.causal_mask_function
    known = mask_of(fn(causal, steps, IDS), AT)
    assert isinstance(known, And) and not has(known, Where)
    assert has(mask_of(fn(causal, steps.flip(-1), IDS), AT), Where)
    # what is no pattern of differences reads a document's own positions
    assert has(mask_of(fn(lambda b, h, i, j: j < 1, steps, IDS), AT), Where)


def test_blocks_of_no_number_are_no_block() -> None:
    ids = torch.tensor([[-1, -1, 0, 0, -1, 1, 1]])
    seen = mask_of(masking_utils.blockwise_overlay(ids), AT).on(7, batch=(1,)).dense()[0, 0]
    assert torch.equal(seen, (ids[0][:, None] == ids[0]) & (ids[0] >= 0))


def test_functions_are_told_absolute_positions() -> None:
    at = MaskContext(Positions(torch.tensor([9]), torch.arange(4, 11)))
    mask = mask_of(lambda b, h, i, j: (i == 9) & (j >= 6) & (h == 0), at)
    assert (
        mask.on(1, 7, positions=at.positions, heads=2).dense().expand(2, 1, 7)[1, 0].tolist()
        == [False] * 2 + [True] * 5
    )
