"""The native kernels against the dense definition, on every instruction set that this machine runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from kernel_checks import calls, compare, drawn, frames
from needed import needs_kernels
from regard import testing
from regard.backends.base import Backend
from regard.backends.native.abi import CallArguments
from regard.backends.native.bind import bind
from regard.backends.native.ffi import Library, load, runnable
from regard.call.arguments import build_problem

pytestmark = needs_kernels

FRAMES = frames(few=1151)


def refused(case: testing.Case) -> bool:
    problem, _ = build_problem(
        case.q.float(), case.k.float(), case.v.float(), case.score, case.mask, case.positions, None
    )
    return rg.Native().why_not(problem, lse=True) is not None


@pytest.mark.parametrize(("size", "mask", "score"), calls(FRAMES))
def test_every_mask_and_score(size: str, mask: str, score: str) -> None:
    call = drawn(FRAMES[size], mask, score)
    if refused(call):
        with pytest.raises(rg.Unsupported, match="cannot run this call"):
            compare(call)
    else:
        compare(call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("mask", ["Causal", "Lengths", "Dense", "Or", "nothing"])
def test_every_instruction_set(isa: str, dtype: torch.dtype, size: str, mask: str) -> None:
    at = FRAMES[size]
    slopes = torch.linspace(0.1, 0.5, at.heads, dtype=torch.float64)
    score = rg.ScaledDot() >> rg.SoftCap(5.0) >> rg.Alibi(slopes)
    compare(testing.draw(at, dk=32, dv=19, score=score, mask=testing.masks(at)[mask]), dtype)
    compare(testing.draw(at, dk=33, dv=16, mask=testing.masks(at)[mask], dropout=rg.Dropout(0.3, seed=11)), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("mask", ["Everything", "Causal", "nothing"])
def test_sinks(isa: str, dtype: torch.dtype, size: str, mask: str) -> None:
    at = FRAMES[size]
    compare(testing.draw(at, mask=testing.masks(at)[mask], sink=True), dtype)
    case = testing.draw(at, mask=testing.masks(at)[mask]).leaves(dtype)
    for sink in (-torch.inf, 1e4, torch.linspace(-3, 90, at.heads)):
        ours, right = (
            rg.attention_state(
                case.q, case.k, case.v, mask=case.mask, positions=case.positions, sink=sink, backend=each
            )
            for each in (rg.Native(), rg.Reference())
        )
        # weights may be rounded to bfloat16, each and so their sum by 2^-9
        off = 2**-8 * float(case.v.detach().abs().max()) if dtype == torch.bfloat16 else 1e-5
        for mine, exact in zip(ours.finish(), right.finish(), strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-5, atol=off)


@pytest.mark.parametrize(
    "mask",
    [
        rg.Causal() & rg.Window(before=20, after=0) | rg.Prefix(5),
        ~rg.Window(before=10, after=10),
        rg.Causal() & ~rg.Window(before=70, after=0) | rg.Prefix(torch.tensor([0, 3, 200])),
    ],
    ids=str,
)
def test_tile_maps_with_tiles_of_every_kind(isa: str, mask: rg.Mask) -> None:
    n = 389
    kinds = mask.on(n, batch=(3,)).cover(64, 128).unique().tolist()
    assert rg.Cover.SOME in kinds and len(kinds) > 1
    compare(testing.draw(testing.frame(nq=n, nk=n, batch=(3,), heads=2), mask=mask))


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257])
def test_lengths_at_every_edge(isa: str, n: int) -> None:
    compare(testing.draw(testing.frame(nq=n, nk=n, batch=(2,), heads=2), dk=5, dv=7, mask=rg.Causal()))
    compare(testing.draw(testing.frame(nq=n, nk=131, batch=(1,), heads=2), dk=5, dv=7))


def test_reading_memory() -> None:
    library = load(runnable()[0])
    data = torch.arange(1003, dtype=torch.float32)
    assert library.handle.regard_bandwidth(data.data_ptr(), data.numel()) == 1003 * 501


@pytest.mark.parametrize("width", [1, 3, 16, 67, 128, 512])
def test_widths(isa: str, width: int) -> None:
    for nq in (3, 70):
        compare(testing.draw(testing.frame(nq=nq, nk=150, batch=(1,), heads=2), dk=width, dv=width + 1))


@pytest.mark.parametrize("nq", [1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(nq: int, dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 8, n, 4, 32).to(dtype).movedim(3, 1)[..., ::2] for n in (nq, 90, 90))
    expected = rg.attention(q.contiguous(), k.contiguous(), v.contiguous(), backend=rg.Native())
    near = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(rg.attention(q, k, v, backend=rg.Native()), expected, **near)
    turned = [t.mT.contiguous().mT for t in (q, k, v)]
    torch.testing.assert_close(rg.attention(*turned, backend=rg.Native()), expected, **near)
    shared = k[:, :1].expand_as(k), v[:1].expand_as(v)
    copied = shared[0].contiguous(), shared[1].contiguous()
    ours, theirs = (rg.attention(q, *pair, backend=rg.Native()) for pair in (shared, copied))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nq", [5, 130])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_hidden_never_leaks_and_what_is_seen_stays(isa: str, dtype: torch.dtype, nq: int, bad: float) -> None:
    q, k, v = (torch.randn(1, 1, n, 16).to(dtype) for n in (nq, 130, 130))
    mask, at = rg.Causal(), rg.tail(nq, 130)
    clean = rg.attention(q, k, v, mask=mask, positions=at, backend=rg.Native())
    k[..., 128, :], v[..., 128, 3] = bad, bad
    out = rg.attention(q, k, v, mask=mask, positions=at, backend=rg.Native())
    assert torch.equal(out[..., :-2, :], clean[..., :-2, :])
    assert not out[..., -2:, 3].isfinite().any()


@pytest.mark.parametrize("nq", [2, 83])
@pytest.mark.parametrize("mask", ["Causal", "Lengths", "nothing"])
def test_a_sink_in_the_kernel(isa: str, nq: int, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = testing.frame(nq=nq, nk=149, batch=(3,), heads=5)
    case = testing.draw(at, dk=16, dv=19, mask=testing.masks(at)[mask]).leaves(torch.float32)
    sink = torch.tensor([2.0, -torch.inf, 0.5, -3.0, 40.0]) + torch.arange(3.0)[:, None]
    plain = Library.run

    def with_sink(self: Library, arguments: CallArguments) -> None:
        bind(arguments, {"sink": sink[..., None, None]})
        plain(self, arguments)

    def run(one: testing.Case, backend: Backend) -> tuple[Tensor, Tensor]:
        return rg.attention_state(one.q, one.k, one.v, mask=one.mask, positions=one.positions, backend=backend).finish()

    def joined(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.logaddexp(lse, sink.to(lse.dtype)[..., None].expand_as(lse))
        share = torch.where(lse == -torch.inf, 0.0, (lse - both).exp())
        return out * share[..., None], both

    with torch.no_grad():
        truth = joined(*run(case.leaves(torch.float64), rg.Reference()))
        usual = joined(*run(case, rg.Reference()))
        monkeypatch.setattr(Library, "run", with_sink)
        for mine, right, other in zip(run(case, Unplanned()), truth, usual, strict=True):
            assert testing.error(mine, right) <= testing.tolerance(right, other)


def test_the_same_bits_for_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    answers = []
    for nq in (3, 200):
        q, k, v = torch.randn(2, 3, nq, 24), torch.randn(2, 3, 3000, 24), torch.randn(2, 3, 3000, 24)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            answers.append(rg.attention(q, k, v, backend=rg.Native()))
        assert torch.equal(answers[-1], answers[-2]) and torch.equal(answers[-2], answers[-3])
    torch.set_num_threads(before)


def test_many_python_threads_at_once() -> None:
    inputs = [torch.randn(3, 1, 2, 90 + n, 16) for n in range(8)]
    expected = [rg.attention(*x, mask=rg.Causal(), backend=rg.Native()) for x in inputs]
    found: list[Tensor | None] = [None] * 8

    def work(n: int) -> None:
        for _ in range(5):
            found[n] = rg.attention(*inputs[n], mask=rg.Causal(), backend=rg.Native())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is not None and torch.equal(one, right) for one, right in zip(found, expected, strict=True))


FORK = """
import multiprocessing, sys, threading
import torch
import regard as rg

def child(x, answer):
    def call():
        answer.put(rg.attention(x, x, x, backend=rg.Native()).flatten().tolist())

    if sys.argv[1] == "one thread":
        torch.set_num_threads(1)  # the pool of the thread that forked does not survive a fork
        call()
    else:  # a new thread gets a pool of its own
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

torch.set_num_threads(2)
x = torch.randn(1, 2, 257, 16)
right = rg.attention(x, x, x, backend=rg.Native()).flatten().tolist()
context = multiprocessing.get_context("fork")
answer = context.SimpleQueue()
process = context.Process(target=child, args=(x, answer))
process.start()
found = answer.get()
process.join(60)
assert process.exitcode == 0 and found == right
"""


@pytest.mark.full
@pytest.mark.parametrize("computes", ["one thread", "a new thread"])
def test_a_fork_after_use(computes: str) -> None:
    """In a process of its own: other libraries that the tests have loaded have threads, which a fork breaks."""
    command = [sys.executable, "-c", FORK, computes]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_it_is_what_runs_on_a_cpu() -> None:
    x = torch.randn(1, 2, 40, 8)
    plan = str(rg.explain(x, x, x, mask=rg.Causal()))
    assert plan.startswith("backend") and "Native()" in plan.splitlines()[0] and "blocks of" in plan


def test_an_instruction_set_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_ISA", "sse9")
    x = torch.randn(1, 2, 40, 8)
    with pytest.raises(ValueError, match=r"REGARD_ISA=sse9: this processor and installation run .*base"):
        rg.attention(x, x, x, backend=rg.Native())


def test_without_kernels_the_rest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.backends.native.backend.runnable", lambda: ())
    x = torch.randn(1, 2, 40, 8)
    assert rg.explain(x, x, x).backend == rg.Tiled()
    with pytest.raises(rg.Unsupported, match="it was not built: "):
        rg.attention(x, x, x, backend=rg.Native())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Bias", "RelativeBias", "SoftCap", "Alibi", "Bilinear"])
def test_gradients(name: str, dtype: torch.dtype) -> None:
    at = FRAMES["blocks"]
    case = testing.draw(at, score=testing.scores(at)[name], mask=rg.Causal(), sink=True)
    case = replace(case, dropout=rg.Dropout(0.2, seed=3))
    mine, plain = (testing.answers(case, b, dtype) for b in (rg.Native(), rg.Reference()))
    truth = testing.answers(case.leaves(dtype), rg.Reference(), torch.float64)
    for key, right in truth.items():
        assert testing.error(mine[key], right) <= testing.tolerance(right, plain[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "mask", [rg.Everything(), rg.Causal(), rg.Window(90, 0), rg.Causal() & ~rg.Window(40, 0)], ids=str
)
def test_invariant_rows_depend_on_no_other(isa: str, dtype: torch.dtype, mask: rg.Mask) -> None:
    n, backend = 300, rg.Native(invariant=True)
    q, k, v = (torch.randn(3, h, n, 24).to(dtype) for h in (4, 2, 2))
    whole = rg.attention(q, k, v, mask=mask, backend=backend)
    for rows in (slice(299, 300), slice(7, 8), slice(100, 117), slice(3, 80)):
        at = rg.Positions(q=torch.arange(n)[rows], k=torch.arange(n))
        part = rg.attention(q[1:2, :, rows], k[1:2], v[1:2], mask=mask, positions=at, backend=backend)
        assert torch.equal(part, whole[1:2, :, rows])
    if (
        mask == rg.Everything() and dtype == torch.float32
    ):  # why the promise has a price: other calls sum in another order
        assert not torch.equal(rg.attention(q[:, :, :1], k, v), whole[:, :, :1])


@pytest.mark.parametrize("cap", [3e38, 1e32, 1e30, 1e-30, 1e-39])
def test_soft_caps_of_any_size(cap: float) -> None:
    """Those whose products or quotients in float32 would be infinite, or 0, run on another backend."""
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    for score in (
        rg.ScaledDot() >> rg.SoftCap(cap),
        rg.ScaledDot() >> rg.Alibi(torch.tensor([0.5, 0.25])) >> rg.SoftCap(cap),
    ):
        out = rg.attention(q, k, v, score=score)
        expected = rg.attention(q.double(), k.double(), v.double(), score=score, backend=rg.Reference())
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        said = rg.explain(q, k, v, score=score)
        assert (said.backend == rg.Native()) == (1e-30 <= cap <= 1e30)
        assert said.backend == rg.Native() or f"a soft cap of {cap:g}; it has those from 8e-31 to 1e+30" in str(said)
