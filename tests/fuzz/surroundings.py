"""What surrounds a call: torch's state, the calls before it and beside it, how its operands lie, their classes.

None of it may change what the call answers. What regard keeps from an earlier call, makes in the caller's default
dtype, or reads at an address that a tensor does not have, is wrong in one of the surroundings that are drawn here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from threading import Barrier

import torch
from torch import Tensor

from regard.runtime import plan_cache

from .call import Call
from .gradients import Dress, Tensors, bare
from .kept import Kept, draw_kept
from .subclasses import KINDS, Kind
from .tensors import Source
from .variations import decoding, laid_out, with_fewer_tokens, with_other_numbers

Ask = Callable[[Call, Dress], Tensors]  # regard's results of a call, and their gradients

DTYPES = (torch.bfloat16, torch.float16, torch.float64)
GRAD_MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@dataclass(frozen=True)
class Surroundings:
    """What surrounds one call.

    default_dtype, grad_mode, device: torch's state while regard is asked (device: as a context).
    earlier: so many calls of the same structure are made before, with other numbers in their tensors and, where that
    leaves the structure, fewer tokens; outside: in torch's usual state.
    threads: so many ask at once, about the call and the earlier ones.
    kind: the class of the operands that `dressed` names, which are plain tensors in the earlier calls.
    kept: how the keys and values of all calls are kept; None: as plain tensors.
    """

    default_dtype: torch.dtype | None = None
    grad_mode: str | None = None
    device: str | None = None
    earlier: int = 0
    outside: bool = False
    threads: int = 1
    kind: Kind | None = None
    dressed: tuple[str, ...] = ()
    kept: Kept | None = None
    seed: int = 0

    def ask(self, call: Call, ask: Ask) -> Tensors:
        """What regard answers here, as plain tensors; nothing where it refuses what it may refuse.

        Plans of other calls are forgotten first, so that a seed is enough to repeat this. The earlier calls live to the
        end: who reads their memory by mistake finds their numbers there.
        """
        plan_cache.clear()
        s = Source.of(self.seed)
        earlier = [with_other_numbers(call, s) for _ in range(self.earlier)]
        earlier = [with_fewer_tokens(each, s) if s.maybe(0.4) else each for each in earlier]
        if self.kept is not None:
            ask = self._asks_kept(ask, self.kept)
        if self.threads > 1:
            with self._state():
                return self._at_once([call, *earlier], ask)
        learning = _learning if self.grad_mode else bare
        with nullcontext() if self.outside else self._state():
            for each in earlier:
                ask(each, learning)
        with self._state():
            return ask(call, learning) if self.kind is None else self._of_kind(call, ask, self.kind)

    @staticmethod
    def _asks_kept(ask: Ask, kept: Kept) -> Ask:
        return lambda call, dress: ask(call, kept.over(call, dress))

    @contextmanager
    def _state(self) -> Iterator[None]:
        grad_mode = GRAD_MODES[self.grad_mode]() if self.grad_mode else nullcontext()
        before = torch.get_default_dtype()
        with grad_mode, torch.device(self.device) if self.device else nullcontext():
            torch.set_default_dtype(self.default_dtype or before)
            try:
                yield
            finally:
                torch.set_default_dtype(before)

    def _at_once(self, calls: list[Call], ask: Ask) -> Tensors:
        """Each thread asks about one call; what it answers must be, bit by bit, what it answers alone."""
        count, barrier = torch.get_num_threads(), Barrier(self.threads)

        def one(n: int) -> Tensors:
            torch.set_num_threads(count)  # each thread of Python has its own
            barrier.wait(60)
            return ask(calls[n % len(calls)], bare)

        with ThreadPoolExecutor(self.threads) as pool:
            found = list(pool.map(one, range(self.threads)))
        for n, results in enumerate(found):
            for name, alone in ask(calls[n % len(calls)], bare).items():
                same = torch.equal(results[name].nan_to_num(1.5), alone.nan_to_num(1.5))
                assert same, f"{name} of a thread has other bits than the same call alone"
        return found[0]

    def _of_kind(self, call: Call, ask: Ask, kind: Kind) -> Tensors:
        chosen = {id(t) for name, t in call.tensors().items() if name in self.dressed}
        try:
            found = ask(call, lambda t, own: kind.of(own) if id(t) in chosen else own)
            plain = {name: kind.plain(t) for name, t in found.items()}
        except kind.refused as refusal:
            if "error of regard" in str(refusal):
                raise
            return {}
        if any(t is None for name, t in plain.items() if not name.startswith("gradient of ")):
            return {}  # a result without numbers: nothing to compare, and no gradient is that of known cotangents
        return {name: t for name, t in plain.items() if t is not None}

    def __str__(self) -> str:
        told = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        told.pop("seed", None)
        return ", ".join(f"{name} {x}" for name, x in told.items()) or "nothing"


def _learning(t: Tensor, own: Tensor) -> Tensor:
    return own.requires_grad_() if own.is_floating_point() else own


def draw_surroundings(s: Source, call: Call) -> tuple[Surroundings, Call]:
    """Random surroundings of a call, and the call with its operands as these have them."""
    call = decoding(call, s) if s.maybe(0.4) else call
    call = laid_out(call, s) if s.maybe(0.3) else call
    kept, call = draw_kept(s, call) if s.maybe(0.4) else (None, call)
    around = Surroundings(
        default_dtype=s.choice.choice(DTYPES) if s.maybe(0.35) else None,
        earlier=s.choice.choice((0, 1, 1, 2, 3)),
        outside=s.maybe(0.3),
        threads=s.choice.choice((2, 3, 4)) if s.maybe(0.1) else 1,
        kept=kept,
        seed=s.choice.randrange(1 << 40),
    )
    if around.threads > 1:
        return around, call
    if s.maybe(0.1):
        around = replace(around, device=s.choice.choice(("cpu", "meta")))
    if kept is None and s.maybe(0.3):
        around, call = _dressed(around, call, s)
    if s.maybe(0.3):
        around = replace(around, grad_mode=s.choice.choice(list(GRAD_MODES)))
        call = replace(call, needs=())
    return around, call


def _dressed(around: Surroundings, call: Call, s: Source) -> tuple[Surroundings, Call]:
    """Some tensors of the call in another class; those that this class cannot differentiate need no gradients."""
    kind = s.choice.choice(KINDS)
    names = tuple(name for name in call.tensors() if s.maybe(0.03 if name in ("q", "k", "v") else 0.6))
    needs = call.needs if kind.learned else tuple(name for name in call.needs if name not in names)
    around = replace(around, kind=kind, dressed=names, earlier=max(around.earlier, 1)) if names else around
    return around, replace(call, needs=needs)
