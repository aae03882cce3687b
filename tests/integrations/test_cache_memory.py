"""examples/cache_memory.py: the caches that it measures answer alike, and a process says what it grew by."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

SMALL = ["cache_memory", "--tokens=40", "--new=3", "--layers=1", "--key-heads=2"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    threads = torch.get_num_threads()
    yield importlib.import_module("cache_memory")
    torch.set_num_threads(threads)


@pytest.mark.full
def test_every_cache_gives_the_same_tokens(example: Any) -> None:
    prompt = torch.randint(1, 1024, (2, 9))
    ask = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    tokens = {}
    for name, (implementation, make) in example.CACHES.items():
        decoder = example.model(implementation, 2, 2, torch.float32)
        tokens[name] = decoder.generate(prompt, **ask, **make(decoder.config, 2, 13))
    exact = {name: found for name, found in tokens.items() if "int8" not in name}
    assert all(torch.equal(found, tokens["sdpa, DynamicCache"]) for found in exact.values())
    rounded = [found for name, found in tokens.items() if "int8" in name]
    assert len(rounded) == 3 and all(torch.equal(found, rounded[0]) for found in rounded)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_process_says_what_it_grew_by(
    example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*SMALL, "--cache", "PagedCache, int8"])
    example.main()
    assert int(capsys.readouterr().out) >= 0


def test_all_are_listed(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", SMALL)
    monkeypatch.setattr(example, "measured", lambda name, environment: environment.get("MALLOC_MMAP_THRESHOLD_", "-"))
    example.main()
    heads, _, *rows = capsys.readouterr().out.splitlines()
    assert heads == "keys and values: 0 MB, as int8 0 MB"
    assert [row.split() for row in rows] == [[*name.split(), "-", "65536"] for name in example.CACHES]
