"""Structures and outlines: what a call, or one of its values, is like before anyone looks at a number in its tensors.

The structure of a call: dtypes, shapes but for the numbers of queries and keys, the outlines of score, mask and sink,
whether there are positions and dropout.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from regard.backends.native.ffi import isa_written
from regard.backends.native.modifiers.table import has_no_step
from regard.backends.native.programs.structure import key_of, sizes_traced
from regard.backends.native.repeated_mask import is_code
from regard.core.deferred import kept_alike
from regard.core.dropout import Dropout
from regard.core.functions import Unknown, settled
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged
from regard.core.positions import Positions
from regard.core.tracing import functorch, watched, wrapped
from regard.core.value import Value, is_regards_own, names, number_key
from regard.masks.algebra import Mask
from regard.masks.dense import Dense, Where
from regard.scores.algebra import Score
from regard.scores.elementwise import Elementwise
from regard.scores.modifiers import Bias
from regard.scores.similarity import Custom


def plain(t: Tensor) -> bool:
    """Whether the kernels can read a tensor where it lies."""
    return t.is_cpu and _ordinary(t)


def _ordinary(*tensors: Tensor) -> bool:
    """Whether tensors are their numbers, as they lie. A subclass may hold its numbers elsewhere, or none."""
    for t in tensors:
        if type(t) not in _PLAIN or t.layout is not _STRIDED or t.is_nested:
            return False
        if t.is_neg() or t._is_zerotensor() or wrapped(t):
            return False
    return True


_CODE = "code"  # a mask that plans lower at each call
_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided


class Leaves(list[Tensor]):
    """The tensors of a call's score, mask and sink, depth first.

    axes      of its queries; nq, nk: how many queries and keys there are
    of_pairs  which of the tensors have an axis of queries and one of keys, of which the outline says nothing: a plan is
              told how they lie at each call
    """

    def __init__(self, axes: int = 0, nq: int = 0, nk: int = 0) -> None:
        super().__init__()
        self.axes, self.nq, self.nk, self.of_pairs = axes, nq, nk, set[int]()

    def take(self, t: Tensor) -> tuple[Any, ...] | None:
        """Takes a tensor of pairs of this call; what its outline says of it. None of others."""
        if not plain(t) or t.dim() != self.axes or self.axes < _LEAST_AXES:
            return None
        if t.shape[-2] not in (1, self.nq) or t.shape[-1] not in (1, self.nk):
            return None
        self.of_pairs.add(len(self))
        self.append(t)
        return t.dtype, t.shape[:-2], None


_LEAST_AXES = 4  # with axes of the batch and of heads, as the kernels read it


class Open(Exception):
    """The value holds something whose meaning may change while it looks the same, such as a function of a score."""


def outline(item: Any, leaves: Leaves) -> Any:
    """What stays of a value when its tensors, which go to `leaves`, are reduced to dtype, shape and strides.

    Of those with a number for each token or pair, to what does not say how many there are.
    """
    kind = type(item)
    if kind in _CONSTANTS:
        return number_key(item) if kind is float and _equals_others(item) else item
    parts = _parts.get(kind)
    if parts is not None:
        of_part = _of_tokens if kind in _per_token else _of_pairs if kind in _per_pair else outline
        return (kind, *[of_part(getattr(item, name), leaves) for name in parts]) if parts else kind
    if kind is tuple:
        return tuple([outline(part, leaves) for part in item])
    if isinstance(item, Tensor) and plain(item):
        leaves.append(item)
        return item.dtype, item.shape, item.stride()
    if _is_traced(item) or isinstance(item, Elementwise):
        leaves.extend(map(_plain, item.tensors()))
        try:
            return key_of(item)
        except Unknown:
            raise Open from None
    if isinstance(item, Mask) and is_code(item):
        own = item.tensors()
        leaves.extend(map(_plain, own))
        return _CODE, kind, len(own), item.compares_positions()
    if isinstance(item, Value) and is_regards_own(kind) and kind is not Where:
        if issubclass(kind, Mask) and kind.per_token:
            _per_token.add(kind)
        _parts[kind] = names(kind)  # last: another thread may read it at once
        return outline(item, leaves)
    if settled(item):
        return item
    if isinstance(item, Where):
        return kind, item.fn
    raise Open


def _is_traced(stage: object) -> TypeGuard[Score]:
    """Whether a stage of a score becomes a program of pairs: a modifier that a person wrote, or a Custom, see
    backends/native/products.py.
    """
    return has_no_step(stage) or type(stage) is Custom


def _equals_others(x: float) -> bool:
    """Whether == does not say which number it is: NaN, which is not found again, and -0.0."""
    return x != x or (x == 0 and math.copysign(1, x) < 0)


def _plain(t: Tensor) -> Tensor:
    if not plain(t):
        raise Open
    return t


def outline_of_positions(positions: Any) -> Any:
    """Whether positions count up by one, known without looking; else the batch axes of their tensors."""
    if type(positions) is not Positions:
        raise Open
    return positions.span is not None or (positions.q.shape[:-1], positions.k.shape[:-1])


def outline_of_dropout(dropout: Any) -> Any:
    """Its probability; None where nothing is dropped. The seed is of a call."""
    if type(dropout) is not Dropout:
        raise Open
    return dropout.p or None


def _of_pairs(item: Any, leaves: Leaves) -> Any:
    """The same of a tensor that broadcasts to the pairs of a call."""
    found = leaves.take(item) if isinstance(item, Tensor) else None
    return outline(item, leaves) if found is None else found


def _of_tokens(item: Any, leaves: Leaves) -> Any:
    """The same of a tensor with a number for each query or key: it does not say how many there are."""
    if not isinstance(item, Tensor):
        return outline(item, leaves)
    if not plain(item):
        raise Open
    leaves.append(item)
    return item.dtype, item.shape[:-1]


_CONSTANTS = frozenset({int, float, bool, type(None)})
_parts: dict[type, tuple[str, ...]] = {}  # of regard's own classes
_per_token = set[type]()
_per_pair: frozenset[type] = frozenset({Bias, Dense})  # whose tensor broadcasts to the pairs of a call


class AttentionArguments(NamedTuple):
    """The arguments of a call, but for the backend. None for q, k, v: what autograd saves."""

    q: Any
    k: Any
    v: Any
    score: Score
    mask: Mask
    positions: Positions | None
    sink: Any
    dropout: Dropout | None


class Structure(NamedTuple):
    """What calls that one plan can serve have in common.

    needs     which of q, k, v and of the tensors of score, mask and sink have a gradient; None: none has
    stats     whether the row statistics are wanted besides the output; then nothing has a gradient
    outlines  of score, mask and sink
    positions what outline_of_positions says of them; None where there are none
    dropout_p the probability of dropout; None where nothing is dropped
    storage   how keys and values are stored that are no ordinary tensors
    device    None: the CPU
    layout    dtypes, and sizes but for the numbers of queries and keys
    sizes     those of the numbers of queries and keys that a program of code of others depends on; () without such code
    isa       what the environment says of it
    backend   the one that must run it; None: the first that can
    """

    needs: tuple[bool, ...] | None
    stats: bool
    outlines: tuple[Any, Any, Any]
    positions: Any
    dropout_p: float | None
    storage: tuple[type, int | None] | None
    device: torch.device | None
    layout: tuple[Any, ...]
    sizes: tuple[Any, ...]
    threads: int
    isa: Any
    backend: Any


def structure_of(
    q: Any, k: Any, v: Any, score: Score, mask: Mask, positions: Any, sink: Any, dropout: Any, backend: Any
) -> tuple[Structure, Leaves] | None:
    """A call's structure, and the tensors of score, mask and sink; None where no plan can serve such a call."""
    deferred = kept_alike(k, v)
    given = (q,) if deferred else (q, k, v)
    if transformed() or not _ordinary(*given) or len({t.device for t in given}) > 1:
        return None
    device = None if q.is_cpu else q.device
    if device is not None and (deferred or not q.is_cuda):
        return None
    if q.dim() < 2 or k.dim() < 2 or v.dim() < 2:
        return None
    if backend is not None and not is_regards_own(type(backend)):
        return None
    stages = score.stages if isinstance(score, Score) else ()  # pyright: ignore[reportUnnecessaryIsInstance]
    own = any(map(_is_traced, stages))
    # a graph of what a person wrote follows from the shapes of all
    leaves = Leaves(0 if own else q.dim(), q.shape[-2], k.shape[-2])
    try:
        outlines = outline(score, leaves), outline(mask, leaves), outline(sink, leaves)
        at = None if positions is None else outline_of_positions(positions)
        p = None if dropout is None else outline_of_dropout(dropout)
    except Open:
        return None
    *q_lead, nq, q_width = q.shape
    *k_lead, nk, k_width = k.shape
    *v_lead, v_count, v_width = v.shape
    if v_count != nk:
        return None
    needs = tuple([t.requires_grad for t in (q, k, v, *leaves)]) if torch.is_grad_enabled() else ()
    sizes = sizes_traced(nq, nk) if own else ()
    layout = (q.dtype, k.dtype, v.dtype, len(q_lead), len(k_lead), *q_lead, q_width, *k_lead, k_width, *v_lead, v_width)
    structure = Structure(
        *(needs if True in needs else None, False, outlines, at, p),
        *(_form_of(k) if deferred else None, device, layout, sizes, torch.get_num_threads(), isa_written(), backend),
    )
    return structure, leaves


def _form_of(k: Tensor) -> tuple[type, int | None]:
    """How keys that are no ordinary tensor are kept; the size of their pages."""
    numbers = k.numbers if isinstance(k, Int8Rows) else k
    return type(k), numbers.page_size if isinstance(numbers, Paged) else None


def transformed() -> bool:
    """Whether someone between the caller and torch watches or changes what happens: a compiler, a mode, a transform."""
    return (
        is_compiling()
        or functorch()
        or watched()
        or _function_modes() > 0
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or _autocast()
    )


_autocast = torch._C._is_any_autocast_enabled  # pyright: ignore[reportPrivateUsage]
_function_modes = torch._C._len_torch_function_stack  # pyright: ignore[reportPrivateUsage]
