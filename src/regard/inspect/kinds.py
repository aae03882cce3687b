"""Kinds: whether a call is self-attention or cross-attention, by what the modules of a model are called with."""

from __future__ import annotations

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
        self._thread = threading.get_ident()

    @contextmanager
    def open(self) -> Generator[None, None, None]:
        """Hooks on the modules that can be given another sequence; those of torch are none of them."""
        with ExitStack() as hooks:
            for module in self._model.modules():
                forward = inspect.getattr_static(type(module), "forward")
                if not isinstance(forward, FunctionType):  # of a script, which has no such parameter
                    continue
                signature = inspect.signature(forward)
                if any(name in signature.parameters for name in _READ):
                    hook = module.register_forward_pre_hook(self._noting(signature), with_kwargs=True)
                    hooks.callback(hook.remove)
            yield

    def of(self, call: AttentionCall, layer: nn.Module) -> Kind:
        """The kind of a call that this layer made."""
        cross = self._cross.get(id(layer)) if call.cross is None else call.cross
        if cross:
            return "cross"
        if id(layer) in self._encoder:
            return "encoder"
        return "self" if cross is False or call.q is call.k else "unknown"

    def _noting(self, signature: inspect.Signature) -> Any:
        def note(module: nn.Module, args: Any, named: dict[str, Any]) -> None:
            if threading.get_ident() == self._thread:
                given = signature.bind_partial(module, *args, **named).arguments
                self._cross[id(module)] = any(given.get(name) is not None for name in _READ)

        return note


def _encoder(model: Any) -> list[nn.Module]:
    """The modules of the encoder that this model's decoder reads: of torch's Transformer, and of transformers."""
    if isinstance(model, nn.Transformer):
        return list(model.encoder.modules())
    config, find = getattr(model, "config", None), getattr(model, "get_encoder", None)
    if find is None or not getattr(config, "is_encoder_decoder", False):
        return []
    encoder = find()
    return [] if encoder is model else list(encoder.modules())
