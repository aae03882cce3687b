"""attention_forward: a call of attention as transformers' attention modules make it, on regard."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from regard.api import attention
from regard.call.hooks import AttentionCall, notify
from regard.compat.transformers.mask import LazyMask, ReducedMask
from regard.compat.transformers.models import READING_ALL_KEPT, FirstForward, eager_alone
from regard.compat.transformers.relative_bias import NoTable, RelativeTable, without_zeros
from regard.compat.transformers.sharded_mask import ShardedMask, running
from regard.core.dropout import Dropout
from regard.core.errors import Unsupported
from regard.core.int8_rows import Int8Rows
from regard.core.positions import Positions
from regard.core.shapes import count_of, listed
from regard.inspect.capture.padding import of_real_queries
from regard.masks.algebra import Everything, Mask
from regard.masks.convert import split
from regard.masks.dense import Dense
from regard.masks.positional import Causal
from regard.masks.ragged import Documents
from regard.scores.algebra import Score
from regard.scores.modifiers import Bias, SoftCap
from regard.scores.similarity import ScaledDot

# Keywords of a model's forward that arrive here and say nothing about the weights that is not in the mask already.
SILENT = frozenset(
    (
        *("cache_position", "deterministic", "grid_thw", "input_ids", "inputs_embeds", "labels", "layer_idx"),
        *("logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states"),
        *("output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "seq_idx"),
        *("shift_labels", "token_type_ids", "use_cache"),
    )
)
# What transformers passes beside the cache of continuous batching.
CONTINUOUS = frozenset(
    (
        *("block_table", "cu_seq_lens_k", "cu_seq_lens_q", "logits_indices", "logits_processor_args", "max_length_k"),
        *("max_length_q", "read_index", "write_index"),
    )
)
# whether this is transformers 5.23 or later, of which regard knows continuous batching and caches
RECENT = find_spec("transformers.generation.continuous_batching.cache_allocators") is not None
REFUSED = {
    "block_indices": 'the model chooses blocks of keys for each query; "eager" can do that',
    "cu_seq_lens_q": "packed sequences are read from position_ids: pass those, and no cu_seq_lens",
    "cu_seq_lens_k": "packed sequences are read from position_ids: pass those, and no cu_seq_lens",
    "sinks": 'these sinks differ from query to query, and its own are one logit a head; "eager" can do that',
    "head_mask": "weights are never scaled by head",
    "output_attentions": 'the weights are never built; regard.record(model) tells facts about them, "eager" has them',
}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LazyMask | ShardedMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: RelativeTable | NoTable | Tensor | None = None,
    indices: Tensor | None = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One call of attention, as transformers' attention modules make it: (out, None), out (batch, nq, heads, dv).

    query (batch, heads, nq, dk), key and value (batch, key heads, nk, ...), not repeated. Scores are scaled (by
    `scaling`; None = 1 / sqrt(dk)), capped (`softcap`), then `position_bias` (T5) is added: the table of relative
    positions if it is known, otherwise a tensor that broadcasts to (batch, heads, nq, nk). `s_aux` (heads,) are learned
    sinks. Of the visible keys, a query sees those in `indices` (batch, nq, n), which takes booleans of nq × nk.
    `dropout` is drawn from torch's generator.

    attention_mask  a lazy mask; or a tensor that broadcasts to (batch, heads, nq, nk): booleans, True = may attend, or
                    numbers that are added, of which -inf and the dtype's least number hide; or None: causal if
                    is_causal, or else the module's attribute of that name (unless its model was written for eager
                    attention alone), says so, or where there is neither the module is none of transformers'. A mask
                    that is passed includes sliding windows.

    cache           the PagedAttentionCache of continuous batching: query, key and value are then the new tokens of all
                    sequences, (1, heads, total, d), and `attention_mask` is not read

    A query that may see nothing (padding) gets 0. Raises Unsupported for arguments that would change the result and are
    not supported: `block_indices`, `cu_seq_lens_q` without `cache`, weights (`output_attentions`), unknown keywords.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(
    ...     vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...     attn_implementation="regard",
    ... )
    >>> LlamaModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
    torch.Size([1, 3, 8])
    """
    if not torch.compiler.is_compiling():
        FirstForward.reached += 1
    drop = Dropout(dropout) if dropout else None
    if cache is not None:
        _check_continuous(position_bias, indices, others)
        score = _score(scaling, softcap)
        return attend_pages(module, query, key, value, score, s_aux, drop, cache, others), None
    _refuse_unknown(others)
    forward = running()
    if forward is not None:
        forward.check_call(attention_mask, position_bias, indices)
    if isinstance(attention_mask, ShardedMask):
        score = _score(scaling, softcap)
        return attention_mask.attend(module, query, key, value, score, s_aux, drop).transpose(1, 2).contiguous(), None
    nq, nk = query.shape[-2], key.shape[-2]
    if nq == 1 < nk and _of_no_keys(attention_mask):
        attention_mask = None
    positions: Positions | None = None
    keys: slice | None = None
    bias, numbers = without_zeros(position_bias, module), None
    if isinstance(bias, RelativeTable) and not bias.stands_with(attention_mask, nq, nk):
        bias = bias.dense()
    if isinstance(attention_mask, LazyMask):
        attention_mask = attention_mask.for_queries(nq)
        # what is chosen is chosen among all keys
        mask, positions, keys = _of_lazy(attention_mask, nq, nk, indices is not None)
    elif attention_mask is not None:
        mask, numbers = _of_tensor(attention_mask, nq, nk)
    else:
        mask = _unmasked(module, nq, nk, is_causal, sliding_window)
    chosen = None if indices is None else _chosen(indices, nk)
    mask = mask if chosen is None else mask & chosen
    if isinstance(bias, RelativeTable) and positions is None:
        positions = bias.at(keys)
    score = _score(scaling, softcap, bias, numbers)
    notify(lambda: _attention_call(module, query, key, value, score, mask, positions, s_aux, attention_mask, chosen))
    if keys is not None:
        # rows of int8 stay rows of int8
        key, value = (t.sliced(keys) if type(t) is Int8Rows else t[:, :, keys] for t in (key, value))
        if isinstance(bias, Tensor) and bias.shape[-1] == nk:
            score = _score(scaling, softcap, bias[..., keys])
    out = attention(query, key, value, score=score, mask=mask, positions=positions, sink=s_aux, dropout=drop)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(others: dict[str, Any]) -> None:
    for name, given in others.items():
        if given is None or given is False or name in SILENT:
            continue
        why = REFUSED.get(name, "it does not know what that means for the weights; leave it out, or take another")
        raise Unsupported(f'attn_implementation="regard" cannot serve {name}=...: {why}.')


def _check_continuous(position_bias: object, indices: Tensor | None, others: dict[str, Any]) -> None:
    _refuse_unknown({name: x for name, x in others.items() if name not in CONTINUOUS})
    if not RECENT:
        raise Unsupported(
            f'attn_implementation="regard" does continuous batching with transformers 5.23 or later, this is '
            f"{version('transformers')}: update it, or use model.generate."
        )
    for name, given in (("position_bias", position_bias), ("indices", indices)):
        if given is not None:
            raise Unsupported(
                f'attn_implementation="regard" cannot serve {name}=... in continuous batching, where keys of many '
                "sequences lie in blocks: use model.generate."
            )


def _of_no_keys(mask: object) -> bool:
    """Whether it is for one token alone.

    transformers asks the first layer how many keys there are, which keeps none where it is a linear one.
    """
    return (
        type(mask) is LazyMask
        and mask.shape[-2:] == (1, 1)
        and isinstance(mask.pattern, (Causal, Everything))
        and (mask.padding is None or bool(mask.padding.all()))
    )


def _of_lazy(lazy: LazyMask, nq: int, nk: int, whole: bool) -> ReducedMask:
    if lazy.shape[-2:] != (nq, nk):
        raise Unsupported(
            f"the model's mask is for {listed(lazy.shape[-2:])} queries and keys, its attention has "
            f"{listed((nq, nk))}: a mask of another call."
        )
    return lazy.as_called(whole)


def _of_tensor(given: Tensor, nq: int, nk: int) -> tuple[Mask, Tensor | None]:
    """A mask that the user or the model made in full: what it lets through, and what it adds to that."""
    if given.shape == (nq, nk) and given.dtype.is_floating_point:  # RT-DETR's, in training
        given = given[None, None]
    if given.dim() != 4 or not (given.dtype == torch.bool or given.dtype.is_floating_point):
        raise Unsupported(
            f"attention_mask has shape {listed(given.shape)}, dtype {given.dtype}; expected (batch, heads, nq, nk), "
            "booleans (True = may attend) or floating point (added to the scores). To the model itself a padding mask "
            "is (batch, n), 1 = a real token."
        )
    if given.dtype == torch.bool:
        return Dense(given), None
    allowed, added = split(given, torch.finfo(given.dtype).min)
    return Everything() if allowed is None else Dense(allowed), added


def _unmasked(module: nn.Module, nq: int, nk: int, is_causal: bool | None, sliding_window: int | None) -> Mask:
    """As torch's attention is called by transformers: one query alone is the last one, and sees everything."""
    causal = _is_causal(module) if is_causal is None else is_causal
    if sliding_window is not None and nk > sliding_window and (causal or not _reads_all_kept(module)):
        raise Unsupported(
            f"a sliding window of {sliding_window} meets {count_of(nk, 'key')}, and the model gives no mask that has "
            "it. Call the whole model, or pass a mask (batch, heads, nq, nk)."
        )
    if not causal or nq == 1:
        return Everything()
    if nq != nk:
        raise Unsupported(
            f"{count_of(nq, 'query')} {'meets' if nq == 1 else 'meet'} {count_of(nk, 'key')} causally, and the model "
            "gives no mask that says where the queries stand. Pass is_causal=False if each query sees every key, or "
            "a mask (batch, heads, nq, nk)."
        )
    return Causal()


def _is_causal(module: nn.Module) -> bool:
    """What a module says. Those of transformers that say nothing see everything: it asks for no mask then.

    In eager attention no mask hides nothing: what modules say counts only where their model knows sdpa too.
    """
    of_transformers = type(module).__module__.startswith("transformers.models.")
    return bool(getattr(module, "is_causal", not of_transformers)) and not eager_alone(getattr(module, "config", None))


def _reads_all_kept(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "model_type", None) in READING_ALL_KEPT


def _chosen(indices: Tensor, nk: int) -> Mask:
    """The keys that are named (batch, nq, n); -1 names none."""
    named = torch.zeros(*indices.shape[:-1], nk + 1, dtype=torch.bool, device=indices.device)
    named.scatter_(-1, indices.long().where(indices >= 0, nk), True)
    return Dense(named[:, None, :, :nk])


def _score(
    scaling: float | None,
    softcap: float | None,
    bias: RelativeTable | Tensor | None = None,
    numbers: Tensor | None = None,
) -> Score:
    """bias: what the model computed; numbers: those of a mask, which may be the user's."""
    score: Score = ScaledDot(scaling)
    if softcap is not None:
        score = score >> SoftCap(softcap)
    if isinstance(bias, RelativeTable):
        score, bias = score >> bias.stage, None
    if bias is None:
        return score if numbers is None else score >> Bias(numbers)
    # one bias, which the native kernels take
    return score >> Bias.around(bias if numbers is None else bias + numbers)


def _attention_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    mask: Mask,
    positions: Positions | None,
    sink: Tensor | None,
    given: LazyMask | Tensor | None,
    chosen: Mask | None,
) -> AttentionCall:
    """The call as recordings see it: padded queries are left out, and the mask is that which transformers described."""
    if isinstance(given, LazyMask):
        mask = given.mask if chosen is None else given.mask & chosen
        positions, real = given.positions, given.real()
        # across sequences (a decoder that reads an encoder) the padding is the keys' alone
        own = given.causal or not (getattr(module, "is_decoder", False) or query.shape[-2] != key.shape[-2])
        if own and real is not None and not bool(real.all()):
            mask = mask & Documents((~real).long(), real.new_zeros(key.shape[-2], dtype=torch.int64))
        return AttentionCall(module, query, key, score=score, mask=mask, positions=positions, sink=sink, v=value)
    own = of_real_queries(module, mask, query.shape[-2], key.shape[-2])
    return AttentionCall(module, query, key, score, own, positions, sink, value, mask_if_cross=mask)


if RECENT:
    from regard.compat.transformers.continuous import attend as attend_pages
