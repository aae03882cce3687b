"""Every modifier against its formula, and what it refuses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import Positions
from regard.call.arguments import build_problem
from regard.core.region import Region

BATCH, HEADS, NQ, NK, WIDTH = 2, 3, 5, 7, 4
CLOSE = {"rtol": 1e-13, "atol": 1e-13}
G = torch.Generator().manual_seed(0)
AT = Positions(torch.tensor([[4, 2, 9, 9, 0], [-1, 5, 3, 2, 8]]), torch.tensor([3, 1, 4, 1, 5, 9, 2]))
BUCKETS = rg.ClippedBuckets(before=3, after=2)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=G)


def qk() -> tuple[Tensor, Tensor]:
    return randn(BATCH, HEADS, NQ, WIDTH), randn(BATCH, HEADS, NK, WIDTH)


def scores(score: rg.Score, q: Tensor, k: Tensor, at: Positions = AT) -> Tensor:
    problem = build_problem(q, k, k[..., :0], score, rg.Everything(), at, None)[0]
    return problem.region_tile(problem.frame.region()).scores


def each_pair(fn: Callable[[int, int, int, int], float]) -> Tensor:
    """fn(batch, head, row, column) for each pair."""
    return torch.tensor(
        [[[[fn(b, h, i, j) for j in range(NK)] for i in range(NQ)] for h in range(HEADS)] for b in range(BATCH)],
        dtype=torch.float64,
    )


def gap(b: int, i: int, j: int) -> int:
    return int(AT.k[j] - AT.q[b, i])


@pytest.mark.parametrize("cap", [0.5, torch.tensor(0.5), torch.tensor([0.5, 2.0, 30.0])], ids=["number", "()", "(h,)"])
def test_soft_cap(cap: float | Tensor) -> None:
    q, k = qk()
    s = scores(rg.Dot(), q, k)
    caps = torch.as_tensor(cap).expand(HEADS).tolist()
    expected = each_pair(lambda b, h, i, j: caps[h] * math.tanh(float(s[b, h, i, j]) / caps[h]))
    torch.testing.assert_close(scores(rg.Dot() >> rg.SoftCap(cap), q, k), expected, **CLOSE)
    assert (scores(rg.Dot() >> rg.SoftCap(cap), q * 1e200, k).abs() <= torch.as_tensor(cap).max()).all()


@pytest.mark.parametrize("slopes", [torch.tensor(0.25), torch.tensor([0.25]), torch.tensor([0.5, 0.125, 2.0])], ids=str)
def test_alibi(slopes: Tensor) -> None:
    q, k = qk()
    each = slopes.expand(HEADS).tolist()
    expected = scores(rg.Dot(), q, k) - each_pair(lambda b, h, i, j: each[h] * abs(gap(b, i, j)))
    torch.testing.assert_close(scores(rg.Dot() >> rg.Alibi(slopes), q, k), expected, **CLOSE)


def test_alibi_over_coordinates_reads_no_positions() -> None:
    q, k = qk()
    x, y, slopes = randn(NQ, 3), randn(NK, 3), torch.tensor([0.5, 0.125, 2.0])
    expected = scores(rg.Dot(), q, k) - each_pair(
        lambda b, h, i, j: float(slopes[h]) * math.dist(x[i].tolist(), y[j].tolist())
    )
    score = rg.Dot() >> rg.Alibi(slopes, y, x)
    for at in (AT, rg.head(NQ, NK), None):
        torch.testing.assert_close(scores(score, q, k, at), expected, **CLOSE)
    own = scores(rg.Dot() >> rg.Alibi(slopes, y), k, k, None) - scores(rg.Dot(), k, k, None)
    torch.testing.assert_close(
        own, scores(rg.Dot() >> rg.Alibi(slopes, y, y), k, k, None) - scores(rg.Dot(), k, k, None)
    )
    assert not own.diagonal(dim1=-2, dim2=-1).any()


def test_coordinates_that_coincide_have_a_gradient() -> None:
    x = randn(NQ, WIDTH)
    places = randn(NQ, 2).requires_grad_()
    out = rg.attention(x, x, x, score=rg.Dot() >> rg.Alibi(torch.ones(1), places), backend=rg.Tiled(2, 3))
    (g,) = torch.autograd.grad(out.square().sum(), places)
    assert g.isfinite().all() and g.any()


@pytest.mark.parametrize("backend", [rg.Native(), rg.Tiled(2, 3), rg.Reference()], ids=repr)
def test_float64_coordinates_far_from_0_keep_their_differences(backend: rg.Backend) -> None:
    """Seconds since 1970, of tokens that are seconds apart: float32 counts them in steps of 128."""
    places, slopes = 1.7e9 + 3 * torch.arange(NK, dtype=torch.float64)[:, None], torch.tensor([0.5, 0.25, 0.125])
    found = list[list[Tensor]]()
    for dtype, own in ((torch.float64, rg.Reference()), (torch.float32, backend)):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(BATCH, HEADS, NK, WIDTH, generator=generator).to(dtype).requires_grad_()
        slope = slopes.to(dtype).requires_grad_()
        out = rg.attention(x, x, x, score=rg.Dot() >> rg.Alibi(slope, places), backend=own)
        found.append([out, *torch.autograd.grad(out.square().sum(), (x, slope))])
    for exact, got in zip(*found, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


def test_geometric_slopes_are_the_papers() -> None:
    """Press et al. 2022, section 3: 1/2 ... 1/256 for 8 heads; their get_slopes for 12: then every other of 16."""
    eight = [1 / 2**n for n in range(1, 9)]
    sixteen = [2 ** (-n / 2) for n in range(1, 17)]
    for heads, expected in (
        (8, eight),
        (16, sixteen),
        (12, [*eight, *sixteen[0::2][:4]]),
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
    ):
        torch.testing.assert_close(rg.Alibi.geometric(heads), torch.tensor(expected))


@pytest.mark.parametrize(
    ("weight", "rate"),
    [
        (0.5, 3.0),
        (torch.tensor(0.5), 0.25),
        (2.0, torch.tensor([0.1])),
        (torch.tensor([0.5, 0.0, 2.0]), torch.tensor([3.0, 1.0, 0.0])),
    ],
    ids=["numbers", "() and a number", "a number and (1,)", "(h,)"],
)
def test_log_distance(weight: float | Tensor, rate: float | Tensor) -> None:
    q, k = qk()
    weights, rates = (torch.as_tensor(x).double().expand(HEADS).tolist() for x in (weight, rate))
    penalty = each_pair(lambda b, h, i, j: weights[h] * math.log(1 + rates[h] * abs(gap(b, i, j))))
    expected = scores(rg.Dot(), q, k) - penalty
    torch.testing.assert_close(scores(rg.Dot() >> rg.LogDistance(weight, rate), q, k), expected, **CLOSE)


@pytest.mark.parametrize(
    "shape",
    [(), (NK,), (NQ, 1), (NQ, NK), (HEADS, 1, NK), (HEADS, NQ, NK), (BATCH, 1, NQ, NK), (BATCH, HEADS, NQ, NK)],
    ids=str,
)
def test_bias_broadcasts_from_every_rank(shape: tuple[int, ...]) -> None:
    q, k = qk()
    bias = randn(*shape)
    torch.testing.assert_close(scores(rg.Dot() >> rg.Bias(bias), q, k), scores(rg.Dot(), q, k) + bias, **CLOSE)


def test_a_bias_of_minus_infinity_hides() -> None:
    q, k = qk()
    bias = randn(NQ, NK).masked_fill(torch.rand(NQ, NK) < 0.4, -math.inf)
    bias[2] = -math.inf
    for backend in (rg.Reference(), rg.Tiled(2, 3)):
        got = rg.attention(q, k, k, score=rg.ScaledDot() >> rg.Bias(bias), backend=backend)
        finite = rg.ScaledDot() >> rg.Bias(bias.nan_to_num(0, 0, 0))
        expected = rg.attention(q, k, k, score=finite, mask=rg.Dense(bias.isfinite()), backend=backend)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert not got[..., 2, :].any()


@pytest.mark.parametrize("table", [randn(6, HEADS), randn(6, 1)], ids=["(buckets, h)", "(buckets, 1)"])
def test_relative_bias(table: Tensor) -> None:
    q, k = qk()
    each = table.expand(6, HEADS)
    expected = each_pair(lambda b, h, i, j: float(each[min(max(gap(b, i, j), -3), 2) + 3, h]))
    got = scores(rg.Dot() >> rg.RelativeBias(table, BUCKETS), q, k)
    torch.testing.assert_close(got, scores(rg.Dot(), q, k) + expected, **CLOSE)


PARAMETERS: dict[str, tuple[Callable[..., rg.Score], tuple[Tensor, ...]]] = {
    "SoftCap": (rg.SoftCap, (torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64),)),
    "SoftCap ()": (rg.SoftCap, (torch.tensor(0.7, dtype=torch.float64),)),
    "Alibi": (rg.Alibi, (randn(HEADS),)),
    "Alibi ()": (rg.Alibi, (randn(1)[0],)),
    "Alibi in space": (rg.Alibi, (randn(HEADS), randn(NK, 2), randn(NQ, 2))),
    "LogDistance": (rg.LogDistance, (randn(HEADS), randn(HEADS).abs())),
    "LogDistance, weight": (lambda t: rg.LogDistance(t, 0.3), (randn(1)[0],)),
    "LogDistance, rate": (lambda t: rg.LogDistance(0.3, t), (randn(1).abs(),)),
    "Bias": (rg.Bias, (randn(NQ, NK),)),
    "Bias by key": (rg.Bias, (randn(NK),)),
    "Bias by batch": (rg.Bias, (randn(BATCH, 1, 1, NK),)),
    "Bias by head": (rg.Bias, (randn(HEADS, NQ, 1),)),
    "Bias ()": (rg.Bias, (randn(1)[0],)),
    "RelativeBias": (lambda t: rg.RelativeBias(t, BUCKETS), (randn(6, HEADS),)),
    "RelativeBias, shared": (lambda t: rg.RelativeBias(t, rg.T5Buckets(8, 16)), (randn(8, 1),)),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_gradients_through_tiles(name: str) -> None:
    make, tensors = PARAMETERS[name]
    q, k = qk()
    leaves = [t.clone().requires_grad_() for t in (q, k, *tensors)]

    def run(q: Tensor, k: Tensor, *held: Tensor) -> Tensor:
        score = rg.ScaledDot() >> make(*held)
        return rg.attention(q, k, k[..., :2], score=score, mask=rg.Prefix(5), positions=AT, backend=rg.Tiled(2, 3))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@dataclass(frozen=True, eq=False)
class OfPlaces(rg.Modifier):
    """Scores of positions alone: what the similarity computed has no gradient."""

    rate: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return (self.rate * (at.i - at.j)).expand(s.shape)


@pytest.mark.parametrize("backend", [rg.Tiled(rows=2, keys=3), None], ids=str)
@pytest.mark.parametrize("similarity", ["dot", "additive", "elementwise"])
def test_a_modifier_may_ignore_the_similarity(similarity: str, backend: rg.Backend | None) -> None:
    learned = [randn(4, 6), randn(4, 6), randn(6)] if similarity == "additive" else [randn(WIDTH)]
    rate, q, k, v, *learned = (t.float().requires_grad_() for t in (randn(), *qk(), qk()[1], *learned))
    score = {
        "dot": lambda: rg.Dot(),
        "additive": lambda: rg.Additive(*learned),
        "elementwise": lambda: rg.Elementwise(lambda q, k, w: -((q - k) * w).abs(), tensors=tuple(learned)),
    }[similarity]()
    g_rate, g_v, *others = torch.autograd.grad(
        rg.attention(q, k, v, score=score >> OfPlaces(rate), positions=AT, backend=backend).square().sum(),
        [rate, v, q, k, *([] if similarity == "dot" else learned)],
    )
    s = rate * (AT.q[..., :, None] - AT.k).float()
    expected = torch.autograd.grad((s.softmax(-1)[:, None] @ v).square().sum(), [rate, v])
    torch.testing.assert_close((g_rate, g_v), expected, rtol=1e-4, atol=1e-4)
    assert not any(g.any() for g in others)


def test_a_hidden_score_that_overflows_spoils_no_gradient_of_the_cap() -> None:
    q, k = torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4)
    k[..., 2, :] = 3e38
    cap = torch.tensor(2.0, requires_grad=True)
    out = rg.attention(q, k, k, score=rg.Dot() >> rg.SoftCap(cap), mask=rg.Prefix(2), positions=rg.head(2, 3))
    assert torch.autograd.grad(out.sum(), cap)[0].isfinite()


def test_a_bias_that_looks_like_a_mask_warns_and_no_other_does() -> None:
    mask = torch.eye(3)
    with pytest.warns(UserWarning, match=r"Bias holds only 0 and 1.*Dense\(bias.bool\(\)\)") as caught:
        rg.Bias(mask)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bias in (torch.zeros(3, 3), torch.ones(3, 3), mask * 0.5, mask[0], mask[:0], mask.clone().requires_grad_()):
            rg.Bias(bias)
        torch.vmap(lambda bias: rg.Bias(bias).bias)(torch.stack([mask, mask]))


X = torch.zeros(BATCH, HEADS, NQ, WIDTH)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: rg.SoftCap(0.0), ValueError, r"SoftCap\(cap=0.0\): expected a finite number above 0"),
        (lambda: rg.SoftCap(-1), ValueError, "expected a finite number above 0"),
        (lambda: rg.SoftCap(math.inf), ValueError, "expected a finite number above 0"),
        (lambda: rg.SoftCap(math.nan), ValueError, "expected a finite number above 0"),
        (
            lambda: rg.SoftCap(torch.ones(2)),
            rg.ShapeError,
            r"SoftCap.cap has shape \(2,\); expected \(\) or one .* \(3,\)",
        ),
        (lambda: rg.SoftCap(torch.ones(3).long()), TypeError, "SoftCap.cap has dtype torch.int64; expected floating"),
        (
            lambda: rg.Alibi(torch.ones(2)),
            rg.ShapeError,
            r"Alibi.slopes has shape \(2,\); expected one slope a head, \(3,\)",
        ),
        (lambda: rg.Alibi(torch.ones(3, 1)), rg.ShapeError, r"Alibi.slopes has shape \(3, 1\)"),
        (
            lambda: rg.Alibi(torch.ones(3), torch.ones(7, 2)),
            rg.ShapeError,
            r"coordinates has shape .*; expected \(5, dims\)",
        ),
        (lambda: rg.Alibi(torch.ones(3), torch.ones(5)), rg.ShapeError, r"Alibi.coordinates has shape \(5,\)"),
        (
            lambda: rg.Alibi(torch.ones(3), torch.ones(5, 2), torch.ones(5, 3)),
            rg.ShapeError,
            "the queries have 3 coordinates each, the keys 2",
        ),
        (lambda: rg.Alibi(torch.ones(3), None, torch.ones(5, 2)), ValueError, "given without coordinates"),
        (lambda: rg.Alibi.geometric(0), ValueError, r"Alibi.geometric\(0\): expected 1 head or more"),
        (
            lambda: rg.LogDistance(-1.0, 1.0),
            ValueError,
            r"LogDistance\(weight=-1.0\): expected a finite number, 0 or above",
        ),
        (lambda: rg.LogDistance(1.0, math.inf), ValueError, r"LogDistance\(rate=inf\): expected a finite number"),
        (lambda: rg.LogDistance(math.nan, 1.0), ValueError, r"LogDistance\(weight=nan\): expected a finite number"),
        (lambda: rg.LogDistance(torch.ones(2), 1.0), rg.ShapeError, r"LogDistance.weight has shape \(2,\); .* \(3,\)"),
        (lambda: rg.LogDistance(1.0, torch.ones(3, 1)), rg.ShapeError, r"LogDistance.rate has shape \(3, 1\)"),
        (lambda: rg.LogDistance(1.0, [1.0]), TypeError, "LogDistance.rate is a list; expected a torch tensor"),
        (lambda: rg.Bias(torch.full((4, 5), 0.5)), rg.ShapeError, r"Bias.bias has shape \(4, 5\); .* \(2, 3, 5, 5\)"),
        (lambda: rg.Bias(torch.eye(5).bool()), TypeError, "Bias.bias has dtype torch.bool; expected floating point"),
        (lambda: rg.RelativeBias(torch.zeros(5, 3), BUCKETS), rg.ShapeError, r"expected \(6, 3\)"),
        (lambda: rg.RelativeBias(torch.zeros(6, 2), BUCKETS), rg.ShapeError, r"expected \(6, 3\)"),
        (lambda: rg.RelativeBias(torch.zeros(6, 3), 6), TypeError, "RelativeBias.buckets is an int; expected Buckets"),
        (
            lambda: rg.RelativeBias(torch.zeros(9, 3), rg.GridBuckets(2, 2)),
            rg.ShapeError,
            r"the queries stand at 0 to 4; GridBuckets\(height=2, width=2\) has the cells 0 to 3",
        ),
        (lambda: rg.Modifier(), NotImplementedError, r"Modifier does not define modify\(s, at\)"),
    ],
)
def test_refusals(make: Callable[[], rg.Score], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        rg.attention(X, X, X, score=rg.Dot() >> make(), backend=rg.Reference())


@pytest.mark.parametrize("backend", [rg.Tiled(), rg.Reference()], ids=repr)
@pytest.mark.parametrize("learned", [False, True])
def test_a_hidden_score_that_is_no_number_reaches_no_gradient_through_a_soft_cap(
    backend: rg.Backend, learned: bool
) -> None:
    bias = torch.zeros(NQ, NK, dtype=torch.float64)
    bias[:, -1], bias[2, 0] = math.nan, math.inf
    cap = torch.full((HEADS,), 5.0, dtype=torch.float64, requires_grad=True)
    q, k, v = (randn(1, HEADS, n, WIDTH).requires_grad_() for n in (NQ, NK, NK))
    given = {"score": rg.ScaledDot() >> rg.Bias(bias) >> rg.SoftCap(cap if learned else 5.0), "backend": backend}
    out = rg.attention(q, k, v, mask=rg.Lengths(keys=torch.tensor([NK - 1])), **given)
    leaves = [q, k, v, *([cap] if learned else [])]
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))
    assert not rg.attention(q, k, v, **given).isfinite().any()  # where it is seen
