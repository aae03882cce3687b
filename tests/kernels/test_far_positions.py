"""Positions 2^31 and more apart, such as times: the kernels, which measure 32-bit distances, leave them to others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard import testing
from regard.core.positions import counted
from regard.runtime import plan_cache
from test_native_ragged import HEADS, KEY_HEADS, Batch, lists

__all__ = ["lists"]
pytestmark = needs_kernels

NQ, NK = 7, 11
LEARNED = {
    "Alibi": lambda: rg.Alibi(torch.rand(HEADS) * 1e-9),
    "LogDistance": lambda: rg.LogDistance(torch.rand(HEADS), torch.rand(HEADS) * 1e-9),
    "PowerDistance": lambda: rg.PowerDistance(torch.rand(HEADS) * 1e-4, torch.rand(HEADS) / 4 + 0.2),
}
# Queries this far behind the first key, then keys this far apart: 32-bit differences would wrap.
FAR = [(1 << 31, 1), (1 << 32, 1), ((1 << 33) + (1 << 31), 1), (5, 1 << 30), (-(1 << 33), 3)]


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, HEADS, NQ, 16), *(torch.randn(2, KEY_HEADS, NK, 16) for _ in range(2))


def compare(given: tuple[Tensor, ...], modifier: rg.Modifier, at: rg.Positions, mask: rg.Mask, far: bool) -> None:
    """Output and gradients have the bits of the backend that serves such positions; the output is near float64."""
    leaves = [t for t in (*given, *modifier.tensors()) if t.requires_grad]
    options: dict[str, Any] = {"score": rg.ScaledDot() >> modifier, "mask": mask, "positions": at}

    def found(backend: Any) -> list[Tensor]:
        out = rg.attention(*given, **options, backend=backend)
        return [out.detach(), *(torch.autograd.grad(out.sin().sum(), leaves) if leaves else ())]

    served, right = found(None), found(rg.Tiled() if far else Unplanned())
    assert all(map(torch.equal, served, right))
    exact = rg.attention(*(t.detach().double() for t in given), **options, backend=rg.Reference())
    torch.testing.assert_close(served[0].double(), exact, atol=1e-4, rtol=0)
    if far:
        with pytest.raises(rg.Unsupported, match="2\\^31 or more apart"):
            found(rg.Native())


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal(), rg.Window(1 << 34, 1 << 34)], ids=repr)
@pytest.mark.parametrize("needs", ["", "q", "q score"])
@pytest.mark.parametrize("name", LEARNED)
def test_a_plan_of_near_positions_does_not_serve_far_ones(name: str, needs: str, mask: rg.Mask) -> None:
    for behind, step in ((0, 1), *FAR, (2, 1)):
        given, modifier = drawn(), LEARNED[name]()
        given[0].requires_grad_("q" in needs)
        for t in modifier.tensors():
            t.requires_grad_("score" in needs)
        keys, far = torch.arange(NK) * step, (behind, step) in FAR
        compare(given, modifier, rg.Positions(torch.arange(NQ) + behind, keys), mask, far)
        queries = torch.arange(NQ) + torch.tensor([[0], [behind]])  # near in one sequence, far in the other
        compare(given, modifier, rg.Positions(queries, keys), mask, far)


@pytest.mark.parametrize("name", LEARNED)
def test_positions_known_as_numbers(name: str) -> None:
    for behind in (0, 1 << 32, -(1 << 33), 2):
        at = counted((behind, NQ), (0, NK))
        compare(drawn(), LEARNED[name](), at, rg.Everything(), far=abs(behind) > 2)


@pytest.mark.parametrize("score", [rg.LogDistance(0.7, 1e-9), rg.PowerDistance(1e-4, 0.4)], ids=repr)
def test_a_list_of_sequences(score: rg.Modifier, lists: list[bool]) -> None:
    """A plan of ragged sequences, kept from near positions."""
    for behind in (0, 1 << 32, 0):
        batch = Batch(torch.float32, paged=False)
        batch.positions = rg.Positions(batch.positions.q + behind, batch.positions.k)
        together = batch.together(score=rg.ScaledDot() >> score)
        offset = 0
        for q, k, v, found in zip(batch.q, batch.k, batch.v, together, strict=True):
            at = rg.Positions(batch.positions.q[offset : offset + q.shape[1]], batch.positions.k[: k.shape[1]])
            offset += q.shape[1]
            own = {"score": rg.ScaledDot() >> score, "positions": at, "backend": rg.Reference()}
            exact, rough = (rg.attention(*(t[None].to(x) for t in (q, k, v)), **own)[0] for x in (torch.float64, None))
            assert not found.numel() or testing.error(found, exact) <= testing.tolerance(exact, rough)
    assert lists[0] and not all(lists)


@pytest.mark.full
@pytest.mark.parametrize("name", LEARNED)
def test_a_graph_says_so(name: str) -> None:
    modifier, given = LEARNED[name](), drawn()

    def call(q: Tensor, k: Tensor, v: Tensor, at_q: Tensor, at_k: Tensor) -> Tensor:
        return rg.attention(q, k, v, score=rg.ScaledDot() >> modifier, positions=rg.Positions(at_q, at_k))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    near = torch.arange(NQ), torch.arange(NK)
    torch.testing.assert_close(compiled(*given, *near), call(*given, *near))
    with pytest.raises(ValueError, match=rf"positions lie 2\^31 or more apart, and {name} measures .*backend=Tiled"):
        compiled(*given, near[0] + (1 << 32), near[1])
