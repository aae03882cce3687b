"""Continuous batching over pages of int8: the tokens of `generate` with an int8 cache, one request after another."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
pytest.importorskip(
    "transformers.generation.continuous_batching.cache_allocators", reason="needs transformers 5.23 or later"
)

from transformers import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from continuous_requests import MODELS, NEW, batching, each_forward, greedy, prompts
from needed import needs_kernels
from regard.call.hooks import observing
from regard.compat.transformers import NAME, BatchingConfig, GrowingCache
from regard.compat.transformers.page_rows import RowsAsGiven, RowsOfInt8, page_rows, width_of_int8
from regard.core.deferred import DeferredRows, written_out
from regard.core.int8_rows import Int8Rows, products, rounded

pytestmark = pytest.mark.usefixtures("few_objects")  # continuous batching collects garbage where it ends


def of_int8(**options: Any) -> BatchingConfig:
    return batching(BatchingConfig, dtype=torch.int8, **options)


def generated(model: Any, texts: list[list[int]], **options: Any) -> list[list[int]]:
    answers = model.generate_batch(texts, generation_config=greedy(), continuous_batching_config=of_int8(**options))
    assert [answer.error for answer in answers.values()] == [None] * len(texts)
    return [answer.generated_tokens for answer in answers.values()]


@cache
def one_by_one(name: str) -> list[list[int]]:
    """The answers to prompts(), each by a `generate` of its own."""
    model = MODELS[name].build(NAME)
    model.generation_config.eos_token_id = None
    found: list[list[int]] = []
    for text in prompts():
        ids = torch.tensor([text])
        plain = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        kept = GrowingCache(model.config, dtype=torch.int8)
        found.append(model.generate(ids, past_key_values=kept, **plain)[0, len(text) :].tolist())
    return found


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_several_orders(name: str) -> None:
    texts, model, expected = prompts(), MODELS[name].build(NAME), one_by_one(name)
    for seed in range(2):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        assert generated(model, [texts[n] for n in order]) == [expected[n] for n in order]


@pytest.mark.full
def test_several_answers_to_a_prompt() -> None:
    config = greedy(num_return_sequences=2, do_sample=True, top_k=1)
    model = MODELS["hybrid"].build(NAME)
    answers = model.generate_batch(prompts()[:3], generation_config=config, continuous_batching_config=of_int8())
    tokens = [answer.generated_tokens for answer in answers.values()]
    assert tokens[::2] == tokens[1::2] == one_by_one("hybrid")[:3]


def test_a_shared_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [[*prompts()[6][:40], 7, 7, n] for n in range(3, 9)]
    model, tokens = MODELS["grouped"].build(NAME), list[int]()
    expected = generated(model, texts, allow_block_sharing=False)

    @contextmanager
    def counting(data: dict[str, Any]) -> Any:
        tokens.append(data["input_ids"].shape[1])
        yield

    with each_forward(monkeypatch, counting):
        assert generated(model, texts, max_batch_tokens=48) == expected
    assert 0 < sum(tokens) - len(texts) * (NEW - 1) < sum(map(len, texts)) / 2


@needs_kernels
@pytest.mark.parametrize("name", ["grouped", "window", "hybrid"])
def test_int8_is_read_where_it_lies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for parts of prompts in a window, which are copied."""
    widened, now = list[int](), list[int]()
    own = Int8Rows.widened
    monkeypatch.setattr(Int8Rows, "widened", lambda self, dtype: (widened.append(now[-1]), own(self, dtype))[1])

    @contextmanager
    def longest(data: dict[str, Any]) -> Any:
        now.append(data["max_length_q"])
        yield

    with each_forward(monkeypatch, longest):
        generated(MODELS[name].build(NAME), prompts()[:4])
    assert 1 in now and 1 not in widened
    assert bool(widened) == (name != "grouped")


def test_observers_get_the_rounded_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    @contextmanager
    def watching(data: dict[str, Any]) -> Any:
        with observing(lambda call: seen.append(call.k)):
            yield

    with each_forward(monkeypatch, watching):
        generated(MODELS["grouped"].build(NAME), prompts()[:2])
    assert seen and not any(isinstance(keys, DeferredRows) for keys in seen)
    for keys in seen:
        torch.testing.assert_close(products(*rounded(keys), keys.dtype), keys)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[Any, int] = {}
    own = PagedAttentionCache.__init__

    def measured(self: Any, config: Any, continuous_batching_config: Any, **named: Any) -> None:
        own(self, config, continuous_batching_config, **named)
        tokens = self.num_blocks * continuous_batching_config.page_size * config.num_hidden_layers
        sizes[continuous_batching_config.dtype] = self.num_sectors * self.bytes_per_sector // tokens
        assert self.num_blocks >= continuous_batching_config.num_blocks

    monkeypatch.setattr(PagedAttentionCache, "__init__", measured)
    model = MODELS["grouped"].build(NAME)
    for dtype in (None, torch.int8):
        config = batching(BatchingConfig, dtype=dtype)
        model.generate_batch(prompts()[:1], generation_config=greedy(), continuous_batching_config=config)
    assert sizes == {None: 2 * 2 * 10 * 4, torch.int8: 2 * 2 * (12 + 4)}  # 2 key heads of 10 features


@pytest.mark.parametrize("d", [1, 7, 8, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_pages(d: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, d, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1, 2] = 0
    form = RowsOfInt8(d, dtype)
    rows = form.packed(x)
    assert rows.shape == (5, 3, width_of_int8(d)) and rows.dtype == torch.int8
    kept = form.unpacked(rows.contiguous())
    assert torch.equal(written_out(kept), products(*rounded(x), dtype))
    pages = rows.new_zeros(4, 2, 3, rows.shape[-1])
    pages.flatten(0, 1)[torch.tensor([6, 7, 2, 3, 0])] = rows  # pages 3, 1 and 0 of two tokens
    found = form.in_pages(pages, torch.tensor([[3, 1, 0]], dtype=torch.int32), 5)
    assert torch.equal(written_out(found)[0], written_out(kept))


def test_which_rows_pages_hold() -> None:
    x = torch.zeros(3, 5, 8, dtype=torch.bfloat16)
    assert page_rows(torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16), x) == RowsAsGiven()
    assert page_rows(torch.zeros(1, 2, 3, 12, dtype=torch.int8), x) == RowsOfInt8(8, torch.bfloat16)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"BatchingConfig\(dtype=torch.float8_e4m3fn\): expected None"):
        BatchingConfig(dtype=torch.float8_e4m3fn)
    model = MODELS["grouped"].build("sdpa")
    with pytest.raises(ValueError, match=r"runs on 'sdpa', which reads no pages of int8.*set_attn_implementation"):
        ContinuousBatchingManager(model, greedy(), of_int8())
    assert model.config._attn_implementation == "sdpa"
    answers = model.generate_batch(
        prompts()[:1], generation_config=greedy(), continuous_batching_config=batching(BatchingConfig)
    )
    assert [answer.error for answer in answers.values()] == [None]
