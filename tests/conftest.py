"""For every test: memory that nobody wrote is NaN, seeds are fixed, the global state comes back."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

# Before torch and matplotlib are loaded: cuBLAS is deterministic with a fixed workspace only, and pictures
# need no screen.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("MPLBACKEND", "Agg")
# Processes of pytest-xdist share the cores: each has one thread, but for tests that ask for more, and none that spins
# while it waits would hold the core that another needs.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import numpy as np
import pytest
import torch

import selection
from regard.backends.native.ffi import runnable
from seeding import seed_torch

SEED = 20170612  # "Attention Is All You Need" came out on this day


def _no_test_forks() -> None:
    warnings.warn(
        "a test forks this process, whose threads (of torch, of JAX) the child does not "
        "have; spawn the child, or fork in a process that the test starts",
        RuntimeWarning,
        stacklevel=3,
    )


# Raised and then told as an error of the test: warnings are errors, and what a hook raises pytest reports.
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(before=_no_test_forks)


def keep_freed_memory() -> None:
    """What tests free stays with the process: large tensors from the system took 16 of 49 s of test_programs.py."""
    if sys.platform != "linux":
        return
    libc, mmap_threshold, trim_threshold = ctypes.CDLL(None), -3, -1
    if hasattr(libc, "mallopt"):  # of glibc
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 30)


keep_freed_memory()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full",
        action="store_true",
        help="run every test, with every two values of its parameters on the best instruction set and every backend",
    )
    parser.addoption(
        "--share", metavar="K/N", help="with --full: of what it has beyond a plain run, one of N parts, K from 0 on"
    )
    parser.addoption("--every", action="store_true", help="run every test, with every combination of its parameters")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")


MOST_PROCESSES = 8  # each takes up to 2 GB


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """A run that names no file takes each core, where pytest-xdist is installed; not with -n, -s or a debugger."""
    option = config.option
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    watched = option.usepdb or option.trace or option.capture == "no"
    told = getattr(option, "numprocesses", 0) is not None or option.dist != "no"
    if named or watched or told or hasattr(config, "workerinput"):
        return
    # pytest-xdist's own "auto" counts two threads of a core as one where psutil is installed
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1:
        option.numprocesses, option.dist = min(cores, option.maxprocesses or MOST_PROCESSES), "worksteal"


LEFT_OUT = pytest.StashKey[Sequence[object]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test runs with few combinations of its parameters; more with --full, all with --every (selection.py).

    Which ones are left out depends on no order and no hash; a test that is named by its whole id always runs.
    No test may need another one before it: `pytest --shuffle 7` shows it, and one file alone.
    """
    if not config.getoption("--every"):
        kept = selection.full(items) if config.getoption("--full") else selection.plain(items)
        if (share := config.getoption("--share")) is not None:
            kept = selection.shared(kept, selection.plain(items), *map(int, share.split("/")))
        config.stash[LEFT_OUT] = list(set(items) - set(kept))
        items[:] = kept
    items[:] = selection.by_case(items)
    seed = config.getoption("--shuffle")
    if seed is not None:
        draw = random.Random(seed)
        place = {path: draw.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: (place[item.path], draw.random()))


def pytest_collection() -> None:
    """Some 60,000 tests are made, which stay: a quarter of the time went into looking through them again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not look through it each time."""
    gc.enable()
    gc.collect()
    gc.freeze()


class TorchRandom:
    """torch's generator as hypothesis wants it: seeded anew for every example, so that a failure repeats."""

    def seed(self, a: int = SEED) -> None:
        seed_torch(a)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


# hypothesis holds this by a weak reference only.
TORCH_RANDOM = TorchRandom()
hypothesis.register_random(TORCH_RANDOM)


def pytest_configure(config: pytest.Config) -> None:
    """hypothesis draws few examples of each law without --full; in CI it draws the same ones each time."""
    examples = 100 if config.getoption("--full") or config.getoption("--every") else 20
    same = {"derandomize": True, "database": None} if os.environ.get("CI") else {}
    hypothesis.settings.register_profile("regard", deadline=None, print_blob=True, max_examples=examples, **same)
    hypothesis.settings.load_profile("regard")


@pytest.fixture(scope="session", autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    """torch.empty and its kin hold NaN (the largest integer, True), so that reading them shows.

    torch fills memory only where it also keeps to deterministic algorithms; on a CPU they are the usual ones.
    """
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_deterministic_debug_mode("error")  # what use_deterministic_algorithms does, without torch's compiler
    x = torch.zeros(1000)
    assert all(made.isnan().all() for made in (torch.empty(1000), torch.empty_like(x), x.new_empty(1000)))
    yield
    torch.set_deterministic_debug_mode("default")


def seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    seed_torch(SEED)


def pytest_collectstart() -> None:
    """What a file draws as it is imported is the same in every process, whichever files were collected before it."""
    seed()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Every test starts from the same random numbers, whichever tests ran before it."""
    seed()


@pytest.fixture(scope="module")
def few_objects() -> None:
    """The garbage collector looks at what is made from now on: for files that call it again and again.

    In a process that has run thousands of tests it takes half a second otherwise.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=runnable())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set that this machine runs, as the one that the native kernels take."""
    monkeypatch.setenv("REGARD_ISA", request.param)
    return request.param


def global_state() -> dict[str, object]:
    """What a library must leave alone."""
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        # Python divides in the same thread, so it sees whether denormals are flushed to zero.
        "denormals kept": sys.float_info.min / 2 > 0,
        "instruction set": os.environ.get("REGARD_ISA"),
    }


def restore(state: dict[str, object]) -> None:
    torch.set_num_threads(state["threads"])
    torch.set_default_dtype(state["default dtype"])
    torch.set_default_device(state["default device"])
    torch.set_grad_enabled(state["grad mode"])
    torch.use_deterministic_algorithms(state["deterministic algorithms"])
    torch.set_float32_matmul_precision(state["float32 matmul precision"])
    torch.set_flush_denormal(not state["denormals kept"])
    os.environ.pop("REGARD_ISA", None)
    if state["instruction set"] is not None:
        os.environ["REGARD_ISA"] = state["instruction set"]


@pytest.fixture(autouse=True)
def global_state_is_left_alone(unwritten_memory_is_nan: None) -> Iterator[None]:
    """A test that changes the global state and leaves it changed fails; the next one starts clean."""
    before = global_state()
    yield
    after = global_state()
    changed = [f"{name}: {was} became {after[name]}" for name, was in before.items() if was != after[name]]
    if changed:
        restore(before)
        pytest.fail("the global state was left changed: " + "; ".join(changed))


# How a reason begins where a test is skipped for want of something that could be installed.
MISSING = "needs "


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says how many tests were left out of a plain run (in the last line), or skipped for want of something."""
    if left_out := config.stash.get(LEFT_OUT, []):
        more = "--every" if config.getoption("--full") else "--full"
        terminalreporter.stats[f"more with {more}"] = left_out
    if found := _missing(terminalreporter):
        terminalreporter.section("skipped for want of something")
        for reason, count in sorted(Counter(found).items()):
            terminalreporter.line(f"{count:5} tests: {reason}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process of pytest-xdist collects the same tests, and says how many it left out, unless it died."""
    if (said := getattr(node, "workeroutput", {}).get("left out")) is not None:
        node.config.stash[LEFT_OUT] = [SimpleNamespace()] * said


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where nothing may be missing (REGARD_NOTHING_MISSING), such a skip fails the run."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = len(session.config.stash.get(LEFT_OUT, ()))
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    # A process of pytest-xdist has no reporter: the one that started it counts.
    if os.environ.get("REGARD_NOTHING_MISSING") and reporter and _missing(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _missing(reporter: pytest.TerminalReporter) -> list[str]:
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", ()) if isinstance(report.longrepr, tuple)]
    reasons = [reason.removeprefix("Skipped: ") for reason in reasons]
    return [reason for reason in reasons if reason.startswith(MISSING)]
