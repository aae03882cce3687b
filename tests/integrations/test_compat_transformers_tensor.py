"""A lazy mask that a model computes with: the tensor that transformers would have given it, and one warning."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from transformers import masking_utils

from regard.compat.transformers import warnings as said_once
from regard.compat.transformers.mask import LazyMask
from regard.compat.transformers.mask_interface import lazy_mask
from regard.compat.transformers.written_out import Form
from regard.core.errors import Unsupported

WINDOW = masking_utils.sliding_window_causal_mask_function(4)
LEFT = torch.arange(11) >= torch.tensor([[2], [3]])


def made() -> LazyMask:
    lazy = lazy_mask(2, 11, 11, mask_function=WINDOW, attention_mask=LEFT)
    assert lazy is not None
    return lazy


def full() -> Tensor:
    mask = masking_utils.sdpa_mask(2, 11, 11, mask_function=WINDOW, attention_mask=LEFT, allow_is_causal_skip=False)
    assert mask is not None
    return mask


# what models do with their masks, and what tells it in the warning
COMPUTED: dict[str, Callable[[Any], Any]] = {
    "add": lambda m: torch.ones(1) + m,
    "radd": lambda m: m + 2.0,
    "sub": lambda m: 1.0 - m.to(torch.float16),
    "where": lambda m: torch.where(m, 0, 1),
    "invert": lambda m: ~m,
    "eq": lambda m: m == 0,
    "lt": lambda m: m < 0.5,
    "and": lambda m: m & ~m[:, :, :, :1],
    "first": lambda m: m[0],
    "heads": lambda m: m[:, 0],
    "none": lambda m: m[None],
    "ellipsis": lambda m: m[..., :7],
    "fill": lambda m: torch.ones(2, 1, 11, 11).masked_fill(m, 0),
    "method": lambda m: m.float().sum(-1),
    "expand": lambda m: m.expand(-1, 3, -1, -1),
    "cat": lambda m: torch.cat([m, m], 1),
    "property": lambda m: m.mT.shape,
    "len": lambda m: len(m),
    "iter": lambda m: next(iter(m)),
    "like": lambda m: m.to(torch.zeros(1, dtype=torch.float64)),
}


LOGICAL = ("where", "invert", "and", "fill")  # of booleans, which models have that can do sdpa
FORMS = [(name, torch.bool) for name in COMPUTED]
FORMS += [(name, form) for name in COMPUTED if name not in LOGICAL for form in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_who_computes_with_it_has_the_tensor(name: str, form: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said_once, "_SAID", set())
    lazy = replace(made(), form=Form(form, "LlamaModel"))
    tensor = full()
    if form != torch.bool:
        tensor = torch.zeros(tensor.shape, dtype=form).masked_fill(~tensor, torch.finfo(form).min)
    with pytest.warns(UserWarning, match="LlamaModel computes with its attention mask"):
        found = COMPUTED[name](lazy)
    expected = COMPUTED[name](tensor)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(COMPUTED[name](lazy), expected, equal_nan=True)  # and is not told again


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.masked_fill_(m, 0),
        lambda m: m.__setitem__((slice(None), 0), True),
        lambda m: torch.relu_(m),
        lambda m: torch.logical_not(torch.ones(2, 1, 11, 11), out=m),
    ],
)
def test_to_change_it_in_place_is_refused(change: Callable[[Any], Any]) -> None:
    with pytest.raises(Unsupported, match="changes its attention mask in place"):
        change(made())


def test_attributes_that_no_tensor_has() -> None:
    lazy = made()
    with pytest.raises(AttributeError, match=r"on regard .*'is_sparse_block', and torch.Tensor"):
        _ = lazy.is_sparse_block
    assert not hasattr(lazy, "__array__") and not hasattr(lazy, "_is_view")
