"""Layers of regard in ONNX models: torch.onnx.export, with attention as the standard operator."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from regard.backends.onnx import OnnxAttention
from regard.inspect.capture.replaced import replaced
from regard.nn.heads import Heads


def export(model: nn.Module, args: tuple[Any, ...], *, opset_version: int = 23, **options: Any) -> Any:
    """torch.onnx.export(model, args, dynamo=True, ...) with each attention layer of rg.nn as one node Attention.

    Runs in any ONNX runtime that has opset 23, without regard. args and options are those of torch.onnx.export; a mask
    that changes from call to call is a tensor argument of the model's forward, which makes a Dense or Lengths from it.
    A query that sees nothing gives 0 in ONNX's definition; runtimes differ.
    Raises torch.onnx's error, with the reason of Unsupported, for what the operator does not have: sinks, dropout in
    training mode, learned similarities, a soft cap with a mask, values of another width than keys.
    Source: torch.onnx, torch 2.13; the operator Attention, onnx 1.23.

    >>> layer = rg.nn.MultiHeadAttention(16, heads=2).eval()
    >>> program = export(layer, (torch.randn(2, 5, 16),), verbose=False)
    >>> [node.op_type for node in program.model.graph].count("Attention")
    1
    """
    with ExitStack() as undo:
        for layer in model.modules():
            if isinstance(layer, Heads):
                undo.enter_context(replaced(layer, "backend", lambda _: OnnxAttention()))
        return torch.onnx.export(model, args, dynamo=True, opset_version=opset_version, **options)
