"""T5's relative bias in transformers' models: its table and buckets, in the place of a tensor (1, heads, nq, nk).

T5Attention, and the modules that transformers copies from it, make that tensor in `compute_bias`, in the first layer,
and pass it to the attention of every layer. `take_modules_of` has `compute_bias` return a RelativeTable instead where
the model runs on regard. A module is recognised by its code and by an example: what its own `compute_bias` returns for
a numbered table must be what RelativeTable stands for. Everything else keeps its tensor.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.compat.transformers.mask import LazyMask
from regard.compat.transformers.mask_interface import counted_from
from regard.compat.transformers.models import NAME
from regard.compat.transformers.written_out import Form, WrittenOut
from regard.core.attributes import Unknown, has_hooks, hooks_of_all, uses_of
from regard.core.positions import Positions, Span, counted
from regard.core.tracing import constant_in_graphs, data_unavailable
from regard.scores.buckets import Buckets, T5Buckets, T5CausalBuckets
from regard.scores.modifiers import RelativeBias

# Of compute_bias(self, ...) where it makes the bias of all pairs; that of blocks (LongT5's encoder) has others.
_PARAMETERS = ["self", "query_length", "key_length", "device", "past_seen_tokens"]
# Of fewer pairs, and for one query, a tensor costs less than a table of differences: it is made once for all layers.
FEWEST_PAIRS = 64 * 64
# Attributes of a module that its compute_bias may read, beside the table.
_OPTIONS = ("is_decoder", "relative_attention_num_buckets", "relative_attention_max_distance")


@dataclass(frozen=True, eq=False)
class RelativeTable(WrittenOut):
    """A bias (1, heads, nq, nk) that is not there: a table by buckets of relative positions.

    table      (buckets, heads), a parameter of the model
    positions  where the queries and the keys of the bias stand, known as numbers

    >>> from regard.core.positions import tail
    >>> bias = RelativeTable(torch.arange(8.0).view(4, 2), T5CausalBuckets(4, 8), tail(1, 3), Form())
    >>> bias.shape, bias.stage
    ((1, 2, 1, 3), RelativeBias(table=float32[4, 2], buckets=T5CausalBuckets(size=4, reach=8)))
    >>> bias.dense()[0, 0]
    tensor([[4., 2., 0.]])
    """

    what: ClassVar[str] = "position bias"
    table: Tensor
    buckets: Buckets
    positions: Positions
    form: Form

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, self.table.shape[1], *self.positions.counts

    @property
    def _span(self) -> Span:
        span = self.positions.span
        assert span is not None
        return span

    @property
    def stage(self) -> RelativeBias:
        """What it is in a score."""
        return RelativeBias(self.table, self.buckets)

    def dense(self) -> Tensor:
        index = self.buckets.index(self.positions.q[:, None], self.positions.k)
        return self.table[index].permute(2, 0, 1)[None]

    def stands_with(self, mask: LazyMask | Tensor | None, nq: int, nk: int) -> bool:
        """Whether it is for these queries and keys, and the mask for the same positions of them."""
        own = self._span
        if (own.q[1], own.k[1]) != (nq, nk):
            return False
        if isinstance(mask, Tensor):
            return True
        if mask is None:  # causal, if it is, where the first query stands at the first key
            return nq == 1 or own.offset() == 0
        span = mask.positions.span
        return span is not None and span.offset() == own.offset()

    def at(self, keys: slice | None) -> Positions | None:
        """The positions of the queries and of these keys (None = all); None where query i stands at key i."""
        span = self._span
        if keys is None:  # in a graph, slice.indices would make a number of a length
            return None if span.q == span.k else counted(span.q, span.k, span.device)
        start, stop, _ = keys.indices(span.k[1])
        same = span.q == (span.k[0] + start, stop - start)
        return None if same else counted(span.q, (span.k[0] + start, stop - start), span.device)


@dataclass(frozen=True, eq=False)
class NoTable(WrittenOut):
    """A bias (1, heads, nq, nk) of zeros that is not there: that of cross-attention, which has no table."""

    what: ClassVar[str] = "position bias"
    shape: tuple[int, int, int, int]
    like: Tensor
    form: Form

    def dense(self) -> Tensor:
        return self.like.new_zeros(self.shape)


def without_zeros(bias: RelativeTable | NoTable | Tensor | None, module: nn.Module) -> RelativeTable | Tensor | None:
    """The bias of a module's call, None where it adds nothing: UMT5 makes zeros for cross-attention."""
    if not isinstance(bias, Tensor):
        return None if isinstance(bias, NoTable) else bias
    if type(module) in _SAY_ZEROS or getattr(module, "has_relative_attention_bias", False):
        return bias
    if not bias.is_cpu or bias.requires_grad or data_unavailable(bias) or bias.numel() == 0:
        return bias
    if torch.autograd.forward_ad.unpack_dual(bias).tangent is not None:
        return bias
    if float(bias[(0,) * bias.dim()]) != 0:  # most are told apart by their first number
        return bias
    return bias if bool(bias.any()) else None


# classes of modules whose compute_bias is replaced, and those whose forward is too: they pass NoTable, not zeros
_TAKEN: set[type[nn.Module]] = set()
_SAY_ZEROS: set[type[nn.Module]] = set()


def take_modules_of(model: type[PreTrainedModel]) -> None:
    """Has the attention modules of a model that takes "regard" pass their table where they are recognised.

    Their classes are changed, not the modules: copies and pickles of a model hold nothing of this.
    """
    for base in model.__mro__:
        if not issubclass(base, PreTrainedModel) or base is PreTrainedModel:
            continue
        for cls in list(vars(sys.modules[base.__module__]).values()):
            if isinstance(cls, type) and issubclass(cls, nn.Module) and cls not in _TAKEN and _makes_a_bias(cls):
                _TAKEN.add(cls)
                _take(cls)


def _makes_a_bias(cls: type[nn.Module]) -> bool:
    """Whether it defines how the bias of all pairs is made, and passes that on to an attention function."""
    compute, forward = (vars(cls).get(name) for name in ("compute_bias", "forward"))
    if not inspect.isfunction(compute) or not inspect.isfunction(forward):
        return False
    known = list(inspect.signature(compute).parameters) == _PARAMETERS
    return known and _reads_the_table(compute) and _reads(forward, "ALL_ATTENTION_FUNCTIONS", "config")


def _reads_the_table(compute: FunctionType) -> bool:
    """Whether a function reads of its module the table, and else nothing but what its buckets depend on."""
    try:
        read = {use.names[:1] for use in uses_of(inspect.unwrap(compute).__code__, "self")}
    except Unknown:
        return False
    known = {(name,) for name in ("relative_attention_bias", "_relative_position_bucket", *_OPTIONS)}
    return ("relative_attention_bias",) in read and read <= known


def _reads(function: Any, *names: str) -> bool:
    """Whether the code of a function has all of these names of attributes and globals."""
    return set(names) <= set(inspect.unwrap(function).__code__.co_names)


def _are_many(queries: int, keys: int) -> bool:
    """Whether a table is read faster than a tensor; an exported graph is for any length."""
    return queries > 1 and (torch.compiler.is_exporting() or queries * keys >= FEWEST_PAIRS)


def _take(cls: Any) -> None:
    own, own_forward = cls.compute_bias, cls.forward

    @functools.wraps(own)
    def compute_bias(self: Any, query_length: int, key_length: int, device: Any = None, past_seen_tokens: Any = 0):
        table = None
        if _are_many(query_length, key_length) and self.config._attn_implementation == NAME:
            table = _table_of(self, own, query_length, key_length, device, past_seen_tokens)
        return own(self, query_length, key_length, device, past_seen_tokens) if table is None else table

    @functools.wraps(own_forward)
    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        source = options.get("key_value_states")
        known = self.config._attn_implementation == NAME and not self.has_relative_attention_bias
        if known and source is not None and not args and options.get("position_bias") is None:
            shape = 1, self.n_heads, hidden_states.shape[1], source.shape[1]
            options["position_bias"] = NoTable(shape, hidden_states, Form(model=type(self).__name__))
        return own_forward(self, hidden_states, *args, **options)

    cls.compute_bias = compute_bias
    zeros = _reads(own_forward, "has_relative_attention_bias", "n_heads", "zeros")
    if zeros and {"key_value_states", "position_bias"} <= inspect.signature(own_forward).parameters.keys():
        cls.forward = forward
        _SAY_ZEROS.add(cls)


def _table_of(module: Any, own: Callable[..., Any], nq: int, nk: int, device: Any, past: Any) -> RelativeTable | None:
    """The table in the place of what `own`, the module's compute_bias, would return; None where that is not sure."""
    embedding = module.relative_attention_bias
    if not _looks_up(embedding) or "_relative_position_bucket" in vars(module):
        return None
    table = embedding.weight
    unknown = data_unavailable(table) and not torch.compiler.is_dynamo_compiling()
    # on other devices the kernels of torch and of FlexAttention read a tensor
    if unknown or table.device.type != "cpu" or torch.device(device or "cpu").type != "cpu":
        return None
    cls = type(module)
    decoder, size, reach = (getattr(module, name, None) for name in _OPTIONS)
    kind = _kind_of(cls, own, getattr(cls, "_relative_position_bucket", None), decoder, size, reach)
    if not kind or not isinstance(size, int) or not isinstance(reach, int) or size != table.shape[0]:
        return None
    positions = counted_from(nq, nk, past, 0, device)
    if positions.span is None:  # in a graph, where a static cache has a tensor of how many tokens it holds
        return None
    return RelativeTable(table, _KINDS[kind](size, reach), positions, Form(model=cls.__name__))


def _looks_up(embedding: Any) -> bool:
    """Whether a module is an embedding that returns rows of its weight, and does nothing else."""
    if type(embedding) is not nn.Embedding or type(embedding.weight) not in (nn.Parameter, Tensor):
        return False
    if embedding.padding_idx is not None or embedding.max_norm is not None:
        return False
    return not (embedding.scale_grad_by_freq or embedding.sparse or _is_watched(embedding))


def _is_watched(module: nn.Module) -> bool:
    """Whether something besides its class sees or changes what a module returns. A recording's hooks do not."""
    others = [hook for hook in hooks_of_all() if not str(getattr(hook, "__module__", "")).startswith("regard.")]
    return has_hooks(module) or bool(others)


# names, since a graph takes no class from what runs while it is made
_KINDS: dict[str, type[T5Buckets] | type[T5CausalBuckets]] = {"both ways": T5Buckets, "behind": T5CausalBuckets}


@constant_in_graphs
def _kind_of(cls: type[nn.Module], own: Callable[..., Any], bucket: object, decoder: Any, size: Any, reach: Any) -> str:
    return _proven_kind(cls, own, bucket, decoder, size, reach)


@functools.lru_cache(maxsize=64)
def _proven_kind(
    cls: type[nn.Module], own: Callable[..., Any], bucket: object, decoder: Any, size: Any, reach: Any
) -> str:
    """The buckets of which compute_bias, in a module with these attributes, makes what RelativeTable says; "" = others.

    bucket: the function of the class, of which compute_bias takes the buckets. The example has every distance up to
    where buckets end.
    """
    if not isinstance(size, int) or not isinstance(reach, int) or reach > 1 << 20:
        return ""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in zip(_OPTIONS, (decoder, size, reach), strict=True):
        setattr(module, name, value)
    table = torch.arange(2 * size, dtype=torch.float32, device="cpu").view(size, 2)
    module.relative_attention_bias = nn.Embedding.from_pretrained(table)
    nq, nk, past = 3, 2 * reach + 5, reach + 1
    try:
        found = own(module, nq, nk, device=table.device, past_seen_tokens=past)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ):  # it reads something else
        return ""
    for name, kind in _KINDS.items():
        try:
            buckets = kind(size, reach)
        except ValueError:
            continue
        expected = RelativeTable(table, buckets, counted((past, nq), (0, nk), "cpu"), Form()).dense()
        if isinstance(found, Tensor) and found.shape == expected.shape and torch.equal(found, expected):
            return name
    return ""
