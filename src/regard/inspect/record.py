"""record: facts of every attention call that a model makes while it runs, its outputs untouched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from regard.call.hooks import AttentionCall, observing
from regard.core.errors import Unsupported
from regard.core.tracing import data_unavailable, functorch, loaded
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.inspect.capture.interface import watching_interface
from regard.inspect.capture.mode import watching
from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.keys import Received
from regard.inspect.facts.pooled import Map
from regard.inspect.facts.rows import Entropy, MaxScore
from regard.inspect.kinds import Kinds
from regard.inspect.layers import Layers, chosen
from regard.inspect.look_tensors import check_facts
from regard.inspect.missing import Misses
from regard.inspect.running import Running
from regard.inspect.tape import Tape

COMPILED = 'record a compiled model under torch.compiler.set_stance("force_eager"): its graphs hold nothing to be seen'

WAY = "with rg.record(model) as tape: model(x), and the tape has them."

OVERVIEW: tuple[Fact[Any], ...] = (Entropy(), MaxScore(), Received(), Map())


@answers_wrong_calls({"model_name": "pass the model itself"})
def record(model: nn.Module, facts: tuple[Fact[Any], ...] = OVERVIEW, *, layers: Layers = "*") -> Recording:
    """Records every attention call that `model` makes on this thread inside the `with` block; yields the Tape.

    It records the calls of regard's own layers and functions, of torch's scaled_dot_product_attention,
    nn.MultiheadAttention and nn.TransformerEncoder (also on its fused path), and of the models of transformers with
    "sdpa", "eager" and "regard", and others where they are given a mask (batch, heads, nq, nk). The outputs stay bit
    for bit the same. Facts are computed at once, without gradients. Memory: the facts, one copy of each mask that
    differs from the ones before, and with Inputs() the queries and keys. Calls that are recomputed in a backward pass
    (checkpointing) are not recorded again.

    facts   the facts of each call: see regard.look
    layers  which: a pattern over module paths ("encoder.*.self_attn", * for any characters), several of them, or a
            function of the path

    If other modules named attention ran and made no call that regard can record, a UserWarning at the end of the block
    says how many and which, and tape.unseen has their names.

    Raises ValueError if `layers` matches no module, LookupError, with the reason, if nothing was recorded; Unsupported
    for compiled models, for calls under torch.func transforms, on tensors without values (meta) and nested ones, and
    for masks of other implementations (flex_attention's BlockMask) and paged caches.

    >>> import regard as rg
    >>> model = nn.Sequential(rg.nn.MultiHeadAttention(8, heads=2), nn.Linear(8, 8))
    >>> with record(model) as tape:
    ...     _ = model(torch.randn(1, 5, 8))
    >>> tape.calls
    (Recorded(0, call 0, MultiHeadAttention, q (1, 2, 5, 4), k (1, 2, 5, 4)),)
    >>> tape["0"][0][Entropy()].shape
    torch.Size([1, 2, 5])
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"record has {kind_of(model)}; expected the model, an nn.Module: with rg.record(model) as tape: "
            "model(x). Of a pipeline of transformers that is pipeline.model."
        )
    check_facts(facts)
    return Recording(partial(_recorded, model, tuple(facts), layers))


class Recording(AbstractContextManager[Tape]):
    """What a `with` block begins and ends, each with a tape of its own. Outside of one it has no calls."""

    def __init__(self, begin: Callable[[], AbstractContextManager[Tape]]) -> None:
        self._begin = begin
        self._open = list[AbstractContextManager[Tape]]()  # blocks, of which one may stand inside another

    def __enter__(self) -> Tape:
        block = self._begin()
        tape = block.__enter__()
        self._open.append(block)
        return tape

    def __exit__(self, *error: Any) -> bool | None:
        return self._open.pop().__exit__(*error)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a recording has no {name!r} before it is run: {WAY}")

    def __getitem__(self, layer: Any) -> NoReturn:
        raise TypeError(f"a recording has no calls before it is run: {WAY}")


@contextmanager
def _recorded(model: nn.Module, facts: tuple[Fact[Any], ...], layers: Layers) -> Generator[Tape, None, None]:
    _refuse_compiled(model)
    running, kinds = Running(model), Kinds(model)
    wanted = chosen(layers, running.names.values())
    tape, misses = Tape(facts), Misses(running)
    listener = _Listener(running, kinds, wanted, tape, misses)
    with running.open(), kinds.open(), observing(listener.notified), watching_interface(), watching(listener.seen):
        yield tape
    if not len(tape):
        raise LookupError(misses.explain())
    tape.unseen = misses.unseen(tape.names)
    if tape.unseen:
        misses.warn(tape.names, tape.unseen)


class _Listener:
    """Brings the calls of one model, by whichever way they are known, onto its tape, each once."""

    def __init__(
        self, running: Running, kinds: Kinds, wanted: Callable[[str], bool], tape: Tape, misses: Misses
    ) -> None:
        self.running, self.kinds, self.wanted, self.tape, self.misses = running, kinds, wanted, tape, misses
        self._notified: tuple[weakref.ref[Tensor], ...] = ()  # queries and keys: held, they could not be freed

    def notified(self, call: AttentionCall) -> None:
        """From a layer that names itself, before it calls regard.attention."""
        self._notified = weakref.ref(call.q), weakref.ref(call.k)
        self._keep(call)

    def seen(self, call: AttentionCall) -> None:
        """From the mode, which also sees the call that it was notified of."""
        noted, self._notified = self._notified, ()
        if not noted or any(t() is not mine for t, mine in zip(noted, (call.q, call.k), strict=True)):
            self._keep(call)

    def _keep(self, call: AttentionCall) -> None:
        if _in_backward():
            return
        layer = call.layer if self.running.name(call.layer) else self.running.innermost()
        if layer is None:
            self.misses.outside += 1
            return
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer = layer.self_attn  # its fused kernel is called for it
        name = self.running.name(layer)
        assert name is not None
        if not self.wanted(name):
            self.misses.unwanted.append(name)
            return
        _check(name, call)
        kind = self.kinds.of(call, layer)
        if kind == "cross" and call.mask_if_cross is not None:
            call = replace(call, mask=call.mask_if_cross)
        # The facts are of no interest to other modes, to autograd, or to inference mode.
        with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():  # pyright: ignore
            self.tape.add(name, type(layer).__name__, call, kind)


def _in_backward() -> bool:
    """Whether autograd runs: a call then is one that a checkpoint makes again."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore


def _check(name: str, call: AttentionCall) -> None:
    reason = None
    if functorch():
        reason = "a torch.func transform (vmap, grad, jvp) is under way; record the plain call"
    elif torch.compiler.is_compiling():
        reason = COMPILED
    elif torch._C._get_tracing_state() is not None or data_unavailable(call.q, call.k):  # pyright: ignore
        reason = f"its tensors have no values of their own (meta, fake, traced); use real ones; {COMPILED}"
    elif call.q.is_nested:
        reason = "its sequences are nested tensors; pad them, and mask the padding"
    if reason is not None:
        raise Unsupported(f"record cannot look at {name}: {reason}.")


def _refuse_compiled(model: nn.Module) -> None:
    """Before anything is watched: a compiler that meets a mode would trace it, and fail in words of its own."""
    compiler = loaded("torch._dynamo.eval_frame")
    if compiler is None or compiler._stance.stance == "force_eager":
        return
    for path, module in model.named_modules():
        if isinstance(module, compiler.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise Unsupported(f"record cannot look at {path or type(model).__name__}: {COMPILED}.")
