"""Which compilers, tracers, transforms and modes see a call, and whether Python may read the numbers in a tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

F = TypeVar("F", bound=Callable[..., object])


def constant_in_graphs(fn: F) -> F:
    """torch.compiler.assume_constant_result, which would import torch._dynamo: a second at `import regard`."""
    fn.__dict__["_dynamo_marked_constant"] = True
    return fn


def outside_of_graphs(fn: F) -> F:
    """The function, at which torch.compile ends a graph; it runs as Python does, and another graph begins behind it.

    This is torch.compiler.disable, asked for when a graph is made, because it imports torch._dynamo.
    """

    @wraps(fn)
    def call(*args: object, **options: object) -> object:
        if not torch.compiler.is_dynamo_compiling():
            return fn(*args, **options)
        if fn not in _DISABLED:
            _DISABLED[fn] = torch.compiler.disable(fn)
        return _DISABLED[fn](*args, **options)

    return cast(F, call)


_DISABLED: dict[Callable[..., object], Callable[..., object]] = {}


def loaded(module: str) -> Any:
    """A module that has been imported; None where it has not been, or a thread is importing it at this moment.

    For packages that regard does not import: they are loaded wherever an object of one of their classes exists.
    """
    found = sys.modules.get(module)
    # importlib puts a module there before its code runs, and sets this while it does
    return None if getattr(getattr(found, "__spec__", None), "_initializing", False) else found


def data_unavailable(*tensors: Tensor) -> bool:
    """Whether Python cannot read values: under torch.func transforms, on the meta device, in a graph."""
    return functorch() or graphed(*tensors) or any(t.is_meta for t in tensors)


def graphed(*tensors: Tensor) -> bool:
    """Whether the call becomes part of a graph (torch.compile, torch.export, torch.jit.trace, make_fx), or has fake
    tensors.
    """
    if torch.compiler.is_compiling() or (watched() and _traced()):
        return True
    fake = loaded("torch._subclasses.fake_tensor")
    return fake is not None and any(isinstance(t, fake.FakeTensor) for t in tensors)


# Whether torch.jit.trace records the call: sizes are then tensors of one number.
scripted: Callable[[], bool] = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]


def watched() -> bool:
    """Whether torch.jit.trace or a TorchDispatchMode sees each operation of torch: no kernel called by address."""
    return scripted() or _dispatch_modes() > 0 or _early_mode()


def _traced() -> bool:
    """Whether one of torch's tracers sees the call: jit.trace, make_fx, FakeTensorMode, functionalization."""
    if scripted() or _early_mode():
        return True
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)  # pyright: ignore[reportPrivateUsage]


_dispatch_modes = torch._C._len_torch_dispatch_stack  # pyright: ignore[reportPrivateUsage]
# Whether there is a mode before autograd: torch asks for this key then. To count the modes takes Python's time.
_early_mode: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_included,  # pyright: ignore[reportPrivateUsage]
    torch._C.DispatchKey.PreDispatch,  # pyright: ignore[reportPrivateUsage]
)
_KEYS = torch._C._TorchDispatchModeKey  # pyright: ignore[reportPrivateUsage]
_TRACERS = (_KEYS.PROXY, _KEYS.FAKE, _KEYS.FUNCTIONAL)


def symbolic(*sizes: float) -> bool:
    """Whether one of them has no fixed value: a dynamic axis of torch.compile, torch.export or make_fx."""
    shapes = loaded("torch.fx.experimental.symbolic_shapes")
    if shapes is None or scripted():
        return False
    return not all(shapes.has_static_value(n) for n in sizes)


def expected(size: int) -> int | None:
    """What a size without a fixed value is in the call for which a graph is made; None where torch does not say."""
    shapes = loaded("torch.fx.experimental.symbolic_shapes")
    if shapes is None or scripted() or not _HAS_HINTS:
        return None
    return shapes.optimization_hint(size, 64)


def fixed(size: int) -> int:
    """A size with a fixed value as a constant; torch.compile may know the value by a guard alone."""
    known = expected(size)
    return size if known is None else known


_HAS_HINTS = torch.__version__ >= "2.13"


# Whether a torch.func transform (vmap, grad, jvp, ...) is under way: torch.autograd.Function asks it in the same way.
functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active  # pyright: ignore[reportPrivateUsage]
# Whether a tensor is a wrapper of torch.func's, which has no memory of its own; also one that outlived its transform.
wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore
# What a wrapper holds whose transform has ended; of every other tensor, the tensor.
unwrapped_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead  # pyright: ignore


def untransformed(tensors: Iterable[object]) -> bool:
    """Whether these are tensors in the CPU's memory and no more: no batch, tangent, transform, class or lazy sign.

    One question to torch a tensor, since small calls feel each of them. False is always right; not asked in graphs.
    """
    if functorch() or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return False
    return all(type(t) is Tensor and _dispatch_keys(t).raw_repr() == _PLAIN for t in tensors)


_dispatch_keys = torch._C._dispatch_keys  # pyright: ignore
_PLAIN = _dispatch_keys(torch.empty(0, dtype=torch.float32, device="cpu")).raw_repr()


def finite(*tensors: Tensor) -> bool:
    """Whether every element is known to be finite. False where Python cannot read them."""
    return not data_unavailable(*tensors) and all(_finite(t.detach()) for t in tensors)


def _finite(t: Tensor) -> bool:
    if not t.is_floating_point() or t.numel() == 0:
        return True
    low, high = torch.aminmax(t)  # both NaN if one element is; no tensor of t's size, as isfinite makes three
    return bool((low - low) + (high - high) == 0)


# Each answers whether somebody watches or changes what torch does, at the price of one call into C++.
GUARDS: tuple[Callable[[], object], ...] = (
    torch._C._are_functorch_transforms_active,  # pyright: ignore[reportPrivateUsage]
    torch._C._is_tracing,  # pyright: ignore[reportPrivateUsage]
    _dispatch_modes,
    _early_mode,
    torch._C._len_torch_function_stack,  # pyright: ignore[reportPrivateUsage]
    torch._C._is_any_autocast_enabled,  # pyright: ignore[reportPrivateUsage]
)


def seen_by_autograd() -> AbstractContextManager[Any]:
    """Autograd records what runs inside, also where an operator runs that it has recorded as one step."""
    core = torch._C  # pyright: ignore[reportPrivateUsage]
    return core._SetExcludeDispatchKeyGuard(core.DispatchKey.AutogradFunctionality, False)  # pyright: ignore[reportPrivateUsage]


@contextmanager
def unwatched() -> Generator[None, None, None]:
    """No mode and no transform that is open sees what runs inside, on tensors that are made inside."""
    core = torch._C  # pyright: ignore[reportPrivateUsage]
    modes = [core._pop_torch_function_stack() for _ in range(core._len_torch_function_stack())]  # pyright: ignore
    try:
        with _disable_current_modes(), core._DisableFuncTorch():  # pyright: ignore
            yield
    finally:
        for mode in reversed(modes):
            core._push_on_torch_function_stack(mode)  # pyright: ignore[reportPrivateUsage]


def unseen_by_hooks() -> AbstractContextManager[Any]:
    """Hides what autograd saves from the caller's hooks, for operations that are part of no call's result.

    A checkpoint counts what its function saves, and refuses another number when it runs the function again.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # pyright: ignore
        return nullcontext()
    return saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(t: Any) -> Any:
    return t
