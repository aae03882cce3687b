"""Plans: calls of a structure seen before give the bits of calls without one; no structure is taken for another."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard import testing
from regard.backends.native.ffi import runnable
from regard.masks.between import Between
from regard.runtime import plan_cache

pytestmark = needs_kernels

AT = testing.frame(nq=23, nk=23, batch=(2,), heads=4)


def native(case: testing.Case) -> bool:
    return rg.Native().why_not(case.leaves(torch.float32).problem, lse=False) is None


CALLS = {name: case for name, case in testing.calls(AT) if runnable() and native(case)}


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


def kept() -> int:
    return len(plan_cache.plans())


def both(q: Tensor, k: Tensor, v: Tensor, **given: object) -> None:
    with torch.no_grad():
        assert torch.equal(rg.attention(q, k, v, **given), rg.attention(q, k, v, **given, backend=Unplanned()))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape or (2, 4, 23, 16)).to(dtype) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_for_every_mask_and_score(name: str, dtype: torch.dtype) -> None:
    case = CALLS[name]
    for _ in range(3):
        other = testing.draw(AT, score=case.score, mask=case.mask).leaves(dtype)
        both(other.q.detach(), other.k.detach(), other.v.detach(), score=other.score, mask=other.mask)


def test_what_is_kept() -> None:
    q, k, v = draw()
    for mask in (rg.Everything(), rg.Causal(), rg.Window(3, 0) | rg.Prefix(2), rg.Dense(torch.rand(23, 23) > 0.5)):
        before = kept()
        for _ in range(2):
            both(q, k, v, mask=mask)
        assert kept() == before + 1, mask
    before = kept()
    for _ in range(2):
        both(q, k, v, sink=0.5)
    assert kept() == before + 1
    for mask in (rg.Lengths(keys=torch.tensor([3, 9])), rg.Documents(torch.arange(23) // 5) & rg.Causal()):
        before = kept()
        for _ in range(2):
            both(q, k, v, mask=mask)
        assert kept() == before + 1, mask
    before = kept()
    for n in range(3):  # one for all functions, which each call lowers itself
        both(q, k, v, mask=rg.Where(lambda b, h, i, j, n=n: i - j >= n))
    assert kept() == before + 1
    before = kept()
    rg.attention(q, k, v, score=rg.Custom(lambda q, k: -torch.cdist(q, k)))
    assert kept() == before


def grown(nq: int, nk: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values of a cache with room for more: their strides are those of the room."""
    room = torch.randn(2, 2, 2, 64, 16, dtype=dtype)
    return torch.randn(2, 4, nq, 16, dtype=dtype), room[0, :, :, :nk], room[1, :, :, :nk]


LENGTHS = [(1, 1), (1, 2), (1, 9), (1, 10), (1, 64), (3, 64), (3, 7), (7, 7), (9, 4), (40, 64), (1, 10)]
MASKS = {
    "none": lambda nq, nk: rg.Everything(),
    "causal": lambda nq, nk: rg.Causal(),
    "window": lambda nq, nk: rg.Window(5, 2) & rg.Causal(),
    "lengths": lambda nq, nk: rg.Lengths(keys=torch.tensor([max(nk - 2, 0), nk])) & rg.Causal(),
    "documents": lambda nq, nk: rg.Documents(torch.arange(nk - nq, nk) // 5, torch.arange(nk) // 5),
    "between": lambda nq, nk: Between(*torch.stack([torch.arange(nq) // 2, torch.arange(nq) + 1]).clamp(max=nk).int()),
    "prefix": lambda nq, nk: rg.Prefix(torch.tensor([3, 1])) | rg.Causal(),
}
POSITIONS = {
    "tail": rg.tail,
    "head": rg.head,
    "shifted": lambda nq, nk: rg.Positions(torch.arange(5, 5 + nq), torch.arange(nk)),
    "each": lambda nq, nk: rg.Positions(torch.arange(nk - nq, nk) - torch.tensor([[0], [2]]), torch.arange(nk)),
    "far": lambda nq, nk: rg.Positions(torch.arange(nk - nq, nk) + (1 << 33), torch.arange(nk) + (1 << 33)),
}


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_one_plan_serves_all_lengths(mask: str, positions: str) -> None:
    slopes = torch.rand(4)
    for score in (rg.ScaledDot() >> rg.SoftCap(5.0), rg.ScaledDot() >> rg.Alibi(slopes)):
        for dropout in (None, rg.Dropout(0.3, seed=7)):
            plan_cache.clear()
            for nq, nk in LENGTHS:
                at, hides = POSITIONS[positions](nq, nk), MASKS[mask](nq, nk)
                both(*grown(nq, nk), score=score, mask=hides, positions=at, dropout=dropout)
            # such a mask says how many queries there are
            assert kept() == (len({nq for nq, _ in LENGTHS}) if mask == "between" else 1)


@pytest.mark.parametrize("nq", [1, 5])
def test_a_mask_for_another_number_of_queries_is_refused(nq: int) -> None:
    mask = Between(torch.zeros(2, nq, dtype=torch.int32), torch.full((2, nq), 40, dtype=torch.int32))
    for _ in range(3):
        both(*grown(nq, 40), mask=mask)
    for other in (3, 9):
        with pytest.raises(rg.ShapeError, match=f"Between.start has shape .2, {nq}.; expected .{other},."):
            rg.attention(*grown(other, 40), mask=mask)
    both(*grown(nq, 41), mask=mask)


def test_a_backend_that_is_named_has_plans_of_its_own() -> None:
    q, k, v = draw()
    with torch.no_grad():
        rows = torch.cat([rg.attention(q[..., [n], :], k, v, backend=Unplanned(invariant=True)) for n in range(9)], -2)
        for _ in range(2):
            assert torch.equal(rg.attention(q, k, v, backend=rg.Native()), rg.attention(q, k, v, backend=Unplanned()))
            assert torch.equal(rg.attention(q, k, v, backend=rg.Native(invariant=True))[..., :9, :], rows)
            rg.attention(q, k, v, backend=rg.Tiled())
    assert kept() == 2
    both(q, k, v)
    assert kept() == 3
    state, other = (rg.attention_state(q, k, v, backend=backend) for backend in (rg.Native(), Unplanned()))
    assert torch.equal(state.o, other.o) and kept() == 4
    with pytest.raises(rg.Unsupported, match=r"backend Sdpa\(\) cannot run this call: it serves cuda tensors"):
        rg.attention(q, k, v, backend=rg.Sdpa())
    with pytest.raises(TypeError, match="backend"):
        rg.attention(q, k, v, backend="native")


def test_a_seed_is_drawn_for_each_call() -> None:
    q, k, v = draw()
    torch.manual_seed(3)
    drawn = [rg.attention(q, k, v, dropout=rg.Dropout(0.5)) for _ in range(3)]
    torch.manual_seed(3)
    right = [rg.attention(q, k, v, dropout=rg.Dropout(0.5), backend=Unplanned()) for _ in range(3)]
    assert all(map(torch.equal, drawn, right)) and not torch.equal(drawn[0], drawn[1])
    assert kept() == 1
    for n in range(3):
        both(q, k, v, dropout=rg.Dropout(0.5, seed=(1 << 63) + n))
    assert kept() == 1


def test_positions_in_tensors_that_are_changed_in_place_are_looked_at() -> None:
    q, k, v = grown(3, 9)
    at = rg.Positions(rg.tail(3, 9).q, torch.arange(9))
    both(q, k, v, mask=rg.Causal(), positions=at)
    at.q.sub_(4)
    both(q, k, v, mask=rg.Causal(), positions=at)
    torch.testing.assert_close(
        rg.attention(q, k, v, mask=rg.Causal(), positions=at),
        rg.attention(q, k[..., :5, :], v[..., :5, :], mask=rg.Causal(), positions=rg.tail(3, 5)),
    )


def test_a_wrong_call_of_a_known_structure_is_refused_as_ever() -> None:
    q, k, v = grown(3, 9)
    lengths = torch.tensor([3, 9])
    for _ in range(2):
        rg.attention(q, k, v, mask=rg.Causal() & rg.Lengths(lengths), positions=rg.tail(3, 9))
        rg.attention(q, k, v)
        rg.attention(k, k, v, mask=rg.Causal())
    for refused, said, given in (
        (rg.ShapeError, "one value a key", {}),
        (rg.ShapeError, "positions.q has shape", {"positions": rg.tail(4, 9)}),
        (rg.ShapeError, "positions.k has shape", {"positions": rg.tail(3, 8)}),
        (rg.ShapeError, "positions are not given", {"mask": rg.Causal()}),
        (rg.ShapeError, "expected numbers from 0 to 9", {"mask": rg.Lengths(lengths + 1)}),
        (
            rg.ShapeError,
            "Documents.k_ids has shape",
            {"mask": rg.Documents(torch.zeros(3).long(), torch.zeros(8).long())},
        ),
    ):
        values = v if given else v[..., :8, :]
        with pytest.raises(refused, match=said):
            rg.attention(q, k, values, **({"positions": rg.tail(3, 9)} if "Lengths" in repr(given) else {}) | given)


def test_tensors_are_read_where_they_lie_now() -> None:
    q, k, v = draw()
    allowed, bias = torch.rand(23, 23) > 0.3, torch.randn(4, 1, 23)
    lengths, slopes, rates, sink = torch.tensor([3, 9]), torch.rand(4), torch.rand(4), torch.rand(4)
    given = [
        ({"mask": rg.Dense(allowed)}, allowed.logical_not_),
        ({"score": rg.ScaledDot() >> rg.Bias(bias)}, bias.neg_),
        ({"score": rg.ScaledDot() >> rg.Alibi(slopes)}, slopes.zero_),
        ({"score": rg.ScaledDot() >> rg.LogDistance(2.0, rates)}, rates.zero_),
        ({"sink": sink, "mask": rg.Causal()}, sink.neg_),
        ({"mask": rg.Lengths(keys=lengths)}, lengths.zero_),
        ({"mask": rg.Dense(allowed) & rg.Lengths(keys=lengths)}, lambda: lengths.fill_(7)),
    ]
    for each, change in given:
        both(q, k, v, **each)
        before = rg.attention(q, k, v, **each)
        change()
        both(q, k, v, **each)
        assert not torch.equal(rg.attention(q, k, v, **each), before)


def test_one_tensor_in_two_roles_is_not_taken_for_two() -> None:
    q, k, v = draw()
    one, slopes, sink = torch.rand(4), torch.rand(4), 5 * torch.rand(4)
    for a, b in ((one, one), (slopes, sink), (sink, sink)):
        both(q, k, v, score=rg.ScaledDot() >> rg.Alibi(a), sink=b)


def test_other_strides_widths_dtypes_and_layouts_are_other_structures() -> None:
    q, k, v = draw(2, 23, 4, 16)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    both(*turned)
    both(*[t.contiguous() for t in turned])
    both(*[t[..., ::2] for t in turned])
    both(turned[0], turned[1][:, :1].expand(-1, 4, -1, -1), turned[2])
    both(*[t.bfloat16() for t in turned])
    both(*[t[:, 0] for t in turned])
    both(*[t[0, 0] for t in turned])
    both(turned[0], turned[1][:, :2], turned[2][:, :2, :, :5])
    negative = torch.randn(2, 4, 23, 16, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    both(negative, *turned[1:])
    assert torch.equal(rg.attention(negative, *turned[1:]), rg.attention(negative.resolve_neg(), *turned[1:]))
    assert kept() == 6  # strides are filled in at each call


def test_nobody_who_watches_is_passed_by() -> None:
    q, k, v = draw()
    out = rg.attention(q, k, v)
    leaf = q.clone().requires_grad_()
    assert rg.attention(leaf, k, v).requires_grad
    with torch.no_grad():
        assert torch.equal(rg.attention(leaf, k, v), out)
    bias = torch.randn(23, 23).requires_grad_()
    assert rg.attention(q, k, v, score=rg.ScaledDot() >> rg.Bias(bias)).requires_grad
    many = torch.vmap(rg.attention)(q, k, v)
    torch.testing.assert_close(many, out)
    _, tangent = torch.func.jvp(lambda q: rg.attention(q, k, v), (q,), (torch.ones_like(q),))
    assert tangent.abs().max() > 1e-4
    with torch.autocast("cpu"):
        assert rg.attention(q, k, v).dtype == torch.bfloat16
    assert rg.attention(q.to("meta"), k.to("meta"), v.to("meta")).is_meta
    with torch.inference_mode():
        assert torch.equal(rg.attention(q, k, v), out)


@dataclass(frozen=True)
class Mood(rg.Mask):
    """A mask of a user's own, whose answer lies outside it."""

    now = torch.tensor(0)

    def visible(self, at: object) -> Tensor:
        return at.col >= Mood.now  # type: ignore[attr-defined]


def test_a_foreign_value_is_asked_each_time() -> None:
    q, k, v = draw()
    before = rg.attention(q, k, v, mask=Mood())
    Mood.now.fill_(3)
    assert not torch.equal(rg.attention(q, k, v, mask=Mood()), before)


def test_outputs_never_share_memory_and_inputs_are_let_go() -> None:
    import gc
    import weakref

    q, k, v = draw()
    a, b = rg.attention(q, k, v), rg.attention(q, k, v)
    assert a.data_ptr() != b.data_ptr()
    gone = [weakref.ref(t) for t in (q, k, v)]
    del q, k, v
    gc.collect()
    assert all(each() is None for each in gone)


def test_many_threads_and_many_structures() -> None:
    wrong: list[int] = []

    def work(n: int) -> None:
        for m in range(80):
            q, k, v = draw(1, 2, 1 + (n * 80 + m) % 300, 8)
            if not torch.equal(rg.attention(q, k, v), rg.attention(q, k, v, backend=Unplanned())):
                wrong.append(m)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(plan_cache.plans()) <= plan_cache._MOST


def test_many_threads_and_many_structures_with_tensors() -> None:
    """Reading a tensor of a call lets other threads run, which put other plans in the places of those known."""
    wrong: list[int] = []
    before = sys.getswitchinterval()

    def work(n: int) -> None:
        sink = torch.rand(2)
        for m in range(200):
            q, k, v = draw(1 + (n * 31 + m) % 99, 2, 3, 8)
            out = rg.attention(q, k, v, sink=sink)
            if not torch.equal(out, rg.attention(q, k, v, sink=sink, backend=Unplanned())):
                wrong.append(m)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    try:
        sys.setswitchinterval(1e-6)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong


def test_a_wrong_call_is_refused_each_time() -> None:
    q, k, v = draw()
    for _ in range(2):
        with pytest.raises(rg.ShapeError, match="positions are not given"):
            rg.attention(q[..., :5, :], k, v, mask=rg.Causal())


def test_relative_biases_share_a_plan_whatever_the_length() -> None:
    plan_cache.clear()
    tables = torch.randn(3, 5, 4)
    tables[1, 2, 0] = -torch.inf
    for n in (7, 11, 7):
        q, k, v = (torch.randn(2, 4, n, 16) for _ in "qkv")
        for table in (*tables, tables[0].double(), tables[0].T.contiguous().T):
            score = rg.ScaledDot() >> rg.RelativeBias(table, rg.ClippedBuckets(2, 2)) >> rg.SoftCap(9.0)
            right = rg.attention(q, k, v, score=score, mask=rg.Causal(), backend=rg.Reference())
            torch.testing.assert_close(rg.attention(q, k, v, score=score, mask=rg.Causal()), right)
            state = rg.attention_state(q, k, v, score=score, mask=rg.Causal())
            torch.testing.assert_close(state.finish()[0], right)
    assert len(plan_cache.plans()) == 6  # of three layouts, with and without statistics
