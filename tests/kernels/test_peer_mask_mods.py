"""The mask_mods that attention-gym and torch's tests hold, and others: all run in the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

from needed import needs_kernels
from pair_definition import BATCH, HEADS, Case, Mod, N, Numbers, largest_errors

pytestmark = needs_kernels

SIDE = 14  # of an image


def plain(mod: Mod) -> Case:
    """A case that reads no numbers."""
    return lambda numbers: mod


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def window(size: int) -> Mod:
    return lambda b, h, i, j: i - j <= size


def prefix(length: int) -> Mod:
    return lambda b, h, i, j: j < length


def neighbours(place_of: Mod, wide: int, high: int, reach: int) -> Mod:
    """NATTEN: windows that are moved inside of the image. place_of: the column and the row of a token."""

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        (x, y), (of_x, of_y) = place_of(i), place_of(j)
        middle_x, middle_y = x.clamp(reach, wide - 1 - reach), y.clamp(reach, high - 1 - reach)
        return ((middle_x - of_x).abs() <= reach) & ((middle_y - of_y).abs() <= reach)

    return mod


def by_rows(t: Tensor) -> tuple[Tensor, Tensor]:
    return t % SIDE, t // SIDE


def by_tiles(t: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles of 2 × 7 tokens, one after the other."""
    tile, inside = t // 14, t % 14
    return tile % 7 * 2 + inside % 2, tile // 7 * 7 + inside // 2


def every_second_bit(t: Tensor) -> Tensor:
    t = t & 0x55555555
    for shift, bits in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF), (8, 0x0000FFFF)):
        t = (t | (t >> shift)) & bits
    return t


def by_morton(t: Tensor) -> tuple[Tensor, Tensor]:
    return every_second_bit(t), every_second_bit(t >> 1)


def sliding_tiles(canvas: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, ...], text: int) -> Mod:
    """Sliding tile attention in two or three dimensions, the last tokens of which are text that sees all."""
    tiles = [size // of for size, of in zip(canvas, tile, strict=True)]
    reach = [size // of for size, of in zip(kernel, tile, strict=True)]
    inside, image = torch.Size(tile).numel(), torch.Size(canvas).numel()

    def places(t: Tensor) -> list[Tensor]:
        t, found = t // inside, list[Tensor]()
        for n, count in reversed(list(enumerate(tiles))):
            found.insert(0, t % count if n else t)
            t = t // count
        return found

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i < image) & (j < image)
        for x, y, count, wide in zip(places(i), places(j), tiles, reach, strict=True):
            before, after = wide // 2, wide // 2 + wide % 2 - 1
            middle = x.clamp(before, count - 1 - after)
            near = near & (y >= middle - before) & (y <= middle + after)
        sees_text = (i < image) & (j >= image) & (j < image + text)
        return near | sees_text | ((i >= image) & (j < image + text))

    return mod


def batchified(mod: Mod, size: int) -> Mod:
    return lambda b, h, i, j: (i // size == j // size) & mod(b, h, i % size, j % size)


def block_diffusion(length: int, size: int) -> Mod:
    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        noised_i, noised_j = i < length, j < length
        x, y = i % length // size, j % length // size
        same = (x == y) & (noised_i == noised_j)
        return same | ((x > y) & noised_i & ~noised_j) | ((x >= y) & ~noised_i & ~noised_j)

    return mod


def drafts(start: int, size: int) -> Mod:
    """Blocks that see a prefix and themselves, causally."""

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own = (i // size == (j - start) // size) & ((j - start) % size <= i % size)
        return (j < start) | ((j >= start) & own)

    return mod


def spatial(prompt: int, frame: int, wide: int) -> Mod:
    return lambda b, h, i, j: (j < prompt + frame) | (i < prompt) | (torch.abs(i - j) < wide * frame)


def temporal(prompt: int, frame: int, wide: int) -> Mod:
    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = torch.abs((i - prompt) % frame - (j - prompt) % frame) < wide
        return (j < prompt) | (i < prompt) | near

    return mod


WITHOUT_NUMBERS: dict[str, Mod] = {
    "everything": noop_mask,
    "causal": causal,
    "inverse causal": lambda b, h, i, j: i <= j,
    "sliding window": and_masks(window(31), causal),
    "causal and not": and_masks(causal, lambda b, h, i, j: i < j + 1),
    "either": or_masks(causal, lambda b, h, i, j: i < j),
    "prefix": or_masks(prefix(50), causal),
    "attention sink": and_masks(or_masks(window(20), prefix(4)), causal),
    "dilated": lambda b, h, i, j: ((i - j).abs() <= 40) & ((i - j).abs() % 4 == 0),
    "natten": neighbours(by_rows, SIDE, SIDE, 3),
    "tiled natten": neighbours(by_tiles, SIDE, SIDE, 2),
    "morton natten": neighbours(by_morton, 16, 16, 2),
    "sliding tiles": sliding_tiles((12, 16), (8, 12), (4, 4), 4),
    "sliding tiles of a video": sliding_tiles((4, 6, 8), (4, 6, 4), (2, 3, 2), 4),
    "batchified": batchified(noop_mask, 28),
    "batchified and causal": batchified(causal, 28),
    "block diffusion": block_diffusion(N // 2, 14),
    "drafts": drafts(21, 7),
    "spatial head": spatial(6, 19, 2),
    "temporal head": temporal(6, 19, 5),
    "global tokens": lambda b, h, i, j: (j < 5) | (i < 5) | ((i - j).abs() < 20),
    "by parity of the element": lambda b, h, i, j: (i >= j) & (b % 2 == 0),
    "wider by head": lambda b, h, i, j: (i - j).abs() <= 8 * (h + 1),
    "some queries": lambda b, h, i, j: i < N // 2,
    "outside": lambda b, h, i, j: (j < 30) | (j >= 150),
    "strided by head": lambda b, h, i, j: (i >= j) & ((i - j) % (h + 1) == 0),
}


# What reads numbers.


def documents(inner: Mod) -> Case:
    """Each document by itself, in its own positions: attention-gym's wrapper of another mask."""

    def case(numbers: Numbers) -> Mod:
        starts = torch.tensor([0, 70, 101, N], dtype=torch.int32)
        of = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), starts.diff())

        def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (of[i] == of[j]) & inner(b, h, i - starts[of[i]], j - starts[of[j]])

        return mod

    return case


def documents_of_elements(numbers: Numbers) -> Mod:
    ids = numbers.whole(3, BATCH, N, dtype=torch.int32).sort(-1).values
    return lambda b, h, i, j: ids[b, i] == ids[b, j]


def shared_question(numbers: Numbers) -> Mod:
    """Answers see the question, document 0, and themselves."""
    ids = torch.arange(N) // 45
    return lambda b, h, i, j: ((ids[j] == 0) & (ids[i] != 0)) | ((i >= j) & (ids[i] == ids[j]))


def shared_prefix(numbers: Numbers) -> Mod:
    starts = torch.tensor([0, 40, 60, 90, 130, 150, N])
    of, first = torch.repeat_interleave(torch.arange(6), starts.diff()), torch.tensor([0, 0, 0, 3, 3, 3])

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        own, root = of[i], first[of[i]]
        before = (own != root) & (j >= starts[root]) & (j < starts[root + 1])
        return ((j >= starts[own]) & (i >= j)) | before

    return mod


def images(numbers: Numbers) -> Mod:
    """Flamingo: text sees the images in whose interval it stands, which a row of a table holds."""
    intervals = torch.tensor([[0, 90], [20, 90], [90, N], [100, 120]], dtype=torch.int32)
    of = torch.repeat_interleave(torch.arange(4), torch.tensor(49))

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        interval = intervals[of[j]]
        return (i >= interval[0]) & (i < interval[1])

    return mod


def images_of_pairs(numbers: Numbers) -> Mod:
    """The same with intervals by the image of the key and the part of the query."""
    intervals, of = numbers.whole(N, 4, 2, 2), torch.arange(N) // 49

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        low, high = intervals[of[j], i % 2].unbind(-1)
        return (i >= low.minimum(high)) & (i <= low.maximum(high))

    return mod


def tree(numbers: Numbers) -> Mod:
    """A tree of drafts behind a prefix: a table says who is whose ancestor."""
    start = N - 50
    ancestors = numbers.whole(2, N, 50).bool()
    return lambda b, h, i, j: (j < start) | ((j >= start) & ancestors[i, (j - start).clamp(min=0, max=49)])


def global_sliding(numbers: Numbers) -> Mod:
    everywhere = numbers.whole(9, N) == 0
    near: Mod = lambda b, h, i, j: (i - j).abs() <= 6  # noqa: E731
    return or_masks(near, lambda b, h, i, j: everywhere[i] | everywhere[j])


def chosen_tiles(numbers: Numbers) -> Mod:
    """Video sparse attention: a table of the tiles of keys that a tile of queries sees."""
    chosen = numbers.whole(2, BATCH, HEADS, 14, 14).bool()
    return lambda b, h, i, j: chosen[b, h, i // 14, j // 14]


def listed_tiles(numbers: Numbers) -> Mod:
    """The same as lists of tiles."""
    tiles = numbers.whole(14, BATCH, HEADS, 14, 4, dtype=torch.int32)
    return lambda b, h, i, j: (tiles[b, h, i // 14] == j // 14).any(-1)


def sizes_of_tiles(numbers: Numbers) -> Mod:
    sizes = numbers.whole(14, 14) + 1
    return lambda b, h, i, j: j % 14 < sizes[j // 14]


def paged(inner: Mod) -> Case:
    """torch's PagedAttention: keys lie in pages, -1 where no page belongs to the element."""

    def case(numbers: Numbers) -> Mod:
        logical = torch.tensor([[0, 2, -1, 1, -1, 3, -1], [-1, -1, 0, -1, 1, -1, 2]])
        lengths = torch.tensor([100, 75])

        def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            page = logical[b, j // 28]
            at = page * 28 + j % 28
            valid = (page >= 0) & (at < lengths[b]) & (at >= 0)
            return torch.where(valid, inner(b, h, i, at), False)

        return mod

    return case


def padded(numbers: Numbers) -> Mod:
    lengths = torch.tensor([150, 31])
    return lambda b, h, i, j: (i < lengths[b]) & (j < lengths[b])


def dense_mask(numbers: Numbers) -> Mod:
    seen = torch.ones(BATCH, 1, N, N).bool().tril()
    return lambda b, h, i, j: seen[b, h.new_zeros(h.shape), i, j]


def flipped_rows(numbers: Numbers) -> Mod:
    hidden = numbers.whole(3, BATCH, N) == 0
    return lambda b, h, i, j: ~hidden[b, i] & (i >= j)


def in_steps(numbers: Numbers) -> Mod:
    ids = numbers.whole(3, BATCH, N, dtype=torch.int32)
    return lambda b, h, i, j: (ids[b][i] == ids[b][j]) | (i == j)


def of_bytes(numbers: Numbers) -> Mod:
    kinds = numbers.whole(3, N, dtype=torch.uint8)
    return lambda b, h, i, j: (kinds[i] == kinds[j]) | (kinds[j] == 0)


def by_times(numbers: Numbers) -> Mod:
    times = numbers.fixed(BATCH, N).float()
    return lambda b, h, i, j: (times[b, i] - times[b, j]).abs() < 0.5


MASK_MODS: dict[str, Case] = {
    **{name: plain(mod) for name, mod in WITHOUT_NUMBERS.items()},
    "documents": documents(noop_mask),
    "documents and causal": documents(causal),
    "documents and a window": documents(and_masks(window(12), causal)),
    "documents of elements": documents_of_elements,
    "shared question": shared_question,
    "shared prefix": shared_prefix,
    "images": images,
    "images of pairs": images_of_pairs,
    "tree": tree,
    "global sliding": global_sliding,
    "chosen tiles": chosen_tiles,
    "listed tiles": listed_tiles,
    "sizes of tiles": sizes_of_tiles,
    "pages": paged(noop_mask),
    "pages and causal": paged(causal),
    "padded": padded,
    "a dense mask": dense_mask,
    "flipped rows": flipped_rows,
    "indexed in steps": in_steps,
    "of bytes": of_bytes,
    "by times": by_times,
}


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name: str) -> None:
    errors = largest_errors(None, MASK_MODS[name])
    assert max(errors.values()) <= 3e-5, errors
