"""Functions that people write for FlexAttention, each as a program of the kernels: values and gradients.

The definition is dense, in float64, by the same functions on all pairs at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from needed import needs_kernels
from regard.compat.torch import explain_flex_attention, flex_attention
from regard.core.region import Region

pytestmark = needs_kernels

BATCH, HEADS, N = 2, 4, 196  # tokens: 14 × 14 of an image
SIDE = 14
Mod = Callable[..., Tensor]


def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    slope = torch.exp2(-8.0 * (h + 1) / HEADS)
    return s + slope * (j - i)


def soft_cap(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 20.0 * torch.tanh(s / 20.0)


def relative(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + (i - j)


def buckets(table: Tensor) -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + table[h, (i - j).clamp(-16, 16) + 16]

    return mod


def pairs(bias: Tensor) -> Mod:
    return lambda s, b, h, i, j: s + bias[b, h, i, j]


def gates(query: Tensor, key: Tensor) -> Mod:
    return lambda s, b, h, i, j: s * torch.sigmoid(query[b, h, i]) + key[b, h, j]


def checkerboard(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    s = torch.where((i - j).abs() % 2 == 1, s * 0.5, s)
    return torch.where((i - j).abs() % 2 == 0, s * 2.0, s)


def by_parity_of_the_head(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(h % 2 == 0, s + 0.02 * (i - j).abs(), torch.tanh(s))


def activated(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.nn.functional.silu(s) - s.square() / 10


def hidden_ahead(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, s, -math.inf)


SCORE_MODS: dict[str, Mod] = {
    "alibi": alibi,
    "soft cap": soft_cap,
    "relative": relative,
    "a bias table": buckets(torch.randn(HEADS, 33, generator=torch.Generator().manual_seed(1))),
    "a bias": pairs(torch.randn(BATCH, HEADS, N, N, generator=torch.Generator().manual_seed(2))),
    "gates": gates(*torch.randn(2, BATCH, HEADS, N, generator=torch.Generator().manual_seed(3))),
    "checkerboard": checkerboard,
    "by parity of the head": by_parity_of_the_head,
    "activated": activated,
    "causal": hidden_ahead,
}


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def sliding(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j <= 31)


def prefix(lengths: Tensor) -> Mod:
    return lambda b, h, i, j: (j < lengths[b]) | (i >= j)


def documents(ids: Tensor, starts: Tensor) -> Mod:
    """Inside of a document, causal in its own positions."""

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (ids[i] == ids[j]) & (i - starts[ids[i]] >= j - starts[ids[j]])

    return mod


def neighbours(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """NATTEN in two dimensions: windows that are moved inside of the image."""
    y, x = (i // SIDE).clamp(3, SIDE - 4), (i % SIDE).clamp(3, SIDE - 4)
    return ((y - j // SIDE).abs() <= 3) & ((x - j % SIDE).abs() <= 3)


def sliding_tiles(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Tiles of 7 × 2 tokens see the tiles around them."""
    rows = (i // SIDE // 7 - j // SIDE // 7).abs() <= 0
    return rows & ((i % SIDE // 2 - j % SIDE // 2).abs() <= 1)


def dilated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i - j).abs() <= 40) & ((i - j) % 4 == 0)


def wider_by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= 8 * (h + 1)


def media(of_text: Tensor, of_media: Tensor) -> Mod:
    """Text sees the media before it."""
    return lambda b, h, i, j: of_text[b, i] >= of_media[b, j]


def padded(lengths: Tensor) -> Mod:
    return lambda b, h, i, j: (i < lengths[b]) & (j < lengths[b]) & (i >= j)


def global_tokens(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j < 5) | (i < 5) | ((i - j).abs() < 20)


IDS = torch.arange(N) // 45
MASK_MODS: dict[str, Mod] = {
    "causal": causal,
    "sliding": sliding,
    "prefix": prefix(torch.tensor([50, 9])),
    "documents": documents(IDS, torch.arange(5) * 45),
    "neighbours": neighbours,
    "sliding tiles": sliding_tiles,
    "dilated": dilated,
    "wider by head": wider_by_head,
    "media": media(torch.arange(N).repeat(2, 1) // 60, torch.arange(N).flip(0).repeat(2, 1) // 70),
    "padded": padded(torch.tensor([150, 31])),
    "global tokens": global_tokens,
}


def drawn() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, HEADS, N, 16, dtype=torch.float64) for _ in "qkvg"]


def definition(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, mask_mod: Mod | None) -> Tensor:
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    i, j = torch.arange(N)[:, None], torch.arange(N)
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s if score_mod is None else score_mod(s, b, h, i, j)
    seen = torch.ones(N, N).bool() if mask_mod is None else mask_mod(b, h, i, j)
    s = s.masked_fill(~seen, -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0) @ v


def compare(score_mod: Mod | None, mask_mod: Mod | None) -> dict[str, str]:
    """Values and gradients of q, k, v; what `explain` says."""
    *given, g = drawn()
    mask = None if mask_mod is None else create_block_mask(mask_mod, BATCH, HEADS, N, N, device="cpu")
    wide, narrow = ([t.to(dtype).requires_grad_() for t in given] for dtype in (torch.float64, torch.float32))
    right, found = definition(*wide, score_mod, mask_mod), flex_attention(*narrow, score_mod, mask)
    rights, founds = (
        (out, *torch.autograd.grad(out, x, g.to(out.dtype))) for out, x in ((right, wide), (found, narrow))
    )
    for name, mine, expected in zip(("output", "q", "k", "v"), founds, rights, strict=True):
        assert (mine - expected).abs().max() <= 3e-5 * expected.abs().max(), name
    plan = explain_flex_attention(*narrow, score_mod, mask)
    assert plan.backend == rg.Native()
    assert dict(plan.facts)["backward"] == "the same kernels"
    return dict(plan.facts)


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str) -> None:
    compare(SCORE_MODS[name], None)


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name: str) -> None:
    said = compare(None, MASK_MODS[name])
    assert "since no program" not in said["mask as"]


@pytest.mark.parametrize(
    ("score", "mask"), [("checkerboard", "neighbours"), ("gates", "documents"), ("alibi", "media")]
)
def test_both(score: str, mask: str) -> None:
    compare(SCORE_MODS[score], MASK_MODS[mask])


def test_functions_are_programs() -> None:
    """Those that regard has no step or mask for."""
    for name in ("checkerboard", "by parity of the head", "activated"):
        assert compare(SCORE_MODS[name], None)["modifiers as"].startswith("a program of"), name
    for name in ("neighbours", "sliding tiles", "dilated", "wider by head", "media"):
        assert "a program of" in compare(None, MASK_MODS[name])["mask as"], name


class Gates(torch.nn.Module):
    """A score_mod that reads the parameters of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.scale = torch.nn.Parameter(torch.randn(BATCH, HEADS, N)), torch.nn.Parameter(torch.rand(HEADS))
        self.distances = torch.nn.Embedding(33, HEADS)

    def mod(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = self.distances((i - j).clamp(-16, 16) + 16)
        return s * torch.sigmoid(self.query[b, h, i]) * self.scale.exp()[h] + near[..., h]


def learned_of(name: str, dtype: torch.dtype) -> tuple[Mod, list[Tensor]]:
    """A score_mod that reads tensors with gradients, and these."""
    torch.manual_seed(4)
    table, bias, factor = torch.randn(HEADS, 33), torch.randn(N, N), torch.rand(HEADS)
    table, bias, factor = (t.to(dtype).requires_grad_() for t in (table, bias, factor))
    with_table = buckets(table)
    return {
        "a table": (with_table, [table]),
        "a bias": (lambda s, b, h, i, j: s + bias[i, j], [bias]),
        "a factor": (lambda s, b, h, i, j: s * factor[h], [factor]),
        "an expression": (lambda s, b, h, i, j: s + bias.sin()[i, j] * factor.exp()[h], [bias, factor]),
        "a function in it": (lambda s, b, h, i, j: with_table(s * factor[h], b, h, i, j), [table, factor]),
    }[name]


@pytest.mark.parametrize("mask", ["none", "neighbours"])
@pytest.mark.parametrize("name", ["a table", "a bias", "a factor", "an expression", "a function in it"])
def test_gradients_of_captured_tensors(name: str, mask: str) -> None:
    *given, g = drawn()
    mask_mod = MASK_MODS.get(mask)
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, BATCH, HEADS, N, N, device="cpu")
    x, narrow = ([t.to(dtype).requires_grad_() for t in given] for dtype in (torch.float64, torch.float32))
    (right, of_right), (mod, of_mod) = (learned_of(name, dtype) for dtype in (torch.float64, torch.float32))
    expected, found = definition(*x, right, mask_mod), flex_attention(*narrow, mod, block_mask)
    wanted = (expected, *torch.autograd.grad(expected, (*x, *of_right), g))
    got = (found, *torch.autograd.grad(found, (*narrow, *of_mod), g.float()))
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine - theirs).abs().max() <= 5e-5 * theirs.abs().max()
    plan = explain_flex_attention(*narrow, mod, block_mask)
    assert plan.backend == rg.Native() and dict(plan.facts)["backward"] == "the same kernels"


def test_gradients_of_a_modules_parameters() -> None:
    *given, g = drawn()
    module = Gates()
    found = flex_attention(*(t.float() for t in given), module.mod)
    got = torch.autograd.grad(found, list(module.parameters()), g.float())
    wide = module.double()
    by_head = [wide.mod(*of_head(h, *given)) for h in range(HEADS)]
    s = torch.stack(by_head, 1)
    expected = torch.autograd.grad(torch.softmax(s, -1) @ given[2], list(wide.parameters()), g)
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine - theirs).abs().max() <= 5e-5 * theirs.abs().max()


def of_head(h: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Any, Any, Any, Any]:
    """The scores of one head, and their indices: an embedding adds an axis that the indices of all heads would meet."""
    s = (q @ k.mT / q.shape[-1] ** 0.5)[:, h]
    return s, torch.arange(BATCH)[:, None, None], torch.tensor(h), torch.arange(N)[:, None], torch.arange(N)


@dataclass(frozen=True)
class Learned(rg.Modifier):
    """What such a function holds, learned: a table of distances, gates of queries and of keys, a number a head."""

    table: Tensor
    by_query: Tensor
    by_key: Tensor
    by_head: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        near = self.table[at.h, (at.i - at.j).clamp(-16, 16) + 16]
        return s * torch.sigmoid(at.queries(self.by_query)) * at.heads(self.by_head) + near + at.keys(self.by_key)


@pytest.mark.parametrize("name", ["neighbours", "documents", "media", "wider by head"])
def test_gradients_of_what_a_function_holds(name: str) -> None:
    *given, g = drawn()
    held = [torch.randn(shape, dtype=torch.float64) for shape in ((HEADS, 33), (N,), (N,), (HEADS,))]
    results: list[tuple[Any, ...]] = []
    for dtype, backend in ((torch.float64, rg.Reference()), (torch.float32, rg.Native())):
        x, own = ([t.to(dtype).requires_grad_() for t in ts] for ts in (given, held))
        score, mask = rg.ScaledDot() >> Learned(*own), rg.Where(MASK_MODS[name])
        out = rg.attention(*x, score=score, mask=mask, backend=backend)
        results.append((out, *torch.autograd.grad(out, (*x, *own), g.to(dtype))))
    for expected, mine in zip(*results, strict=True):
        assert (mine - expected).abs().max() <= 5e-5 * expected.abs().max()
