"""score_mods that add a product of a row of the query and a row of the key, as the rotary part of latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor

from regard.compat.torch.pair_functions import ATEN, Node, NotRecorded, Sizes, evaluate, record
from regard.core.attributes import Unknown, as_method
from regard.core.dispatch_mode import flat

_MOST = 1024
# of functions that add no such product, as far as was seen, to scores of keys of a dtype
_without: dict[tuple[CodeType, torch.dtype], None] = {}
_SUMS = (ATEN.sum.default, ATEN.sum.dim_IntList)


@dataclass(frozen=True, eq=False)
class RowProduct:
    """More features of queries, (b, h, nq, f), and of keys, (b, hk, nk, f): what is added to the products of both."""

    query: Tensor
    key: Tensor

    def joined(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys with these features behind their own, and values."""
        if self.key.shape[1] > k.shape[1]:  # the rows of heads that share a key differ
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        query, key = self.query.to(q.dtype), self.key.to(k.dtype)
        q = torch.cat([q, query.expand(*q.shape[:-1], -1)], -1)
        return q, torch.cat([k, key.expand(*k.shape[:-1], -1)], -1), v


def row_product(fn: Callable[..., Any], scale: float, sizes: Sizes, k: Tensor) -> RowProduct | None:
    """What fn(s, b, h, i, j) = s + c · (row of b, h, i) · (row of b, h, j) adds; None for other functions.

    scale: of the product of q and k, by which the rows of queries are divided. Rows that the dtype of the keys would
    round are none: the function adds their product to scores of float32.
    """
    code, key_heads = _code_of(fn), k.shape[1]
    if code is None or (code, k.dtype) in _without or not sizes.pairs or not scale:
        return None
    try:
        found = _rows(record(fn, "sbhij", sizes.dtype, sizes.device))
    except (NotRecorded, TypeError):
        found = None
    if found is None or not _exact(k.dtype, *found[:2]):
        if len(_without) >= _MOST:
            _without.clear()
        _without[code, k.dtype] = None
        return None
    query, key, factor = found
    of_key, group = _evaluated(key, sizes), sizes.heads // max(key_heads, 1)
    if of_key.shape[1] != 1 and _shared(key, sizes, group):
        of_key = of_key[:, ::group]
    return RowProduct(_evaluated(query, sizes) * (factor / scale), of_key)


def _exact(dtype: torch.dtype, *rows: Node) -> bool:
    """Whether keys of a dtype hold such rows: those of float16 may overflow where they are divided by the scale."""
    return dtype in (torch.float32, torch.float64) or (
        dtype == torch.bfloat16 and all(row.value.dtype == dtype for row in rows)
    )


def _code_of(fn: Any) -> CodeType | None:
    """The code that runs where a callable is called; None where that is not of Python."""
    if isinstance(fn, partial):
        return _code_of(cast("partial[Any]", fn).func)
    if isinstance(fn, FunctionType):
        return fn.__code__
    try:
        return _code_of((fn if isinstance(fn, MethodType) else as_method(fn)).__func__)
    except Unknown:
        return None


def _shared(node: Node, sizes: Sizes, group: int) -> bool:
    """Whether heads that share a key read the same numbers: not by these, which a gradient may change."""
    if "h" not in node.reads:
        return True
    if node.reads == frozenset("h") and not node.value.is_floating_point():
        of = evaluate(node, **sizes.indices("h")).unflatten(0, (-1, group))
        return bool((of == of[:, :1]).all())
    return node.op is not None and all(_shared(y, sizes, group) for y in flat(node.args) if isinstance(y, Node))


def _evaluated(node: Node, sizes: Sizes) -> Tensor:
    """The rows of a node, (batch or 1, heads or 1, queries or keys, features)."""
    index = sizes.indices(node.reads)
    found = evaluate(node, **index)
    return found.reshape([*(len(index[name]) if name in index else 1 for name in "bh"), -1, found.shape[-1]])


def _rows(x: Any) -> tuple[Node, Node, float] | None:
    """The rows of queries and of keys whose product, times a number, a recorded function adds to the score."""
    if not isinstance(x, Node) or x.op != ATEN.add.Tensor or x.kwargs:
        return None
    terms = [y for y in x.args if not (isinstance(y, Node) and y.op is None and y.args == ("s",))]
    term, factor = terms[0] if len(terms) == 1 else None, 1.0
    while isinstance(term, Node) and term.op in (ATEN.mul.Tensor, ATEN.div.Tensor) and not term.kwargs:
        a, b = term.args if isinstance(term.args[0], Node) or term.op == ATEN.div.Tensor else term.args[::-1]
        if not isinstance(a, Node) or isinstance(b, Node) or (isinstance(b, Tensor) and (b.dim() or b.requires_grad)):
            return None
        term, factor = a, factor * float(b) if term.op == ATEN.mul.Tensor else factor / float(b)
    if not isinstance(term, Node):
        return None
    pair = term.args if term.op == ATEN.dot.default else ()
    if term.op in _SUMS and isinstance(term.args[0], Node) and term.args[0].op == ATEN.mul.Tensor:
        pair = term.args[0].args
    if len(pair) != 2 or not all(isinstance(y, Node) and y.value.dim() == 1 and "s" not in y.reads for y in pair):
        return None
    a, b = cast("tuple[Node, Node]", pair)
    a, b = (b, a) if "i" in b.reads else (a, b)
    ours = "i" in a.reads and "j" not in a.reads and "j" in b.reads and "i" not in b.reads
    return (a, b, factor) if ours and a.value.shape == b.value.shape else None
