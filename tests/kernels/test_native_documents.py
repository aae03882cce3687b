"""Documents out of order, whose numbers the kernels compare, against the dense definition, on every instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import regard as rg
from fact_checks import hold, looked
from kernel_checks import check
from needed import needs_kernels
from regard import facts, testing
from regard.backends.native.lower_mask import lower_mask

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=151, nk=331, batch=(3,), heads=4),
    "few rows": testing.frame(nq=5, nk=331, batch=(3,), heads=4),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pieces(nq: int, nk: int) -> tuple[Tensor, Tensor]:
    """Long runs in any order, so that whole tiles are hidden."""
    return torch.arange(nq) // 67 * 3 % 4, torch.arange(nk) // 83 * 3 % 4


def mixed(nq: int, nk: int) -> tuple[Tensor, Tensor]:
    """Neighbours of different documents; some queries whose document has no key."""
    return torch.arange(nq) * 5 % 7, torch.arange(nk) * 3 % 5


def far(nq: int, nk: int) -> tuple[Tensor, Tensor]:
    """Numbers of which some differ in their high words alone."""
    numbers = torch.tensor([0, 1 << 32, -(1 << 32), 5 << 60, -(7 << 60)])
    return numbers[torch.arange(nq) % 5], numbers[torch.arange(nk) // 3 % 5]


def each(nq: int, nk: int) -> tuple[Tensor, Tensor]:
    """Of each batch element others, of one in order."""
    q, k = mixed(nq, nk)
    return torch.stack([q, q.sort().values, q.flip(0)]), torch.stack([k, k.sort().values, k // 2])


def shared(nq: int, nk: int) -> tuple[Tensor, Tensor]:
    """Queries of all batch elements have the same numbers, keys have not."""
    return mixed(nq, nk)[0], each(nq, nk)[1]


KINDS = {f.__name__: f for f in (pieces, mixed, far, each, shared)}


def documents(kind: str, nq: int, nk: int) -> rg.Documents:
    return rg.Documents(*KINDS[kind](nq, nk))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", FRAMES)
def test_values_and_gradients(isa: str, size: str, kind: str, dtype: torch.dtype) -> None:
    at = FRAMES[size]
    seen = documents(kind, at.nq, at.nk)
    case = testing.draw(at, dk=17, dv=11, mask=seen)
    assert "k_documents" in lower_mask(case.problem, (64, 128))
    check(case, dtype)
    capped = rg.ScaledDot() >> rg.SoftCap(5.0)
    lengths = rg.Lengths(keys=torch.tensor([331, 0, 170]))
    check(
        testing.draw(at, key_heads=2, dk=24, dv=19, score=capped, mask=rg.Causal() & seen & lengths, sink=True), dtype
    )
    dense = rg.Dense(torch.rand(at.nq, at.nk) < 0.7)
    check(testing.draw(at, dk=16, dv=19, mask=seen & dense, dropout=rg.Dropout(0.3, seed=3)), dtype)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", FRAMES)
def test_additive_scores(isa: str, size: str, kind: str) -> None:
    at = FRAMES[size]
    score = rg.Additive(None, None, torch.randn(16, dtype=torch.float64) / 4)
    check(testing.draw(at, key_heads=2, dk=16, dv=7, score=score, mask=documents(kind, at.nq, at.nk)))


@pytest.mark.parametrize("kind", KINDS)
def test_facts(isa: str, kind: str) -> None:
    at = FRAMES["blocks"]
    wanted = (facts.Visible(), facts.Entropy(), facts.Top(3), facts.Received(), facts.Readers(), facts.Map(5, 7))
    case = testing.draw(at, mask=documents(kind, at.nq, at.nk), sink=True)
    assert {looked(case.leaves(torch.float32), wanted).way(fact) for fact in wanted} == {"the native kernels"}
    hold(case, wanted, torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_in_tensors(kind: str) -> None:
    """The intervals of the rest are then a table, beside the numbers; a plan looks at both in each call."""
    places = [rg.Positions(torch.arange(151) * step + 40, torch.arange(331)) for step in (2, 3)]
    at, seen = FRAMES["blocks"], rg.Causal() & documents(kind, 151, 331)
    for place in places:
        framed = rg.core.region.Frame.of(at.nq, at.nk, batch=at.batch, heads=at.heads, positions=place)
        case = testing.draw(framed, dk=17, dv=11, mask=seen)
        assert {"start", "k_documents"} <= lower_mask(case.problem, (64, 128)).keys()
        check(case)
    q, k, v = (torch.randn(3, 4, n, 8) for n in (151, 331, 331))
    for place in (*places, *places):
        given: dict[str, Any] = {"mask": seen, "positions": place}
        expected = rg.attention(q, k, v, **given, backend=rg.Reference())
        torch.testing.assert_close(rg.attention(q, k, v, **given), expected, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_alone(isa: str) -> None:
    q, k, v = torch.randn(1, 2, 151, 19), torch.randn(1, 2, 331, 19), torch.randn(1, 2, 331, 7)
    for kind in ("pieces", "mixed", "far"):
        own, ids = KINDS[kind](151, 331)
        whole = rg.attention(q, k, v, mask=rg.Documents(own, ids), backend=rg.Native(invariant=True))
        for rows in (slice(0, 1), slice(66, 68), slice(64, 131)):
            mask = rg.Documents(own[rows], ids)
            part = rg.attention(q[:, :, rows], k, v, mask=mask, backend=rg.Native(invariant=True))
            assert torch.equal(part, whole[:, :, rows]), (kind, rows)


@pytest.mark.full
def test_graphs_hold_numbers_and_no_table() -> None:
    q, k, v = (torch.randn(3, 2, n, 8, requires_grad=True) for n in (151, 331, 331))
    own, ids = each(151, 331)

    def f(q: Tensor, k: Tensor, v: Tensor, own: Tensor, ids: Tensor) -> Tensor:
        return rg.attention(q, k, v, mask=rg.Documents(own, ids))

    made = make_fx(f, tracing_mode="fake")(q, k, v, own, ids)
    shapes = [tuple(n.meta["val"].shape) for n in made.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
    assert not [shape for shape in shapes if shape[-2:] == (151, 331)]
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for numbers in ((own, ids), (own.sort().values, ids.sort().values)):
        found, expected = compiled(q, k, v, *numbers), f(q, k, v, *numbers)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected)]
        torch.testing.assert_close(*grads)


def test_explain_tells_which_way_documents_go() -> None:
    x = torch.randn(1, 1, 6, 8)
    for ids, way in (
        ([0, 0, 1, 1, 2, 2], "an interval of keys for each query"),
        ([0, 1, 0, 1, 2, 2], "numbers of documents"),
    ):
        said = str(rg.explain(x, x, x, mask=rg.Documents(torch.tensor(ids)), backend=rg.Native()))
        assert way in said
