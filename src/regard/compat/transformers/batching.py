"""BatchingConfig: continuous batching whose pages hold int8."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, ContinuousBatchingManager
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.utils import find_head_dim

from regard.compat.transformers.cache import OF_MODEL
from regard.compat.transformers.models import NAME
from regard.compat.transformers.page_rows import width_of_int8
from regard.nn.cache.forms import form_of_any


@dataclass
class BatchingConfig(ContinuousBatchingConfig):
    """transformers' ContinuousBatchingConfig, and the dtype of the pages.

    dtype: None, the model's; or torch.int8, which rounds the key and the value of each token and head once, when the
    token comes, as regard.nn.KVCache says. A page then has d + 4 bytes (d rounded up to a multiple of 4) for each of
    its tokens, key heads, and keys and values. Raises ValueError for another.

    Pages of int8 need a model on regard: otherwise generate_batch raises ValueError. Without num_blocks, transformers
    reckons how many fit into memory as if hidden states were int8 too: pass num_blocks.

    >>> from regard.compat.transformers import BatchingConfig
    >>> config = BatchingConfig(dtype=torch.int8, num_blocks=16, max_batch_tokens=64, page_size=16)
    >>> config.dtype, config.page_size
    (torch.int8, 16)
    """

    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        form_of_any(self.dtype, "BatchingConfig", OF_MODEL)  # ValueError for another than None and int8


def install() -> None:
    """Has transformers' manager and its cache read BatchingConfig.dtype."""
    begin, allocate = ContinuousBatchingManager.__init__, PagedAttentionCache.__init__

    @functools.wraps(begin)
    def begin_checked(
        self: Any, model: Any, generation_config: Any, continuous_batching_config: Any, *others: Any, **named: Any
    ) -> None:
        name = model.config._attn_implementation
        if _of_int8(continuous_batching_config) and name.removeprefix("paged|") != NAME:
            raise ValueError(
                f"BatchingConfig(dtype=torch.int8): the model runs on {name!r}, which reads no pages of int8. Call "
                f'model.set_attn_implementation("{NAME}"), or leave dtype=None.'
            )
        begin(self, model, generation_config, continuous_batching_config, *others, **named)

    @functools.wraps(allocate)
    def allocate_rows(self: Any, config: Any, continuous_batching_config: Any, *others: Any, **named: Any) -> None:
        if _of_int8(continuous_batching_config):
            config = copy.copy(config)
            config.head_dim = width_of_int8(find_head_dim(config))
            named["dtype"] = torch.int8
        allocate(self, config, continuous_batching_config, *others, **named)

    ContinuousBatchingManager.__init__, PagedAttentionCache.__init__ = begin_checked, allocate_rows


def _of_int8(config: ContinuousBatchingConfig) -> bool:
    return isinstance(config, BatchingConfig) and config.dtype == torch.int8
