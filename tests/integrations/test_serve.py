"""examples/serve.py: what it prints, and that it stops where a request fails."""

from __future__ import annotations

import importlib
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators", reason="needs transformers 5.23 or later"
)

pytestmark = pytest.mark.usefixtures("few_objects")  # continuous batching collects garbage where it ends

SMALL = [
    *("serve", "--requests=5", "--shortest=2", "--longest=40", "--system=19", "--new=3", "--page=8", "--batch=32"),
    *("--heads=2", "--layers=2", "--repeats=1"),
]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example, which sets the number of threads."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    threads = torch.get_num_threads()
    yield importlib.import_module("serve")
    torch.set_num_threads(threads)


@pytest.mark.full
@pytest.mark.parametrize("window", [[], ["--window", "16"]], ids=["full", "window"])
@pytest.mark.parametrize("key_heads", ["1", "2"])
def test_every_way_gives_the_same_answers(
    serve: Any, window: list[str], key_heads: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [*SMALL, "--key-heads", key_heads, *window])
    serve.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == "requests answered by seconds a second of sdpa equal answers"
    ours = [("sdpa", "generate"), ("regard", "generate"), ("regard, int8 pages", "generate, int8 cache")]
    expected = [(*way, arrival) for arrival in ("together", "steady", "bursts") for way in ours]
    for row, (name, peer, arrival) in zip(rows, expected, strict=False):
        assert re.fullmatch(rf"{arrival} +{name} +[\d.]+ +[\d.]+ +[\d.]+x   5 of 5 as by {peer}", row), row
    for row, name in zip(rows[len(expected) :], ("generate", "generate, int8 cache"), strict=True):
        assert re.fullmatch(rf"one by one +{name} +[\d.]+ +[\d.]+", row), row


def test_the_logits_where_answers_differ(serve: Any) -> None:
    served = serve.model(2, 1, 1, None)
    text, answer = [5, 6, 7], [8, 9, 10]
    logits = served(torch.tensor([[5, 6, 7, 8]])).logits[0, -1].detach()
    expected = float((logits[9] - logits[20]).abs())
    assert serve.tie(served, text, answer, [8, 20, 30], None) == pytest.approx(expected)
    served.set_attn_implementation("regard")
    assert serve.tie(served, text, answer, [8, 20, 30], torch.int8) == pytest.approx(expected, rel=0.1)


def test_requests_come_by_forwards(serve: Any) -> None:
    """What a server finds before each forward, however late it was given the requests."""
    from transformers.generation.continuous_batching.utils import drain_queue

    for kind, expected in {
        "together": [[0, 1, 2, 3, 4], [], []],
        "steady": [[0], [], [1], [], [2], [], [3], [], [4], []],
        "bursts": [[0, 1, 2, 3, 4], []],
    }.items():
        come = serve.Arriving([serve.ARRIVALS[kind](n) for n in range(5)])
        for n in range(5):
            assert drain_queue(come) == []
            come.put(n)
        assert [drain_queue(come) for _ in expected] == expected
    assert [serve.ARRIVALS["bursts"](n) for n in (7, 8, 15, 16)] == [0, 16, 16, 32]


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
        serve.answered(served, serve.WAYS["regard"], [[5, 6], [7]], [0, 0], Namespace(new=2, batch=16, page=8))
