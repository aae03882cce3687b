"""Every text encoder of transformers that can be built small gives, packed, what eager gives padded; or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from selection import few
from tiny_models import VOCABULARY

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from encoder_models import NOT_BUILT, REFUSED, build, encoder_types
from regard.compat.transformers import packed
from regard.compat.transformers.packing import LAYERS
from regard.core.errors import Unsupported

FEW = ("albert", "bert", "distilbert", "electra", "esm", "modernbert", "roberta")
FEW_REFUSED = ("deberta", "mpnet", "t5", "xlm")
KINDS = [kind for kind in encoder_types() if kind not in NOT_BUILT and kind not in REFUSED]
CLOSE = 1e-5  # of the largest number, in float32
N = 13


def batch(side: str) -> dict[str, Tensor]:
    """Three sequences: padded, whole, padded to 2 tokens. Where padding is, there is the token of padding."""
    real = torch.ones(3, N, dtype=torch.int64)
    real[0, 9:] = 0
    real[2, 2:] = 0
    if side == "between":
        real[1, 4:6] = 0
    real = real.flip(1) if side == "left" else real
    ids = torch.randint(4, VOCABULARY, (3, N), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids * real, "attention_mask": real}


@pytest.mark.parametrize("kind", few(KINDS, *FEW))
@torch.no_grad()
def test_the_vectors_of_eager(kind: str) -> None:
    eager, ours = build(kind), build(kind)
    with packed(ours) as packing:
        for side in ("right", "left", "between"):
            feed = batch(side)
            expected, out = eager(**feed)[0], ours(**feed)[0]
            assert out.shape == expected.shape
            real = feed["attention_mask"].bool()
            assert float((out - expected)[real].abs().max()) < CLOSE * float(expected[real].abs().max()), side
        # all three batches in each layer; a layer with a window leaves the padding between tokens where it is
        windows = 2 if kind == "openai_privacy_filter" else layer_types(ours).count("sliding_attention")
        assert packing.calls == 6 and packing.packed == 6 - windows
        assert packing.padded - packing.real == 2 * (15 + 15 + 17) - windows * 17


def layer_types(model: Any) -> list[str]:
    return getattr(model.config, "layer_types", None) or []


@pytest.mark.parametrize("kind", few(REFUSED, *FEW_REFUSED))
def test_what_is_refused(kind: str) -> None:
    with pytest.raises(Unsupported, match=r"has (layers of class|no layers of a known class).* Pass one of these"):
        packed(build(kind))


def test_the_tables_are_of_this_release() -> None:
    assert set(NOT_BUILT) | set(REFUSED) | set(FEW) | set(FEW_REFUSED) <= set(encoder_types())
    assert not set(NOT_BUILT) & set(REFUSED)
    assert {folder(kind) for kind in KINDS} == set(LAYERS)


def folder(kind: str) -> str:
    """The folder of a type in transformers.models."""
    import transformers

    return getattr(transformers, encoder_types()[kind]).__module__.split(".")[2]
