"""Reference, the definition of correct: against torch's math path, and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard as rg
from regard import testing

REFERENCE = rg.Reference()
NAN, INF = math.nan, math.inf


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("masked", ["no", "causal", "dense", "bias"])
@pytest.mark.parametrize("key_heads", [6, 2])
def test_agrees_with_torch_s_math_path(masked: str, key_heads: int) -> None:
    nk = 13 if masked == "causal" else 17
    case = testing.draw(testing.frame(nk=nk), key_heads=key_heads).leaves(torch.float64)
    q, k, v, at = case.q, case.k, case.v, testing.frame(nk=nk)
    allowed = torch.rand(5, 6, 13, nk) < 0.7
    allowed[..., 0] = True  # torch's own paths differ where a row sees nothing
    bias = torch.randn(6, 13, nk, dtype=torch.float64)
    ours = {
        "no": {},
        "causal": {"mask": rg.Causal(), "positions": at.positions},
        "dense": {"mask": rg.Dense(allowed)},
        "bias": {"score": rg.ScaledDot() >> rg.Bias(bias)},
    }[masked]
    theirs = {"no": {}, "causal": {"is_causal": True}, "dense": {"attn_mask": allowed}, "bias": {"attn_mask": bias}}
    with sdpa_kernel(SDPBackend.MATH):
        expected = sdpa(q, k, v, enable_gqa=True, **theirs[masked])
    got = rg.attention(q, k, v, backend=REFERENCE, **ours)
    close(got, expected)
    cotangent = torch.randn_like(got)
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), cotangent) for out in (got, expected)), strict=True):
        close(a, b)


def one(scores: list[float], values: list[float], **more: object) -> tuple[Tensor, Tensor]:
    """(out, lse) of one query with these scores."""
    k = torch.tensor(scores, dtype=torch.float64)[:, None]
    v = torch.tensor(values, dtype=torch.float64)[:, None]
    query = torch.ones(1, 1, dtype=torch.float64)
    out = rg.attention(query, k, v, score=rg.Dot(), backend=REFERENCE, **more)
    lse = rg.attention_state(query, k, v, score=rg.Dot(), backend=REFERENCE, **more).finish()[1]
    return out[0, 0], lse[0]


def test_three_keys_by_hand() -> None:
    # weights 1/6, 2/6, 3/6
    out, lse = one([0.0, math.log(2), math.log(3)], [6.0, 12.0, 18.0])
    close(out, torch.tensor(14.0, dtype=torch.float64))
    close(lse, torch.tensor(math.log(6), dtype=torch.float64))


def test_a_sink_takes_mass_and_adds_nothing() -> None:
    # e^0 + e^ln2 for the keys, e^ln3 for the sink: half of the mass
    out, lse = one([0.0, math.log(2)], [6.0, 12.0], sink=math.log(3))
    close(out, torch.tensor(5.0, dtype=torch.float64))
    close(lse, torch.tensor(math.log(6), dtype=torch.float64))


def test_an_empty_row_is_zero_and_minus_infinity() -> None:
    out, lse = one([0.0, 1.0], [6.0, 12.0], mask=~rg.Everything())
    assert out == 0 and lse == -INF
    out, lse = one([], [])
    assert out == 0 and lse == -INF


def test_an_empty_row_with_a_sink_has_the_sink_s_lse() -> None:
    out, lse = one([0.0, 1.0], [6.0, 12.0], mask=~rg.Everything(), sink=2.0)
    assert out == 0
    close(lse, torch.tensor(2.0, dtype=torch.float64))


def test_dropout_thins_the_output_and_not_the_sum() -> None:
    at, drop = testing.frame(), rg.Dropout(0.3, seed=11)
    case = testing.draw(at)
    given = {"positions": case.positions}
    keep = drop.keep(at.region(), torch.float64)
    weights = rg.attention_weights(case.q, case.k, **given)
    out = rg.attention(case.q, case.k, case.v, dropout=drop, backend=REFERENCE, **given)
    close(out, (weights * keep) @ case.v.repeat_interleave(3, 1))
    lse = [
        rg.attention_state(case.q, case.k, case.v, dropout=d, backend=REFERENCE, **given).finish()[1]
        for d in (drop, None)
    ]
    assert torch.equal(*lse)
    assert set(keep.unique().tolist()) == {0.0, 1 / 0.7}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_hidden_leaks_nowhere(bad: float, where: str) -> None:
    scores, values = [0.0, math.log(2), 7.0], [6.0, 12.0, 9.0]
    (scores if where == "k" else values)[2] = bad
    out, lse = one(scores, values, mask=rg.Prefix(2), positions=rg.head(1, 3))
    close(out, torch.tensor(10.0, dtype=torch.float64))
    close(lse, torch.tensor(math.log(3), dtype=torch.float64))


@pytest.mark.parametrize("where", ["k", "v"])
def test_a_visible_nan_stays_visible(where: str) -> None:
    scores, values = [0.0, 1.0], [6.0, 12.0]
    (scores if where == "k" else values)[1] = NAN
    out, lse = one(scores, values)
    assert out.isnan() and bool(lse.isnan()) == (where == "k")


def test_a_visible_infinite_value_is_infinite() -> None:
    assert one([0.0, 1.0], [6.0, INF])[0] == INF
    assert one([0.0, 1.0], [-INF, INF])[0].isnan()


def test_it_says_what_it_holds() -> None:
    x = torch.zeros(2, 3, 5, 8)
    plan = rg.explain(x, x, x, backend=REFERENCE)
    assert plan.backend == REFERENCE
    assert dict(plan.facts)["memory"] == "600 bytes for the dense scores"
