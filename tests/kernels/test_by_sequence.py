"""Positions and lengths of each sequence as numbers: the results of tensors, in plans that serve all lengths."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels, needs_shortcut
from regard import testing
from regard.backends.native.args import lower
from regard.backends.native.lower_mask import lower_mask
from regard.backends.native.torch_ops import traced
from regard.inspect import facts
from regard.nn import PagedCache
from regard.runtime import plan_cache
from test_direct import Looks

pytestmark = needs_kernels

SCORES: dict[str, Callable[[], rg.Score]] = {
    "plain": rg.ScaledDot,
    "soft cap": lambda: rg.ScaledDot() >> rg.SoftCap(3.0),
    "slopes": lambda: rg.ScaledDot() >> rg.Alibi(torch.tensor([0.5, 0.25, 0.1, 0.0])),
}
MASKS: dict[str, Callable[[list[int]], tuple[rg.Mask, rg.Mask]]] = {
    "causal": lambda n: (rg.Causal(), rg.Causal()),
    "window": lambda n: (rg.Window(4, 1), rg.Window(4, 1)),
    "causal, lengths": lambda n: (rg.Causal() & rg.Lengths(n), rg.Causal() & rg.Lengths(torch.tensor(n))),
    "lengths": lambda n: (rg.Lengths(n), rg.Lengths(torch.tensor(n))),
    "padded queries": lambda n: (rg.Lengths(n, [1, 0, 1]), rg.Lengths(torch.tensor(n), torch.tensor([1, 0, 1]))),
    "prefix": lambda n: (rg.Prefix(3) | rg.Causal(), rg.Prefix(3) | rg.Causal()),
}


def draw(nq: int, nk: int, batch: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, 4, nq, 16), torch.randn(batch, 2, nk, 16), torch.randn(batch, 2, nk, 8)


def tensors(nq: int, lengths: list[int]) -> rg.Positions:
    """The definition: the last query of each sequence stands at its last key."""
    return rg.Positions(torch.tensor(lengths)[:, None] - nq + torch.arange(nq), torch.arange(max(lengths)))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    plan_cache.clear()
    return Looks(monkeypatch)


@pytest.mark.parametrize("grad", [False, True], ids=["", "gradients"])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
def test_numbers_give_the_bits_of_tensors(looks: Looks, mask: str, score: str, grad: bool) -> None:
    """Values and gradients, in calls whose lengths change."""
    for n in (9, 12, 10, 31):
        for lengths in ([n, n - 5, n - 8], [n, n, 2]):
            inputs = [t.requires_grad_(grad) for t in draw(2, n)]
            numbers, written = MASKS[mask](lengths)
            found = list[list[Tensor]]()
            for how in (
                {"mask": numbers, "positions": rg.tail(2, lengths)},
                {"mask": written, "positions": tensors(2, lengths)},
            ):
                out = rg.attention(*inputs, score=SCORES[score](), **how)  # pyright: ignore[reportArgumentType]
                found.append([out, *(torch.autograd.grad(out.square().sum(), inputs) if grad else ())])
            for mine, theirs in zip(*found, strict=True):
                assert torch.equal(mine, theirs), lengths


@needs_shortcut
@pytest.mark.parametrize("mask", ["causal", "causal, lengths", "lengths", "padded queries"])
def test_steps_are_one_plan_and_make_no_tensor(looks: Looks, mask: str) -> None:
    for n in range(9, 109):
        q, k, v = draw(2, n)
        (numbers, written), at = MASKS[mask]([n, n - 5, n - 8]), rg.tail(2, [n, n - 5, n - 8])
        seen = looks.count
        out = rg.attention(q, k, v, mask=numbers, positions=at)
        assert n == 9 or (looks.count == seen and not {"q", "k", "keys"} & at.__dict__.keys())
        assert torch.equal(
            out, rg.attention(q, k, v, mask=written, positions=tensors(2, [n, n - 5, n - 8]), backend=Unplanned())
        )
    assert len(plan_cache.plans()) == 1


def test_one_plan_serves_sequences_of_one_length_and_of_many(looks: Looks) -> None:
    q, k, v = draw(2, 9)
    for _ in range(2):
        for at in (
            rg.tail(2, [9, 4, 3]),
            rg.tail(2, 9),
            rg.tail(2, [9]),
            rg.head(2, 9),
            rg.tail(2, [9, 9, 2], start=70),
        ):
            mine = rg.attention(q, k, v, mask=rg.Causal(), positions=at)
            written = rg.Positions(at.q.clone(), at.k.clone())
            assert torch.equal(mine, rg.attention(q, k, v, mask=rg.Causal(), positions=written, backend=Unplanned()))
    assert len(plan_cache.plans()) == 1


def test_what_was_read_and_written_to_counts(looks: Looks) -> None:
    q, k, v = draw(1, 9)
    for n in (9, 8):
        rg.attention(
            q, k[:, :, :n], v[:, :, :n], mask=rg.Causal() & rg.Lengths([n, 3, 4]), positions=rg.tail(1, [n, 3, 4])
        )
    at, mask = rg.tail(1, [9, 3, 4]), rg.Lengths([9, 3, 4])
    assert mask.keys is not None
    at.q.sub_(1), mask.keys.sub_(2)
    now = {"mask": rg.Causal() & rg.Lengths([7, 1, 2]), "positions": tensors(1, [8, 2, 3])}
    now["positions"] = rg.Positions(now["positions"].q, torch.arange(9))  # pyright: ignore
    assert torch.equal(rg.attention(q, k, v, mask=rg.Causal() & mask, positions=at), rg.attention(q, k, v, **now))  # pyright: ignore


WRONG: dict[str, tuple[str, Callable[[], object], str]] = {
    "too few positions": (
        *("positions", lambda: rg.tail(1, [9, 5])),
        r"positions.q has shape \(2, 1\); expected \(1,\) or \(3, 1\)",
    ),
    "too many queries": (
        *("positions", lambda: rg.tail(2, [9, 5, 4])),
        r"positions.q has shape \(3, 2\); expected \(1,\) or \(3, 1\)",
    ),
    "too few keys": (
        *("positions", lambda: rg.tail(1, [8, 5, 4])),
        r"positions.k has shape \(8,\); expected \(9,\) or \(3, 9\)",
    ),
    "too few lengths": (
        "mask",
        lambda: rg.Lengths([9, 5]),
        r"Lengths.keys has shape \(2,\); expected a number a sequence",
    ),
    "too many lengths": (
        *("mask", lambda: rg.Lengths([9, 5, 4, 3])),
        r"Lengths.keys has shape \(4,\); expected a number a sequence",
    ),
    "too long": ("mask", lambda: rg.Lengths([10, 5, 4]), "Lengths.keys holds 4 to 10; expected numbers from 0 to 9"),
    "below 0": ("mask", lambda: rg.Lengths([9, 5, -4]), "Lengths.keys holds -4 to 9; expected numbers from 0 to 9"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_refused_like_wrong_tensors(looks: Looks, name: str) -> None:
    """By the first call, and by calls that a plan would serve."""
    (q, k, v), (argument, wrong, said) = draw(1, 9), WRONG[name]
    for _ in range(3):
        right = {"mask": rg.Lengths([9, 5, 4]), "positions": rg.tail(1, [9, 5, 4])}
        with pytest.raises(rg.ShapeError, match=said):
            rg.attention(q, k, v, **{**right, argument: wrong()})  # pyright: ignore
        rg.attention(q, k, v, **right)  # pyright: ignore


def test_a_call_without_batch_axes_has_no_sequences(looks: Looks) -> None:
    q, k, v = (t[0] for t in draw(1, 9))
    for _ in range(2):
        rg.attention(q[0], k[0], v[0], mask=rg.Causal(), positions=rg.tail(1, 9))
        with pytest.raises(rg.ShapeError, match=r"positions.q has shape \(1, 1\); expected \(1,\)"):
            rg.attention(q[0], k[0], v[0], mask=rg.Causal(), positions=rg.tail(1, [9]))


@needs_shortcut
def test_far_positions(looks: Looks) -> None:
    q, k, v = draw(1, 9)
    for start in (0, 2**40, -(2**33)):
        for far in (0, 2**31, -(2**31), 2**45):
            first = tuple(start + n + far for n in (8, 3, 4))
            mask = rg.Causal() & rg.Window(6, None)
            at = rg.core.positions.counted((first, 1), (start, 9))
            written = rg.Positions(torch.tensor(first)[:, None], start + torch.arange(9))
            seen = looks.count
            found = rg.attention(q, k, v, mask=mask, positions=at)
            assert looks.count - seen == (far != 0 or start == 0), "kernels measure distances in 32 bits"
            assert torch.equal(found, rg.attention(q, k, v, mask=mask, positions=written)), (start, far)


def test_facts_states_and_other_backends(looks: Looks) -> None:
    (q, k, v), lengths = draw(2, 11), [11, 4, 7]
    own = {"mask": rg.Causal() & rg.Lengths(lengths), "positions": rg.tail(2, lengths)}
    written = {"mask": rg.Causal() & rg.Lengths(torch.tensor(lengths)), "positions": tensors(2, lengths)}
    assert str(rg.explain(q, k, v, **own)) == str(rg.explain(q, k, v, **written))  # pyright: ignore
    for mine, theirs in zip(*(rg.attention_state(q, k, v, **how).finish() for how in (own, written)), strict=True):  # pyright: ignore
        assert torch.equal(mine, theirs)
    wanted = facts.Entropy(), facts.Readers(), facts.Distance()
    mine, theirs = (rg.look(q, k, **how, facts=wanted) for how in (own, written))  # pyright: ignore
    assert all(torch.equal(mine[fact], theirs[fact]) for fact in wanted)
    for backend in (rg.Reference(), rg.Tiled()):
        assert torch.equal(
            rg.attention(q, k, v, **own, backend=backend), rg.attention(q, k, v, **written, backend=backend)
        )  # pyright: ignore


def test_shifts_of_another_batch_are_refused_in_a_graph() -> None:
    case = testing.Case(*draw(1, 9), rg.ScaledDot(), mask=rg.Causal(), positions=rg.tail(1, [9, 5, 4]))
    lowered = lower(case.problem, lower_mask(case.problem, None))
    shifts = lowered.operands["shifts"]
    assert shifts.tolist() == [[8], [4], [3]]
    with pytest.raises(rg.ShapeError, match=r"the native kernels: shifts has shape \(2, 1\)"):
        traced(lowered.with_operands(shifts=shifts[:2]))


@pytest.mark.full
def test_a_graph_serves_all_lengths() -> None:
    torch.compiler.reset()
    graphs = CompileCounter()
    compiled = torch.compile(lambda q, k, v, **how: rg.attention(q, k, v, **how), backend=graphs, fullgraph=True)
    for n in range(9, 15):
        (q, k, v), lengths = draw(1, n), [n, n - 4, n - 5]
        how = {"mask": rg.Causal() & rg.Lengths(lengths), "positions": rg.tail(1, lengths)}
        assert torch.equal(compiled(q, k, v, **how), rg.attention(q, k, v, **how))  # pyright: ignore
    assert graphs.frame_count == 2, "one of the first length, one of all"


def test_references_to_numbers_are_counted(looks: Looks) -> None:
    q, k, v = (t.requires_grad_() for t in draw(1, 9))
    lengths, first = (9, 4, 3), (900, 400, 300)

    def call() -> None:
        at = rg.core.positions.counted((first, 1), (892, 9))
        with torch.no_grad():
            rg.attention(q, k, v, mask=rg.Lengths(lengths) & rg.Causal(), positions=at)
        rg.attention(q, k, v, mask=rg.Causal(), positions=at).sum().backward()

    held = (*first, first, lengths)
    for _ in range(3):
        call()
    gc.collect()
    before = [sys.getrefcount(x) for x in held]
    for _ in range(300):
        call()
    gc.collect()
    assert all(abs(sys.getrefcount(x) - b) < 100 for x, b in zip(held, before, strict=True))


@needs_shortcut
def test_a_paged_cache_of_unequal_lengths(looks: Looks) -> None:
    """Its positions and its mask are numbers, and all its steps one plan, from the first on."""
    cache, tokens = PagedCache(batch=3, heads=2, pages=60, page_size=4, dk=16, dv=16), torch.randn(3, 2, 9, 16)
    cache.append(tokens, tokens)
    cache.crop(torch.tensor([9, 5, 2]))
    for step in range(40):
        new, q = torch.randn(3, 2, 1, 16), torch.randn(3, 4, 1, 16)
        k, v = cache.append(new, new)
        at, mask = cache.positions, cache.mask
        lengths = [10 + step, 6 + step, 3 + step]
        assert at == tensors(1, lengths) and mask == rg.Lengths(torch.tensor(lengths))
        at, mask = cache.positions, cache.mask
        out = rg.attention(q, k, v, mask=rg.Causal() & mask, positions=at)
        written = {"mask": rg.Causal() & rg.Lengths(torch.tensor(lengths)), "positions": tensors(1, lengths)}
        assert step == 0 or not {"q", "k", "keys"} & (at.__dict__.keys() | mask.__dict__.keys())
        assert torch.equal(out, rg.attention(q, k, v, **written, backend=Unplanned()))  # pyright: ignore
    assert len(plan_cache.plans()) == 1
