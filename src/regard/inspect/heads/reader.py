"""A model that reads token ids, for measurements of its heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.errors import Unsupported
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.inspect.embeddings import checked_embeddings
from regard.inspect.reading import Tokenizer, evaluating, is_ids, read_inputs, takes_input_ids, text_part, tokenizer_for
from regard.inspect.tape import Recorded

answers_head_calls = answers_wrong_calls(
    {
        **dict.fromkeys(
            ("text", "prompt", "input_ids", "ids", "tokens"), "pass the text or its ids second, by position"
        ),
        **dict.fromkeys(("layer", "layers", "head", "heads"), "all heads of the model are answered at once"),
        **dict.fromkeys(("position", "index"), "write at=, a position of the text"),
        **dict.fromkeys(("n", "num_tokens", "seq_len"), "write length=, the number of random tokens"),
    }
)


def check_model(model: nn.Module) -> None:
    """TypeError for what is no model."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"model is {kind_of(model)}; expected an nn.Module that reads token ids.")


@dataclass(frozen=True, eq=False)
class Reader:
    """A model and one text, on the model's device. It runs in eval mode and is left as it was.

    ids     (n,)
    others  what else the model reads (token types, a mask), by the names of its arguments, (n,) each
    """

    model: nn.Module
    ids: Tensor
    others: Mapping[str, Tensor]

    @staticmethod
    def of(model: nn.Module, given: Any, tokenizer: Tokenizer | None, most: int | None = None) -> Reader:
        """The first `most` tokens of a text, or of its ids. Errors as look's; Unsupported for encoder and decoder."""
        check_model(model)
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise Unsupported(
                f"{type(model).__name__} has an encoder and a decoder; expected a model with one of them: pass "
                "model.get_encoder() for the encoder's heads."
            )
        if isinstance(given, (list, tuple)) and given and not is_ids(given):
            raise TypeError(f"heads are measured on one text, or its token ids (n,), not on a list of {len(given)}.")
        tokenizer, model = tokenizer_for(model, tokenizer), text_part(model)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        read = read_inputs(model, given, tokenizer).arguments
        rows = {name: torch.tensor(row[:most], device=device, dtype=torch.int64) for name, row in read.items()}
        return Reader(model, rows.pop("input_ids"), rows)

    @torch.no_grad()
    def run(self) -> Any:
        """What the model answers to the ids, as one sequence (1, n)."""
        with evaluating(self.model), checked_embeddings(self.model, self.ids.tolist()):
            others = {name: row[None] for name, row in self.others.items()}
            if takes_input_ids(self.model):
                return self.model(input_ids=self.ids[None], **others)
            return self.model(self.ids[None], **others)

    def logits(self, answer: Any) -> Tensor | None:
        """The logits (n, vocabulary) of an answer; None where the model gives none."""
        found = getattr(answer, "logits", answer)
        fits = isinstance(found, Tensor) and found.dim() == 3 and found.shape[:2] == (1, len(self.ids))
        return found[0] if fits else None


def check_number(value: Any, name: str) -> None:
    """TypeError, naming the argument, for what is neither an integer nor None."""
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{name} is {kind_of(value)}; expected an integer, or None.")


def check_causal(model: nn.Module, calls: Iterable[Recorded], why: str) -> None:
    """Raises Unsupported if a query of the model sees later tokens; `why` says why that matters."""
    for call in calls:
        counts = call.view.counts()
        if bool((counts > torch.arange(1, counts.shape[-1] + 1, device=counts.device, dtype=torch.int64)).any()):
            raise Unsupported(f"{type(model).__name__} is not causal: {call.name} sees later tokens, {why}.")
