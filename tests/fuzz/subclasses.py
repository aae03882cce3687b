"""Classes of tensors that callers have in the place of plain ones, with and without a memory. Nothing of regard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.masked import MaskedTensor, masked_tensor
from torch.utils._pytree import tree_map


class Tagged(Tensor):
    """A plain subclass: its memory is where data_ptr() says."""


class Wrapper(Tensor):
    """A tensor that holds another one and has no memory of its own: data_ptr() is 0."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Wrapper({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, cls) else x, (args, kwargs or {}))
        return tree_map(lambda x: cls(x) if isinstance(x, Tensor) else x, op(*args, **kwargs))


@dataclass(frozen=True, eq=False)
class Kind:
    """of: a tensor of this kind with the numbers of a plain one. plain: the way back; None where it has no numbers.

    learned: whether it may require a gradient. refused: what may be raised of such a tensor, where plain ones run.
    """

    name: str
    of: Callable[[Tensor], Tensor]
    plain: Callable[[Tensor], Tensor | None]
    learned: bool = False
    refused: tuple[type[Exception], ...] = (TypeError, ValueError, RuntimeError)

    def __str__(self) -> str:
        return self.name


def _parameter(t: Tensor) -> Tensor:
    return torch.nn.Parameter(t, requires_grad=False)


def _made_in_inference(t: Tensor) -> Tensor:
    with torch.inference_mode():
        return t.clone() if 0 in t.stride() else torch.empty_like(t).copy_(t)


def _of_fake(t: Tensor) -> Tensor | None:
    return None if isinstance(t, FakeTensor) else t


def _of_masked(t: Tensor) -> Tensor:
    return t.get_data() if isinstance(t, MaskedTensor) else t


def _of_wrapper(t: Tensor) -> Tensor:
    return t.inner if isinstance(t, Wrapper) else t


FAKE = FakeTensorMode()
KINDS = (
    Kind("plain subclass", lambda t: t.as_subclass(Tagged), lambda t: t.as_subclass(Tensor), True, (TypeError,)),
    Kind("Parameter", _parameter, lambda t: t, True, ()),
    # autograd refuses to save such a tensor
    Kind("inference tensor", _made_in_inference, lambda t: t, refused=(RuntimeError,)),
    Kind("wrapper without memory", Wrapper, _of_wrapper),
    # torch asserts that nobody has plain tensors beside fake ones
    Kind("FakeTensor", FAKE.from_tensor, _of_fake, refused=(TypeError, ValueError, RuntimeError, AssertionError)),
    Kind("MaskedTensor", lambda t: masked_tensor(t, torch.ones_like(t, dtype=torch.bool)), _of_masked),
)
