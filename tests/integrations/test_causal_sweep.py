"""Every causal class of transformers that can be built small generates with regard what it generates with eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from selection import few
from tiny_models import VOCABULARY

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from causal_models import NOT_BUILT, REFUSED, build, model_types
from regard.compat.transformers import NAME
from regard.core.errors import Unsupported

FEW = (
    "bloom",
    "deepseek_v3",
    "deepseek_v4",
    "falcon",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "llama",
    "mamba",
    "mistral",
    "mpt",
    "qwen3_next",
)
KINDS = [kind for kind in model_types() if kind not in NOT_BUILT and kind not in REFUSED]
PROMPT, NEW = 5, 8
CLOSE = 1e-4  # of the largest logit: tokens whose logits are nearer than that may change places


def prompt(side: str) -> dict[str, Tensor]:
    """Two sequences, of which the first has two tokens of padding."""
    ids = torch.randint(3, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(5))
    real = torch.ones_like(ids)
    real[0, slice(0, 2) if side == "left" else slice(PROMPT - 2, PROMPT)] = 0
    return {"input_ids": ids, "attention_mask": real}


def generated(model: Any, side: str, cache: str) -> tuple[Tensor, Tensor]:
    """The new tokens (2, NEW) and their logits (2, NEW, vocabulary)."""
    kind = {} if cache == "dynamic" else {"cache_implementation": cache}
    asked = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    out = model.generate(**prompt(side), **asked, **kind, return_dict_in_generate=True, output_logits=True)
    return out.sequences[:, -NEW:], torch.stack(out.logits, 1).float()


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Logits up to the first token that differs, which may be where two logits are as good as equal."""
    for ours, logits, theirs, truth in zip(*found, *expected, strict=True):
        same = ours.eq(theirs)
        steps = NEW if bool(same.all()) else int(same.long().argmin()) + 1
        scale = float(truth[truth.isfinite()].abs().max())
        torch.testing.assert_close(logits[:steps], truth[:steps], rtol=0, atol=CLOSE * scale)
        if steps < NEW:
            first, second = truth[steps - 1].topk(2).values
            assert float(first - second) < CLOSE * scale, f"token {steps} differs"


@pytest.mark.filterwarnings("ignore:.*(regard|deprecated)")
@pytest.mark.filterwarnings("ignore:Bias holds only 0 and 1")  # Doge's, whose exponents begin at 0
@pytest.mark.parametrize("kind", few(KINDS, *FEW))
def test_the_tokens_of_eager(kind: str) -> None:
    eager, ours = build(kind, "eager"), build(kind, NAME)
    for cache in ("dynamic", "static") if eager._can_compile_fullgraph else ("dynamic",):
        for side in ("left", "right"):
            assert_same(generated(ours, side, cache), generated(eager, side, cache))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: str) -> None:
    with pytest.raises(Unsupported) as refused:
        generated(build(kind, NAME), "left", "dynamic")
    assert str(refused.value).startswith(REFUSED[kind])


def test_the_tables_are_of_this_release() -> None:
    assert set(NOT_BUILT) | set(REFUSED) | set(FEW) <= set(model_types())
    assert len(KINDS) > 150
