"""Custom similarities that are functions of the dot product of q and k, in the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import hold, looked
from kernel_checks import check
from needed import needs_kernels
from regard import facts, testing

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "few rows": testing.frame(nq=3, nk=150, batch=(2,), heads=6),
}


def number(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def by_head(q: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * w[:, None, None]) * 3 + b


CUSTOM: dict[str, Callable[[], rg.Custom]] = {
    "tanh": lambda: rg.Custom(lambda q, k: 4 * torch.tanh(q @ k.mT / 8)),
    "numbers that are learned": lambda: rg.Custom(by_head, (number(6), number(1))),
    "multiples": lambda: rg.Custom(lambda q, k: ((0.5 * q) @ (k / 2).transpose(-1, -2) * q.shape[-1] ** -0.5).relu()),
    "matmul": lambda: rg.Custom(lambda q, k: torch.matmul(q, k.mT).abs().sqrt() / q.size(-1)),
    "einsum": lambda: rg.Custom(lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) / 5),
    "twice": lambda: rg.Custom(lambda q, k: (q @ k.mT) / (1 + (q @ k.mT).abs())),
}


def gated(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    return torch.tanh((q * gate.exp()) @ k.mT / 5) * gate.sum()


def mapped(q: Tensor, k: Tensor, w_q: Tensor, w_k: Tensor, b: Tensor) -> Tensor:
    """Other widths of queries and keys, and a matrix for each head."""
    return torch.nn.functional.gelu(q @ w_q) @ torch.relu(torch.nn.functional.linear(k[..., :20], w_k, b) + 1).mT


def unit(q: Tensor, k: Tensor) -> Tensor:
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return 7 * (q @ k.mT) - (q @ k.mT).square()


ROWS: dict[str, Callable[[], rg.Custom]] = {
    "gate": lambda: rg.Custom(gated, (number(24),)),
    "only the keys": lambda: rg.Custom(lambda q, k, m: q @ (k @ m).mT / 5, (number(24, 24),)),
    "maps": lambda: rg.Custom(mapped, (number(6, 24, 9) - 1, number(9, 20) - 1, number(9))),
    "unit": lambda: rg.Custom(unit),
    "numbers": lambda: rg.Custom(lambda q, k: (1 - q.sigmoid() * 2 + 0.5) @ torch.exp(-k / 4).transpose(-2, -1)),
    "a tensor before": lambda: rg.Custom(lambda q, k, w: (w * q + w) @ k.mT, (number(24),)),
    "softmax": lambda: rg.Custom(lambda q, k: 9 * (q.softmax(dim=-1) @ (k**2).mT)),
}


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", CUSTOM)
def test_values_and_gradients(isa: str, name: str, size: str) -> None:
    at, score = FRAMES[size], CUSTOM[name]()
    assert rg.Native().why_not(testing.draw(at, score=score).leaves(torch.float32).problem, lse=True) is None
    check(testing.draw(at, key_heads=3, dk=24, dv=19, score=score, mask=rg.Window(90, 2), sink=True))


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", ROWS)
def test_rows_that_the_function_makes(isa: str, name: str, size: str) -> None:
    at, score = FRAMES[size], ROWS[name]()
    drawn = testing.draw(at, key_heads=3, dk=24, dv=19, score=score, mask=rg.Window(90, 2), sink=True)
    assert rg.Native().why_not(drawn.leaves(torch.float32).problem, lse=True) is None
    check(drawn)


@pytest.mark.parametrize("learned", ["q", "k", "v", "gate", "q gate"])
def test_some_gradients_of_rows(learned: str) -> None:
    q, k, v = (torch.randn(2, 4, n, 24) for n in (7, 9, 9))
    given = {"q": q, "k": k, "v": v, "gate": torch.randn(24)}
    found = []
    for dtype, backend in ((torch.float32, rg.Native()), (torch.float64, rg.Reference())):
        own = {name: t.to(dtype).requires_grad_(name in learned.split()) for name, t in given.items()}
        score = rg.Custom(gated, (own["gate"],))
        out = rg.attention(own["q"], own["k"], own["v"], score=score, backend=backend)
        found.append(torch.autograd.grad(out.square().sum(), [t for t in own.values() if t.requires_grad]))
    for mine, right in zip(*found, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))


def test_rows_of_padding_pass_no_gradient() -> None:
    """Hidden queries and keys may hold NaN."""
    q, k, v = (torch.randn(2, 4, n, 24) for n in (7, 9, 9))
    q[1, :, 5:], k[1, :, 6:], v[1, :, 6:] = torch.nan, torch.nan, torch.nan
    gate = torch.randn(24, requires_grad=True)
    mask = rg.Lengths(keys=torch.tensor([9, 6]), queries=torch.tensor([7, 5]))
    out = rg.attention(q, k, v, score=rg.Custom(gated, (gate,)), mask=mask, backend=rg.Native())
    out.sum().backward()
    assert out.isfinite().all() and gate.grad is not None and gate.grad.isfinite().all()


def test_rows_in_facts_and_in_half_precision(isa: str) -> None:
    asked = (facts.MaxScore(), facts.Entropy(), facts.Received())
    hold(testing.draw(FRAMES["blocks"], dk=24, score=ROWS["gate"]()), asked)
    q, k, v = (torch.randn(1, 4, 40, 24).bfloat16() for _ in "qkv")
    own = rg.Custom(gated, (torch.randn(24),))
    right = rg.attention(q.double(), k.double(), v.double(), score=rg.Custom(gated, (own.inputs[0].double(),)))
    found = rg.attention(q, k, v, score=own, backend=rg.Native())
    torch.testing.assert_close(found.double(), right, rtol=1e-2, atol=1e-2)


def written_later(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    total, x = torch.zeros(()), torch.zeros_like(w)
    for n in range(3):
        x.zero_()
        x[n] = 1
        total = total + ((q * x) @ k.mT).tanh()
    return total


def without_gradients(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        gated_rows = (q * w).tanh()
    return gated_rows @ k.mT * w.sum()


SUBTLE: dict[str, Callable[[Tensor], rg.Custom]] = {
    "compares with a number": lambda w: rg.Custom(lambda q, k: (q + (q == 0)) @ k.mT),
    "compares shapes": lambda w: rg.Custom(lambda q, k: q.tanh() @ k.mT * (2.0 if q.shape != k.shape else 1.0)),
    "asks for the class": lambda w: rg.Custom(lambda q, k: (q.tanh() if isinstance(q, Tensor) else q) @ k.mT),
    "forbids gradients": lambda w: rg.Custom(without_gradients, (w,)),
    "one tensor twice": lambda w: rg.Custom(lambda q, k, a, b: (q * a) @ k.mT + ((q * b) @ k.mT).tanh(), (w, w)),
    "makes infinity finite": lambda w: rg.Custom(lambda q, k, w: ((q * w).exp() @ k.tanh().mT) / 8, (w,)),
}


@pytest.mark.parametrize("name", SUBTLE)
def test_subtle_functions_have_their_values_and_gradients(name: str) -> None:
    """On the kernels or not: what stands in for q and k changes nothing."""
    q, k, v = (torch.randn(2, h, n, 8) for h, n in ((4, 7), (2, 9), (2, 9)))
    q[0, 1, 2], q[0, 0, 1, 2], k[1, 0, 3, 4] = 0, -torch.inf, torch.inf
    if name != "makes infinity finite":
        q, k = q.nan_to_num(neginf=0), k.nan_to_num(posinf=0)
    found = []
    for dtype, backend in ((torch.float32, None), (torch.float64, rg.Reference())):
        own = [t.to(dtype).requires_grad_() for t in (q, k, v, torch.linspace(0.5, 1.5, 8))]
        out = rg.attention(*own[:3], score=SUBTLE[name](own[3]), backend=backend)
        with torch.no_grad():
            same = rg.attention(*own[:3], score=SUBTLE[name](own[3]), backend=backend)
        assert torch.allclose(out, same)
        found.append(
            [out.detach(), *torch.autograd.grad(out.square().sum(), own, allow_unused=True, materialize_grads=True)]
        )
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-4 * max(1.0, float(right.abs().max())))


def test_a_tensor_that_is_written_into_between_products() -> None:
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 9, 8)
    own, right = (
        rg.attention(q, k, k, score=rg.Custom(written_later, (torch.ones(8),)), backend=b) for b in (None, rg.Tiled())
    )
    torch.testing.assert_close(own, right)


def test_a_matrix_for_each_head_does_not_meet_keys_that_heads_share() -> None:
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 9, 8)
    own = rg.Custom(lambda q, k, w: q @ (k * w).mT, (torch.randn(2, 1, 8),))
    with pytest.raises(RuntimeError, match="must match the size"):
        rg.attention(q, k, k, score=own)


def test_the_function_may_not_write_into_queries() -> None:
    q = torch.randn(1, 4, 7, 24)
    before = q.clone()
    own = rg.Custom(lambda q, k: torch.nn.functional.relu(q, inplace=True) @ k.mT)
    assert rg.Native().why_not(testing.draw(FRAMES["blocks"], score=own).leaves(torch.float32).problem, lse=True)
    rg.attention(q, q, q, score=rg.Custom(lambda q, k: torch.nn.functional.relu(q) @ k.mT), backend=rg.Native())
    assert torch.equal(q, before)


def test_explain_says_that_rows_are_made() -> None:
    x = torch.randn(1, 4, 7, 24)
    assert "which the score's function makes once" in str(rg.explain(x, x, x, score=ROWS["unit"]()))


@pytest.mark.parametrize("name", ["tanh", "numbers that are learned"])
def test_before_modifiers_and_beside_a_mask(isa: str, name: str) -> None:
    at = FRAMES["blocks"]
    score = CUSTOM[name]() >> rg.Alibi(number(6)) >> rg.SoftCap(4.0)
    check(testing.draw(at, dk=24, dv=19, score=score, mask=rg.Where(lambda b, h, i, j: (i + j + h) % 3 > 0)))


def test_facts(isa: str) -> None:
    asked = (facts.MaxScore(), facts.Entropy(), facts.Received())
    case = testing.draw(FRAMES["blocks"], score=CUSTOM["tanh"]())
    assert {looked(case.leaves(torch.float32), asked).way(fact) for fact in asked} == {"the native kernels"}
    hold(case, asked)


def test_second_derivatives() -> None:
    q = torch.randn(1, 6, 5, 8, dtype=torch.float32, requires_grad=True)
    found = []
    for backend in (rg.Native(), rg.Tiled()):
        out = rg.attention(q, q, q, score=CUSTOM["tanh"](), backend=backend)
        (g,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), q)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda q, k: -torch.cdist(q, k), "otherwise than in q @ k.mT"),
        (lambda q, k: q @ k.mT - k.square().sum(-1)[..., None, :], "otherwise than in q @ k.mT"),
        (lambda q, k: (k @ q.mT).mT, "otherwise than in q @ k.mT"),
        (lambda q, k: torch.special.i0(q) @ k.mT, "otherwise than in q @ k.mT"),
        (lambda q, k: (q - q.mean(-2, keepdim=True)) @ k.mT, "otherwise than in q @ k.mT"),
        (lambda q, k: torch.nn.functional.normalize(q) @ k.mT, "otherwise than in q @ k.mT"),
        (lambda q, k: q @ k.mT + q.sin() @ k.mT, "several products"),
        (lambda q, k: q @ k.mT / q.shape[-2], "otherwise than in q @ k.mT"),
        (lambda q, k: torch.einsum("bhid,bhje->bhij", q, k), "otherwise than in q @ k.mT"),
        (lambda q, k: torch.special.i0(q @ k.mT), "no instruction for aten.i0"),
        (lambda q, k: (q @ k.mT) - (q @ k.mT).mean(-1, keepdim=True), "no instruction for aten.mean.dim"),
    ],
)
def test_what_is_no_function_of_the_product_says_why(fn: Any, why: str) -> None:
    case = testing.draw(FRAMES["blocks"], score=rg.Custom(fn)).leaves(torch.float32)
    found = rg.Native().why_not(case.problem, lse=True)
    assert found is not None and why in found
    few = testing.draw(FRAMES["few rows"], score=rg.Custom(fn))
    if "mean.dim" in why:  # of several keys, which states are not merged for
        with pytest.raises(rg.Unsupported, match="depends on other pairs"):
            check(few, backend=rg.Tiled())
    else:
        check(few, backend=rg.Tiled())


def test_a_function_that_holds_parameters_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    layer, x = torch.nn.Linear(8, 8), torch.randn(2, 4, 12, 8)
    with torch.no_grad():
        rg.attention(x, x, x, score=rg.Custom(lambda q, k: layer(q) @ k.mT))
    assert not [str(one.message) for one in recwarn if "regard" in one.filename]
