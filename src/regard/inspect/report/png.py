"""PNG: a small picture, of palette colours or of any, without any package."""

from __future__ import annotations

import struct
import zlib

from torch import Tensor


def png(levels: Tensor, palette: list[tuple[int, int, int]]) -> bytes:
    """A picture (rows, cols) of uint8 numbers of colours; a number beyond the palette is transparent.

    >>> import torch
    >>> png(torch.tensor([[0, 1]], dtype=torch.uint8), [(255, 255, 255), (0, 0, 0)])[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    rows, cols = levels.shape
    colours = b"".join(bytes(colour) for colour in palette) + bytes(3 * (256 - len(palette)))
    opaque = bytes([255] * len(palette) + [0] * (256 - len(palette)))
    return _file(rows, cols, 3, levels, (b"PLTE", colours), (b"tRNS", opaque))


def png_of_pixels(pixels: Tensor) -> bytes:
    """A picture (rows, cols, 3) of uint8 red, green and blue."""
    rows, cols, _ = pixels.shape
    return _file(rows, cols, 2, pixels.flatten(1))


def _file(rows: int, cols: int, colour_type: int, lines: Tensor, *chunks: tuple[bytes, bytes]) -> bytes:
    """A file of 8 bits a sample; each line of the picture begins with its filter, which is none."""
    head = struct.pack(">IIBBBBB", cols, rows, 8, colour_type, 0, 0, 0)
    data = b"".join(b"\0" + bytes(line) for line in lines.tolist())
    parts = ((b"IHDR", head), *chunks, (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
