"""entropy and max_score: their values are the facts', their gradients those of the dense definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import regard as rg
from fact_checks import AT, looked
from regard import facts, testing
from regard.inspect import differentiable

SMALL = testing.frame((2,), 2, nq=3, nk=5)
F64 = torch.float64
FUNCTIONS = {"entropy": rg.entropy, "max_score": rg.max_score}
Function = Callable[..., Tensor]


@pytest.fixture(params=[(2, 3), (64, 64)], ids=str)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward from several tiles, and from one."""
    made = differentiable.Size(*request.param)
    monkeypatch.setattr(differentiable, "Size", lambda: made)


@pytest.fixture(params=FUNCTIONS)
def function(request: pytest.FixtureRequest) -> Function:
    return FUNCTIONS[request.param]


def run(function: Function, case: testing.Case) -> Tensor:
    given: dict[str, Any] = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}
    return function(case.q, case.k, **given)


def dense(function: Function, case: testing.Case) -> Tensor:
    """The definition, by operations that autograd differentiates; rows that see nothing give the constant."""
    problem = case.problem
    s = problem.region_tile(problem.frame.region()).masked
    seen = s != -math.inf
    if function is rg.max_score:
        return torch.where(seen.any(-1), s.masked_fill(~seen, -1e300).amax(-1), -math.inf)
    sink = (
        torch.full_like(s[..., :1], -math.inf)
        if problem.sink is None
        else problem.sink[..., None, None].expand_as(s[..., :1])
    )
    none = ~seen.any(-1, keepdim=True)
    log_p = torch.log_softmax(torch.cat([s.masked_fill(none, 0), sink], -1), -1)[..., :-1].masked_fill(~seen, 0)
    return -(log_p.exp() * log_p).masked_fill(~seen, 0).sum(-1)


def leaves(score: str, mask: str, sink: bool) -> tuple[testing.Case, dict[str, Tensor]]:
    drawn = testing.draw(SMALL, dk=3, score=testing.scores(SMALL, 3)[score], mask=testing.masks(SMALL)[mask], sink=sink)
    case = drawn.leaves(F64)
    return case, {name: t for name, t in case.differentiable.items() if name != "v"}


def gradients(out: Tensor, wanted: dict[str, Tensor]) -> list[Tensor]:
    """Of a sum with unequal weights, rows of -inf left out."""
    weights = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
    total = (out * weights).masked_fill(out == -math.inf, 0).sum()
    return list(torch.autograd.grad(total, list(wanted.values()), materialize_grads=True))


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize(
    ("score", "mask"),
    [
        *((score, "Or") for score in testing.scores(SMALL, 3)),
        *(("ScaledDot", mask) for mask in testing.masks(SMALL)),
    ],
)
def test_values_and_gradients(function: Function, score: str, mask: str, sink: bool) -> None:
    case, wanted = leaves(score, mask, sink)
    out, expected = run(function, case), dense(function, case)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)
    for name, a, b in zip(wanted, gradients(out, wanted), gradients(expected, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("score", ["ScaledDot 2", "Additive", "Pipeline"])
def test_numerical_derivatives(function: Function, score: str) -> None:
    case, wanted = leaves(score, "Causal", sink=True)

    def call(q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
        again = replace(case, q=q, k=k, score=case.score.with_tensors(iter(rest[:-1])), sink=rest[-1])
        return run(function, again).masked_fill(SMALL_EMPTY, 0)

    given = tuple(wanted.values())
    assert gradcheck(call, given, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, given, fast_mode=True)


SMALL_EMPTY = rg.Causal().on(3, 5, positions=SMALL.positions).empty_rows()


@pytest.mark.parametrize("hidden", [math.nan, math.inf, 1.0])
def test_rows_that_see_nothing_have_no_gradient(function: Function, hidden: float) -> None:
    """Even where the loss gives them one that is not finite, and their tokens are not."""
    q, k = torch.randn(1, 2, 7, 4, dtype=F64), torch.randn(1, 2, 7, 4, dtype=F64)
    q[..., 5:, :], k[..., 4:, :] = hidden, hidden
    q.requires_grad_(), k.requires_grad_()
    out = function(q, k, mask=rg.Lengths(keys=torch.tensor([4]), queries=torch.tensor([5])), sink=0.5)
    assert (out[..., 5:] == (0 if function is rg.entropy else -math.inf)).all()
    g = torch.ones_like(out)
    g[..., 5:] = math.nan
    g_q, g_k = torch.autograd.grad(out, (q, k), g)
    assert (g_q[..., 5:, :] == 0).all() and (g_k[..., 4:, :] == 0).all()
    assert g_q.isfinite().all() and g_k.isfinite().all() and (g_q[..., :5, :] != 0).any()


def test_values_are_the_facts(function: Function) -> None:
    case = testing.draw(AT, mask=rg.Causal(), sink=True)
    seen = looked(case, (facts.Entropy(), facts.MaxScore()))
    expected = seen[facts.Entropy()] if function is rg.entropy else seen[facts.MaxScore()].score
    assert torch.equal(run(function, case), expected)
    assert torch.equal(run(function, case.leaves(F64)).detach(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_in_lower_precision(function: Function, dtype: torch.dtype) -> None:
    """Those of float64 on the same rounded numbers, up to one rounding of the answer and 1e-5 of the sums."""
    case = testing.draw(AT, mask=rg.Causal(), sink=True).leaves(dtype)
    exact = case.leaves(F64)
    out = run(function, case)
    assert out.dtype == torch.float32
    wanted, precise = ({"q": one.q, "k": one.k, "sink": one.sink} for one in (case, exact))
    for a, b in zip(gradients(out, wanted), gradients(run(function, exact), precise), strict=True):
        assert a.dtype == dtype
        size = float(b.abs().max())
        torch.testing.assert_close(a.double(), b, rtol=torch.finfo(dtype).eps, atol=1e-5 * size)


def test_scores_beyond_the_digits_of_the_lse() -> None:
    """Scores of 10⁴ that float32 holds exactly: the gradient of each row's scores sums to 0, as in float64."""
    bias = 10_000 + torch.randint(-3000, 3000, (11, 13)).double() / 1024
    found = []
    for dtype in (torch.float32, F64):
        scores = bias.to(dtype, copy=True).requires_grad_()
        x = torch.zeros(13, 4, dtype=dtype)
        out = rg.entropy(x[:11], x, score=rg.ScaledDot() >> rg.Bias(scores))
        found.append(torch.autograd.grad(out.sum(), scores)[0].double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_one_input_alone(function: Function, needs: tuple[bool, bool]) -> None:
    case, _ = leaves("ScaledDot", "Causal", sink=False)
    whole = gradients(run(function, case), {"q": case.q, "k": case.k})
    some = [t.detach().requires_grad_(need) for t, need in zip((case.q, case.k), needs, strict=True)]
    one = gradients(run(function, replace(case, q=some[0], k=some[1])), {"": some[needs.index(True)]})
    assert torch.equal(one[0], whole[needs.index(True)])


def test_only_the_sink() -> None:
    case, _ = leaves("ScaledDot", "Causal", sink=True)
    whole = gradients(run(rg.entropy, case), {"sink": case.sink})
    alone = replace(case, q=case.q.detach(), k=case.k.detach())
    assert torch.equal(gradients(run(rg.entropy, alone), {"sink": case.sink})[0], whole[0])
    assert (gradients(run(rg.max_score, case), {"sink": case.sink})[0] == 0).all()


def test_equal_scores_give_the_gradient_to_the_first() -> None:
    q, k = torch.ones(1, 1, dtype=F64), torch.tensor([[1.0], [3.0], [3.0]], dtype=F64, requires_grad=True)
    rg.max_score(q, k, score=rg.Dot()).sum().backward()
    assert k.grad is not None and k.grad.flatten().tolist() == [0.0, 1.0, 0.0]


def test_an_input_changed_before_backward_is_noticed(function: Function) -> None:
    q = torch.randn(5, 4, requires_grad=True)
    own = q * 1
    out = function(own, own.detach().clone())
    own.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_transforms_of_torch_func(function: Function) -> None:
    q, k = torch.randn(3, 2, 5, 4, dtype=F64), torch.randn(3, 2, 7, 4, dtype=F64)
    each = torch.stack([function(a[None], b[None])[0] for a, b in zip(q, k, strict=True)])
    torch.testing.assert_close(torch.func.vmap(lambda a, b: function(a[None], b[None])[0])(q, k), each)
    g = torch.func.grad(lambda a: function(a, k).sum())(q)
    q.requires_grad_()
    torch.testing.assert_close(g, torch.autograd.grad(function(q, k).sum(), q)[0])


def test_axes_sizes_and_arrays(function: Function) -> None:
    q, k = torch.randn(2, 5, 4), torch.randn(2, 7, 4)
    assert function(q, k).shape == (2, 5) and function(q[0], k[0]).shape == (5,)
    assert type(function(q.numpy(), k.numpy())).__name__ == "ndarray"
    for nq, nk in ((0, 3), (3, 0)):
        q, k = torch.randn(2, 3, nq, 4, requires_grad=True), torch.randn(2, 3, nk, 4, requires_grad=True)
        out = function(q, k)
        assert out.shape == (2, 3, nq)
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k), allow_unused=True))
