"""Kinds: whether a call is self-attention or cross-attention, by what the modules of a model are called with."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, Literal

from torch import nn

from regard.call.hooks import AttentionCall

Kind = Literal["self", "encoder", "cross", "unknown"]

# The parameters by which layers of transformers and diffusers take the sequence that their keys are made from.
_READ = ("key_value_states", "encoder_hidden_states", "cross_attention_states")


class Kinds:
    """The kinds of the calls that a model makes while `open` is; known by arguments and types, never by module names.

    "self"     queries and keys are made from one sequence
    "encoder"  the same, in the encoder of a model whose decoder reads it
    "cross"    keys are made from another sequence than the queries
    "unknown"  the call shows no source of its keys: torch's scaled_dot_product_attention, called directly
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._encoder = {id(part) for module in model.modules() for part in _encoder(module)}
        self._cross = dict[int, bool]()  # by the id of a module: whether it was given another sequence last
        self._keys = dict[int, int]()  # and how many keys it then had: in later calls a cache has them
        self._thread = threading.get_ident()

    @contextmanager
    def open(self) -> Generator[None, None, None]:
        """Hooks on the modules that can be given another sequence; those of torch are none of them."""
        with ExitStack() as hooks:
            for module in self._model.modules():
                forward = inspect.getattr_static(type(module), "forward")
                if not isinstance(forward, FunctionType):  # of a script, which has no such parameter
                    continue
                if places := _places(forward):
                    hook = module.register_forward_pre_hook(self._noting(places), with_kwargs=True)
                    hooks.callback(hook.remove)
            yield

    def of(self, call: AttentionCall, layer: nn.Module) -> Kind:
        """The kind of a call that this layer made."""
        cross = self._cross.get(id(layer)) if call.cross is None else call.cross
        nq, nk = call.q.shape[-2], call.k.shape[-2]
        if cross is False and call.cross is None:
            cross = nq != nk and self._keys.get(id(layer)) == nk
        if cross:
            self._keys[id(layer)] = nk
            return "cross"
        if id(layer) in self._encoder:
            return "encoder"
        return "self" if cross is False or call.q is call.k else "unknown"

    def _noting(self, places: dict[str, int | None]) -> Any:
        def note(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
            if threading.get_ident() == self._thread:
                own = [args[n] for n in places.values() if n is not None and n < len(args)]
                self._cross[id(module)] = any(x is not None for x in (*own, *map(named.get, places)))

        return note


@functools.lru_cache(maxsize=1024)
def _places(forward: FunctionType) -> dict[str, int | None]:
    """The parameters that take another sequence, and which positional argument of a call each is, if it may be one."""
    found: dict[str, int | None] = {}
    for n, (name, one) in enumerate(inspect.signature(forward).parameters.items()):
        if name in _READ:
            found[name] = n - 1 if one.kind == one.POSITIONAL_OR_KEYWORD else None
    return found


def _encoder(model: Any) -> list[nn.Module]:
    """The modules of the encoder that this model's decoder reads, of torch's Transformer and of transformers; without
    those that the decoder has too."""
    if isinstance(model, nn.Transformer):
        encoder, decoder = model.encoder, model.decoder
    else:
        config, find = getattr(model, "config", None), getattr(model, "get_encoder", None)
        if find is None or not getattr(config, "is_encoder_decoder", False):
            return []
        encoder, decoder = find(), getattr(model, "decoder", None)
    if not isinstance(encoder, nn.Module) or encoder is model:
        return []
    shared = set(decoder.modules()) if isinstance(decoder, nn.Module) else set[nn.Module]()
    return [part for part in encoder.modules() if part not in shared]
