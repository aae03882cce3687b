"""What lint says of the numbers that a call is given: NaN and infinity, a bias that is a mask, padding that is seen."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from regard.call.arguments import Layout
from regard.core.region import Frame
from regard.core.shapes import count_of, sum_groups
from regard.core.value import Value, names
from regard.inspect.lint.defect import Defect, first_place
from regard.inspect.lint.pattern import strips
from regard.masks.algebra import Mask
from regard.scores.algebra import Pipeline
from regard.scores.modifiers import Bias, looks_like_a_mask


def not_finite(given: dict[str, Tensor], seen: dict[str, Tensor]) -> Iterator[Defect]:
    """NaN and infinity in tensors of a call, by name; -inf in a bias or a sink hides, so it is none of them.

    seen: by name, which numbers of a tensor take part, in its shape, or 1 for the last axis. The rest is harmless.
    """
    for name, t in given.items():
        bad = ~t.isfinite() & ~((t == -torch.inf) & (name not in "qkv"))
        if name in seen:
            bad = bad & seen[name].to(torch.float32).sum_to_size(*t.shape[:-1], seen[name].shape[-1]).bool()
        if not bool(bad.any()):
            continue
        nan, where = int((bad & t.isnan()).sum()), bad.nonzero()[0].tolist()
        what = f"{nan:,} NaN and {int(bad.sum()) - nan:,} infinite numbers"
        at = f"{name}[{', '.join(map(str, where))}]" if t.dim() else name
        yield Defect(
            "not finite",
            int(bad.sum()),
            f"{name} holds {what} that queries see; the first is {at}.",
            f"Find what makes {at}: it spoils every row that sees it. What is padding, a mask hides "
            "(Lengths(keys=...)), and then it leaks nowhere, whatever it holds.",
        )


def named_tensors(score: Pipeline) -> dict[str, Tensor]:
    """The tensors of a score by the names of their fields, as Bias.bias; a field with several is counted through."""
    found: dict[str, Tensor] = {}
    for stage in score.parts:
        for field in names(type(stage)):
            value = getattr(stage, field)
            held = value.tensors() if isinstance(value, Value) else value if isinstance(value, tuple) else (value,)
            tensors = [t for t in held if isinstance(t, Tensor)]
            for n, t in enumerate(tensors):
                name = f"{type(stage).__name__}.{field}" + (f"[{n}]" if isinstance(value, tuple) else "")
                found[name if name not in found else f"{name} ({len(found)})"] = t
    return found


def seen_vectors(visible: Tensor, readers: Tensor, key_heads: int, layout: Layout) -> dict[str, Tensor]:
    """Which vectors of q, k and v take part: those of queries that see a key, and of keys that a query sees."""
    keys = sum_groups(readers[..., None], key_heads)[..., 0] > 0
    queries, keys = (layout.restore(part, 1)[..., None] for part in (visible > 0, keys))
    return {"q": queries, "k": keys, "v": keys}


def seen_biases(score: Pipeline, mask: Mask, frame: Frame) -> dict[str, Tensor]:
    """Which numbers of biases that are not finite belong to a pair that the mask shows, by name."""
    biases = [stage.bias for stage in score.parts if isinstance(stage, Bias)]
    named = {name: t for name, t in named_tensors(score).items() if any(t is bias for bias in biases)}
    bad = {name: ~t.isfinite() for name, t in named.items() if not bool(t.isfinite().all())}
    found = {name: torch.zeros_like(pairs) for name, pairs in bad.items()}
    for at, seen in strips(mask, frame) if bad else ():
        for name, pairs in bad.items():
            part = at.pairs(found[name])  # a view
            part |= (seen & at.pairs(pairs)).to(torch.float32).sum_to_size(part.shape).bool()
    return found


def masks_as_biases(score: Pipeline) -> Iterator[Defect]:
    """Biases of 0 and 1."""
    for stage in score.parts:
        if isinstance(stage, Bias) and looks_like_a_mask(stage.bias):
            ones = int((stage.bias == 1).sum())
            yield Defect(
                "mask as a bias",
                ones,
                f"Bias{list(stage.bias.shape)} holds 0 and 1 alone, {ones:,} times 1: it makes scores larger by 1, and "
                "hides nothing.",
                "If 1 means may attend, write mask=Dense(bias.bool()); if 1 means masked, mask=Dense(bias == 0). Added "
                "to the scores, a mask holds 0 and -inf.",
            )


def seen_padding(k: Tensor, v: Tensor, readers: Tensor, frame: Frame) -> Iterator[Defect]:
    """Keys that are 0 with their values and are seen, where others that are not 0 are hidden from everybody."""
    blank = ((k == 0).all(-1) & (v == 0).all(-1)).all(-2)  # in all heads
    blank, hidden = blank.expand(*frame.batch, frame.nk), (readers == 0).all(-2)
    wrong = (blank & ~hidden).any(-1) & (~blank & hidden).any(-1)
    if not bool(wrong.any()):
        return
    shown, real = (blank & ~hidden)[wrong], (~blank & hidden)[wrong]
    zeros, others = int(shown.sum()), int(real.sum())
    seen = "1 key of 0, with a value of 0, is" if zeros == 1 else f"{zeros:,} keys of 0, with values of 0, are"
    unseen = "1 other is" if others == 1 else f"{others:,} others are"
    yield Defect(
        "padding in the wrong place",
        zeros,
        f"{seen} seen, and {unseen} hidden from every query, in {int(wrong.sum()):,} of "
        f"{count_of(wrong.numel(), 'sequence', ',')} (first seen: "
        f"{first_place(blank & ~hidden & wrong[..., None], ('key',))}).",
        "Lengths(keys=lengths) pads at the end. Padding in front, as generation has it, is "
        "Lengths(first=(~mask).sum(-1)), mask (batch, nk) true where a token is real.",
    )
