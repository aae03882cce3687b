"""Warnings for users of transformers' models, each sentence once in a process."""

from __future__ import annotations

import warnings

import torch

_SAID: set[str] = set()


def warn_once(subject: str, sentence: str) -> None:
    """Warns, but for a second time about the same subject, and not in a graph that is being compiled."""
    if not torch.compiler.is_compiling() and subject not in _SAID:
        _SAID.add(subject)
        warnings.warn(sentence, stacklevel=3)
