"""look on a model, by what it is and what it reads: one text or several, token ids, an image."""

from __future__ import annotations

import time
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.arrays import of_numbers
from regard.core.shapes import listed
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.inspect.facts.algebra import Fact
from regard.inspect.reading import Progress, Tokenizer, is_ids, model_name, model_report, observed, tokenizer_for
from regard.inspect.report.picture import CLS, Picture
from regard.inspect.report.report import Report
from regard.inspect.report.texts import TextReports
from regard.inspect.tape import Tape


class Pipeline(ABC):  # noqa: B024
    """A pipeline of transformers, known by its class's name: transformers need not be installed."""

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        return any(c.__module__.startswith("transformers.pipelines") and c.__name__ == "Pipeline" for c in kind.__mro__)


def of_pipeline(pipeline: Any, given: Any, pair: str | None = None, **options: Any) -> Report | TextReports:
    """`of_model` on the pipeline's model, with its tokenizer and its processor of images."""
    options.setdefault("tokenizer", pipeline.tokenizer)
    options.setdefault("processor", getattr(pipeline, "image_processor", None))
    return of_model(pipeline.model, given, pair, **options)


@answers_wrong_calls(
    {
        **dict.fromkeys(("input_ids", "ids", "inputs"), "pass the ids by position: look(model, ids)"),
        **dict.fromkeys(
            ("text", "texts", "sentence", "prompt"), "pass the text by position: look(model, text, tokenizer=...)"
        ),
        **dict.fromkeys(
            ("sentence_a", "sentence_b", "text_pair"), "pass both by position: look(model, a, b, tokenizer=...)"
        ),
        "tokens": "pass tokenizer=, which names them; of a recording: Report.of(tape.calls, tokens=...)",
        **dict.fromkeys(("image", "pixel_values"), "pass it by position: look(model, image, processor=...)"),
        **dict.fromkeys(("layer", "head", "heads"), "the report has all heads: look(...).save('a.html', head='L3H1')"),
        "mask": "a model makes its own mask",
        "device": "models run where they are loaded",
    },
    callee="look",
)
def of_model(
    model: nn.Module,
    given: Any,
    pair: str | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    processor: Callable[..., Any] | None = None,
    title: str | None = None,
    context: int = 2,
    facts: tuple[Fact[Any], ...] | None = None,
    progress: Progress = lambda calls: None,
) -> Report | TextReports:
    """A report on a model that reads what is given, or one a text where several are given.

    model      of transformers, or any that takes token ids (1, n), or pixels (1, channels, height, width), as
               its first argument; a SentenceTransformer brings its tokenizer, and so does one with `model.tokenizer`
    given      a text; token ids (n,); an image: pixels (channels, height, width), or (1, ...), or whatever the
               processor takes; a list of texts or of ids, or ids (b, n), which are read one after the other, unpadded;
               what a tokenizer returned for one text (a BatchEncoding, a mapping with input_ids), or a list of these
    pair       a second text: look(model, "a", "b", tokenizer=...) reads both as the tokenizer joins them
    processor  makes an image pixels, as those of transformers do
    The rest as regard.inspect.reading.model_report, errors too; TypeError for an image without a processor.
    """
    named: dict[str, Any] = {"title": title, "context": context, "facts": facts, "progress": progress}
    if any(kind.__name__ == "SentenceTransformer" for kind in type(model).__mro__):
        tokenizer = tokenizer_for(model, tokenizer)
        model = next(part for part in model.modules() if hasattr(part, "get_input_embeddings"))
    if pair is not None:
        return model_report(model, given, pair, tokenizer=tokenizer, **named)
    if _is_image(given):
        return _image_report(model, given, processor, **named)
    if _is_batch(given):
        return TextReports(tuple(_reports(partial(model_report, model, tokenizer=tokenizer, **named), given)))
    return model_report(model, given, tokenizer=tokenizer, **named)


def _reports(read: Callable[[Any], Report], given: Sequence[Any]) -> Iterator[Report]:
    """A report of each text; an error says of which."""
    for n, one in enumerate(given, 1):
        try:
            yield read(one)
        except ValueError as error:
            raise ValueError(f"text {n} of {len(given)}: {error}") from error


def _is_batch(given: Any) -> bool:
    if isinstance(given, Tensor):
        return given.dim() == 2 and len(given) > 1 and is_ids(given[0])
    several = isinstance(given, (list, tuple)) and bool(given)
    return several and all(isinstance(one, (str, Mapping)) or is_ids(one) for one in given)


def _is_image(given: Any) -> bool:
    """Pixels as a tensor of three or four axes, or as an array of height, width and colours; or an image of PIL."""
    if isinstance(given, Tensor):
        return given.dim() in (3, 4) and given.is_floating_point() and given.shape[-3] in (1, 3)
    of_pil = any(kind.__module__ == "PIL.Image" for kind in type(given).__mro__)
    return of_pil or (hasattr(given, "dtype") and getattr(given, "ndim", 0) == 3 and given.shape[-1] in (1, 3, 4))


def _image_report(
    model: nn.Module,
    image: Any,
    processor: Callable[..., Any] | None,
    title: str | None,
    context: int,
    facts: tuple[Fact[Any], ...] | None,
    progress: Progress,
) -> Report:
    model = getattr(model, "vision_model", model)  # of CLIP and its like, which read texts too
    pixels = _pixels(model, image, processor)
    by_name = getattr(model, "main_input_name", None) == "pixel_values"
    start = time.perf_counter()
    inputs, named = ((), {"pixel_values": pixels}) if by_name else ((pixels,), {})
    try:
        tape = observed(model, Report.FACTS if facts is None else facts, progress, *inputs, **named)
    except (AssertionError, RuntimeError, ValueError) as error:
        if not isinstance(image, Tensor) or image.dim() == 4 or len(image) > 1:
            raise
        raise ValueError(
            f"a tensor of shape {listed(image.shape)} came for an image of one channel, (1, height, width), and "
            f"{type(model).__name__} raised {type(error).__name__} ({error}). An input that is no image goes to "
            "record: with rg.record(model, rg.Report.FACTS) as tape: model(x), then rg.Report.of(tape.calls, "
            "title=..., model=...)."
        ) from error
    picture = _picture(model, pixels, tape)
    return Report.of(
        tape.calls,
        title=title or model_name(model),
        model=type(model).__name__,
        tokens=_patch_names(picture) if picture is not None else (),
        seconds=time.perf_counter() - start,
        context=context,
        picture=picture,
    )


def _pixels(model: nn.Module, image: Any, processor: Callable[..., Any] | None) -> Tensor:
    """(1, channels, height, width)."""
    if isinstance(image, Tensor):
        if image.dim() == 4 and len(image) != 1:
            raise ValueError(f"look has {len(image)} images; expected one, (channels, height, width) or (1, ...).")
        return image.reshape(-1, *image.shape[-3:])
    if processor is None:
        raise TypeError(
            f"look has an image, {kind_of(image)}, and no processor; pass the one of {type(model).__name__}: "
            "look(model, image, processor=AutoImageProcessor.from_pretrained(...)), or the pixels as a tensor, "
            "(channels, height, width)."
        )
    return of_numbers(processor(images=image, return_tensors="pt")["pixel_values"], torch.float32)


def _picture(model: nn.Module, pixels: Tensor, tape: Tape) -> Picture | None:
    """The image and how its patches lie in it; None where the patches and the tokens do not add up."""
    sources = (getattr(model, "config", None), getattr(model, "patch_embed", None), model)
    size = next((found for one in sources if (found := getattr(one, "patch_size", None)) is not None), None)
    if size is None:
        return None
    height, width = (size, size) if isinstance(size, int) else size
    rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
    special = tape.calls[0].view.frame.nk - rows * columns
    return Picture.of(pixels[0], rows, columns, special) if special >= 0 else None


def _patch_names(picture: Picture) -> list[str]:
    """[CLS], other special tokens by number, then each patch by row and column."""
    names = [CLS, *(f"[special {n}]" for n in range(1, picture.special))][: picture.special]
    return names + [f"{row},{column}" for row in range(picture.rows) for column in range(picture.columns)]
