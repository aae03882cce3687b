"""Output projections: the modules that add up the heads of attention layers, found by when they are called."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from regard.core.errors import Unsupported
from regard.core.wrong_calls import kind_of
from regard.inspect.record import record
from regard.inspect.tape import Recorded
from regard.nn.heads import plain


@dataclass(frozen=True, eq=False)
class Projection:
    """Adds up the heads of one attention call: (1, n, h · dv) -> Σ_i A_i W_i^O + b, (1, n, d_out).

    call    the attention call
    module  the projection: an nn.Linear, or what stands for one
    """

    call: Recorded
    module: nn.Module

    @property
    def layer(self) -> str:
        """The path of the attention layer in the model."""
        return self.call.name

    @property
    def heads(self) -> int:
        return self.call.q_shape[-3]

    @property
    def weight(self) -> Tensor:
        """W_i^O of each head: (h, dv, d_out). Unsupported for a module that computes more than x W + b (LoRA)."""
        return matrix(self.module, self.layer).unflatten(0, (self.heads, -1))

    def by_head(self, joined: Tensor) -> Tensor:
        """A_i of each head, (h, n, dv), of what the projection is given."""
        return joined.detach().reshape(-1, self.heads, joined.shape[-1] // self.heads).transpose(0, 1)


def matrix(module: nn.Module, layer: str) -> Tensor:
    """W (d_in, d_out) of a module that computes x W + b; Unsupported, naming its layer, for one that computes more."""
    weight: Any = module.weight
    if plain(module):
        weight = weight.T
    elif type(module).__name__ != "Conv1D":  # GPT-2's, whose weight is (in, out)
        raise Unsupported(
            f"{layer} is projected by {kind_of(module)}, whose forward is its own; merge it into an nn.Linear first."
        )
    return weight.detach()


def find_projections(model: nn.Module, run: Callable[[], object]) -> tuple[Projection, ...]:
    """The projection behind each attention call that `run` makes, in the order of the calls.

    It is the first module with a matrix that is called after the attention call, inside the attention layer or a module
    around it that is called attention too (BERT's "attention.output.dense" beside "attention.self"). Raises Unsupported
    where there is none: a layer that projects without calling a module, such as torch's nn.MultiheadAttention.
    """
    names = {id(module): path for path, module in model.named_modules()}
    found: list[Projection] = []
    waiting: list[Recorded] = []

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if len(tape) > len(found) + len(waiting):
            waiting.append(tape.calls[-1])
        if waiting and _adds_up(module, inputs, waiting[0]) and inside(names.get(id(module)), waiting[0].name):
            found.append(Projection(waiting.pop(), module))

    with record(model, facts=()) as tape:
        hook = register_module_forward_pre_hook(before)
        try:
            run()
        finally:
            hook.remove()
    if len(found) < len(tape):
        missing = tape.calls[len(found)]
        raise Unsupported(
            f"no projection was seen behind {missing.name}, a {missing.layer}: it adds up its heads without calling a "
            "module. Of torch's nn.MultiheadAttention, regard.nn.MultiHeadAttention.from_torch makes a layer that does."
        )
    return tuple(found)


def _adds_up(module: nn.Module, inputs: tuple[Any, ...], call: Recorded) -> bool:
    weight, given = getattr(module, "weight", None), inputs[0] if inputs else None
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(given, Tensor) or len(call.q_shape) < 3:
        return False
    heads, queries = call.q_shape[-3:-1]
    return given.shape[-1] in weight.shape and given.shape[-1] % heads == 0 and given[..., 0].numel() == queries


def inside(path: str | None, layer: str) -> bool:
    """Whether a module stands in an attention layer, or in one around it that is called attention too."""
    parts = layer.split(".")
    while len(parts) > 1 and "att" in parts[-2].lower():
        parts.pop()
    return path is not None and path.startswith(".".join(parts) + ".")


@contextmanager
def at_projections(
    projections: tuple[Projection, ...],
    change: Callable[[Projection, Tensor], Tensor] = lambda projection, given: given,
    seen: Callable[[Projection, Tensor, Tensor], None] = lambda projection, given, made: None,
) -> Generator[None, None, None]:
    """While the model runs once: each projection gets what `change` makes of its input; `seen` sees it and its output.

    The calls are those of `find_projections`, in the same order: a module may stand for several layers, as ALBERT's.
    """
    modules = dict.fromkeys(projection.module for projection in projections)
    order, current = iter(projections), projections[0]

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal current
        current = next(order)
        return change(current, inputs[0]), *inputs[1:]

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen(current, inputs[0], output)

    hooks = [module.register_forward_pre_hook(before) for module in modules]
    hooks += [module.register_forward_hook(after) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
