"""The additive similarity on the native kernels, against the dense definition, on every instruction set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard as rg
from kernel_checks import check, compare, frames, judge
from needed import needs_kernels
from regard import testing
from regard.scores.activations import Activation

pytestmark = needs_kernels

ACTIVATIONS = (rg.Tanh(), rg.Sigmoid(), rg.LeakyReLU())
KINDS = [(rg.Tanh(), torch.bfloat16), (rg.Tanh(), torch.float16), *((f, torch.float32) for f in ACTIVATIONS)]
FRAMES = frames(few=331) | {"one row": testing.frame(nq=1, nk=331, batch=(17,), heads=3)}
del FRAMES["small"]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize(("activation", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("mask", ["Causal", "Lengths", "Dense", "Or", "nothing"])
def test_every_instruction_set(isa: str, activation: Activation, dtype: torch.dtype, size: str, mask: str) -> None:
    at = FRAMES[size]
    # as AdditiveScore begins
    weights = drawn(19, 32) / 38**0.5, drawn(19, 32) / 38**0.5, drawn(at.heads, 32) / 32**0.5, drawn(32)
    slopes = torch.linspace(0.1, 0.5, at.heads, dtype=torch.float64)
    score = rg.Additive(*weights, activation) >> rg.SoftCap(5.0) >> rg.Alibi(slopes)
    compare(testing.draw(at, dk=19, dv=19, score=score, mask=testing.masks(at)[mask]), dtype)
    score = rg.Additive(None, None, drawn(33) / 33**0.5, None, activation)
    case = testing.draw(at, dk=33, dv=16, score=score, sink=True)
    compare(replace(case, mask=testing.masks(at)[mask], dropout=rg.Dropout(0.3, seed=11)), dtype)


@pytest.mark.parametrize(("activation", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("mask", ["Causal", "Lengths", "Dense", "Or", "nothing"])
def test_gradients(isa: str, activation: Activation, dtype: torch.dtype, size: str, mask: str) -> None:
    at = FRAMES[size]
    weights = drawn(19, 32) / 38**0.5, drawn(19, 32) / 38**0.5, drawn(at.heads, 32) / 32**0.5, drawn(32)
    score = rg.Additive(*weights, activation)
    case = testing.draw(at, dk=19, dv=21, score=score, mask=testing.masks(at)[mask], sink=True)
    case = replace(case, dropout=rg.Dropout(0.2, seed=3))
    check(case, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_weights_are_what_they_were_to_the_last_digit(isa: str, activation: Activation) -> None:
    """With a cotangent of 1, the gradients of a row's values are its weights, and that of its sink what they leave."""
    q, k, v = torch.randn(29, 3, 1, 32), torch.randn(29, 3, 331, 32), torch.zeros(29, 3, 331, 1, requires_grad=True)
    score = rg.Additive(None, None, torch.randn(32) / 32**0.5, None, activation)
    for sink in (None, torch.randn(29, 3, requires_grad=True)):
        state = rg.attention_state(q, k, v, score=score, sink=sink, backend=rg.Native())
        out, lse = state.finish()
        g_v = torch.autograd.grad(out.sum(), v, retain_graph=True)[0].double().sum((-1, -2))
        g_sink = torch.zeros(29, 3) if sink is None else torch.autograd.grad(lse.sum(), sink)[0]
        assert testing.error(g_v + g_sink, torch.ones_like(g_v)) <= torch.finfo(torch.float32).eps


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("modifier", ["SoftCap", "Alibi", "Bias", "RelativeBias"])
@pytest.mark.parametrize("size", ["blocks", "few rows"])
def test_gradients_before_modifiers(isa: str, activation: Activation, modifier: str, size: str) -> None:
    """Gradients of q, k, v and w natively; that of a bias, slopes or a table over tiles in PyTorch."""
    at = FRAMES[size]
    stage = testing.scores(at)[modifier].stages[-1]
    score = rg.Additive(None, None, drawn(9) / 3, None, activation) >> stage
    case = testing.draw(at, dk=9, dv=5, score=score, mask=rg.Causal())
    check(case)
    judge(errors_beside_constants, case)


def errors_beside_constants(case: testing.Case) -> list[tuple[float, float]]:
    """Of the gradients of q, k, v and w where the modifier's tensors require none: how far off, and how far allowed."""
    found = list[tuple[Tensor, ...]]()
    for dtype, backend in (
        (torch.float64, rg.Reference()),
        (torch.float32, rg.Reference()),
        (torch.float32, rg.Native()),
    ):
        one = case.leaves(dtype)
        assert isinstance(one.score, rg.Score)
        similarity, modifier = one.score.stages
        fixed = similarity >> modifier.with_tensors(iter(t.detach() for t in modifier.tensors()))
        out = rg.attention(one.q, one.k, one.v, score=fixed, mask=one.mask, positions=one.positions, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), (one.q, one.k, one.v, one.score.tensors()[0])))
    each = zip(*found, strict=True)
    return [(testing.error(got, right), testing.tolerance(right, usual)) for right, usual, got in each]


@pytest.mark.parametrize("width", [1, 2, 7, 64, 67, 128, 512])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_widths(isa: str, activation: Activation, width: int) -> None:
    score = rg.Additive(None, None, drawn(width) / width**0.5, None, activation)
    for nq in (3, 70):
        compare(testing.draw(testing.frame(nq=nq, nk=150, batch=(1,), heads=2), dk=width, dv=width + 1, score=score))


@pytest.mark.parametrize("dv", [7, 16, 31, 32, 33, 80])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_values_of_any_width(isa: str, dtype: torch.dtype, dv: int) -> None:
    score = rg.Additive(None, None, drawn(5) / 5**0.5)
    for nq in (3, 70):
        check(testing.draw(testing.frame(nq=nq, nk=75, batch=(2,), heads=2), dk=5, dv=dv, score=score), dtype)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257])
def test_lengths_at_every_edge(isa: str, n: int) -> None:
    score = rg.Additive(None, None, drawn(5))
    compare(testing.draw(testing.frame(nq=n, nk=n, batch=(2,), heads=2), dk=5, dv=7, score=score, mask=rg.Causal()))
    compare(testing.draw(testing.frame(nq=n, nk=131, batch=(1,), heads=2), dk=5, dv=7, score=score))


@pytest.mark.parametrize("nq", [5, 70])
@pytest.mark.parametrize("size", [(3.0, 3.0), (12.0, 1.0), (10.0, 10.0), (25.0, 25.0), (100.0, 1.0), (1e4, 1e4)])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_every_range(isa: str, activation: Activation, size: tuple[float, float], nq: int) -> None:
    """Beyond each range a tile's scores are found another way: near, far, and with no product of exponentials."""
    at = testing.frame(nq=nq, nk=300, batch=(5,), heads=2)
    case = testing.draw(at, dk=33, dv=5, score=rg.Additive(None, None, drawn(33) / 33**0.5, None, activation))
    far = torch.arange(300) >= 150  # one tile of many reaches far
    k = torch.where(far[:, None], case.k * size[1], case.k)
    check(replace(case, q=case.q * size[0], k=k))


def test_weights_of_every_size(isa: str) -> None:
    at = testing.frame(nq=70, nk=150, batch=(1,), heads=2)
    for w in (
        torch.zeros(8),
        torch.logspace(-40, 0, 8),
        torch.tensor([1e30, -1e30, 1e22, 0, 1e-30, 1, 2, 3]),
        -torch.ones(8),
    ):
        for activation in ACTIVATIONS:
            case = testing.draw(at, dk=8, dv=5, score=rg.Additive(None, None, w.double(), None, activation))
            compare(replace(case, q=case.q * 4, k=case.k * 4))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nq", [5, 130])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_what_is_hidden_never_leaks_and_what_is_seen_stays(
    isa: str, activation: Activation, dtype: torch.dtype, nq: int, bad: float
) -> None:
    q, k, v = (torch.randn(1, 1, n, 16).to(dtype) for n in (nq, 130, 130))
    given = {"score": rg.Additive(None, None, torch.randn(16), None, activation), "mask": rg.Causal()}
    given["positions"] = rg.tail(nq, 130)
    clean = rg.attention(q, k, v, **given, backend=rg.Tiled())
    k[..., 128, :], v[..., 128, 3] = bad, bad
    mine, right = (rg.attention(q, k, v, **given, backend=backend) for backend in (rg.Native(), rg.Reference()))
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(mine[..., :-2, :], clean[..., :-2, :], **near)
    torch.testing.assert_close(mine, right, **near, equal_nan=True)
    assert not mine[..., -2:, 3].isfinite().any()


def test_infinite_queries_and_keys_have_saturated_scores(isa: str) -> None:
    at = testing.frame(nq=70, nk=150, batch=(1,), heads=2)
    for activation in (rg.Tanh(), rg.Sigmoid()):
        case = testing.draw(at, dk=8, dv=5, score=rg.Additive(None, None, drawn(8), None, activation))
        q, k = case.q.clone(), case.k.clone()
        q[..., 3, 2], k[..., 5, 1], k[..., 149, 1] = torch.inf, -torch.inf, torch.inf
        compare(replace(case, q=q, k=k))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("nq", [5, 130])
def test_gradients_of_what_is_hidden_and_of_what_is_not_finite(
    isa: str, activation: Activation, nq: int, bad: float
) -> None:
    at = replace(testing.frame(nq=nq, nk=130, batch=(1,), heads=2), headed=True)
    case = testing.draw(at, dk=8, dv=5, score=rg.Additive(None, None, drawn(8), None, activation), mask=rg.Causal())
    q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
    k[..., 128, 1], v[..., 129, 2] = bad, bad  # the last two queries see the key, the last one the value
    q[..., 1, 3] = bad
    case = replace(case, q=q, k=k, v=v)
    mine, right = (testing.answers(case, backend, torch.float32) for backend in (rg.Native(), rg.Tiled()))
    for key in right:
        torch.testing.assert_close(mine[key], right[key], rtol=1e-4, atol=1e-5, equal_nan=True)
    assert mine["gradient of q"][..., 2:-2, :].isfinite().all()


@pytest.mark.parametrize("nq", [5, 130])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_cotangent_that_is_not_finite_reaches_what_its_row_sees(isa: str, nq: int, bad: float) -> None:
    q, k, v = (torch.randn(2, n, 8, requires_grad=True) for n in (nq, 130, 130))
    given = {"score": rg.Additive(None, None, torch.randn(8)), "mask": rg.Causal(), "positions": rg.tail(nq, 130)}
    out = rg.attention(q, k, v, **given, backend=rg.Native())
    cotangent = torch.ones_like(out)
    cotangent[:, -2, 3] = bad  # the last key is hidden from that row
    g_q, g_k, g_v = torch.autograd.grad(out, (q, k, v), cotangent)
    assert g_q[:, :-2].isfinite().all() and g_k[:, -1].isfinite().all() and g_v[:, -1].isfinite().all()
    assert not g_q[:, -2].isfinite().any() and not g_v[:, :-1, 3].isfinite().any()
    assert g_v[..., :3].isfinite().all()


@pytest.mark.parametrize("nq", [9, 70])
def test_keys_that_nobody_sees_and_rows_that_see_nothing_have_gradient_0(isa: str, nq: int) -> None:
    at = replace(testing.frame(nq=nq, nk=300, batch=(2,), heads=2), positions=rg.head(nq, 300))
    w = drawn(8)
    for mask in (rg.Causal() & rg.Prefix(40), rg.Dense(torch.arange(300)[None] < torch.arange(nq)[:, None])):
        case = testing.draw(at, dk=8, dv=5, score=rg.Additive(None, None, w), mask=mask)
        k, v = case.k.clone(), case.v.clone()
        k[..., 200:, :], v[..., 200:, :] = torch.nan, torch.inf
        found = testing.answers(replace(case, k=k, v=v), rg.Native(), torch.float32)
        assert bool((found["gradient of k"][..., 70:, :] == 0).all() & (found["gradient of v"][..., 70:, :] == 0).all())
        assert all(t.isfinite().all() for name, t in found.items() if name != "lse")
    assert bool((found["gradient of q"][..., 0, :] == 0).all())


def test_strides(isa: str) -> None:
    w = torch.randn(16)
    for nq in (1, 70):
        q, k, v = (torch.randn(2, 8, n, 4, 32).movedim(3, 1)[..., ::2] for n in (nq, 90, 90))
        score = rg.Additive(None, None, w)
        expected = rg.attention(*(t.contiguous() for t in (q, k, v)), score=score, backend=rg.Native())
        turned = [t.mT.contiguous().mT for t in (q, k, v)]
        plain = [t.contiguous().requires_grad_() for t in (q, k, v)]
        out = rg.attention(*plain, score=score, backend=rg.Native())
        gradients = torch.autograd.grad(out.square().sum(), plain)
        for given in ((q, k, v), turned):
            leaves = [t.detach().requires_grad_() for t in given]
            out = rg.attention(*leaves, score=score, backend=rg.Native())
            assert torch.equal(out, expected)
            for mine, right in zip(torch.autograd.grad(out.square().sum(), leaves), gradients, strict=True):
                assert torch.equal(mine, right)
        far = rg.attention(100 * q, 100 * k, v, score=score, backend=rg.Native())
        torch.testing.assert_close(
            far, rg.attention(*(t.contiguous() for t in (100 * q, 100 * k, v)), score=score, backend=rg.Tiled())
        )


def test_the_same_bits_for_any_number_of_threads() -> None:
    before, w = torch.get_num_threads(), torch.randn(24)
    for nq in (1, 3, 200):
        q, k, v = torch.randn(2, 3, nq, 24), torch.randn(2, 3, 3000, 24), torch.randn(2, 3, 3000, 24)
        answers = list[Tensor]()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            leaves = [t.requires_grad_() for t in (q, k, v, w)]
            out = rg.attention(q, k, v, score=rg.Additive(None, None, w), backend=rg.Native())
            answers.append(torch.cat([t.flatten() for t in (out, *torch.autograd.grad(out.square().sum(), leaves))]))
        assert torch.equal(answers[0], answers[1]) and torch.equal(answers[1], answers[2])
    torch.set_num_threads(before)


def test_an_activation_of_ones_own_is_refused() -> None:
    class Mine(rg.Tanh):
        pass

    x = torch.randn(3, 5)
    with pytest.raises(rg.Unsupported, match="have tanh, the sigmoid or a leaky ReLU, not Mine"):
        rg.attention(x, x, x, score=rg.Additive(None, None, torch.ones(5), None, Mine()), backend=rg.Native())


def test_explain_says_where_backward_runs() -> None:
    x, bias = torch.randn(40, 8), torch.zeros(40, 40, requires_grad=True)
    score = rg.Additive(None, None, torch.ones(8, requires_grad=True))
    assert "the same kernels" in str(rg.explain(x, x, x, score=score))
    assert "the same kernels" in str(rg.explain(x, x, x, score=score >> rg.Bias(bias)))
    cap = torch.tensor(2.0, requires_grad=True)
    assert "its soft cap is learned" in str(rg.explain(x, x, x, score=score >> rg.SoftCap(cap)))


def test_rows_that_depend_on_no_other_are_refused() -> None:
    x = torch.randn(3, 5)
    with pytest.raises(rg.Unsupported, match="how far the queries beside it reach"):
        rg.attention(x, x, x, score=rg.Additive(None, None, torch.ones(5)), backend=rg.Native(invariant=True))


@pytest.mark.parametrize("nq", [5, 70])
@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal()], ids=repr)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_score_of_minus_infinity_is_a_weight_of_0(isa: str, nq: int, mask: rg.Mask, p: float) -> None:
    """No mask hides the pair, and the values there receive nothing."""
    at = testing.frame(nq=nq, nk=130, batch=(2,), heads=2)
    w = torch.tensor([1, 1000, 1, 1, 1, 1, 1, 1], dtype=torch.float64)
    case = testing.draw(at, dk=8, dv=5, score=rg.Additive(None, None, w, None, rg.LeakyReLU()), mask=mask)
    q, k = case.q.clone(), case.k.clone()
    q[..., 1], k[..., 1], k[..., [5, 40], 1] = 0, 0, -3e38  # their sums are beyond float32's
    case = replace(case, q=q, k=k, dropout=rg.Dropout(p, seed=3) if p else None)
    mine, right = (testing.answers(case, backend, torch.float32) for backend in (rg.Native(), rg.Tiled()))
    for name in right:
        torch.testing.assert_close(mine[name], right[name], rtol=1e-3, atol=1e-4, equal_nan=True)
    assert bool((mine["gradient of v"][..., [5, 40], :] == 0).all())
