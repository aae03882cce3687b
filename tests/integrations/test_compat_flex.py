"""flex_attention on regard: torch's results, gradients that torch lacks on a CPU, and what patch leaves to torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from regard.compat.torch import flex_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
]
BATCH, HEADS, KEY_HEADS, NQ, NK, WIDTH = 3, 4, 2, 11, 13, 8
BIAS, BY_HEAD = torch.randn(NQ, NK), torch.randn(BATCH, HEADS, NQ, NK)
DOCUMENTS = torch.randint(3, (BATCH, NK))
SLOPES = torch.rand(HEADS)
SCORES: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "slopes": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "bias": lambda s, b, h, i, j: s + BIAS[i, j],
    "bias by head": lambda s, b, h, i, j: s + BY_HEAD[b][h][i][j],
    "cap": lambda s, b, h, i, j: 0.5 * torch.tanh(s / 0.5),
    "hides": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
}
MASKS: dict[str, tuple[Callable[..., Tensor], int | None, int | None] | None] = {
    "everything": None,
    "causal": (lambda b, h, i, j: i >= j, None, None),
    "empty rows": (lambda b, h, i, j: i > j + 3, None, None),
    "documents": (lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b][j], BATCH, None),
    "by head": (lambda b, h, i, j: (i - j).abs() <= h, None, HEADS),
}


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((BATCH, HEADS, NQ, WIDTH), (BATCH, KEY_HEADS, NK, WIDTH), (BATCH, KEY_HEADS, NK, WIDTH))
    q, k, v = (torch.randn(shape) for shape in shapes)
    return q, k, v


def block_mask(name: str) -> Any:
    made = MASKS[name]
    return made if made is None else create_block_mask(*made, NQ, NK, device="cpu")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_like_torch(score: str, mask: str) -> None:
    q, k, v = drawn()
    options = {"score_mod": SCORES[score], "block_mask": block_mask(mask), "enable_gqa": True}
    expected = theirs.flex_attention(q, k, v, **options, return_lse=True)
    torch.testing.assert_close(flex_attention(q, k, v, **options, return_lse=True), expected)
    with rg.patch(report=None) as patch:
        found = theirs.flex_attention(q, k, v, **options, scale=0.2)
    assert dict(patch.calls) == {("flex_attention", None): 1}
    torch.testing.assert_close(found, theirs.flex_attention(q, k, v, **options, scale=0.2))


@pytest.mark.parametrize("mask", ["everything", "empty rows"])
def test_an_aux_request_is_answered_as_torch_does(mask: str) -> None:
    (q, k, v), asked = drawn(), theirs.AuxRequest(lse=True)
    options = {"block_mask": block_mask(mask), "enable_gqa": True, "scale": 0.2, "return_aux": asked}
    with rg.patch(report=None) as patch:
        found = theirs.flex_attention(q, k, v, **options)
    assert dict(patch.calls) == {("flex_attention", None): 1}
    expected = theirs.flex_attention(q, k, v, **options)
    torch.testing.assert_close((found[0], found[1].lse), (expected[0], expected[1].lse))
    assert found[1].max_scores is None


@pytest.mark.parametrize("mask", ["everything", "empty rows", "documents"])
def test_gradients(mask: str) -> None:
    """Of the definition written out; torch has none on a CPU."""
    q, k, v = (t.double().requires_grad_() for t in drawn())
    out = flex_attention(q, k, v, SCORES["slopes"], block_mask(mask), enable_gqa=True)
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    i, j = torch.arange(NQ)[:, None], torch.arange(NK)
    keys, values = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    s = q @ keys.mT / WIDTH**0.5 - SLOPES[h] * (i - j).abs()
    seen = {"everything": j >= 0, "empty rows": i > j + 3, "documents": DOCUMENTS[b, i] == DOCUMENTS[b, j]}[mask]
    p = s.masked_fill(~seen, -1e300).softmax(-1).masked_fill(~seen, 0)
    torch.testing.assert_close(out, p @ values)
    weight = torch.randn_like(out)
    found, expected = (torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (out, p @ values))
    torch.testing.assert_close(found, expected)


def test_a_mask_runs_natively_and_is_asked_once_for_all_heads() -> None:
    q, k, v = drawn()
    from regard.compat.torch.mask_mods import MaskMod

    mask = MaskMod(lambda b, h, i, j: i >= j)
    assert "native" in str(rg.explain(q, k, v, mask=mask)).lower().splitlines()[0]
    assert mask.on(NQ, NK, batch=(BATCH,), heads=HEADS).dense().shape == (1, 1, NQ, NK)


OF_FIVE = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 5, 5, "cpu")
LEARNED = torch.zeros(NQ, NK, requires_grad=True)
Q, K, V = drawn()
LEFT: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], str]] = {
    "learned": ((Q, Q, Q), {"score_mod": lambda s, b, h, i, j: s + LEARNED[i, j]}, "score_mod uses a tensor that"),
    "dtypes": ((Q, Q, Q.bfloat16()), {}, "expected one dtype"),
    "heads": ((Q, K, V), {}, "with enable_gqa"),
    "axes": ((Q[0], Q[0], Q[0]), {}, "expected four axes"),
    "another length": (
        (Q, Q, Q),
        {"block_mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 5, 5, "cpu")},
        "crea",
    ),
    "largest": ((Q, Q, Q), {"return_aux": theirs.AuxRequest(max_scores=True)}, "largest scores"),
}


@pytest.mark.parametrize(("tensors", "options", "said"), LEFT.values(), ids=LEFT.keys())
def test_what_torch_keeps(tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any], said: str) -> None:
    with pytest.raises(rg.Unsupported, match=said):
        flex_attention(*tensors, **options)
    with contextlib.suppress(Exception), rg.patch(report=None) as patch:  # torch's own refusal, of what it refuses too
        theirs.flex_attention(*tensors, **options)
    assert patch.calls.total() == 1 and said in str(patch)


def test_a_learned_score_serves_inference() -> None:
    options = LEFT["learned"][1]
    with torch.no_grad():
        torch.testing.assert_close(flex_attention(Q, Q, Q, **options), theirs.flex_attention(Q, Q, Q))


def test_compiled_calls_stay_with_torch() -> None:
    compiled = torch.compile(lambda q: theirs.flex_attention(q, q, q), backend="eager")
    with rg.patch(report=None) as patch:
        torch.testing.assert_close(compiled(Q), theirs.flex_attention(Q, Q, Q))
    assert [why for _, why in patch.traced] == ["it is inside torch.compile, which makes a kernel of it"]
