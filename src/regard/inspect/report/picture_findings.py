"""What is said of a model that reads an image: findings, grids and the head that is shown, by patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

import regard.inspect.report.heads as heads
from regard.core.shapes import count_of
from regard.inspect.report.findings import (
    NEIGHBOUR,
    Finding,
    Head,
    Shares,
    first_key,
    largest,
    most_received,
    named,
    peak,
    percent,
    quoted,
    without_numbers,
)
from regard.inspect.report.grids import Grid, grid_of, overview
from regard.inspect.report.layer import Layer
from regard.inspect.report.picture import CLS, Picture


def picture_findings(layers: Sequence[Layer], picture: Picture) -> tuple[Finding, ...]:
    """All that can be said of these layers, whose tokens are the patches of an image."""
    rule = "patches, the heaviest key is one of the up to 8 patches around it"
    around = named("near-patch heads", near_shares(layers, picture), NEIGHBOUR, rule)
    of_cls = (_focus(layers, picture), _favourite(layers, picture), first_key(layers, CLS)) if picture.special else ()
    every = (without_numbers(layers), around, *of_cls, most_received(layers), peak(layers))
    return tuple(found for found in every if found is not None)


def picture_overview(layers: Sequence[Layer], picture: Picture) -> tuple[Grid, ...]:
    """Mean entropy, the mass on [CLS] where there is one, and the largest score of each head."""
    entropy, first, peaks = overview(layers, CLS)
    return (entropy, replace(first, title=CLS), peaks) if picture.special else (entropy, peaks)


def picture_shares(layers: Sequence[Layer], picture: Picture) -> tuple[Grid, ...]:
    """The share of patches that look at a patch around them."""
    return (grid_of(layers, "near patch", "% of patches", [100 * near(layer, picture)[0] for layer in layers], 0, 100),)


def picture_striking(layers: Sequence[Layer], picture: Picture) -> tuple[Head, str]:
    """The head worth a picture and why: that in which [CLS] looks at the fewest patches, or one that looks near."""
    focused = _most_focused(layers, picture) if picture.special else None
    if focused is not None:
        return focused, f"{CLS} looks at the equivalent of {focused.value:.3g} keys"
    found = near_shares(layers, picture)
    most = largest(layers, found.share)
    if most.value >= NEIGHBOUR:
        return most, f"looks at a patch around its own in {most.value:.0%} of patches"
    decided = largest(layers, [-heads.mean_entropy(layer) for layer in layers])
    return decided, f"lowest mean entropy, {-decided.value:.2f} nats"


def near(layer: Layer, picture: Picture) -> tuple[Tensor, Tensor, int]:
    """The share of patches whose heaviest key is one of the patches around (at most 8), that which a head has that
    chooses among the visible keys by chance, and how many patches there are.

    A layer that does not read the whole image, [CLS] and patches, has the share 0.
    """
    none = torch.zeros(layer.heads, dtype=torch.float32, device="cpu")
    if not _of_image(layer, picture):
        return none, none, 0
    n = picture.rows * picture.columns
    patch = torch.arange(n, dtype=torch.int64, device="cpu")
    row, column = patch // picture.columns, patch % picture.columns
    heaviest = layer.top_keys[:, picture.special :, 0] - picture.special
    down = heaviest.div(picture.columns, rounding_mode="floor") - row
    across = heaviest.remainder(picture.columns) - column
    around = (heaviest >= 0) & (torch.maximum(down.abs(), across.abs()) == 1)
    high, wide = (
        (at + 1).clamp(max=count - 1) - (at - 1).clamp(min=0) + 1
        for at, count in ((row, picture.rows), (column, picture.columns))
    )
    beside = high * wide - 1
    chance = (beside / layer.counts[:, picture.special :].clamp(min=1)).mean(-1)
    return around.float().mean(-1), chance, n


def near_shares(layers: Sequence[Layer], picture: Picture) -> Shares:
    """`near` of each layer, with intervals."""
    return Shares.of(layers, [near(layer, picture) for layer in layers])


def _of_image(layer: Layer, picture: Picture) -> bool:
    count = picture.special + picture.rows * picture.columns
    return len(layer.queries) == len(layer.keys) == count


def _focus(layers: Sequence[Layer], picture: Picture) -> Finding | None:
    found = _most_focused(layers, picture)
    if found is None:
        return None
    count = picture.special + picture.rows * picture.columns
    said = f"{CLS} looks at the fewest patches in {found.name}: the equivalent of {found.value:.3g} of {count:,} keys"
    rule = f"the least exp(entropy) of {CLS}'s row, of the heads whose heaviest key for {CLS} is a patch"
    return Finding(said, rule, (found,))


def _most_focused(layers: Sequence[Layer], picture: Picture) -> Head | None:
    """The head whose exp(entropy) of the row of [CLS] is least, of those whose heaviest key is a patch there."""
    effective = [
        layer.entropy[:, 0].exp().masked_fill(layer.top_keys[:, 0, 0] < picture.special, torch.inf)
        if _of_image(layer, picture)
        else torch.full_like(layer.entropy[:, 0], torch.inf)
        for layer in layers
    ]
    found = largest(layers, [-each for each in effective])
    return None if found.value == -torch.inf else replace(found, value=-found.value)


def _favourite(layers: Sequence[Layer], picture: Picture) -> Finding | None:
    """The patch that is the heaviest key of [CLS] in the most heads."""
    read = [layer for layer in layers if _of_image(layer, picture)]
    if not read:
        return None
    heaviest = torch.cat([layer.top_keys[:, 0, 0] for layer in read])
    patches = heaviest[heaviest >= picture.special]
    if not len(patches):
        return None
    key = int(patches.bincount().argmax())
    count = int((patches == key).sum())
    found = tuple(
        Head(n, head, float(layer.top_weights[head, 0, 0]), place=layer.place)
        for n, layer in enumerate(layers)
        if layer in read
        for head in range(layer.heads)
        if int(layer.top_keys[head, 0, 0]) == key
    )
    most = max(found, key=lambda head: head.value)
    name, share = quoted(read[0].keys.name(key)), percent(most.value)
    heads = count_of(len(heaviest), "head")
    said = f"patch {name} is the heaviest key of {CLS} in {count} of {heads}, most in {most.name} ({share})"
    return Finding(
        said, f"the patch that is the heaviest key of {CLS} in the most heads; its row and column from 0", found
    )
