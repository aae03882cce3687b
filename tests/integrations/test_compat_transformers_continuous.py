"""Continuous batching on regard: the tokens of transformers' own paged attention, over pages that are read in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators", reason="needs transformers 5.23 or later"
)

from transformers.generation.configuration_utils import CompileConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from continuous_requests import HYBRID, LENGTHS, MODELS, NEW, batching, each_forward, greedy, prompts
from regard.call.hooks import AttentionCall, observing
from regard.compat.transformers import NAME, attention_forward
from regard.compat.transformers.continuous import GatheredPart, Layout
from regard.core.errors import Unsupported
from regard.core.paged import Paged

pytestmark = pytest.mark.usefixtures("few_objects")  # continuous batching collects garbage where it ends

# sdpa has neither caps nor sinks
PEERS = {name: "paged|eager" if name in ("soft cap", "sinks") else "sdpa" for name in MODELS}


def generated(model: Any, texts: list[list[int]], **options: Any) -> list[list[int]]:
    answers = model.generate_batch(texts, generation_config=greedy(), continuous_batching_config=batching(**options))
    assert [answer.error for answer in answers.values()] == [None] * len(texts)
    return [answer.generated_tokens for answer in answers.values()]


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_several_orders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = prompts()
    expected = generated(MODELS[name].build(PEERS[name]), texts)
    ours = MODELS[name].build(NAME)

    def write_out(self: Paged) -> Tensor:
        raise AssertionError("pages were copied")

    monkeypatch.setattr(Paged, "_write_out", write_out)
    for seed in range(3):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        assert generated(ours, [texts[n] for n in order]) == [expected[n] for n in order]


@pytest.mark.parametrize("name", ["grouped", "hybrid"])
def test_requests_that_come_while_others_are_answered(name: str) -> None:
    texts = prompts()
    expected = generated(MODELS[name].build("sdpa"), texts)
    manager = (
        MODELS[name]
        .build(NAME)
        .init_continuous_batching(generation_config=greedy(), continuous_batching_config=batching())
    )
    manager.start()
    try:
        found: dict[str, list[int]] = {}
        for n, text in enumerate(texts):  # the next one when one has been answered
            manager.add_request(text, request_id=str(n), max_new_tokens=NEW)
            if n % 3 == 2:
                answer = manager.get_result(timeout=60)
                found[answer.request_id] = answer.generated_tokens
        while len(found) < len(texts):
            answer = manager.get_result(timeout=60)
            found[answer.request_id] = answer.generated_tokens
    finally:
        manager.stop(block=True)
    assert [found[str(n)] for n in range(len(texts))] == expected


def test_a_shared_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    system = prompts()[6][:40]
    texts = [[*system, 7, 7, n] for n in range(3, 9)]
    expected = generated(MODELS["grouped"].build("sdpa"), texts, allow_block_sharing=False)
    tokens: list[int] = []

    @contextmanager
    def counting(data: dict[str, Any]) -> Iterator[None]:
        tokens.append(data["input_ids"].shape[1])
        yield

    with each_forward(monkeypatch, counting):
        assert generated(MODELS["grouped"].build(NAME), texts, max_batch_tokens=48) == expected
    answered = len(texts) * (NEW - 1)
    assert 0 < sum(tokens) - answered < sum(map(len, texts)) / 2


def test_several_answers_to_a_prompt() -> None:
    config = greedy(num_return_sequences=2, do_sample=True, top_k=1)
    model = MODELS["hybrid"].build(NAME)
    answers = model.generate_batch(prompts()[:3], generation_config=config, continuous_batching_config=batching())
    tokens = [answer.generated_tokens for answer in answers.values()]
    assert tokens[::2] == tokens[1::2] == generated(MODELS["hybrid"].build("sdpa"), prompts()[:3])


@pytest.mark.full
def test_graphs_of_fixed_sizes() -> None:
    texts = prompts()[:4]
    config = CompileConfig(backend="eager", fullgraph=False, dynamic=True, mode=None)
    ours = generated(MODELS["hybrid"].build(NAME), texts, varlen_compile_config=config, q_padding_interval_size=16)
    assert ours == generated(MODELS["hybrid"].build("sdpa"), texts)


@pytest.mark.parametrize("name", ["grouped", "hybrid"])
def test_observers_get_what_a_token_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[AttentionCall, Tensor]] = []

    @contextmanager
    def watching(data: dict[str, Any]) -> Iterator[None]:
        positions = data["position_ids"].flatten().clone()
        with observing(lambda call: seen.append((call, positions))):
            yield

    with each_forward(monkeypatch, watching):
        generated(MODELS[name].build(NAME), prompts()[:4])
    assert seen
    for call, positions in seen:
        layer: Any = call.layer
        visible = call.mask.on(call.q.shape[2], call.k.shape[2], batch=(1,)).dense().sum(-1).flatten()
        windowed = name == "hybrid" and HYBRID["layer_types"][layer.layer_idx] == "sliding_attention"
        most = HYBRID["sliding_window"] if windowed else max(LENGTHS) + NEW
        assert torch.equal(visible, (positions + 1).clamp(max=most))


@pytest.mark.parametrize("name", ["window", "hybrid"])
def test_one_new_token_each_copies_no_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    now: list[int] = []
    own = GatheredPart.copy
    monkeypatch.setattr(GatheredPart, "copy", lambda self, *rows: (copied.append(now[-1]), own(self, *rows))[1])

    @contextmanager
    def longest(data: dict[str, Any]) -> Iterator[None]:
        now.append(data["max_length_q"])
        yield

    with each_forward(monkeypatch, longest):
        generated(MODELS[name].build(NAME), prompts()[:4])
    assert 1 in now and copied and 1 not in copied


def test_one_new_token_each_reads_a_window_in_its_pages() -> None:
    """5 keys of a window of 5, a ring in pages of 2 rows: positions 3 to 7 lie in rows 3, 4, 0, 1, 2 of the ring."""
    ring = [8, 9, 4, 5, 0]  # rows of the cache: page 4, page 2, and the first row of page 0
    slots = torch.tensor([ring[p % 5] for p in range(3, 8)])
    layout = Layout(torch.tensor([1]), torch.tensor([5]), slots, torch.tensor([3]), page_size=2, window=5)
    assert layout.gathered is None and layout.pages is not None
    assert layout.pages.table.tolist() == [[4, 2, 0]]


def test_the_old_name_and_the_model_afterwards() -> None:
    model = MODELS["grouped"].build("sdpa")
    expected = generated(model, prompts())
    with pytest.warns(FutureWarning, match="paged"):
        model.set_attn_implementation(f"paged|{NAME}")
    assert generated(model, prompts(), auto_switch_to_flash=True) == expected
    assert model.config._attn_implementation == NAME
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        generated(model, prompts())


def test_what_is_refused() -> None:
    q = torch.zeros(1, 4, 2, 10)
    cache = PagedAttentionCache.__new__(PagedAttentionCache)
    module = torch.nn.Module()
    for name in ("position_bias", "indices"):
        with pytest.raises(Unsupported, match=rf"cannot serve {name}=.*model\.generate"):
            attention_forward(module, q, q, q, None, cache=cache, **{name: torch.zeros(1, 4, 2, 2)})
    with pytest.raises(Unsupported, match="max_blocks_per_request=0"):
        attention_forward(module, q, q, q, None, cache=cache, block_table=torch.zeros(1, 1, 1))
    with pytest.raises(Unsupported, match="output_attentions"):
        attention_forward(module, q, q, q, None, cache=cache, output_attentions=True)
    with pytest.raises(Unsupported, match="cu_seq_lens_q"):
        attention_forward(module, q, q, q, None, cu_seq_lens_q=torch.tensor([0, 2]))
