"""WrittenOut: an object in the place of a mask or bias, which becomes a tensor only if a model computes with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from regard.compat.transformers.warnings import warn_once
from regard.core.errors import Unsupported
from regard.core.shapes import listed


@dataclass(frozen=True)
class Form:
    """How a mask is written out for a model: as transformers' own masks for "sdpa" or for "eager" are.

    dtype  torch.bool, True = may attend ("sdpa"); or a floating-point dtype, 0 = may attend, its least number = hidden
           ("eager"), for models that cannot do "sdpa" and so add whatever they are given
    model  the class of the model, as far as it is known
    """

    dtype: torch.dtype = torch.bool
    model: str = "the model"

    def write(self, allowed: Tensor) -> Tensor:
        if self.dtype == torch.bool:
            return allowed
        return torch.where(allowed, torch.zeros((), dtype=self.dtype, device=allowed.device), self.least)

    @property
    def least(self) -> float:
        return torch.finfo(self.dtype).min


class WrittenOut(ABC):
    """Becomes a tensor, with one warning for each class of models, when code computes with it.

    Functions of torch, operators, indexing and every attribute of a tensor that a subclass does not define act on that
    tensor. Changes in place raise Unsupported: layers that read the object later would not see them.

    what  the name of that tensor, for messages
    """

    what: ClassVar[str] = "attention mask"
    form: Form

    @abstractmethod
    def dense(self) -> Tensor:
        """The tensor, made once."""

    def written(self, why: str) -> Tensor:
        """The tensor; the warning says with `why` which operation needs it."""
        tensor = self.dense()
        warn_once(
            f"{self.what} of {self.form.model}",
            f'{self.form.model} computes with its {self.what} ({why}), so attn_implementation="regard" writes the '
            f"{self.what.split()[-1]} out, {listed(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}: the "
            "memory of this model grows with queries × keys. The results are the same.",
        )
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "__name__", func))
        named = kwargs or {}
        if isinstance(named.get("out"), WrittenOut) or (_in_place(name) and args and isinstance(args[0], WrittenOut)):
            changed = named["out"] if isinstance(named.get("out"), WrittenOut) else args[0]
            changed.refuse_change(name)
        given, options = tree_map(lambda x: x.written(name) if isinstance(x, WrittenOut) else x, (args, named))
        return func(*given, **options)

    def __getattr__(self, name: str) -> Any:
        # names with an underscore are asked by protocols (copy, pickle, NumPy), to which this is an object
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(
                f"the {self.what} of a model on regard ({type(self).__name__}) has no attribute {name!r}, and "
                "torch.Tensor has none either."
            )
        if _in_place(name):
            self.refuse_change(name)
        return getattr(self.written(name), name)

    def __getitem__(self, index: Any) -> Any:
        return self.written("__getitem__")[index]

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self.refuse_change("__setitem__")

    def refuse_change(self, name: str) -> NoReturn:
        raise Unsupported(
            f"the model changes its {self.what} in place ({name}), which all its layers share and regard does not "
            'hold in full. Load the model with attn_implementation="eager".'
        )

    # by element, as of a tensor; sets and dicts go by the object
    __hash__ = object.__hash__


_BINARY = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul", "rand", "ror", "rxor"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
)
_UNARY = ("neg", "pos", "abs", "invert", "len", "iter", "float", "int")


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: WrittenOut, *others: Any) -> Any:
        given = [x.written(name) if isinstance(x, WrittenOut) else x for x in others]
        return getattr(self.written(name), name)(*given)

    method.__name__ = name
    return method


# Python looks operators up on the class, where __getattr__ is not asked
for _name in (*_BINARY, *_UNARY):
    setattr(WrittenOut, f"__{_name}__", _forwarded(f"__{_name}__"))


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")
