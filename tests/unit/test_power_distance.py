"""PowerDistance against its formula, its gradients, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg

HEADS, NQ, NK = 3, 5, 7
F64 = torch.float64


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, HEADS, n, d, dtype=F64) for n, d in ((NQ, 4), (NK, 4), (NK, 2)))


@pytest.mark.parametrize(
    ("weight", "power"),
    [
        (0.5, 2.0),
        (torch.tensor(0.5), 0.25),
        (2.0, torch.tensor([0.1])),
        (torch.tensor([0.5, 0.0, 2.0]), torch.tensor([1.5, 1.0, 0.3])),
    ],
    ids=["numbers", "() and a number", "a number and (1,)", "(h,)"],
)
def test_its_formula(weight: float | Tensor, power: float | Tensor) -> None:
    q, k, _ = inputs()
    weights, powers = (torch.as_tensor(x).double().expand(HEADS).tolist() for x in (weight, power))
    places = torch.tensor([3, 0, 90, 4, 5]), torch.tensor([0, 1, 2, 3, 4, 100, 6])
    s = rg.attention_scores(q, k, score=rg.Dot())
    for h in range(HEADS):
        for n, i in enumerate(places[0].tolist()):
            for m, j in enumerate(places[1].tolist()):
                s[:, h, n, m] -= 0 if i == j else weights[h] * math.pow(abs(i - j), powers[h])
    found = rg.attention_scores(
        q, k, score=rg.Dot() >> rg.PowerDistance(weight, power), positions=rg.Positions(*places)
    )
    torch.testing.assert_close(found, s, rtol=1e-12, atol=1e-12)


def test_a_power_of_1_is_alibi() -> None:
    q, k, v = inputs()
    slopes = torch.tensor([0.5, 0.25, 1.0], dtype=F64)
    pair = (rg.Alibi(slopes), rg.PowerDistance(slopes, 1.0))
    outs = [rg.attention(q, k, v, score=rg.ScaledDot() >> one, positions=rg.tail(NQ, NK)) for one in pair]
    torch.testing.assert_close(*outs, rtol=1e-14, atol=1e-14)


PARAMETERS: dict[str, tuple[Callable[..., rg.Score], tuple[float | list[float], ...]]] = {
    "both": (rg.PowerDistance, ([0.5, 1.0, 0.1], [0.3, 1.0, 1.9])),
    "() and (1,)": (rg.PowerDistance, (0.4, [0.7])),
    "weight": (lambda t: rg.PowerDistance(t, 0.3), ([0.5, 1.0, 0.1],)),
    "power": (lambda t: rg.PowerDistance(0.3, t), ([0.5, 1.0, 2.0],)),
}


@pytest.mark.parametrize("backend", [rg.Reference(), rg.Tiled(2, 3)], ids=repr)
@pytest.mark.parametrize("name", PARAMETERS)
def test_gradients(name: str, backend: rg.Backend) -> None:
    make, numbers = PARAMETERS[name]
    held = [torch.tensor(x, dtype=F64) for x in numbers]
    leaves = [t.clone().requires_grad_() for t in (*inputs(), *held)]

    def run(q: Tensor, k: Tensor, v: Tensor, *held: Tensor) -> Tensor:
        score = rg.ScaledDot() >> make(*held)
        return rg.attention(q, k, v, score=score, mask=rg.Causal(), positions=rg.tail(NQ, NK), backend=backend)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def test_a_query_that_sees_its_own_position_alone_changes_nothing() -> None:
    """0 to any power is 0, and no derivative is infinite there: of x^0.1 it is, and ln 0 is."""
    weight, power = (torch.tensor([x], dtype=F64, requires_grad=True) for x in (2.0, 0.1))
    q, k, v = (t.requires_grad_() for t in inputs())
    score = rg.ScaledDot() >> rg.PowerDistance(weight, power)
    at = rg.head(NQ, NK)
    out = rg.attention(q, k, v, score=score, mask=rg.Window(0, 0), positions=at)
    assert torch.equal(out, v[..., :NQ, :])
    scores = rg.attention_scores(q, k, score=score, positions=at)
    grads = torch.autograd.grad(out.sum() + scores.sum(), (weight, power))
    assert all(g.isfinite().all() for g in grads)


def test_it_goes_over_any_source() -> None:
    q, k, v = (t[0, 0] for t in inputs())
    score = rg.ScaledDot() >> rg.PowerDistance(0.5, 0.7)
    out = rg.attention_over(q, iter([(k[:3], v[:3]), (k[3:], v[3:])]), score=score, positions=rg.tail(NQ, NK).q)
    torch.testing.assert_close(out, rg.attention(q, k, v, score=score, positions=rg.tail(NQ, NK)))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: rg.PowerDistance(-1.0, 1.0), ValueError, r"PowerDistance\(weight=-1.0\): .* 0 or above"),
        (lambda: rg.PowerDistance(math.inf, 1.0), ValueError, r"PowerDistance\(weight=inf\): expected a finite number"),
        (lambda: rg.PowerDistance(1.0, 0.0), ValueError, r"PowerDistance\(power=0.0\): expected a number above 0"),
        (lambda: rg.PowerDistance(1.0, 2.1), ValueError, r"PowerDistance\(power=2.1\): .* above 0, at most 2"),
        (lambda: rg.PowerDistance(1.0, math.nan), ValueError, r"PowerDistance\(power=nan\)"),
        (lambda: rg.PowerDistance(1.0, "1"), TypeError, "PowerDistance.power is a str"),
        (lambda: rg.PowerDistance([1.0], 1.0), TypeError, "PowerDistance.weight is a list; expected a torch tensor"),
        (lambda: rg.PowerDistance(torch.ones(2), 1.0), rg.ShapeError, r"PowerDistance.weight has shape \(2,\)"),
        (lambda: rg.PowerDistance(1.0, torch.ones(3, 1)), rg.ShapeError, r"PowerDistance.power has shape \(3, 1\)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_numbers(make: Callable[[], rg.Score], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rg.attention(*inputs(), score=rg.ScaledDot() >> make(), positions=rg.tail(NQ, NK))
