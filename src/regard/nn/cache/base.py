"""KVCache: the methods that every cache of keys and values has."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import ClassVar, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self

from regard.core.arrays import size
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.shapes import count_of, listed
from regard.core.wrong_calls import kind_of
from regard.masks.algebra import Everything, Mask

# What generate and the models of transformers read of a cache first.
_OF_TRANSFORMERS = (
    *("get_seq_length", "get_mask_sizes", "is_compileable", "is_initialized", "is_sliding", "layers", "update"),
    *("get_max_cache_shape", "get_max_length", "max_cache_len", "early_initialization", "self_attention_cache"),
)


class KVCache(ABC):
    """Keys and values of the tokens so far, kept for the queries of later tokens. Abstract.

    GrowingCache   any number of tokens; the memory doubles when it is full
    FixedCache     memory for a given number of tokens, allocated once
    RollingCache   the last `window` tokens, for sliding windows
    PagedCache     pages of a pool that sequences share, with a block table and a length for each sequence

    `append(k, v)` adds the next tokens, k (*batch, hk, n, dk) and v (*batch, hk, n, dv), and returns the keys and
    values that these tokens' queries read. `positions` has the positions of those queries and keys, and `mask` hides
    the keys that must be hidden whatever the caller's mask is:

        rg.attention(q, *cache.append(k, v), mask=rg.Causal() & cache.mask, positions=cache.positions)

    Decoding in chunks of any sizes then equals one call on all tokens. `mask` is Everything() for growing and fixed
    caches, which need no `& cache.mask`. A layer does all this: layer(x, mask=rg.Causal(), cache=cache). One cache
    serves one layer.

    A cache of dtype=torch.int8 takes about half of the memory of bfloat16: each token's key and value of a head is
    rounded once, when it is appended, to int8 numbers and one float32 scale, max|x| / 127. From then on attention is
    exact attention of the rounded numbers. A row of zeros has the scale 0; one that holds NaN or infinity becomes NaN.
    The native kernels read the int8 numbers where they lie; other calls (with gradients, on other backends) widen all
    keys first, and `explain` says so.

    A cache is for inference. It records no gradients: appending a tensor that requires one raises ValueError, unless
    gradients are switched off (torch.no_grad, torch.inference_mode; the two may alternate). The result of `append` may
    be a view of the cache's memory, or refer to its pages: read it, do not write to it, and do not read it again after
    an `append` that follows a `crop` or a `reorder`.
    """

    instead_of_tensor: ClassVar[str] = "pass what it returns, *cache.append(k, v), and positions=cache.positions"

    @abstractmethod
    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys (*batch, hk, n, dk) and values (*batch, hk, n, dv) of the next n tokens; returns those to read.

        Three axes are (batch, n, d), two (n, d), where a cache allows them. The first call of a cache without fixed
        sizes sets them. An append that raises adds nothing.
        Raises ShapeError for other shapes than those of before, TypeError for another dtype, ValueError for another
        device, for tensors that require a gradient, and where there is no room.
        """

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor]:
        """The keys and values that the last append returned, in the order of `reorder`; after `crop` those that the
        next token reads.

        `positions` and `mask` are of them. Raises ValueError where no tokens have come yet, which say the axes.
        """

    @abstractmethod
    def reorder(self, indices: Tensor) -> None:
        """Sequence b becomes a copy of sequence indices[b], along the first axis: the beams of a beam search.

        indices are integers (n,); n may differ from the number of sequences so far. Raises IndexError for a sequence
        that does not exist, ShapeError where there is no batch axis.
        """

    @abstractmethod
    def crop(self, length: int) -> None:
        """Removes all tokens after the first `length`. Raises ValueError if there are fewer, or length is negative."""

    def remove_last(self, n: int) -> None:
        """Removes the last n tokens of each sequence. Raises ValueError if one has fewer, or n is negative."""
        n = size(n, "remove_last: n")
        if n > self.length:
            raise ValueError(f"remove_last({n}): the cache has {count_of(self.length, 'token')}.")
        self.crop(self.length - n)

    def take_back(self, n: int) -> None:
        """Removes the last n tokens, of an append whose call failed: the caller will pass them again."""
        self.remove_last(n)

    @abstractmethod
    def reset(self) -> None:
        """Removes all tokens."""

    @property
    @abstractmethod
    def length(self) -> int:
        """The number of tokens, including those that a window has dropped; of ragged lengths the largest."""

    @property
    @abstractmethod
    def lengths(self) -> Tensor:
        """The length of each sequence: int64 (*batch), or () before the batch axes are known."""

    @property
    @abstractmethod
    def positions(self) -> Positions:
        """Positions of the last append's queries and of the keys that it returned. No queries after crop and reset."""

    @property
    def mask(self) -> Mask:
        """Hides the keys of the last append that must be hidden; combine it with the caller's mask by &."""
        return Everything()

    @property
    def first_key(self) -> int:
        """The position of the first key that the next append returns: 0, or later where a window has dropped keys."""
        return 0

    @abstractmethod
    def next_positions(self, n: int) -> Tensor:
        """The positions of the next n tokens, for rotations before they are appended: int64 (n,) or (*batch, n)."""

    def __getattr__(self, name: str) -> NoReturn:
        """Raises AttributeError. For a name that transformers reads of a cache, the error says which cache to pass."""
        error = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in _OF_TRANSFORMERS:
            error += (
                f": a {type(self).__name__} is the cache of one layer of regard.nn, layer(x, cache=cache), or of your "
                "own calls, regard.attention(q, *cache.append(k, v), ...). A model of transformers keeps the keys of "
                "all its layers in one object: pass past_key_values=GrowingCache(model.config), or FixedCache or "
                "PagedCache, of regard.compat.transformers, or leave it out."
            )
        raise AttributeError(error)

    def __copy__(self) -> Self:
        """A cache of its own, as of copy.deepcopy: two that share their memory would overwrite each other's tokens."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self.length})"


def writable(buffers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same numbers where every mode can write them: a copy made in inference mode can be written in no other."""
    with torch.inference_mode(False):
        return tuple([buffer.clone() if buffer.is_inference() else buffer for buffer in buffers])


def read_before_tokens() -> ValueError:
    """The error of `read` where no tokens have come."""
    return ValueError("read: no tokens have been appended, whose axes and dtype the result would have.")


def check_tokens(k: Tensor, v: Tensor) -> None:
    """Raises an error unless k and v are keys and values of the same tokens, without gradients."""
    for name, t in (("k", k), ("v", v)):
        if not isinstance(t, Tensor) or t.layout not in (torch.strided, torch.jagged):  # pyright: ignore
            kind = kind_of(t) if not isinstance(t, Tensor) else f"a tensor of layout {t.layout}"  # pyright: ignore
            raise TypeError(f"{name} is {kind}; a cache keeps tensors (*batch, heads, n, d).")
    if k.is_nested or v.is_nested:
        raise TypeError(
            "k or v is a nested tensor, and this cache adds as many tokens to every sequence; use PagedCache, which "
            "takes another number for each."
        )
    if k.dim() < 2 or k.dim() != v.dim() or k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(
            f"k has shape {listed(k.shape)}, v {listed(v.shape)}; expected (*batch, heads, n, dk) and "
            "(*batch, heads, n, dv): a value for each key."
        )
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ValueError(
            f"{'k' if k.requires_grad else 'v'} requires a gradient, and a cache records none. "
            "Generate under torch.no_grad() or torch.inference_mode(), or append k.detach() and v.detach()."
        )


def check_like(buffer: Tensor, lead: tuple[int, ...], t: Tensor, name: str) -> None:
    """Raises an error unless t is (*lead, n, d), with the width, the dtype and the device of the cache's numbers."""
    check_rows(buffer, lead, t, name)
    if t.dtype != buffer.dtype:
        raise TypeError(f"{name} has dtype {t.dtype}, this cache {buffer.dtype}: convert with .to(...).")


def check_rows(buffer: Tensor, lead: tuple[int, ...], t: Tensor, name: str) -> None:
    """Raises an error unless t is (*lead, n, d), with the width and the device of the cache's numbers."""
    if t.shape[:-2] != lead or t.shape[-1] != buffer.shape[-1]:
        expected = ", ".join(map(str, (*lead, "n", buffer.shape[-1])))
        raise ShapeError(f"{name} has shape {listed(t.shape)}; this cache holds ({expected}).")
    if t.device != buffer.device:
        raise ValueError(f"{name} is on {t.device}, this cache on {buffer.device}: move it with .to(...).")
