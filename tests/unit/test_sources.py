"""Sources: chunks, files, the thread that reads ahead, its errors and its end, progress."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from regard.sources import Arrays, Chunks, Part, Safetensors, Source
from selection import few

Drawn = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def drawn() -> Drawn:
    return torch.randn(2, 4, 3, 8), torch.randn(2, 2, 29, 8), torch.randn(2, 2, 29, 5)


def same(q: Tensor, source: Source, exact: Tensor, **given: object) -> None:
    """Values, and the gradient of q."""
    leaf = q.clone().requires_grad_()
    out = rg.attention_over(leaf, source, **given)
    torch.testing.assert_close(out.detach(), exact, rtol=2e-6, atol=2e-6)
    if not source.rereadable:
        return
    out.square().sum().backward()
    again = q.clone().requires_grad_()
    k, v = whole(source)
    rg.attention(again, k, v).square().sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad, rtol=1e-5, atol=1e-5)


def whole(source: Source) -> tuple[Tensor, Tensor]:
    read = [[torch.as_tensor(np.asarray(x)) for x in part.read()] for part in source.parts()]
    return torch.cat([k for k, _ in read], -2), torch.cat([v for _, v in read], -2)


def chunks(k: Tensor, v: Tensor, size: int = 10) -> list[tuple[Tensor, Tensor]]:
    return list(zip(k.split(size, -2), v.split(size, -2), strict=True))


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "regard-read-ahead"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()


def test_chunks(drawn: Drawn) -> None:
    q, k, v = drawn
    exact, parts = rg.attention(q, k, v), chunks(k, v)
    same(q, Chunks(parts), exact)
    same(q, Chunks(tuple(parts)), exact)
    same(q, Chunks(lambda: iter(parts)), exact)
    same(q, Chunks(dict(enumerate(parts)).values()), exact)
    torch.testing.assert_close(rg.attention_over(q, iter(parts)), exact)
    torch.testing.assert_close(rg.attention_over(q, (part for part in parts)), exact)


def test_a_part_that_is_none_is_no_end(drawn: Drawn) -> None:
    q, k, v, *_ = drawn
    with pytest.raises(TypeError, match="part 1 of Chunks is None"):
        rg.attention_over(q, iter([(k, v), None, (k, v)]))


def test_an_iterator_is_read_once(drawn: Drawn) -> None:
    q, k, v = drawn
    source = Chunks(iter(chunks(k, v)))
    rg.attention_over(q, source)
    with pytest.raises(ValueError, match=r"Chunks\(list_iterator\) has been read already.*Pass a list, or a function"):
        rg.attention_over(q, source)
    spent = iter(chunks(k, v))
    list(spent)
    with pytest.raises(ValueError, match=r"gave no part; .*An iterator that was read before gives nothing"):
        rg.attention_over(q, spent)


def test_a_backward_needs_a_second_reading(drawn: Drawn) -> None:
    q, k, v = drawn
    q.requires_grad_()
    parts = iter(chunks(k, v))
    with pytest.raises(ValueError, match=r"is an iterator: the backward\s+would read it a second time. Pass a list"):
        rg.attention_over(q, parts)
    assert len(list(parts)) == 3  # nothing was read
    with torch.no_grad():
        rg.attention_over(q, iter(chunks(k, v)))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("of_q", [False, True])
def test_a_gradient_that_could_not_arrive_is_refused(drawn: Drawn, ahead: int, of_q: bool) -> None:
    q, k, v = drawn
    w = torch.ones((), requires_grad=True)
    q = q.requires_grad_(of_q)
    with pytest.raises(ValueError, match=r"k or v of a part requires a gradient, .* Pass a list of parts"):
        rg.attention_over(q, lambda: ((w * a, b) for a, b in chunks(k, v)), ahead=ahead)
    with torch.no_grad():
        rg.attention_over(q, lambda: ((w * a, b) for a, b in chunks(k, v)), ahead=ahead)


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        (3, TypeError, "Chunks.parts is an int; expected a list or an iterator"),
        ([torch.zeros(2, 3)], TypeError, "part 0 of Chunks is a Tensor of float32; expected"),
        ([(torch.zeros(2, 3),)], TypeError, "part 0 of Chunks is 1 thing"),
        ([(torch.zeros(2, 3), 5)], TypeError, "v of part 0 of Chunks is an int"),
        ([(torch.zeros(2), torch.zeros(2))], TypeError, r"k of part 0 of Chunks has shape \(2,\)"),
        ([(torch.zeros(2, 3),) * 2 + (torch.arange(3),)], ValueError, r"2 keys and positions \(3,\)"),
        ([(torch.zeros(2, 3),) * 2, (*(torch.zeros(2, 3),) * 2, torch.arange(2))], ValueError, "part 1 has positions"),
        ([(torch.zeros(2, 3), torch.zeros(2, 3)), (torch.zeros(2, 3), torch.zeros(2, 4))], ValueError, "keys 2 to 3"),
        ([], ValueError, "gave no part"),
    ],
)
def test_what_is_no_part_is_refused(parts: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        rg.attention_over(torch.zeros(1, 3), parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "error", "said"),
    [
        ((), ValueError, r"Own\(\) gave no part; expected one at least"),
        (
            (Part(0, 2, torch.arange(2), lambda: (torch.zeros(2, 3),) * 2), None),
            TypeError,
            r"part 1 .* is None",
        ),
        (((torch.zeros(2, 3), torch.zeros(2, 3)),), TypeError, "is a tuple; expected a regard.sources.Part"),
    ],
)
def test_what_a_source_of_ones_own_must_give(parts: tuple[Any, ...], error: type[Exception], said: str) -> None:
    class Own(rg.sources.Source):
        def parts(self) -> Iterator[Any]:
            return iter(parts)

        def __repr__(self) -> str:
            return "Own()"

    for call in (rg.attention_over, rg.explain_over):
        with pytest.raises(error, match=said):
            call(torch.zeros(1, 3), Own())


@pytest.mark.parametrize("size", [None, 1, 7, 29, 100])
def test_arrays(drawn: Drawn, size: int | None, tmp_path: Path) -> None:
    q, k, v = drawn
    exact = rg.attention(q, k, v)
    for name, x in (("k", k), ("v", v)):
        np.save(tmp_path / f"{name}.npy", x.numpy())
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "kv"]
    for a, b in ((k, v), (k.numpy(), v.numpy()), mapped, (tmp_path / "k.npy", str(tmp_path / "v.npy")), (k, mapped[1])):
        same(q, Arrays(a, b, size=size), exact)
        out = rg.attention_over(q.numpy(), Arrays(a, b, size=size))
        assert isinstance(out, np.ndarray)
        np.testing.assert_allclose(out, exact, rtol=2e-6, atol=2e-6)


def test_arrays_of_tensors_have_gradients(drawn: Drawn) -> None:
    q, k, v = (t.requires_grad_() for t in drawn)
    given = torch.randn(2, 4, 3, 5)
    got = torch.autograd.grad(rg.attention_over(q, Arrays(k, v, size=6)), (q, k, v), given)
    exact = torch.autograd.grad(rg.attention(q, k, v), (q, k, v), given)
    torch.testing.assert_close(got, exact)


def test_changes_of_a_private_mapping_stay(drawn: Drawn, tmp_path: Path) -> None:
    """Pages of a copy-on-write mapping hold what no file has: they are not given back."""
    q, k, v = drawn
    np.save(tmp_path / "k.npy", torch.zeros_like(k).numpy())
    private = np.load(tmp_path / "k.npy", mmap_mode="c")
    private[:] = k.numpy()
    torch.testing.assert_close(rg.attention_over(q, Arrays(private, v.numpy(), size=7)), rg.attention(q, k, v))
    np.testing.assert_array_equal(private, k.numpy())
    shared = np.load(tmp_path / "k.npy", mmap_mode="r+")
    shared[:] = k.numpy()
    torch.testing.assert_close(rg.attention_over(q, Arrays(shared, v.numpy(), size=7)), rg.attention(q, k, v))
    np.testing.assert_array_equal(shared, k.numpy())


def test_mapped_arrays_as_chunks(drawn: Drawn, tmp_path: Path) -> None:
    """A cache on the disk and the tokens since then."""
    q, k, v = drawn
    old = []
    for name, x in (("k", k), ("v", v)):
        np.save(tmp_path / f"{name}.npy", x[..., :20, :].numpy())
        old.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    same(q, Chunks([tuple(old), (k[..., 20:, :], v[..., 20:, :])]), rg.attention(q, k, v))


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(rg.ShapeError, match=r"Arrays.k has shape \(3, 4\), Arrays.v \(2, 4\)"):
        Arrays(np.zeros((3, 4)), np.zeros((2, 4)))
    with pytest.raises(TypeError, match=r"Arrays.k is an int; expected an array, a tensor or a path"):
        Arrays(3, np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"Arrays\(size=0\): expected 1 key a part or more"):
        Arrays(np.zeros((2, 4)), np.zeros((2, 4)), size=0)
    with pytest.raises(FileNotFoundError, match=r"^there is no file .*nowhere\.npy; Arrays reads"):
        Arrays(tmp_path / "nowhere.npy", np.zeros((2, 4)))


def saved(folder: Path, k: Tensor, v: Tensor) -> Path:
    torch_files = pytest.importorskip("safetensors.torch", reason="needs safetensors: pip install 'regard[hf]'")
    whole = {"k": k, "v": v, "k.0": k[..., :11, :], "k.1": k[..., 11:, :], "v.0": v[..., :11, :], "v.1": v[..., 11:, :]}
    torch_files.save_file({name: t.contiguous() for name, t in whole.items()}, folder / "kv.safetensors")
    return folder / "kv.safetensors"


@pytest.mark.parametrize("size", [None, 1, 7, 29, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors(drawn: Drawn, size: int | None, dtype: torch.dtype, tmp_path: Path) -> None:
    q, k, v = (t.to(dtype) for t in drawn)
    file, exact = saved(tmp_path, k, v), rg.attention(q, k, v)
    for source in (Safetensors(file, size=size), Safetensors(str(file), ["k.0", "k.1"], ["v.0", "v.1"], size=size)):
        assert source.keys == 29
        if dtype == torch.float32:
            same(q, source, exact)
        else:
            torch.testing.assert_close(rg.attention_over(q, source), exact)
        at = torch.tensor([3, 15, 28])
        causal = rg.attention(q, k, v, mask=rg.Causal(), positions=rg.Positions(at, torch.arange(29)))
        torch.testing.assert_close(rg.attention_over(q, source, mask=rg.Causal(), positions=at), causal)


def test_safetensors_that_do_not_fit(drawn: Drawn, tmp_path: Path) -> None:
    file = saved(tmp_path, *drawn[1:])
    with pytest.raises(KeyError, match=r"has no tensor 'keys'; it has 'k', 'k.0'"):
        Safetensors(file, "keys", "v")
    with pytest.raises(ValueError, match="names 2 tensors of keys and 1 of values"):
        Safetensors(file, ["k.0", "k.1"], "v")
    with pytest.raises(rg.ShapeError, match=r"'k.0' has shape \(2, 2, 11, 8\), 'v.1' \(2, 2, 18, 5\)"):
        Safetensors(file, "k.0", "v.1")
    with pytest.raises(FileNotFoundError, match=r"^there is no file .*nowhere\.safetensors; Safetensors reads"):
        Safetensors(tmp_path / "nowhere.safetensors")


def open_files(folder: Path) -> list[str]:
    """What this process has opened or mapped of a folder."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("needs /proc: which files are open is seen there")
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)]
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return [name for name in (*descriptors, *lines) if str(folder) in name]


def _exists(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


@pytest.mark.parametrize("how", few(["whole", "error", "error without a thread"], "whole"))
def test_files_are_closed(drawn: Drawn, how: str, tmp_path: Path) -> None:
    q, k, v = drawn
    file = saved(tmp_path, k, v)
    for name, x in (("k", k), ("v", v)):
        np.save(tmp_path / f"{name}.npy", x.numpy())

    def stop(done: int, total: int | None) -> None:
        assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")  # files are read, not mapped
        raise KeyError("stop")

    for source in (Arrays(tmp_path / "k.npy", tmp_path / "v.npy", size=4), Safetensors(file, size=4)):
        if how == "whole":
            rg.attention_over(q, source)
        else:
            with pytest.raises(KeyError, match="stop"):
                rg.attention_over(q, source, progress=stop, ahead=2 if how == "error" else 0)
        gc.collect()
        assert not open_files(tmp_path)


class Listed(Source):
    """Its parts are no generator."""

    keys, first_position = 8, 0

    def parts(self) -> Iterator[Part]:
        return iter([Part(n, 4, torch.arange(n, n + 4), lambda: (torch.ones(4, 8),) * 2) for n in (0, 4)])


def test_a_source_of_ones_own() -> None:
    out = rg.attention_over(torch.ones(8, 8), Listed(), mask=rg.Causal())
    torch.testing.assert_close(out, torch.ones(8, 8))


class Broken(Source):
    """Its third part cannot be read."""

    keys, first_position = 20, 0

    def __init__(self) -> None:
        self.read, self.closed = 0, 0

    def parts(self) -> Iterator[Part]:
        try:
            for m in range(5):
                yield Part(4 * m, 4, torch.arange(4 * m, 4 * m + 4), self.load)
        finally:
            self.closed += 1

    def load(self) -> tuple[Tensor, Tensor]:
        self.read += 1
        if self.read == 3:
            raise OSError("the disk is gone")
        return torch.zeros(4, 8), torch.zeros(4, 8)

    def __repr__(self) -> str:
        return "Broken()"


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_an_error_of_the_reader_arrives_with_its_cause(ahead: int) -> None:
    source = Broken()
    with pytest.raises(RuntimeError, match=r"keys 8 to 11 of the source Broken\(\).*OSError: the disk is gone") as seen:
        rg.attention_over(torch.zeros(2, 8), source, ahead=ahead)
    assert isinstance(seen.value.__cause__, OSError)
    assert (source.read, source.closed) == (3, 1)


def test_an_error_of_an_iterator_arrives_with_its_cause() -> None:
    def give() -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.zeros(4, 8), torch.zeros(4, 8)
        raise KeyError("nothing more")

    with pytest.raises(RuntimeError, match=r"part 1 of the source Chunks\(.*\) could not be read: KeyError") as seen:
        rg.attention_over(torch.zeros(2, 8), give)
    assert isinstance(seen.value.__cause__, KeyError)


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_a_function_made_is_closed(ahead: int) -> None:
    ended = []

    def give() -> Iterator[tuple[Tensor, Tensor]]:
        try:
            for n in range(9):
                yield torch.zeros(4, 8 if n < 3 else 5), torch.zeros(4, 8)
        finally:
            ended.append(True)

    made = give()  # which lives as long as this name does
    with pytest.raises(rg.ShapeError, match="width"):
        rg.attention_over(torch.zeros(2, 8), lambda: made, ahead=ahead)
    assert ended == [True]


@pytest.mark.parametrize("ahead", few([1, 2, 3], 2))
def test_no_more_parts_are_held_than_said(ahead: int) -> None:
    """`ahead` that are read or being read, and the one in use."""
    alive: list[int] = []
    most = 0
    lock = threading.Lock()

    class Held:
        def __init__(self) -> None:
            with lock:
                alive.append(1)

        def __del__(self) -> None:
            with lock:
                alive.pop()

    def give() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        nonlocal most
        for _ in range(20):
            k = np.zeros((4, 8), np.float32).view(Counted)
            k.held = Held()
            most = max(most, len(alive))
            yield k, np.zeros((4, 8), np.float32)
            del k

    class Counted(np.ndarray):
        held: Held

    def slow(done: int, total: int | None) -> None:
        time.sleep(0.002)

    rg.attention_over(torch.zeros(2, 8), give, ahead=ahead, progress=slow)
    gc.collect()
    assert most <= ahead + 1 + 1  # an iterator holds a part before it is taken
    assert not alive


INTERRUPTED = """
import os, signal, sys, threading, time, torch, regard as rg

signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs tests in the background may have it ignored

def give():
    n = 0
    while True:
        n += 1
        if n == 5:
            print("reading", flush=True)
        time.sleep(0.01)
        yield torch.zeros(4, 8), torch.zeros(4, 8)

try:
    rg.attention_over(torch.zeros(2, 8), give())
except KeyboardInterrupt:
    left = [t for t in threading.enumerate() if t is not threading.main_thread()]
    out = rg.attention_over(torch.zeros(2, 8), [(torch.zeros(4, 8), torch.ones(4, 8))])
    print("interrupted", left, float(out.mean()), flush=True)
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_control_c_ends_it() -> None:
    done = subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None and done.stdout.readline() == "reading\n"
    done.send_signal(signal.SIGINT)
    try:
        assert done.communicate(timeout=60)[0] == "interrupted [] 1.0\n"
    finally:
        done.kill()
    assert done.returncode == 0


def test_progress_tells_keys(drawn: Drawn) -> None:
    q, k, v = drawn
    told: list[tuple[int, int | None]] = []
    rg.attention_over(q, chunks(k, v), progress=lambda done, total: told.append((done, total)))
    assert told == [(10, 29), (20, 29), (29, 29), (29, 29)]
    told.clear()
    rg.attention_over(q, iter(chunks(k, v)), progress=lambda done, total: told.append((done, total)))
    assert told == [(10, None), (20, None), (29, None)]


@pytest.mark.parametrize("package", ["tqdm", "rich"])
@pytest.mark.parametrize("as_iterator", [False, True])
def test_bars(drawn: Drawn, package: str, as_iterator: bool, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(package)
    q, k, v = drawn
    parts = chunks(k, v)
    rg.attention_over(q, iter(parts) if as_iterator else parts, progress=package)  # type: ignore[arg-type]
    assert ("29.0" if package == "tqdm" else "keys") in "".join(capfd.readouterr())
    rg.attention_over(q, parts)
    assert "".join(capfd.readouterr()) == ""


def test_bars_that_are_not_there(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"progress='tqdm' needs tqdm: pip install 'regard\[progress\]'"):
        rg.attention_over(q, chunks(k, v), progress="tqdm")
    with pytest.raises(ValueError, match="progress is 'bar'; expected 'tqdm', 'rich'"):
        rg.attention_over(q, chunks(k, v), progress="bar")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ahead is -1; expected a number of parts"):
        rg.attention_over(q, chunks(k, v), ahead=-1)


MEASURE = """
import json, sys
import numpy as np, torch, regard as rg

kind, folder, n = sys.argv[1], sys.argv[2], int(sys.argv[3])

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def source(size):
    if kind == "safetensors":
        return rg.sources.Safetensors(f"{folder}/kv.safetensors", size=size)
    if kind == "iterator":
        return lambda: ((torch.zeros(1, 2, size, 64),) * 2 for _ in range(0, n, size))
    k, v = (f"{folder}/{name}.npy" for name in "kv")
    return rg.sources.Arrays(k, v, size=size) if kind == "paths" else rg.sources.Arrays(
        np.load(k, mmap_mode="r"), np.load(v, mmap_mode="r"), size=size
    )

q = torch.zeros(1, 4, 1, 64, requires_grad=True)
size = 4096  # 4 MB, with the values
few = [(torch.zeros(1, 2, size, 64),) * 2] * 2
rg.attention_over(q, few).sum().backward()  # what loads once is no growth
if kind == "safetensors":
    import safetensors
before = peak()
rg.attention_over(q, source(size)).sum().backward()
print(json.dumps(peak() - before))
"""

KEYS = 200_000  # of 64 features and 2 heads in float32, with as many values: 205 MB


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of keys and values, sparse: zeros that no disk holds."""
    folder = tmp_path_factory.mktemp("large")
    shape, half = (1, 2, KEYS, 64), 2 * KEYS * 64 * 4
    for name in "kv":
        np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float32, shape).flush()
    at = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": (n * half, (n + 1) * half)}
        for n, name in enumerate("kv")
    }
    header = json.dumps(at).encode()
    header += b" " * (-len(header) % 8)
    with open(folder / "kv.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * half)
    return folder


def growth(kind: str, folder: Path, code: str = MEASURE) -> int:
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc: the peak of one process is read there")
    given = [sys.executable, "-c", code, kind, str(folder), str(KEYS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if kind == "iterator":
        # its parts are made with malloc, which keeps blocks of this size unless it maps each of them
        environment["MALLOC_MMAP_THRESHOLD_"] = "131072"
    done = subprocess.run(given, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["paths", "safetensors", "mapped", "iterator"])
def test_memory_is_flat(kind: str, large: Path) -> None:
    """205 MB forward and backward, in the memory of a few parts of 4 MB."""
    assert growth(kind, large) < 40e6


@pytest.mark.full
def test_the_measure_sees_what_is_held(large: Path) -> None:
    held = MEASURE.replace("source(size))", "list(source(size)()))").replace("torch.zeros(1, 2", "torch.ones(1, 2")
    assert growth("iterator", large, held) > 80e6
