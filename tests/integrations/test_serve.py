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
    *("serve", "--requests=3", "--shortest=2", "--longest=40", "--new=3"),
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
def test_both_give_the_same_answers(
    serve: Any, window: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [*SMALL, *window])
    serve.main()
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"regard: [\d.]+ s, [\d.]+ requests a second", lines[0])
    assert re.fullmatch(r"[\d.]+x; 3 of 3 answers equal", lines[-1])


def test_a_request_that_fails_ends_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve.model(2, 1, 1, None)
    served.set_attn_implementation("regard")

    def broken(*args: Any, **named: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr("regard.compat.transformers.continuous._read_layout", broken)
    with pytest.raises(SystemExit, match=r"2 of 2 requests failed: .*no memory"):
        serve.answers(served, [[5, 6], [7]], new=2, batch=16)
