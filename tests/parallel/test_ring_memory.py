"""What a rank of a ring holds while it computes the gradients of a block: nothing of the blocks before it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
import regard.parallel.ring_call as ring
from gloo_processes import Group
from regard.parallel import ring_attention


def tensors() -> dict[int, int]:
    """Bytes of each storage of the tensors that Python knows, by address."""
    alive = [t for t in gc.get_objects() if type(t) is Tensor]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}


def held(group: Any) -> list[float]:
    """At each block's backward, what is held that was not before the call's backward, in tensors of q's size."""
    q, k, v = (torch.randn(1, 2, 64, 8).requires_grad_() for _ in range(3))
    out = ring_attention(q, k, v, group=group, mask=rg.Causal() & rg.Window(before=31, after=0), timeout=60.0)
    right, found = ring.part_gradients, list[float]()
    gc.collect()
    g, before = torch.ones_like(out), tensors()

    def part_gradients(*given: Any) -> tuple[Tensor | None, ...]:
        new = sum(size for at, size in tensors().items() if at not in before)
        found.append(new / q.untyped_storage().nbytes())
        return right(*given)

    ring.part_gradients = part_gradients
    try:
        out.backward(g)
    finally:
        ring.part_gradients = right
    return found


@pytest.mark.full
def test_a_blocks_backward_finds_the_room_of_the_one_before(gloo: Group) -> None:
    """The first one's takes place before there are sums of the gradients (3 of q's size), the second one's when the
    gradients of the first block (3) are gone.
    """
    for rank, found in enumerate(gloo.run(held, ranks=3)):
        assert len(found) == (1 if rank == 0 else 2)
        assert all(size < most for size, most in zip(found, (8.5, 9.5), strict=False)), (rank, found)
