"""attention_scores: the scores before the softmax, their gradients, and the laws between them and the weights."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import regard as rg
from regard import testing
from regard.runtime import pairs

F64, INF = torch.float64, torch.inf
AT = testing.frame((2,), 3, 11, 13)
SMALL = testing.frame((2,), 2, nq=3, nk=5)
ROWS = [7, 0, -1, 7, 8, 9]


def given(case: testing.Case) -> dict[str, Any]:
    return {"score": case.score, "mask": case.mask, "positions": case.positions}


def defined(case: testing.Case) -> Tensor:
    """The definition: every pair's score at once, -inf where hidden, by operations that autograd differentiates."""
    problem = case.problem
    tile = problem.region_tile(problem.frame.region())
    s = tile.scores.expand(problem.frame.shape)
    hidden = s.detach() == -INF if tile.visible is None else (s.detach() == -INF) | ~tile.visible
    return torch.where(hidden, -INF, s)


def leaves(at: testing.Frame, **drawn: Any) -> tuple[testing.Case, dict[str, Tensor]]:
    case = testing.draw(at, **drawn).leaves(F64)
    return case, {name: t for name, t in case.differentiable.items() if name != "v"}


@pytest.fixture(params=[1 << 20, 100], ids=["one strip", "strips"])
def strips(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "BUDGET", request.param)


def test_by_hand() -> None:
    q, k = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    raw = torch.tensor([[3.0, 8.0], [0.0, 2.0]])
    close = torch.testing.assert_close
    close(rg.attention_scores(q, k), raw / math.sqrt(2))
    close(rg.attention_scores(q, k, score=rg.Dot()), raw)
    capped, bias = 5 * torch.tanh(raw / 5), torch.tensor([[0.0, -1.0], [-INF, 2.0]])
    score = rg.Dot() >> rg.SoftCap(5.0)
    close(rg.attention_scores(q, k, score=score), capped)
    close(rg.attention_scores(q, k, score=score >> rg.Bias(bias)), capped + bias)
    shown = capped.masked_fill(torch.tensor([[False, True], [False, False]]), -INF)
    close(rg.attention_scores(q, k, score=score, mask=rg.Causal()), shown)
    close(rg.attention_scores(q, k, score=score, mask=rg.Causal(), rows=[-1, 0]), shown[[1, 0]])


@pytest.mark.usefixtures("strips")
@pytest.mark.parametrize("name", testing.scores(AT))
@pytest.mark.parametrize("masked", testing.masks(AT))
def test_every_score_and_mask_against_the_definition(masked: str, name: str) -> None:
    case, wanted = leaves(AT, score=testing.scores(AT)[name], mask=testing.masks(AT)[masked])
    right = defined(case)
    assert right.shape == (2, 3, 11, 13)
    for rows in (None, ROWS):
        found = rg.attention_scores(case.q, case.k, **given(case), rows=rows)
        want = right if rows is None else right[..., rows, :]
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)
        g = torch.randn(want.shape, dtype=F64)
        g[0, 0] = torch.where(want[0, 0] == -INF, math.nan, g[0, 0])  # of a hidden pair it plays no part
        of = tuple(wanted.values())
        ours = torch.autograd.grad(found, of, g, materialize_grads=True)
        exact = torch.autograd.grad(want, of, g, materialize_grads=True, retain_graph=True)
        for tensor, a, b in zip(wanted, ours, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda text, tensor=tensor: f"{tensor}: {text}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("masked", testing.masks(AT))
def test_their_softmax_is_the_weights(masked: str, dtype: torch.dtype) -> None:
    for name in ("ScaledDot", "Additive", "Pipeline"):
        case = testing.draw(AT, score=testing.scores(AT)[name], mask=testing.masks(AT)[masked]).leaves(dtype)
        with torch.no_grad():
            s = rg.attention_scores(case.q, case.k, **given(case))
            weights = rg.attention_weights(case.q, case.k, **given(case))
        assert s.dtype == (F64 if dtype == F64 else torch.float32) and weights.dtype == dtype
        empty = (s == -INF).all(-1, keepdim=True)
        softmax = torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(weights, softmax.to(dtype), rtol=8 * eps, atol=eps / 8)


def test_their_largest_is_max_score_and_their_sum_the_lse() -> None:
    case, _ = leaves(AT, score=testing.scores(AT)["Pipeline"], mask=testing.masks(AT)["Or"])
    s = rg.attention_scores(case.q, case.k, **given(case))
    assert testing.error(s.amax(-1), rg.max_score(case.q, case.k, **given(case))) < 1e-14
    lse = rg.attention_state(case.q, case.k, case.v, **given(case)).finish()[1]
    assert testing.error(s.logsumexp(-1), lse) < 1e-13


def test_half_precision_keeps_the_digits_of_float32() -> None:
    """1001 is no bfloat16, and 122,880 no float16."""
    q, k = torch.tensor([[1.0, 1.0]]), torch.tensor([[1000.0, 1.0]])
    assert rg.attention_scores(q.bfloat16(), k.bfloat16(), score=rg.Dot()).item() == 1001
    k = torch.tensor([[61440.0, 61440.0]])
    assert rg.attention_scores(q.half(), k.half(), score=rg.Dot()).item() == 122880


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [None, ROWS], ids=["all", "rows"])
def test_gradients_in_each_dtype(dtype: torch.dtype, rows: list[int] | None) -> None:
    q, k = torch.randn(2, 4, 37, 16).to(dtype), torch.randn(2, 4, 53, 16).to(dtype)
    chosen = list(range(37)) if rows is None else rows
    g = torch.randn(2, 4, len(chosen), 53)

    def plain(as_dtype: torch.dtype, sums: torch.dtype) -> tuple[Tensor, ...]:
        own = tuple(t.to(as_dtype).requires_grad_() for t in (q, k))
        wide = [t.to(sums) for t in own]
        return torch.autograd.grad(wide[0][..., chosen, :] @ wide[1].mT / 4, own, g.to(sums))

    ours = tuple(t.clone().requires_grad_() for t in (q, k))
    found = torch.autograd.grad(rg.attention_scores(*ours, rows=rows), ours, g)
    for got, want, theirs in zip(found, plain(F64, F64), plain(dtype, torch.float32), strict=True):
        assert got.dtype == dtype and testing.error(got, want) <= testing.tolerance(want, theirs)


@pytest.mark.parametrize("name", ["ScaledDot 2", "Additive", "Pipeline"])
def test_numerical_derivatives(name: str) -> None:
    case, wanted = leaves(SMALL, dk=3, score=testing.scores(SMALL, 3)[name], mask=rg.Causal())

    def call(q: Tensor, k: Tensor, *rest: Tensor) -> Tensor:
        again = replace(case, q=q, k=k, score=case.score.with_tensors(iter(rest)))
        s = rg.attention_scores(again.q, again.k, **given(again), rows=[2, 0, 2])
        return s.masked_fill(s == -INF, 0)

    assert gradcheck(call, tuple(wanted.values()), check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(call, tuple(wanted.values()), fast_mode=True)


def test_torch_func_and_dual_numbers() -> None:
    case, wanted = leaves(SMALL, mask=rg.Causal(), score=rg.ScaledDot() >> rg.SoftCap(2.0))

    def call(q: Tensor, k: Tensor) -> Tensor:
        s = rg.attention_scores(q, k, **given(case))
        return s.masked_fill(s == -INF, 0)

    q, k = (wanted[name].detach() for name in "qk")
    want = torch.autograd.grad(call(case.q, case.k).square().sum(), (case.q, case.k))
    got = torch.func.grad(lambda q, k: call(q, k).square().sum(), (0, 1))(q, k)
    assert all(testing.error(a, b) < 1e-14 for a, b in zip(got, want, strict=True))
    many = torch.func.vmap(call)(torch.stack([q, -q]), torch.stack([k, 2 * k]))
    assert testing.error(many, torch.stack([call(q, k), call(-q, 2 * k)])) < 1e-14
    tangents = k[..., :3, :].clone(), q[..., [0, 1, 2, 0, 1], :].clone()
    _, push = torch.func.jvp(call, (q, k), tangents)
    with warnings.catch_warnings(), forward_ad.dual_level():
        duals = (forward_ad.make_dual(t, tangent) for t, tangent in zip((case.q, case.k), tangents, strict=True))
        assert testing.error(forward_ad.unpack_dual(call(*duals)).tangent, push) < 1e-15
    assert push.any()


@pytest.mark.parametrize("way", ["backward", "create_graph", "torch.func"])
@pytest.mark.parametrize("hidden", [math.nan, INF, -INF])
def test_what_is_hidden_leaks_nowhere(hidden: float, way: str) -> None:
    """The answer is -inf there, the gradient 0, whatever stands there and whatever the cotangent is."""
    q, k = torch.randn(1, 2, 7, 4, dtype=F64), torch.randn(1, 2, 7, 4, dtype=F64)
    q[..., 5:, :], k[..., 4:, :] = hidden, hidden
    mask = rg.Lengths(keys=torch.tensor([4]), queries=torch.tensor([5]))
    g = torch.full((1, 2, 7, 7), math.nan, dtype=F64)
    g[..., :5, :4] = 1

    def call(q: Tensor, k: Tensor) -> Tensor:
        return rg.attention_scores(q, k, mask=mask)

    if way == "torch.func":
        s, pull = torch.func.vjp(call, q, k)
        g_q, g_k = pull(g)
    else:
        q.requires_grad_(), k.requires_grad_()
        s = call(q, k)
        g_q, g_k = torch.autograd.grad(s, (q, k), g, create_graph=way == "create_graph")
    assert (s[..., 5:, :] == -INF).all() and (s[..., 4:] == -INF).all() and s[..., :5, :4].isfinite().all()
    assert (g_q[..., 5:, :] == 0).all() and (g_k[..., 4:, :] == 0).all()
    torch.testing.assert_close(g_q[..., :5, :], k.detach()[..., :4, :].sum(-2, keepdim=True).expand(1, 2, 5, 4) / 2)
    torch.testing.assert_close(g_k[..., :4, :], q.detach()[..., :5, :].sum(-2, keepdim=True).expand(1, 2, 4, 4) / 2)


@pytest.mark.parametrize("way", ["backward", "create_graph"])
def test_a_bias_of_minus_infinity_hides_too(way: str) -> None:
    q, k = (torch.randn(n, 4, dtype=F64, requires_grad=True) for n in (3, 5))
    bias = torch.zeros(3, 5, dtype=F64)
    bias[:, 3:] = -INF
    bias.requires_grad_()
    s = rg.attention_scores(q, k, score=rg.Dot() >> rg.Bias(bias))
    g_q, g_k, g_bias = torch.autograd.grad(s.sum(), (q, k, bias), create_graph=way == "create_graph")
    assert (s[:, 3:] == -INF).all() and (g_k[3:] == 0).all() and (g_bias[:, 3:] == 0).all()
    torch.testing.assert_close(g_q, k[:3].sum(0).expand(3, 4))


def test_a_visible_nan_stays_visible() -> None:
    q, k = torch.randn(3, 4), torch.randn(5, 4)
    k[1, 2] = math.nan
    s = rg.attention_scores(q, k)
    assert s[:, 1].isnan().all() and s[:, [0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 3, 5), (2, 0, 5), (2, 3, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_empty_axes(shape: tuple[int, ...], requires_grad: bool) -> None:
    *batch, nq, nk = shape
    q, k = (torch.randn(*batch, n, 4, requires_grad=requires_grad) for n in (nq, nk))
    s = rg.attention_scores(q, k, mask=rg.Causal(), positions=rg.head(nq, nk))
    assert s.shape == shape
    assert rg.attention_scores(q, k, rows=[]).shape == (*batch, 0, nk)
    if requires_grad:
        g_q, g_k = torch.autograd.grad(s.sum(), (q, k))
        assert not g_q.any() and not g_k.any()


def test_arrays_in_arrays_out() -> None:
    q, k = np.random.randn(2, 3, 5, 4), np.random.randn(2, 3, 7, 4)
    s = rg.attention_scores(q, k, rows=np.array([1, -1]))
    assert type(s) is np.ndarray and s.dtype == np.float64 and s.flags.writeable
    np.testing.assert_allclose(s, (q @ k.swapaxes(-1, -2) / 2)[..., [1, -1], :])
    half = rg.attention_scores(q.astype(np.float16), k.astype(np.float16))
    assert type(half) is np.ndarray and half.dtype == np.float32


def test_autocast_takes_its_dtype_and_sums_in_float32() -> None:
    q, k = torch.randn(3, 4), torch.randn(5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        s = rg.attention_scores(q, k)
    assert s.dtype == torch.float32 and torch.equal(s, rg.attention_scores(q.bfloat16(), k.bfloat16()))


def test_meta_tensors_have_the_right_shape() -> None:
    q, k = torch.empty(2, 6, 3, 8, device="meta"), torch.empty(2, 2, 5, 8, device="meta")
    s = rg.attention_scores(q.bfloat16(), k.bfloat16())
    assert s.is_meta and s.shape == (2, 6, 3, 5) and s.dtype == torch.float32


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*torch.jit.script(_method)?. is deprecated")
def test_one_graph_of_torch_compile() -> None:
    torch.compiler.reset()
    case = testing.draw(AT, mask=rg.Causal(), score=rg.ScaledDot() >> rg.SoftCap(2.0)).leaves(torch.float32)

    def call(q: Tensor, k: Tensor) -> Tensor:
        return rg.attention_scores(q, k, **given(case))

    found = []
    for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
        s = run(case.q, case.k)
        found.append((s, *torch.autograd.grad(s.masked_fill(s == -INF, 0).sin().sum(), (case.q, case.k))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def refusals() -> list[tuple[type[Exception], str, Callable[[Tensor, Tensor], object]]]:
    score, value = rg.attention_scores, rg.ShapeError
    return [
        (IndexError, r"rows holds \[3\]; there are 3 queries", lambda q, k: score(q, k, rows=[3])),
        (TypeError, "rows has dtype torch.bool", lambda q, k: score(q, k, rows=[True])),
        (value, "q has width 4, k has width 3", lambda q, k: score(q, k[:, :3])),
        (value, "positions are not given", lambda q, k: score(q, k, mask=rg.Causal())),
        (TypeError, "score is a Tensor", lambda q, k: score(q, k, score=q)),
    ]


@pytest.mark.parametrize(("kind", "said", "call"), refusals())
def test_what_is_refused(kind: type[Exception], said: str, call: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(kind, match=said):
        call(torch.zeros(3, 4), torch.zeros(5, 4))


def test_inputs_are_never_written_and_the_answer_is_memory_of_its_own() -> None:
    case, wanted = leaves(AT, score=testing.scores(AT)["Pipeline"], mask=testing.masks(AT)["And"])
    before = [(t._version, t.detach().clone()) for t in wanted.values()]
    found = rg.attention_scores(case.q, case.k, **given(case))
    made = [found, *torch.autograd.grad(found.masked_fill(found == -INF, 0).sum(), tuple(wanted.values()))]
    for t, (version, content) in zip(wanted.values(), before, strict=True):
        assert t._version == version and torch.equal(t, content)
    storages = {t.untyped_storage().data_ptr() for t in made}
    assert len(storages) == len(made) and not storages & {t.untyped_storage().data_ptr() for t in wanted.values()}


def test_an_input_that_changes_before_backward_is_found_out() -> None:
    q, k = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    s = rg.attention_scores(q, k)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        s.sum().backward()
