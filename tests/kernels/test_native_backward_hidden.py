"""Gradients of the native kernels where something is hidden, or is no number."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import regard as rg
from exact_checks import check_gradients
from needed import needs_kernels
from regard import testing
from regard.runtime.autograd import attend_with_stats

pytestmark = needs_kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "mask", [rg.Lengths(keys=torch.tensor([100])), rg.Dense(torch.arange(130) < 100)], ids=["interval", "booleans"]
)
def test_what_is_hidden_leaks_nowhere(isa: str, dtype: torch.dtype, bad: float, mask: rg.Mask) -> None:
    """Hidden keys and values, and the queries and cotangents of rows that see nothing."""
    rows = rg.Dense((torch.arange(70) < 60)[:, None])
    at = testing.frame(nq=70, nk=130, batch=(1,), heads=2)
    score = rg.ScaledDot() >> rg.SoftCap(3.0)

    def run(spoil: bool) -> list[Tensor]:
        torch.manual_seed(0)
        case = testing.draw(at, dk=16, dv=8, score=score)
        q, k, v = (t.detach().to(dtype) for t in (case.q, case.k, case.v))
        g = torch.randn(1, 2, 70, 8).to(dtype)
        if spoil:
            q[..., 60:, :], g[..., 60:, :], k[..., 100:, :], v[..., 100:, :] = bad, bad, bad, bad
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        out = rg.attention(q, k, v, score=score, mask=mask & rows, backend=rg.Native())
        return [out, *torch.autograd.grad(out, (q, k, v), g)]

    near = 4 * torch.finfo(dtype).eps  # products that leave pairs out round in another order
    for clean, spoiled in zip(run(False), run(True), strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(spoiled, clean, rtol=near, atol=near)
    _, g_q, g_k, g_v = run(True)
    assert not g_q[..., 60:, :].any() and not g_k[..., 100:, :].any() and not g_v[..., 100:, :].any()
    assert g_q[..., :60, :].any() and g_k[..., :100, :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [33, 36, 40, 44, 60, 64, 127, 460])
def test_hidden_keys_beside_keys_that_are_seen(isa: str, length: int, dtype: torch.dtype) -> None:
    """The products that give dQ multiply blocks of keys, whose gradients of scores are 0 where they are hidden."""
    q, k, v = (torch.randn(1, 1, n, 64).to(dtype) for n in (64, 512, 512))
    k[..., length:, :] = torch.nan
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = rg.attention(*leaves, mask=rg.Lengths(keys=torch.tensor([length])), backend=rg.Native())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, leaves, torch.ones_like(out)))


@pytest.mark.parametrize("what", ["q", "k", "v", "g"])
def test_what_is_seen_and_no_number_stays_visible(isa: str, what: str) -> None:
    torch.manual_seed(0)
    given = {name: torch.randn(1, 1, 130, 16) for name in ("q", "k", "v", "g")}
    given[what][..., 70, 3] = torch.nan
    q, k, v = (given[name].requires_grad_() for name in ("q", "k", "v"))
    out = rg.attention(q, k, v, mask=rg.Causal(), backend=rg.Native())
    g_q, g_k, g_v = (g[0, 0] for g in torch.autograd.grad(out, (q, k, v), given["g"]))
    if what in ("q", "g"):  # one row is lost, and every key that it sees
        assert g_q[70].isnan().any() and g_k[:71].isnan().any(-1).all() and g_v[:71].isnan().any(-1).all()
        assert g_q[:70].isfinite().all() and g_q[71:].isfinite().all()
        assert g_k[71:].isfinite().all() and g_v[71:].isfinite().all()
    else:  # every row that sees the key
        assert g_q[:70].isfinite().all() and g_q[70:].isnan().any(-1).all()


def test_keys_that_nobody_sees_get_nothing(isa: str) -> None:
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (40, 300, 300))
    mask = rg.Window(before=20, after=0)
    out, lse = rg.attention_state(q, k, v, mask=mask, positions=rg.tail(40, 300), backend=rg.Native()).finish()
    _, g_k, g_v = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert not g_k[..., :240, :].any() and not g_v[..., :240, :].any() and g_k[..., 240:, :].any()


AT = testing.frame(nq=37, nk=41, batch=(2,), heads=4)


@cache
def scores() -> dict[str, rg.Score]:
    """All that the kernels take where something is no number."""
    torch.manual_seed(0)
    found = {name: score for name, score in testing.scores(AT).items() if not name.startswith(("Custom", "Distance"))}
    return {**found, "ScaledDot of a tensor ()": rg.ScaledDot(torch.tensor(0.3, dtype=torch.float64))}


@pytest.mark.parametrize("road", ["operation", "node of a graph"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", scores())
def test_what_is_hidden_reaches_no_tensor_of_any_score(name: str, bad: float, dtype: torch.dtype, road: str) -> None:
    """Queries that see nothing, with their cotangents, and keys and values that nobody sees."""
    allowed = (torch.rand(2, 1, 37, 41) < 0.7).index_fill(2, torch.tensor([3, 36]), False)
    allowed = allowed.index_fill(3, torch.tensor([2, 39, 40]), False)
    case = testing.draw(AT, key_heads=2, score=scores()[name], mask=rg.Dense(allowed), sink=name != "Dot").leaves(dtype)
    g_out, g_lse = torch.randn(2, 4, 37, 3), torch.randn(2, 4, 37)

    def gradients(value: float) -> dict[str, Tensor]:
        q, k, v = (t.detach().clone() for t in (case.q, case.k, case.v))
        q[..., [3, 36], :], k[..., [2, 39], :], k[..., 40, 1], v[..., [2, 39, 40], 2] = value, value, value, value
        spoiled = replace(case, q=q, k=k, v=v).leaves(dtype)
        problem = spoiled.problem
        if road == "operation":
            out, stats = attend_with_stats(rg.Native(), problem)
        else:
            out, stats = rg.Native().traced(problem)
        g = g_out.index_fill(2, torch.tensor([3, 36]), value if case.sink is None else 0)
        wanted = spoiled.differentiable
        found = torch.autograd.grad((out, stats.lse), tuple(wanted.values()), (g, g_lse), materialize_grads=True)
        return dict(zip(wanted, found, strict=True))

    clean, near = gradients(0.0), 32 * torch.finfo(dtype).eps  # products that leave pairs out round in another order
    for name, spoiled in gradients(bad).items():
        most = float(clean[name].abs().max())
        assert most > 0
        torch.testing.assert_close(spoiled, clean[name], rtol=near, atol=near * most)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [-0.3, 0.0, -0.02])
@pytest.mark.parametrize(
    "mask",
    [rg.Causal(), rg.Window(64, 0), rg.Lengths(keys=torch.tensor([200])), rg.Everything()],
    ids=["causal", "window", "lengths", "a last tile of 44 keys"],
)
def test_scales_that_turn_scores_round(isa: str, mask: rg.Mask, scale: float, dtype: torch.dtype) -> None:
    """A score that a mask hides is -inf after it was multiplied by the scale, not before."""
    n = 300 if isinstance(mask, rg.Everything) else 320
    q, k, v = (torch.randn(1, 1, rows, 64).to(dtype) for rows in (320, n, n))
    check_gradients(q, k, v, torch.randn(1, 1, 320, 64).to(dtype), score=rg.ScaledDot(scale=scale), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nq", [32, 70, 96])
@pytest.mark.parametrize("what", ["table", "bias of keys"])
def test_a_block_s_missing_queries_give_nothing_to_what_is_learned(
    isa: str, dtype: torch.dtype, nq: int, what: str
) -> None:
    """0 times an infinite key is NaN, in lanes that have no query."""
    at = testing.frame(nq=nq, nk=128, batch=(2,), heads=2)
    bias = rg.Bias(torch.randn(2, 1, 128, dtype=torch.float64))
    score = testing.scores(at)["RelativeBias"] if what == "table" else rg.ScaledDot() >> bias
    case = testing.draw(at, key_heads=2, dk=32, dv=32, score=score)
    q, k = case.q.clone(), case.k.clone()
    q[..., 0], k[..., 40, 0] = -q[..., 0].abs() - 0.1, torch.inf  # scores of -inf: nobody sees the key
    case = replace(case, q=q, k=k)
    mine, right = (testing.answers(case, backend, dtype) for backend in (rg.Native(), rg.Tiled()))
    learned = [name for name in right if name not in ("out", "lse", "gradient of q", "gradient of k", "gradient of v")]
    assert learned
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    for name in ("out", "gradient of v", *learned):
        assert right[name].isfinite().all()
        torch.testing.assert_close(mine[name], right[name], **near)
