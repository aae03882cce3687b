"""Token ids that a model cannot read are refused: where an embedding has no such row, or where there is none."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def checked_embeddings(model: nn.Module, ids: Sequence[int] = ()) -> Generator[None, None, None]:
    """Raises ValueError where an embedding of the model is asked for a row that it does not have.

    Without it torch raises "index out of range in self", and a GPU stops at an assertion. `ids` are the token ids of
    the text: an embedding that reads these is the one of the tokens, any other one is named by its path. A model that
    fails on them and has no embedding raises TypeError, which says what it answered.
    """
    paths = {id(module): path for path, module in model.named_modules() if isinstance(module, nn.Embedding)}

    def check(module: nn.Module, given: Any) -> None:
        # A subclass with a forward of its own adds an offset, or reads something else than rows.
        if id(module) not in paths or type(module).forward is not nn.Embedding.forward:
            return
        assert isinstance(module, nn.Embedding)
        read, rows = given[0] if given else None, module.num_embeddings
        if not isinstance(read, Tensor) or read.numel() == 0 or torch.compiler.is_compiling():
            return
        largest = int(read.max())
        if largest < rows:
            return
        if read.flatten().tolist() == list(ids):
            raise ValueError(unknown_token(model, largest, rows))
        raise ValueError(
            f"{paths[id(module)]} of {type(model).__name__} has {rows:,} rows, and is asked for row {largest:,}. "
            "Shorten the text if these are positions."
        )

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    except RuntimeError as error:
        if not ids or paths:
            raise
        raise TypeError(
            f"{type(model).__name__} has no nn.Embedding and cannot read token ids ({error}); expected a model that "
            "reads a text. record sees any module on its own input: with rg.record(model, facts) as tape: model(x)."
        ) from error
    finally:
        hook.remove()


def unknown_token(model: nn.Module, token: int, known: int) -> str:
    """The sentence for a token id that the model has no embedding for."""
    return (
        f"the text holds token {token:,}; {type(model).__name__} knows {known:,}. Pass the tokenizer that belongs to "
        "the model, or other ids."
    )
