"""DeferredRows: keys or values that are kept in another form than a tensor's, and written out only where needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class DeferredRows(Tensor):
    """Keys (or values), a tensor (*batch, heads, n, d) whose rows are kept in another form. Abstract.

    Paged     rows in the pages of a pool
    Int8Rows  rows of int8, with a scale each

    A subclass says what `parts` it is kept in and how it is written out. regard.attention reads some forms as they are;
    `explain` says whether a call does. Any other operation computes with `written_out()`, an ordinary tensor, which is
    made once and kept. An operation in place raises TypeError.
    """

    _written: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @property
    def in_pages(self) -> bool:
        """Whether the rows lie in the pages of a pool."""
        return False

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors in memory that hold the rows."""
        raise NotImplementedError

    def lies_like(self, other: Any) -> bool:
        """Whether `other` is kept in the same form and its rows are found in the same way: keys and values, say."""
        raise NotImplementedError

    def _write_out(self) -> Tensor:
        raise NotImplementedError

    def written_out(self) -> Tensor:
        """The same rows in a contiguous tensor, as torch takes this one to be."""
        if self._written is None:
            self._written = self._write_out().contiguous()
        return self._written

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and any(isinstance(x, DeferredRows) for x in args[:1]):
            raise TypeError(f"{func}: keys and values of a cache are read only; write to a clone() of them.")
        # of tensors made in inference mode; of others torch does this before: to() of their dtype is then no operation
        divided = func.decompose(*args, **(kwargs or {}))
        if divided is not NotImplemented:
            return divided
        args, kwargs = tree_map_only(DeferredRows, DeferredRows.written_out, (args, kwargs or {}))
        return func(*args, **kwargs)

    # what torch does without asking __torch_dispatch__
    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("keys and values of a cache are read only; write to a clone() of them.")

    def data_ptr(self) -> int:
        return self.written_out().data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        return self.written_out().numpy(force=force)

    def tolist(self) -> Any:
        return self.written_out().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.written_out().__dlpack__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.written_out().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.written_out().clone()


wrapper = Tensor._make_wrapper_subclass  # pyright: ignore


def kept_alike(k: Any, v: Any) -> bool:
    """Whether keys and values are kept in one form other than a tensor's, and lie alike."""
    return isinstance(k, DeferredRows) and k.lies_like(v)


def written_out(t: Tensor) -> Tensor:
    """An ordinary tensor of the same numbers."""
    return t.written_out() if isinstance(t, DeferredRows) else t
