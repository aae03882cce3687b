"""A model reads a text once, and what its attention did is reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from regard.core.arrays import of_numbers
from regard.core.shapes import count_of
from regard.core.wrong_calls import kind_of
from regard.inspect.embeddings import checked_embeddings, unknown_token
from regard.inspect.facts.algebra import Fact
from regard.inspect.model_inputs import TextInputs, of_mapping, of_pair, takes
from regard.inspect.record import record
from regard.inspect.report.report import Report
from regard.inspect.tape import Tape

Progress = Callable[[int], None]


class Tokenizer(Protocol):
    """The methods of a tokenizer that are used; those of transformers have them."""

    def __call__(self, text: str) -> Any:
        """A mapping with the tokens' numbers as "input_ids"."""
        ...

    def convert_ids_to_tokens(self, ids: list[int]) -> Sequence[str]: ...

    def decode(self, token_ids: list[int]) -> str: ...


def model_report(
    model: nn.Module,
    given: Any,
    pair: str | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    title: str | None = None,
    context: int = 2,
    facts: tuple[Fact[Any], ...] | None = None,
    progress: Progress = lambda calls: None,
) -> Report:
    """A report on a model that reads a text once: of transformers, or any that takes token ids (1, n).

    The model runs in eval mode, without gradients, and is left as it was. One with a decoder that reads an encoder gets
    the text on both sides, the decoder's behind its start token.

    given     a text; or its token ids, a list of integers or an integer tensor (n,) or (1, n), special ones included;
              or what a tokenizer returned for one text: a BatchEncoding, or a mapping with input_ids
    pair      a second text, read with the first as the tokenizer joins them, with its token types
    tokenizer needed for a text; of ids it gives the names (default: `model.tokenizer`, where the model has one)
    title     what the report is called (default: the name that the model was loaded under, or its class)
    context   how many tokens have to repeat for an earlier copy to count (induction)
    facts     what is recorded of each call (default: Report.FACTS and, for Report.row and the weights in .npz,
              facts.Inputs() where the text has 2,048 tokens or fewer)
    progress  is called with the number of attention calls that were looked at so far

    Raises ValueError for a blank text, one of more tokens than the model has positions, a tokenizer that is not the
    model's, and a model that reads no text; TypeError without a text or a tokenizer; LookupError where no attention
    call was seen, which says why.
    """
    tokenizer, title = tokenizer_for(model, tokenizer), title or model_name(model)
    model = text_part(model)
    read = read_inputs(model, given, tokenizer, pair)
    ids = read.arguments["input_ids"]
    inputs, tokens = _feed(model, read.arguments)
    facts = Report.facts_of_text(max(len(ids), len(tokens))) if facts is None else facts
    tensors = {name: torch.tensor([each], dtype=torch.int64, device="cpu") for name, each in inputs.items()}
    start = time.perf_counter()
    with checked_embeddings(model, ids):
        if takes_input_ids(model):
            tape = observed(model, facts, progress, **tensors)
        else:
            tape = observed(model, facts, progress, *tensors.values())
    return Report.of(
        tape.calls,
        title=title,
        model=type(model).__name__,
        tokens=texts(tokenizer, tokens),
        key_tokens=texts(tokenizer, ids),
        seconds=time.perf_counter() - start,
        context=context,
        second_text=read.second if tokens is ids else 0,
    )


def text_part(model: nn.Module) -> nn.Module:
    """The part of a model of images and texts that reads texts (CLIP and its like); any other model as it is."""
    text = getattr(model, "text_model", None)
    return text if isinstance(text, nn.Module) and hasattr(model, "vision_model") else model


def takes_input_ids(model: nn.Module) -> bool:
    """Whether the model takes token ids by this name, as those of transformers do; if not, as its first argument."""
    return takes(model, "input_ids")


def tokenizer_for(model: nn.Module, given: Tokenizer | None) -> Tokenizer | None:
    """The tokenizer that is given, else the model's own, where it has one (a SentenceTransformer, the byte model)."""
    return getattr(model, "tokenizer", None) if given is None else given


def observed(
    model: nn.Module, facts: tuple[Fact[Any], ...], progress: Progress, *args: Tensor, **named: Tensor
) -> Tape:
    """The calls of attention that a model makes on these inputs, moved to its device; in eval mode, no gradients."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with evaluating(model), torch.no_grad(), record(model, facts) as tape, _telling(tape, progress):
        model(*(t.to(device) for t in args), **{name: t.to(device) for name, t in named.items()})
    return tape


def _feed(model: nn.Module, read: dict[str, list[int]]) -> tuple[dict[str, list[int]], list[int]]:
    """What the model is given, and the tokens that ask: a decoder's, where it reads an encoder."""
    config, ids = getattr(model, "config", None), read["input_ids"]
    if not getattr(config, "is_encoder_decoder", False):
        return read, ids
    asking = read.get("decoder_input_ids", [_start(config), *ids])
    limit = positions(model)
    if limit is not None and len(asking) > limit:
        raise ValueError(
            f"the text has {count_of(len(ids), 'token', ',')}, {len(asking):,} with the decoder's start token; "
            f"{type(model).__name__} has positions for {limit:,}. Shorten the text by a token."
        )
    return {**read, "decoder_input_ids": asking}, asking


def is_ids(given: Any) -> bool:
    """Whether these are the token ids of one text: a list of integers, or an integer tensor (n,) or (1, n)."""
    if isinstance(given, Tensor):
        whole = not (given.dtype.is_floating_point or given.dtype.is_complex or given.dtype == torch.bool)
        return whole and (given.dim() == 1 or (given.dim() == 2 and len(given) == 1))
    return isinstance(given, (list, tuple)) and bool(given) and all(isinstance(one, int) for one in given)


def read_inputs(model: nn.Module, given: Any, tokenizer: Tokenizer | None, pair: str | None = None) -> TextInputs:
    """What the model is to read of one text."""
    if pair is not None:
        found = of_pair(model, tokenizer, given, pair)
    elif isinstance(given, Mapping):
        found = of_mapping(model, cast("Mapping[str, Any]", given))
    else:
        found = TextInputs({"input_ids": _ids(model, given, tokenizer)})
    reads = getattr(model, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise ValueError(f"{type(model).__name__} reads {reads}, not text; run it under rg.record, then Report.of.")
    _check_ids(found.arguments["input_ids"], model)
    return found


def _ids(model: nn.Module, given: Any, tokenizer: Tokenizer | None) -> list[int]:
    name = type(model).__name__
    if isinstance(given, (list, tuple)) and not given:
        return []
    if isinstance(given, bytes):
        raise TypeError(
            f"{name} reads a text, not bytes; write given.decode(), or list(given) where its tokens are bytes."
        )
    if is_ids(given):
        return of_numbers(given, torch.int64).flatten().tolist()
    if not isinstance(given, str):
        raise TypeError(
            f"{kind_of(given)} came for {name}; expected a text, with tokenizer=..., or its token ids. look "
            "also takes an image, and the input of a layer of regard.nn: look(layer, x). record sees any module on any "
            "input: with rg.record(model, facts) as tape: model(x)."
        )
    if tokenizer is None:
        raise TypeError(
            f"a text for {name} needs the model's tokenizer: tokenizer=...; or pass the token ids in place of the text."
        )
    return [int(one) for one in tokenizer(given)["input_ids"]] if given.strip() else []


def _check_ids(ids: list[int], model: nn.Module) -> None:
    if not ids:
        raise ValueError("the text is blank; expected something to read.")
    limit, known = positions(model), _vocabulary(model)
    if known is not None and max(ids) >= known:
        raise ValueError(unknown_token(model, max(ids), known))
    if min(ids) < 0:
        raise ValueError(f"the token ids hold {min(ids)}; expected numbers from 0 on.")
    if limit is not None and len(ids) > limit:
        raise ValueError(
            f"the text has {count_of(len(ids), 'token', ',')}; {type(model).__name__} has positions for {limit:,}. "
            "Shorten the text, or look at its parts one by one."
        )


def positions(model: nn.Module) -> int | None:
    """How many tokens a model of transformers can place, None where its configuration names no limit."""
    config = getattr(model, "config", None)
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    limits = [limit for name in names if isinstance(limit := getattr(config, name, None), int) and limit > 0]
    # Where the table of positions has a place for padding, the tokens' begin behind it (RoBERTa).
    tables = [
        module.num_embeddings - module.padding_idx - 1
        for path, module in model.named_modules()
        if path.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None
    ]
    return min((*limits, *tables), default=None)


def _vocabulary(model: nn.Module) -> int | None:
    """How many tokens a model of transformers embeds, None where that is not known."""
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    return embed.num_embeddings if isinstance(embed, nn.Embedding) else None


def _start(config: Any) -> int:
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:
        raise ValueError(f"{type(config).__name__} names no decoder_start_token_id, which the decoder begins with.")
    return int(start)


def model_name(model: nn.Module) -> str:
    """The last part of the name that a model was loaded under, or its class."""
    path = str(getattr(model, "name_or_path", "")).rstrip("/\\")
    return path.replace("\\", "/").rsplit("/", 1)[-1] or type(model).__name__


def texts(tokenizer: Tokenizer | None, ids: list[int]) -> list[str]:
    """Each token as a reader knows it; where its bytes are a part of a character, as the tokenizer calls it.

    Without a tokenizer: its number.
    """
    if tokenizer is None:
        return [str(one) for one in ids]
    found: list[str] = []
    for one, name in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True):
        text = tokenizer.decode([one])
        if not text or "\ufffd" in text:
            text = name
        # SentencePiece's decoders drop the space in front of a text, and so of each single token.
        found.append(f" {text}" if name.startswith("\u2581") and not text.startswith((" ", "\u2581")) else text)
    return found


@contextmanager
def evaluating(model: nn.Module) -> Generator[None, None, None]:
    """The model in eval mode, each of its modules as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _telling(tape: Tape, progress: Progress) -> Generator[None, None, None]:
    """Tells how many calls the tape has, after each module that has run."""
    reported = 0

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal reported
        if len(tape) > reported:
            reported = len(tape)
            progress(reported)

    hook = register_module_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()
