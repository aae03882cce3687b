"""The semantics table, row by row, on both backends, in values and gradients."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing
from regard.backends.base import Backend

BACKENDS = [rg.Reference(), rg.Tiled(rows=4, keys=5), rg.Tiled()]
AT = testing.frame()
F64 = torch.float64
NAN, INF = math.nan, math.inf

pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=repr)


def same(a: dict[str, Tensor], b: dict[str, Tensor], allowed: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert testing.error(a[name], b[name]) <= allowed, name


def test_grouped_queries(backend: Backend) -> None:
    """Query head i reads key head i // (h // hk)."""
    case = testing.draw(AT, key_heads=2)
    got = testing.answers(case, backend, F64)
    index = torch.tensor([0, 0, 0, 1, 1, 1])
    want = testing.answers(replace(case, k=case.k[:, index], v=case.v[:, index]), rg.Reference(), F64)
    for name in ("k", "v"):
        want[f"gradient of {name}"] = want[f"gradient of {name}"].unflatten(1, (2, 3)).sum(2)
    same(got, want)


def test_order_of_stages(backend: Backend) -> None:
    """Similarity, modifiers as written, mask, sink, softmax, dropout, values."""
    drop, allowed = rg.Dropout(0.4, seed=5), torch.rand(13, 17) < 0.7
    bias = torch.randn(13, 17, dtype=F64)
    for capped_first in (True, False):
        stages = (rg.SoftCap(1.5), rg.Bias(bias))
        score = rg.ScaledDot()
        for stage in stages if capped_first else stages[::-1]:
            score = score >> stage
        case = testing.draw(AT, key_heads=6, score=score, mask=rg.Dense(allowed[None, None]), sink=True, dropout=drop)
        s = case.q @ case.k.mT / math.sqrt(7)
        s = 1.5 * torch.tanh(s / 1.5) + bias if capped_first else 1.5 * torch.tanh((s + bias) / 1.5)
        s = s.masked_fill(~allowed, -INF)
        s = torch.cat([s, case.sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
        keep = drop.keep(replace(AT, positions=case.positions).region(), F64)
        want = (s.softmax(-1)[..., :-1] * keep) @ case.v
        assert testing.error(testing.answers(case, backend, F64)["out"], want) < 1e-13


def test_true_means_may_attend(backend: Backend) -> None:
    case = testing.draw(AT, mask=rg.Dense(torch.arange(17)[None] == 3))
    want = case.v[:, :, 3:4].repeat_interleave(3, 1).expand(-1, -1, 13, -1)
    assert torch.equal(testing.answers(case, backend, F64)["out"], want)


@pytest.mark.parametrize(("stands", "first"), [(rg.head, 0), (rg.tail, 4)])
def test_causal_is_by_position(backend: Backend, stands: object, first: int) -> None:
    case = replace(testing.draw(AT, mask=rg.Causal()), positions=stands(13, 17))
    for i in (0, 5, 12):
        seen = first + i + 1
        alone = rg.attention(case.q[..., i : i + 1, :], case.k[..., :seen, :], case.v[..., :seen, :])
        assert testing.error(testing.answers(case, backend, F64)["out"][..., i : i + 1, :], alone) < 1e-13


def test_a_window_counts_keys_besides_the_query_s_own(backend: Backend) -> None:
    case = replace(testing.draw(AT, mask=rg.Window(before=2, after=1)), positions=rg.head(13, 17))
    out = testing.answers(case, backend, F64)["out"][..., 7:8, :]
    alone = rg.attention(case.q[..., 7:8, :], case.k[..., 5:9, :], case.v[..., 5:9, :])
    assert testing.error(out, alone) < 1e-13


@pytest.mark.parametrize("sink", [False, True])
def test_empty_rows(backend: Backend, sink: bool) -> None:
    """0, weights 0, lse -inf (or the sink's), gradients 0."""
    allowed = torch.ones(13, 17, dtype=torch.bool)
    allowed[4:9] = False
    case = testing.draw(AT, mask=rg.Dense(allowed[None, None]), sink=sink)
    got = testing.answers(case, backend, F64)
    assert (got["out"][..., 4:9, :] == 0).all()
    want = case.sink[:, None].expand(5, 6, 5) if sink else torch.full((5, 6, 5), -INF, dtype=F64)
    assert torch.equal(got["lse"][..., 4:9], want)
    assert (got["gradient of q"][..., 4:9, :] == 0).all()
    assert all(t.isfinite().all() for name, t in got.items() if name != "lse")
    weights = rg.attention_weights(case.q, case.k, mask=case.mask, sink=case.sink)
    assert (weights[..., 4:9, :] == 0).all()
    without = torch.cat([case.q[..., :4, :], case.q[..., 9:, :]], -2)
    rest = replace(case, q=without, mask=rg.Everything(), positions=None)
    cut = torch.cat([got["out"][..., :4, :], got["out"][..., 9:, :]], -2)
    assert testing.error(cut, testing.answers(rest, backend, F64)["out"]) < 1e-13


@pytest.mark.parametrize("by", ["mask", "bias"])
def test_what_is_asked_of_an_empty_row_leaks_nowhere(backend: Backend, by: str) -> None:
    """A loss that is NaN where a query saw nothing: 0 · NaN must not reach the others."""
    least = torch.zeros(13, 1, dtype=F64).masked_fill(torch.arange(13)[:, None] >= 9, -INF)
    given = {
        "mask": {"mask": rg.Lengths(queries=torch.full((5,), 9))},
        "bias": {"score": rg.ScaledDot() >> rg.Bias(least)},
    }[by]
    case = testing.draw(AT).leaves(F64)
    leaves = (case.q, case.k, case.v)
    out = rg.attention(*leaves, backend=backend, **given)
    cotangent = torch.randn_like(out)
    zero, bad = cotangent.clone(), cotangent.clone()
    zero[..., 9:, :], bad[..., 9:, :] = 0, NAN
    a, b = (torch.autograd.grad(out, leaves, g, retain_graph=True) for g in (zero, bad))
    assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("score", list(testing.scores(AT)))
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e300])
def test_what_is_hidden_leaks_nowhere(backend: Backend, score: str, bad: float) -> None:
    """Not into values, nor into any gradient, were it hidden keys, hidden values or queries that see nothing."""
    allowed = torch.rand(5, 1, 13, 17) < 0.7
    allowed[:, :, 3], allowed[..., 2], allowed[..., 11:] = False, False, False
    case = testing.draw(AT, score=testing.scores(AT)[score], mask=rg.Dense(allowed))
    q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
    q[..., 3, :], k[..., 2, :], v[..., 2, :], k[..., 11:, 0], v[..., 12:, 1] = bad, bad, bad, bad, -bad
    zeros = replace(case, q=q.where(q == case.q, 0), k=k.where(k == case.k, 0), v=v.where(v == case.v, 0))
    same(testing.answers(replace(case, q=q, k=k, v=v), backend, F64), testing.answers(zeros, rg.Reference(), F64))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_nan_that_is_seen_stays(backend: Backend, name: str) -> None:
    case = testing.draw(AT, mask=rg.Causal())
    t = getattr(case, name).clone()
    t[2, 1, 9] = NAN
    out = testing.answers(replace(case, **{name: t}), backend, F64)["out"].isnan()
    expected = torch.zeros_like(out)
    if name == "q":
        expected[2, 1, 9] = True
    else:
        expected[2, 3:, 5:] = True  # queries stand at 4 and after
    assert torch.equal(out, expected)


def test_infinite_values(backend: Backend) -> None:
    case = testing.draw(AT, mask=rg.Causal())
    v = case.v.clone()
    v[..., 9, 0], v[..., 11, 0], v[..., 16, 1] = INF, -INF, INF
    out = testing.answers(replace(case, v=v), backend, F64)["out"]
    assert (out[..., 5:7, 0] == INF).all() and out[..., 7:, 0].isnan().all()
    assert (out[..., 12, 1] == INF).all() and out[..., :12, 1].isfinite().all() and out[..., 2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_dtypes(backend: Backend, dtype: torch.dtype) -> None:
    case = testing.draw(AT).leaves(dtype)
    with torch.no_grad():
        state = rg.attention_state(case.q, case.k, case.v, backend=backend)
        assert rg.attention(case.q, case.k, case.v, backend=backend).dtype == dtype
    wide = F64 if dtype == F64 else torch.float32
    assert {t.dtype for t in (state.m, state.l, state.o, state.finish()[1])} == {wide}
    assert rg.attention_weights(case.q, case.k).dtype == dtype


def test_lse_is_the_natural_logarithm(backend: Backend) -> None:
    case = testing.draw(AT, key_heads=6)
    s = case.q @ case.k.mT / math.sqrt(7)
    assert testing.error(testing.answers(case, backend, F64)["lse"], s.exp().sum(-1).log()) < 1e-13


def test_sums_are_kept_in_float32(backend: Backend) -> None:
    """4099 equal weights of 1: in float16, sums would end at 2048, in bfloat16 at 256."""
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (torch.zeros(n, 4, dtype=dtype) for n in (1, 4099, 4099))
        state = rg.attention_state(q, k, v + 1, backend=backend).finish()
        assert abs(float(state[1]) - math.log(4099)) < 1e-5
        assert testing.error(state[0], torch.ones(1, 4)) < 1e-5


def test_float16_scores_that_overflow(backend: Backend) -> None:
    q = torch.full((3, 64), 60.0, dtype=torch.float16)
    k = q * torch.linspace(-1, 1, 3, dtype=torch.float16)[:, None]
    assert (q @ k.mT).isinf().any()
    out = rg.attention(q, k, torch.eye(3, dtype=torch.float16), score=rg.Dot(), backend=backend)
    assert torch.equal(out, torch.tensor([0.0, 0.0, 1.0]).half().expand(3, 3))


@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_1e34(backend: Backend, sign: int) -> None:
    q = torch.full((2, 1), 1e17).requires_grad_()
    k = torch.tensor([[sign * 1e17], [sign * 0.9e17], [0.0]], requires_grad=True)
    v = torch.eye(3, requires_grad=True)
    out = rg.attention(q, k, v, score=rg.Dot(), backend=backend)
    assert torch.equal(out, v[0 if sign > 0 else 2].expand(2, 3))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), (q, k, v)))


def test_finfo_min_added_twice(backend: Backend) -> None:
    """The peers' mask: one hides beside visible keys; a row of two of them shares an offset, finite as mathematics."""
    least = torch.zeros(2, 3)
    least[0, 1:], least[1] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    score = rg.ScaledDot() >> rg.Bias(least) >> rg.Bias(least)
    x = torch.zeros(2, 4, requires_grad=True)
    out = rg.attention(x, torch.zeros(3, 4), torch.eye(3), score=score, backend=backend)
    torch.testing.assert_close(out, torch.tensor([[1.0, 0, 0], [1 / 3, 1 / 3, 1 / 3]]))
    assert (torch.autograd.grad(out.square().sum(), x)[0] == 0).all()


def test_denormals(backend: Backend) -> None:
    tiny = torch.full((3, 2), 1e-40)
    out = rg.attention(tiny, tiny, tiny, backend=backend)
    assert testing.error(out, tiny) < 1e-44


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_dropout_of_nothing_and_of_everything(backend: Backend, p: float) -> None:
    case = testing.draw(AT)
    got = testing.answers(replace(case, dropout=rg.Dropout(p, seed=1)), backend, F64)
    plain = testing.answers(case, backend, F64)
    if p == 0:
        same(got, plain, 0)
    else:
        assert (got["out"] == 0).all() and (got["gradient of v"] == 0).all()
        assert testing.error(got["lse"], plain["lse"]) == 0


def test_dropout_is_a_function_of_position(backend: Backend) -> None:
    """The same whatever else is in the call: a few rows alone are thinned as they are among all."""
    drop = rg.Dropout(0.5, seed=9)
    case = testing.draw(AT, dropout=drop)
    out = testing.answers(case, backend, F64)["out"]
    at = rg.Positions(case.positions.q[3:8], case.positions.k)
    some = rg.attention(case.q[..., 3:8, :], case.k, case.v, dropout=drop, positions=at, backend=backend)
    assert testing.error(some, out[..., 3:8, :]) < 1e-14
    other = replace(case, dropout=rg.Dropout(0.5, seed=10))
    assert testing.error(testing.answers(other, backend, F64)["out"], out) > 0.1


def test_dropout_without_a_seed_follows_torch_s_generator(backend: Backend) -> None:
    case = replace(testing.draw(AT), dropout=rg.Dropout(0.5))
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(rg.attention(case.q, case.k, case.v, dropout=case.dropout, backend=backend))
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_the_same_call_gives_the_same_bits(backend: Backend) -> None:
    case = testing.draw(AT, mask=rg.Causal(), score=testing.scores(AT)["Additive"], sink=True)
    same(*(testing.answers(case, backend, torch.float32) for _ in range(2)), allowed=0)


def test_one_batch_element_against_the_rest(backend: Backend) -> None:
    case = testing.draw(AT, mask=rg.Causal(), score=testing.scores(AT)["Pipeline"])
    case = replace(case, score=rg.ScaledDot() >> rg.SoftCap(2.0))
    whole = testing.answers(case, backend, F64)
    alone = testing.answers(replace(case, q=case.q[2:3], k=case.k[2:3], v=case.v[2:3]), backend, F64)
    assert testing.error(whole["out"][2:3], alone["out"]) < 1e-14
    assert testing.error(whole["lse"][2:3], alone["lse"]) < 1e-14


def test_looking_changes_nothing(backend: Backend) -> None:
    case = testing.draw(AT, mask=rg.Causal(), sink=True).leaves(F64)
    given = {"mask": case.mask, "positions": case.positions, "sink": case.sink}
    before = rg.attention(case.q, case.k, case.v, backend=backend, **given)
    weights = rg.attention_weights(case.q, case.k, **given)
    after = rg.attention(case.q, case.k, case.v, backend=backend, **given)
    assert torch.equal(before, after)
    ours = weights @ case.v.repeat_interleave(3, 1)
    assert testing.error(ours, before) < 1e-14
    cotangent, leaves = torch.randn_like(before), (case.q, case.k, case.v, case.sink)
    for a, b in zip(*(torch.autograd.grad(t, leaves, cotangent) for t in (ours, before)), strict=True):
        assert testing.error(a, b) < 1e-13


def test_nothing_warns_and_the_generator_rests(backend: Backend) -> None:
    case = testing.draw(AT, dropout=rg.Dropout(0.5, seed=1))
    state = torch.get_rng_state()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        leaves = case.leaves(torch.float32)
        rg.attention(leaves.q, leaves.k, leaves.v, dropout=case.dropout, backend=backend).sum().backward()
    assert not said and torch.equal(state, torch.get_rng_state())
