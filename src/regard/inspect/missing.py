"""Misses: what was met while nothing was recorded, and the sentence that says why."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from regard.core.shapes import count_of
from regard.inspect.layers import some
from regard.inspect.running import Running


class Misses:
    """The calls that a recording saw and did not keep: of other models, and of layers that `layers` leaves out."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.outside = 0
        self.unwanted = list[str]()

    def explain(self) -> str:
        """Why nothing was recorded, and what to do."""
        model = self.running.model
        kind = type(model).__name__
        if self.unwanted:
            names = some(list(dict.fromkeys(self.unwanted)))
            return f"nothing was recorded: `layers` names none of the layers that were called; they are {names}."
        if not self.running.ran:
            elsewhere = (
                f"; {count_of(self.outside, 'attention call')} {'was' if self.outside == 1 else 'were'} made by others"
                if self.outside
                else ""
            )
            return (
                f"nothing was recorded: no module of {kind} ran in the block, on the thread that opened it{elsewhere}. "
                "Call the model inside the block; what worker threads run (DataParallel) is recorded in them alone."
            )
        return f"nothing was recorded: {kind} ran, but made no attention call that can be seen. {_way_out(model)}"

    def unseen(self, recorded: Iterable[str]) -> tuple[str, ...]:
        """Modules called attention that ran and made no call that can be seen, themselves, in a part or as a part."""
        seen = {*recorded, *self.unwanted}
        kinds = {name: type(module).__name__.lower() for name, module in self.running.model.named_modules() if name}
        ran = [
            name for name, kind in kinds.items() if ("attention" in kind or "attn" in kind) and name in self.running.ran
        ]
        alone = [name for name in ran if not any(_part(name, other) or _part(other, name) for other in seen)]
        return tuple(name for name in alone if not any(_part(other, name) for other in alone if other != name))

    def warn(self, recorded: Iterable[str], unseen: tuple[str, ...]) -> None:
        """Says that a tape is not of the whole model."""
        count = len({*recorded, *self.unwanted})
        kinds = list(dict.fromkeys(type(self.running.model.get_submodule(name)).__name__ for name in unseen))
        warnings.warn(
            f"record saw attention calls of {count_of(count, 'module')}, but not of "
            f"{count_of(len(unseen), 'other')} that ran and {'is' if len(unseen) == 1 else 'are'} called attention "
            f"({some(kinds)}): {some(list(unseen))}. They multiply and normalise by themselves, or call a kernel of "
            "their own; tape.unseen names them.",
            stacklevel=4,
        )


def _part(name: str, of: str) -> bool:
    """Whether a module is another one, or a part of it."""
    return name == of or name.startswith(f"{of}.")


def _way_out(model: nn.Module) -> str:
    """What the model seems to be made of, and which calls would be seen."""
    kinds = list(dict.fromkeys(type(m).__name__ for m in model.modules() if "attention" in type(m).__name__.lower()))
    made = f"Its {some(kinds)} most likely" if kinds else "If it has attention at all, it most likely"
    return (
        f"{made} multiplies and normalises by itself, or calls a kernel of its own (flex_attention, flash-attention). "
        "Seen are torch's scaled_dot_product_attention and MultiheadAttention, regard's layers and functions, and the "
        "transformers models that go through its attention interface; a layer of your own is seen once it calls one."
    )
