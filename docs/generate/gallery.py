"""The gallery: every mask, score and bucket of regard as a picture, made from one table when the site is built."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import regard as rg
from generate.notebook import STYLE

N = 16
COLOR = "#1d4e79"


@dataclass(frozen=True)
class Entry:
    """One picture: Python that makes the value, in the names of `NAMES`, and a sentence about it."""

    expression: str
    text: str

    def value(self) -> Any:
        """What the expression says. The seed is fixed, so that a picture of drawn numbers stays the same."""
        torch.manual_seed(4)
        return eval(self.expression, dict(NAMES))


@dataclass(frozen=True)
class Group:
    """Entries that are drawn alike, under one heading."""

    title: str
    text: str
    draw: Callable[[Any, Any], None]
    entries: tuple[Entry, ...]


def draw_mask(axes: Any, mask: rg.Mask) -> None:
    seen = mask.dense(N).reshape(N, N).float()
    axes.pcolormesh(seen.numpy()[::-1], cmap="Blues", vmin=-0.08, vmax=1.25, edgecolors="white", linewidth=0.6)


def draw_similarity(axes: Any, score: rg.Score) -> None:
    """The weight of each point of a square as a key of the query at (1, 0.5)."""
    side = torch.linspace(-2, 2, 41)
    query = torch.tensor([[1.0, 0.5]])
    weights = rg.attention_weights(query, torch.cartesian_prod(side, side), score=score).reshape(41, 41)
    axes.imshow(weights.T.numpy(), origin="lower", extent=(-2, 2, -2, 2), cmap="Blues")
    axes.scatter(*query[0].tolist(), color="#b3541e", s=18)


def draw_positional(axes: Any, modifier: rg.Modifier) -> None:
    """What the modifier adds to scores of 0."""
    tokens = torch.zeros(1, 1, N, 4)
    scores = rg.attention_scores(tokens, tokens, score=rg.Dot() >> modifier).reshape(N, N)
    axes.imshow(scores.numpy(), cmap="Blues")


def draw_curve(axes: Any, modifier: rg.Modifier) -> None:
    """A score before, from left to right, and after the modifier."""
    before = torch.linspace(-4, 4, 81)
    after = rg.attention_scores(torch.ones(1, 1), before[:, None], score=rg.Dot() >> modifier)[0]
    _curve(axes, before, after)


def draw_activation(axes: Any, activation: Any) -> None:
    before = torch.linspace(-4, 4, 81)
    _curve(axes, before, activation.of(before))


def _curve(axes: Any, before: torch.Tensor, after: torch.Tensor) -> None:
    axes.plot(before.numpy(), before.numpy(), color="#bbb", lw=1, ls=":")
    axes.plot(before.numpy(), after.numpy(), color=COLOR, lw=2)
    axes.set(ylim=(-4.2, 4.2), aspect="equal")


def draw_buckets(axes: Any, buckets: rg.Buckets) -> None:
    at = torch.arange(N)
    index = buckets.index(at[:, None], at[None, :])
    axes.imshow((index * 7 % buckets.count).numpy(), cmap="tab20b")
    for i in range(0, N, 3):
        for j in range(0, N, 3):
            axes.text(j, i, int(index[i, j]), ha="center", va="center", color="white", fontsize=6)


NAMES: dict[str, Any] = {
    **{name: getattr(rg, name) for name in rg.__all__},
    "torch": torch,
    "ids": torch.tensor([0] * 5 + [1] * 4 + [2] * 7),
    "until": torch.arange(N) * 7 % N + 4,
    "allowed": (torch.arange(N)[:, None] * torch.arange(N) % 5) < 3,
    "quarter_turn": torch.tensor([[0.0, 1.0], [-1.0, 0.0]]),
    "grid": torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)),
}
GROUPS = (
    Group(
        "Masks",
        "Rows are queries, columns are keys; a dark square is a key that the query may see.",
        draw_mask,
        (
            Entry("Everything()", "Every query sees every key. The default."),
            Entry("Causal()", "Keys at or before the query."),
            Entry("Window(before=4, after=2)", "Keys near the query, on each side."),
            Entry("Causal() & Window(before=4, after=0)", "A sliding window of 5 tokens, as in Mistral."),
            Entry("Prefix(4)", "The first keys, for every query."),
            Entry("Causal() | Prefix(5)", "A prefix language model: each prompt token sees the whole prompt."),
            Entry("Causal() & (Window(before=4, after=0) | Prefix(2))", "A window that keeps the first tokens."),
            Entry("Dilated(3)", "Keys at distances that are multiples of 3."),
            Entry("Window(before=9, after=0) & Dilated(3)", "A dilated window, as in Longformer."),
            Entry("Documents(ids)", "Packed sequences: each token sees its own sequence."),
            Entry("Documents(ids) & Causal()", "Packed sequences of a language model."),
            Entry("Lengths(keys=torch.tensor([11]))", "Padding at the end of the keys."),
            Entry("Lengths(torch.tensor([11]), torch.tensor([13]))", "Padding of keys and of queries."),
            Entry("Retained(until)", "Keys that are evicted: each is seen up to a position of its own."),
            Entry("Causal() & Retained(until)", "The same in a language model, as a cache that evicts keys."),
            Entry("Dense(allowed)", "Any boolean tensor: True = may attend."),
            Entry("Where(lambda b, h, i, j: (i // 4) >= (j // 4))", "A function of positions: causal by blocks of 4."),
            Entry("~Window(before=3, after=3)", "The opposite of a mask: all keys that are not near."),
        ),
    ),
    Group(
        "Similarities",
        "A score begins with a similarity. The orange point is a query, the colour the weight of a key at each place.",
        draw_similarity,
        (
            Entry("ScaledDot()", "q · k / √d. The default."),
            Entry("Dot()", "q · k, not scaled."),
            Entry("Cosine(4.0)", "Only the angle; the length of a key has no effect."),
            Entry("Distance(1.0)", "Minus the squared distance: a Gaussian kernel."),
            Entry("Bilinear(quarter_turn)", "q M k, with a matrix between query and key."),
            Entry(
                "Additive(*torch.randn(2, 2, 8), torch.randn(8))", "A perceptron with one hidden layer, as Bahdanau's."
            ),
            Entry(
                "Custom(lambda q, k: -torch.cdist(q, k, p=1))", "A function of your own: here the Manhattan distance."
            ),
            Entry(
                "Elementwise(lambda q, k: -(q - k).abs().sqrt())",
                "A sum over features of a function of your own: here the square root of their difference.",
            ),
        ),
    ),
    Group(
        "Modifiers by position",
        "Modifiers that add a number to the score of each pair, joined by `>>`; dark means more.",
        draw_positional,
        (
            Entry("Alibi(torch.tensor(0.5))", "A penalty that grows with the distance."),
            Entry(
                "Alibi(torch.tensor(0.5), coordinates=grid)",
                "The same with distances of points: here 4 × 4 patches of a picture.",
            ),
            Entry("LogDistance(weight=1.0, rate=1.0)", "A penalty that grows with the logarithm of the distance."),
            Entry("PowerDistance(weight=1.0, power=0.5)", "A penalty that grows with a power of the distance."),
            Entry(
                "RelativeBias(torch.randn(8, 1), T5Buckets(8, 16))", "A learned number for each bucket of distances."
            ),
            Entry("Bias(torch.randn(16, 16))", "Any tensor, added."),
        ),
    ),
    Group(
        "Modifiers by value",
        "The horizontal axis is the score before, the vertical axis the score after; the dotted line is no change.",
        draw_curve,
        (
            Entry("SoftCap(2.0)", "Scores stay within ±2, as in Gemma 2 with 50."),
            Entry("Clamp(-1.0, 2.0)", "Scores below -1 become -1, those above 2 become 2."),
            Entry("Temperature(2.0)", "Above 1 it makes the weights more uniform, below 1 it sharpens them."),
        ),
    ),
    Group(
        "Buckets",
        "A bucket is the row of a relative-bias table that a pair reads: one colour, and one number, for each bucket.",
        draw_buckets,
        (
            Entry(
                "ClippedBuckets(before=4, after=4)", "One bucket for each distance up to 4; longer distances share one."
            ),
            Entry(
                "T5Buckets(8, 16)",
                "T5's encoder: exact buckets for short distances, logarithmic ones for long distances.",
            ),
            Entry("T5CausalBuckets(8, 16)", "T5's decoder: all buckets are for keys before the query."),
            Entry("GridBuckets(4, 4)", "Offsets in a grid of 4 × 4 cells, as in Swin."),
        ),
    ),
    Group(
        "Activations",
        "The function of the hidden layer of `Additive`.",
        draw_activation,
        (
            Entry("Tanh()", "Bahdanau's, the default."),
            Entry("Sigmoid()", "From 0 to 1."),
            Entry("LeakyReLU()", "GATv2's."),
        ),
    ),
)


def page() -> tuple[str, dict[str, bytes]]:
    """The gallery's Markdown, and its pictures by name."""
    parts = [
        "# Gallery",
        "The pictures show every mask, score and bucket, drawn by the code under the picture (without `rg.`). "
        "Definitions: [masks](reference/masks.md), [scores](reference/scores.md).",
    ]
    files: dict[str, bytes] = {}
    for group in GROUPS:
        cards = []
        for entry in group.entries:
            name = f"gallery/{len(files) + 1}.svg"
            files[name] = picture(group.draw, entry)
            code = entry.expression.replace("|", "&#124;").replace("*", "&#42;")
            cards.append(f"-   ![{entry.text}]({name}){{ .figure }}\n\n    <code>{code}</code>\n\n    {entry.text}")
        joined = "\n\n".join(cards)
        parts.append(
            f'## {group.title}\n\n{group.text}\n\n<div class="grid cards gallery" markdown>\n\n{joined}\n\n</div>'
        )
    return "\n\n".join(parts) + "\n", files


def picture(draw: Callable[[Any, Any], None], entry: Entry) -> bytes:
    """The picture of one entry, as SVG."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), torch.no_grad():
        figure = Figure(figsize=(1.7, 1.7))
        axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
        draw(axes, entry.value())
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        out = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(out, metadata={"Date": None})
    return out.getvalue()
