"""Masks that a person wrote, as programs that the native kernels run a tile at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from fact_checks import hold, looked
from kernel_checks import check
from needed import needs_kernels
from regard import facts, testing
from regard.backends.native.lower_mask import lower_mask, why_no_program
from regard.backends.native.programs import structure
from regard.backends.native.programs.trace import trace_mask
from regard.compat.torch import flex_attention
from regard.core.region import Frame, Region, Tiling
from regard.masks.algebra import Cover
from regard.masks.intervals import Interval
from regard.masks.of_rule import joined

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=151, nk=331, batch=(3,), heads=4),
    "one block": testing.frame(nq=17, nk=149, batch=(3,), heads=4),
}
AT = FRAMES["blocks"]
DOCUMENTS = torch.arange(400) // 57
FLAGS = torch.arange(400) % 11 > 2
TABLE = torch.arange(4 * 30).reshape(4, 30) % 7 > 1


@dataclass(frozen=True)
class Grid(rg.Mask):
    """Neighbours in a grid of so many columns."""

    columns: int
    reach: int

    def visible(self, at: Region) -> Tensor:
        rows, columns = at.i // self.columns - at.j // self.columns, at.i % self.columns - at.j % self.columns
        return (rows.abs() <= self.reach) & (columns.abs() <= self.reach)


@dataclass(frozen=True)
class Held(rg.Mask):
    """A mask of numbers that it holds for heads, queries, keys and sequences."""

    by_head: Tensor
    by_query: Tensor
    by_key: Tensor
    by_sequence: Tensor

    def visible(self, at: Region) -> Tensor:
        near = at.queries(self.by_query) - at.keys(self.by_key) < at.heads(self.by_head)
        return near | (at.col < at.sequences(self.by_sequence))


@dataclass(frozen=True)
class Covered(rg.Mask):
    """Blocks of 64 × 128, which says of each tile what it hides."""

    indexed: ClassVar[bool] = True

    def visible(self, at: Region) -> Tensor:
        return (at.row // 64 + at.col // 128) % 2 == 0

    def cover(self, at: Tiling) -> Tensor:
        (low, high), (first, last) = at.row, at.col
        one = (low // 64 == high // 64) & (first // 128 == last // 128)
        seen = (low // 64 + first // 128) % 2 == 0
        return torch.where(one, torch.where(seen, Cover.ALL, Cover.NONE), Cover.SOME)


MASKS: dict[str, rg.Mask] = {
    "causal": rg.Where(lambda b, h, i, j: i >= j),
    "hash": rg.Where(lambda b, h, i, j: (i * 3 + j * 5 + h + b) % 7 < 4),
    "documents": rg.Where(lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j)),
    "flags": rg.Where(lambda b, h, i, j: FLAGS[j] | (i == j) | (i < 190)),
    "a table": rg.Where(lambda b, h, i, j: TABLE[h, (i - j).clamp(-14, 15) + 14]),
    "floats": rg.Where(lambda b, h, i, j: ((i / 3 - j / 2) ** 2 + (0.5 * i) ** 2).sqrt() < 80.5),
    "beside intervals": rg.Causal() & rg.Where(lambda b, h, i, j: (i - j) % 3 != 1) & rg.Window(99, None),
    "or": rg.Prefix(7) | rg.Where(lambda b, h, i, j: (i - j).abs() < 40) & ~Grid(10, 3),
    "a grid": Grid(17, 2),
    "held": Held(
        torch.tensor([1, 30, -4, 9]), torch.arange(151) % 50, torch.arange(331) % 40, torch.tensor([5, 0, 200])
    ),
    "covered": Covered(),
    "all": rg.Where(lambda b, h, i, j: b * 0 == 0),
    "nothing": rg.Where(lambda b, h, i, j: i < j - 1000),
}


def drawn(size: str, name: str, **more: Any) -> testing.Case:
    at = FRAMES[size]
    mask = MASKS[name]
    if isinstance(mask, Held):
        mask = Held(mask.by_head, mask.by_query[: at.nq], mask.by_key[: at.nk], mask.by_sequence)
    return testing.draw(at, **{"dk": 17, "dv": 11, "mask": mask, **more})


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients(isa: str, name: str, size: str) -> None:
    case = drawn(size, name)
    assert "mask_code" in lower_mask(case.problem, (64, 128)), why_no_program(case.problem)
    check(case)


@pytest.mark.parametrize("name", ["hash", "documents", "a grid"])
def test_beside_other_steps(isa: str, name: str) -> None:
    capped = rg.ScaledDot() >> rg.SoftCap(5.0)
    check(drawn("blocks", name, key_heads=2, dk=24, dv=19, score=capped, sink=True))
    check(drawn("blocks", name, dk=16, dv=19, dropout=rg.Dropout(0.3, seed=3)), torch.bfloat16)


@pytest.mark.full
@pytest.mark.parametrize("name", ["hash", "documents", "causal"])
def test_additive_scores(isa: str, name: str) -> None:
    score = rg.Additive(None, None, torch.randn(16, dtype=torch.float64) / 4)
    check(drawn("blocks", name, key_heads=2, dk=16, dv=7, score=score))


@pytest.mark.parametrize("name", ["hash", "documents", "nothing", "covered"])
def test_facts(isa: str, name: str) -> None:
    wanted = (facts.Visible(), facts.Entropy(), facts.Top(3), facts.Received(), facts.Readers(), facts.Map(5, 7))
    case = drawn("blocks", name, sink=True)
    assert {looked(case.leaves(torch.float32), wanted).way(fact) for fact in wanted} == {"the native kernels"}
    hold(case, wanted, torch.float32)


@dataclass(frozen=True)
class Gate(rg.Modifier):
    """A table by distance, and a number, both learned."""

    table: Tensor
    number: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return torch.tanh(s * self.number) + self.table[(at.i - at.j).clamp(-5, 5) + 5]


@pytest.mark.parametrize("name", ["held", "documents", "a grid"])
def test_beside_a_program_of_scores(isa: str, name: str) -> None:
    """Both read operands of one table: the scores' from its beginning, the mask's from its end."""
    gate = Gate(torch.randn(11, dtype=torch.float64), torch.tensor(1.3, dtype=torch.float64))
    case = drawn("blocks", name, score=rg.ScaledDot() >> gate)
    args = lower_mask(case.problem, (64, 128))
    assert "program_11" in args and "program_0" not in args
    check(case)


@dataclass(frozen=True)
class Many(rg.Modifier):
    """Reads so many tensors."""

    numbers: tuple[Tensor, ...]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        for t in self.numbers:
            s = s + at.keys(t)
        return s


def test_operands_that_scores_leave() -> None:
    for count, why in ((10, None), (11, "it reads 2 tensors; the kernels have room for 1")):
        score = rg.ScaledDot() >> Many(tuple(torch.randn(331, dtype=torch.float64) for _ in range(count)))
        case = drawn("blocks", "causal", score=score)
        assert why_no_program(case.leaves(torch.float32).problem) == why
        check(case)


RANGES = st.integers(-9, 9)
WHOLE = st.recursive(
    st.sampled_from(["i", "j", "h", "b", "i", "j"]) | RANGES.map(str),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-*"), inner, inner).map(lambda x: f"({x[1]} {x[0]} {x[2]})"),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(2, 70)).map(lambda x: f"({x[1]} {x[0]} {x[2]})"),
        st.tuples(st.sampled_from(["//", "%"]), inner, st.integers(-70, -2)).map(lambda x: f"({x[1]} {x[0]} {x[2]})"),
        inner.map(lambda x: f"(z + {x}).abs()"),
        st.tuples(inner, inner).map(lambda x: f"torch.maximum(z + {x[0]}, z + {x[1]})"),
        st.tuples(inner, inner, inner).map(lambda x: f"torch.where(z + {x[0]} < i, {x[1]}, z + {x[2]})"),
    ),
    max_leaves=6,
)
TRUTH = st.recursive(
    st.tuples(WHOLE, st.sampled_from(["<", "<=", "==", "!=", ">"]), WHOLE).map(lambda x: f"(z + {x[0]} {x[1]} {x[2]})"),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("&|^"), inner).map(lambda x: f"({x[0]} {x[1]} {x[2]})"),
        inner.map(lambda x: f"~{x}"),
    ),
    max_leaves=4,
)


@given(TRUTH)
def test_random_programs_say_what_torch_says(text: str) -> None:
    """Without scores, a query's weights are alike where it sees a key, and 0 elsewhere: values of the unit matrix."""
    fn = eval(f"lambda b, h, i, j, z: {text}", {"torch": torch})
    mask = rg.Where(lambda b, h, i, j: fn(b, h, i, j, 0 * (i + j)))
    at = testing.frame(nq=151, nk=331, batch=(2,), heads=2)
    case = testing.draw(at, dk=1, mask=mask)
    seen = mask.visible(at.region()).expand(at.shape)
    why = why_no_program(case.problem)
    assert why is None or "2^31" in why, why
    q, k, v = torch.zeros(2, 2, 151, 1), torch.zeros(2, 2, 331, 1), torch.eye(331).expand(2, 2, 331, 331)
    out = rg.attention(q, k, v, mask=mask, positions=case.positions, backend=rg.Native())
    assert torch.equal(out > 0, seen)


@dataclass(frozen=True)
class Asked(rg.Mask):
    """How many pairs it was asked about at once, at most."""

    most: ClassVar[list[int]] = []

    def visible(self, at: Region) -> Tensor:
        seen = (at.i - at.j) % 5 < 3
        self.most.append(seen.numel())
        return seen


def test_no_work_is_done_pair_by_pair_in_torch() -> None:
    Asked.most.clear()
    for n in (96, 250, 96):
        q = torch.randn(1, 2, n, 16, requires_grad=True)
        rg.attention(q, q, q, mask=Asked()).sum().backward()
    assert Asked.most and max(Asked.most) <= 3 * 250  # of a few queries or keys, all keys or queries: it reads a size


def test_a_function_without_tensors_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = list[rg.Mask]()
    monkeypatch.setattr(structure, "trace_mask", lambda mask, frame: traced.append(mask) or trace_mask(mask, frame))
    for factor in (5, 6):
        for n in (96, 250, 90):
            q, mask = torch.randn(1, 2, n, 16), rg.Where(lambda b, h, i, j, factor=factor: (i - factor * j) % 7 < 3)
            right = rg.attention(q, q, q, mask=mask, backend=rg.Reference())
            torch.testing.assert_close(rg.attention(q, q, q, mask=mask), right)
    assert len(traced) == 2


def test_tensors_that_a_function_holds_are_read_anew() -> None:
    ids = torch.zeros(90, dtype=torch.int64)
    mask, q = rg.Where(lambda b, h, i, j: ids[i] == ids[j]), torch.randn(1, 2, 90, 16)
    for n in (1, 2, 30, 7):
        ids.copy_(torch.arange(90) // n)
        right = rg.attention(q, q, q, mask=mask, backend=rg.Reference())
        torch.testing.assert_close(rg.attention(q, q, q, mask=mask), right)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda b, h, i, j: torch.sin(i - 0.5 * j) > 0, "depends on the last digit of aten.sin.default"),
        (lambda b, h, i, j: (i - j).double() / 3 < 2, "it computes in float64"),
        (lambda b, h, i, j: torch.lerp(1.0 * i, 1.0 * j, 0.3) < 9, "no instruction for aten.lerp.Scalar"),
        (lambda b, h, i, j: i.bitwise_left_shift(j) == 0, "it shifts bits by a number that depends on the pair"),
        (lambda b, h, i, j: (i - j + 0 * h).cumsum(-1) > 9, "no instruction for aten.cumsum.default"),
    ],
)
def test_what_is_no_program_is_a_map_of_tiles(fn: Any, why: str) -> None:
    case = testing.draw(AT, mask=rg.Where(fn), key_heads=2)
    found = dict(rg.explain(*case.leaves(torch.float32).tensors()[:3], mask=case.mask, positions=case.positions).facts)
    assert found["mask as"].startswith("a map of tiles, since no program: ") and why in found["mask as"]


def test_explain_describes_the_program() -> None:
    q = torch.randn(1, 2, 90, 16)

    def said(mask: rg.Mask) -> str:
        return dict(rg.explain(q, q, q, mask=mask).facts)["mask as"]

    assert said(MASKS["causal"]) == "a program of 4 instructions, which reads 2 tensors"
    assert said(MASKS["beside intervals"]).endswith(" and an interval of keys for each query")
    assert said(rg.Dilated(3)) == "a map of tiles"


@dataclass(frozen=True)
class Reach(rg.Mask):
    """A class of one's own that says intervals."""

    def visible(self, at: Region) -> Tensor:
        return (at.j <= at.i) & (at.i - at.j < 9)

    def rows(self, frame: Frame) -> Interval | None:
        return rg.Window(before=8, after=0).rows(frame)


def odd(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j) % 3 == 0


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (Reach(), "an interval of keys for each query"),
        (rg.Causal() & Reach(), "an interval of keys for each query"),
        (Reach() & rg.Dense(torch.ones(40, 40, dtype=torch.bool)), "booleans and an interval of keys for each query"),
        (Reach() & rg.Where(odd), "a program of"),
        (rg.Causal() & rg.Where(odd) & rg.Window(before=4, after=0), "and an interval of keys for each query"),
    ],
    ids=repr,
)
def test_a_class_that_says_intervals_is_no_program(mask: rg.Mask, said: str) -> None:
    q, k, v = (torch.randn(1, 4, 40, 24, generator=torch.Generator().manual_seed(n)) for n in range(3))
    found = dict(rg.explain(q, k, v, mask=mask).facts)["mask as"]
    assert said in found and found.startswith("a program of") == (rg.Where in map(type, joined(mask)))
    right = rg.attention(q, k, v, mask=mask, backend=rg.Reference())
    torch.testing.assert_close(rg.attention(q, k, v, mask=mask), right, rtol=1e-5, atol=1e-5)


def test_mask_mod_of_flex_attention() -> None:
    """i and j are indices, of single pairs."""
    at = torch.arange(150) % 13

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (at[i] + at[j] + h) % 4 < i % 3

    q, k, v = (torch.randn(2, 3, n, 16, dtype=torch.float64) for n in (90, 150, 150))
    mask = create_block_mask(mask_mod, None, None, 90, 150, device="cpu")
    result = []
    for dtype in (torch.float32, torch.float64):
        given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = flex_attention(*given, block_mask=mask)
        result.append((out, *torch.autograd.grad(out.square().sum(), given)))
    facts_ = dict(rg.compat.torch.explain_flex_attention(q.float(), k.float(), v.float(), None, mask).facts)
    assert facts_["mask as"].startswith("a program of")
    for mine, right in zip(*result, strict=True):
        torch.testing.assert_close(mine, right.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("nq", [3, 40])
def test_booleans_whose_bytes_are_not_1(isa: str, nq: int) -> None:
    """Flags of uint8 that are viewed: any byte but 0 is true, as in torch."""
    bytes_ = ((torch.arange(nq * 70) % 3) * 2).to(torch.uint8).reshape(nq, 70)
    seen, flags = bytes_ != 0, bytes_.view(torch.bool)
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (nq, 70, 70))
    masks = (rg.Dense(flags), rg.Dense(flags[None, None]), rg.Where(lambda b, h, i, j: flags[i, j]))
    at = rg.head(nq, 70)
    found = [rg.attention(q, k, v, mask=mask, positions=at, backend=rg.Native()) for mask in (*masks, rg.Dense(seen))]
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in found]
    for out, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(out, found[-1])
        torch.testing.assert_close(grad, grads[-1])
