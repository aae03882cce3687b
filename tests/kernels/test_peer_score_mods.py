"""The score_mods that attention-gym and torch's tests hold, and others: all run in the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from needed import needs_kernels
from pair_definition import BATCH, HEADS, Case, Mod, N, Numbers, largest_errors

pytestmark = needs_kernels

SIDE = 14  # of an image
HIDDEN = float("-inf")


def plain(mod: Mod) -> Case:
    """A case that reads no numbers."""
    return lambda numbers: mod


# What torch's tests call _identity, _causal, and so on.


def causal(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, s, HIDDEN)


def relative_and_causal(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, s + (i - j), float("-inf"))


def alibi_and_causal(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    slope = torch.exp2(-((h + 1) * 8.0 / HEADS))
    return torch.where(i >= j, s + (j - i) * slope, float("-inf"))


def trigonometric(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.sin(torch.cos(s)) + torch.tan(b)


def trigonometric_twice(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    c, d = torch.cos(s), torch.sin(s)
    return c * d + torch.tan(b)


def composed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    def first(s: Tensor) -> Tensor:
        return s + (i - j)

    return torch.where(i <= j, first(s), float("-inf"))


def cross_of_rows_and_columns(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """NATTEN in torch's test: rows are quotients, not whole numbers."""
    near = (i / SIDE - j / SIDE).abs() <= 3
    return torch.where(near | ((i % SIDE - j % SIDE).abs() <= 3), s, float("-inf"))


def windowed(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    y, x = i // SIDE, i % SIDE
    inside = ((y - j // SIDE).abs() <= 3) & ((x - j % SIDE).abs() <= 3)
    return torch.where(inside, s, -math.inf)


def quotient(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s - i // (1 + j)


def by_parity(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    s = torch.where(i % 2 == 0, s, s * 0.5)
    return torch.where((h % 2 == 1) & (b % 2 == 0), s + 1, s)


def checkerboard(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    s = torch.where(torch.abs(i - j) % 2 == 1, s * 0.5, s)
    return torch.where(torch.abs(i - j) % 2 == 0, s * 2.0, s)


WITHOUT_NUMBERS: dict[str, Mod] = {
    "identity": lambda s, b, h, i, j: s,
    "causal": causal,
    "inverse causal": lambda s, b, h, i, j: torch.where(i <= j, s, float("-inf")),
    "relative": lambda s, b, h, i, j: s + (i - j),
    "relative and causal": relative_and_causal,
    "alibi": lambda s, b, h, i, j: s + (j - i) * torch.exp2(-((h + 1) * 8.0 / HEADS)),
    "alibi and causal": alibi_and_causal,
    "twice": lambda s, b, h, i, j: s * 2,
    "squared": lambda s, b, h, i, j: s * s,
    "trigonometric": trigonometric,
    "trigonometric twice": trigonometric_twice,
    "composed": composed,
    "odd keys hidden": lambda s, b, h, i, j: torch.where(j % 2 == 0, s, float("-inf")),
    "natten by quotients": cross_of_rows_and_columns,
    "natten": windowed,
    "less a whole quotient": quotient,
    "by parity": by_parity,
    "checkerboard": checkerboard,
    "silu": lambda s, b, h, i, j: F.silu(s),
    "soft cap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "batch element": lambda s, b, h, i, j: s + b,
}


def activation(function: Callable[[Tensor], Tensor]) -> Case:
    return plain(lambda s, b, h, i, j: torch.log(function(s) + 1.0))


# What reads numbers: attention-gym's generators, torch's captured buffers and learned biases.


def latent(numbers: Numbers) -> Mod:
    """MLA: what rotary positions add, a product of a query's row and a row that the keys of all heads share."""
    query, key = numbers.learn(BATCH, HEADS, N, 20), numbers.learn(BATCH, 1, N, 20)
    return lambda s, b, h, i, j: s + 0.125 * torch.dot(query[b, h, i], key[b, h // HEADS, j])


def euclidean(numbers: Numbers) -> Mod:
    place, length = numbers.learn(N, 3), numbers.fixed(HEADS).abs() + 1

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (place[i] - place[j]).pow(2).sum(-1).add(1e-6).sqrt()
        return torch.exp(-distance / length[h]) * s

    return mod


def sandwich(numbers: Numbers) -> Mod:
    waves = 1e-4 ** (torch.arange(16, dtype=numbers.dtype) / 16)
    table = torch.cos((torch.arange(2 * N, dtype=numbers.dtype) - N)[:, None] * waves).sum(-1)
    ratio = HEADS / (8.0 * torch.arange(1, HEADS + 1, dtype=numbers.dtype))
    return lambda s, b, h, i, j: s + table[i - j + N] * ratio[h]


def graphormer(numbers: Numbers) -> Mod:
    table, distance = numbers.learn(HEADS, 9), numbers.whole(9, BATCH, N, N, dtype=torch.int32)
    return lambda s, b, h, i, j: s + table[h, distance[b, i, j]]


def graphormer_edges(numbers: Numbers) -> Mod:
    tables = [numbers.learn(HEADS, 5) for _ in range(3)]
    kinds = numbers.whole(5, BATCH, N, N, 3, dtype=torch.int32)
    lengths = numbers.whole(4, BATCH, N, N, dtype=torch.int32)

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        length, total = lengths[b, i, j], 0.0
        for n, table in enumerate(tables):
            total = total + torch.where(length > n, table[h, kinds[b, i, j, n]], 0.0)
        return s + total / torch.clamp(length, min=1)

    return mod


def all_axes(numbers: Numbers) -> Mod:
    token, element, head = numbers.fixed(N), numbers.fixed(BATCH), numbers.fixed(HEADS)
    return lambda s, b, h, i, j: s + token[i] + element[b] + head[h]


def documents(numbers: Numbers) -> Mod:
    ids = torch.arange(N, dtype=torch.int32) // 45
    return lambda s, b, h, i, j: torch.where((i >= j) & (ids[i] == ids[j]), s, -math.inf)


def packed(numbers: Numbers) -> Mod:
    starts = torch.tensor([0, 70, 101, N], dtype=torch.int32)
    of = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), starts.diff())

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return relative_and_causal(s, b, h, i - starts[of[i]], j - starts[of[j]])

    return mod


def seen_halves(numbers: Numbers) -> Mod:
    second = torch.arange(N) >= N // 2
    return lambda s, b, h, i, j: torch.where(second[i] == second[j], s, float("-inf"))


def bidirectional(numbers: Numbers) -> Mod:
    n = numbers.whole(N, BATCH, dtype=torch.int32)

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        most = n[b]
        return torch.where(((i <= most) & (j <= most)) | (i >= j), s, -float("inf"))

    return mod


def padded_by_score(numbers: Numbers) -> Mod:
    n = torch.arange(BATCH, dtype=torch.int32) + 1
    return lambda s, b, h, i, j: torch.where(s <= n[b], causal(s, b, h, i, j), -float("inf"))


def decomposed(numbers: Numbers) -> Mod:
    """Relative positions of an image's rows, as in Segment Anything: a view of another tensor."""
    rows = numbers.learn(BATCH * HEADS, N, SIDE, 1)
    view = rows.view(BATCH, HEADS, N, SIDE, 1).squeeze(-1)
    return lambda s, b, h, i, j: s + view[b, h, i, j // SIDE]


def by_view(numbers: Numbers) -> Mod:
    bias = numbers.learn(BATCH, N, N, HEADS)
    return lambda s, b, h, i, j: s + (2 * bias).permute(0, 3, 1, 2)[b, h, i, j]


def gate_in_float32(numbers: Numbers) -> Mod:
    gate = numbers.learn(HEADS)
    return lambda s, b, h, i, j: s * torch.sigmoid(gate[h].to(torch.float32))


def mask_as_number(numbers: Numbers) -> Mod:
    seen = numbers.whole(2, BATCH, 1, N, N).bool()
    return lambda s, b, h, i, j: s + seen[b, h.new_zeros(h.shape), i, j]


def indexed_by_a_slice(numbers: Numbers) -> Mod:
    bias = numbers.learn(3, HEADS, N)
    return lambda s, b, h, i, j: s + bias[0, h, i] + bias[1][h][j] + bias[2, :, j][h]


def negative(numbers: Numbers) -> Mod:
    table = numbers.learn(HEADS, 2 * N)
    return lambda s, b, h, i, j: s + table[h, i - j]


def twice_learned(numbers: Numbers) -> Mod:
    first, second = numbers.learn(N), numbers.learn(N)
    return lambda s, b, h, i, j: s + first[i] + second[j]


def read(*shape: int, by: str, learned: bool = True) -> Case:
    """s + t[..], where t has a shape and `by` says the indices, or the whole expression of s and t."""

    def case(numbers: Numbers) -> Mod:
        t = numbers.learn(*shape) if learned else numbers.fixed(*shape)
        offset, scale = numbers.whole(N, N), torch.ones((), dtype=torch.int32)
        return eval(f"lambda s, b, h, i, j: {by}", {"t": t, "torch": torch, "offset": offset, "scale": scale})

    return case


SCORE_MODS: dict[str, Case] = {
    **{name: plain(mod) for name, mod in WITHOUT_NUMBERS.items()},
    "activation gelu": activation(F.gelu),
    "activation relu": activation(F.relu),
    "activation sigmoid": activation(torch.sigmoid),
    "latent attention": latent,
    "euclidean": euclidean,
    "sandwich": sandwich,
    "graphormer": graphormer,
    "graphormer edges": graphormer_edges,
    "all axes": all_axes,
    "documents": documents,
    "packed": packed,
    "seen halves": seen_halves,
    "bidirectional": bidirectional,
    "padded by score": padded_by_score,
    "decomposed": decomposed,
    "a view": by_view,
    "a gate in float32": gate_in_float32,
    "a mask as a number": mask_as_number,
    "indexed by a slice": indexed_by_a_slice,
    "a negative index": negative,
    "two biases": twice_learned,
    "head offset": read(HEADS, by="s * t[h]", learned=False),
    "learned head offset": read(HEADS, by="s * t[h]"),
    "a bias of pairs": read(N, N, by="s + t[i, j]"),
    "a bias of pairs, indexed twice": read(N, N, by="s + t[i][j]"),
    "a bias of pairs, flipped": read(N, N, by="s + t[j, i]"),
    "a bias of heads, flipped": read(HEADS, N, N, by="s + t[h, j, i]"),
    "a bias of elements": read(BATCH, N, N, by="s + t[b, i, j]"),
    "a bias of all": read(BATCH, HEADS, N, N, by="s + t[b, h, i, j]"),
    "a bias of the head": read(HEADS, by="s + t[h]"),
    "a bias of the sum": read(2 * N, by="s + t[i + j]"),
    "a bias of the distance": read(2 * N, by="s + t[torch.abs(i - j)]"),
    "a bias of the difference": read(2 * N, by="s + t[(i - j) + N]".replace("N", str(N))),
    "a bias of a window": read(17, by="s + t[torch.clamp(i - j + 8, 0, 16)]"),
    "a bias of the key": read(N, by="s + t[j]"),
    "a bias of both": read(N, by="s + t[i] + t[j]"),
    "a bias by an offset": read(N, by="s + t[offset[i]]"),
    "a bias by two offsets": read(N, N, by="s + t[offset[i], offset[j]]"),
    "a bias indexed in steps": read(BATCH, N, by="s + t[b][i]"),
    "a bias of four, in steps": read(4, BATCH, HEADS, N, by="s + t[0][b, h][i]"),
    "a bias by a tensor": read(BATCH, HEADS, 4, N, by="s + t[b][h][scale, i]"),
    "a factor of the query": read(N, by="s * t[i]"),
    "a temperature": read(HEADS, by="s / (t[h].exp() + 0.5)"),
    "a whole number": read(1, by="s + scale + 0 * t[0]", learned=False),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str) -> None:
    errors = largest_errors(SCORE_MODS[name], None)
    assert max(errors.values()) <= 3e-5, errors
