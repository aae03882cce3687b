"""examples/serve.py: what it prints, and that it stops where a request fails."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators", reason="needs transformers 5.23 or later"
)

SMALL = [
    *("serve", "--requests=3", "--shortest=2", "--longest=40", "--system=19", "--new=3", "--page=8", "--batch=32"),
    *("--heads=2", "--key-heads=1", "--layers=2", "--repeats=1"),
]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, which sets the number of threads."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    threads = torch.get_num_threads()
    yield importlib.import_module("serve")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [[], ["--window", "16"]], ids=["full", "window"])
def test_every_way_gives_the_same_answers(
    serve: Any, window: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [*SMALL, *window])
    serve.main()
    sdpa, ours, int8, loop = capsys.readouterr().out.splitlines()
    speed = r"[\d.]+ s, [\d.]+ requests a second"
    assert re.fullmatch(rf"sdpa: {speed}", sdpa)
    assert re.fullmatch(rf"regard: {speed}, [\d.]+x; 3 of 3 answers as by sdpa", ours)
    assert re.fullmatch(rf"regard, int8 pages: {speed}, [\d.]+x; 3 of 3 answers as by {serve.PEER}", int8)
    assert re.fullmatch(rf"{serve.PEER}: {speed}", loop)


def test_prompts_begin_alike(serve: Any) -> None:
    texts = serve.prompts(4, 2, 9, system=5)
    assert len({tuple(text[:5]) for text in texts}) == 1 and len({tuple(text) for text in texts}) == 4
    assert all(7 <= len(text) <= 14 for text in texts)


def test_a_request_that_fails_ends_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve.model(2, 1, 1, None)
    served.set_attn_implementation("regard")

    def broken(*args: Any, **named: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr("regard.compat.transformers.continuous._read_layout", broken)
    with pytest.raises(SystemExit, match=r"2 of 2 requests failed: .*no memory"):
        serve.answered(served, serve.WAYS["regard"], [[5, 6], [7]], new=2, batch=16, page=8)
