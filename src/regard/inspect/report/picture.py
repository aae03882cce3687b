"""Picture: the image that a model read, and how its patches lie in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

CLS = "[CLS]"  # the first of the tokens that are no patches
LARGEST = 512  # pixels that a picture has at most, each way


@dataclass(frozen=True, eq=False)
class Picture:
    """The image of a report whose tokens are its patches, rows × columns of them, row by row, behind `special` others.

    pixels  uint8 (height, width, 3), as a model saw them: cropped and scaled as its patches are
    """

    pixels: Tensor
    rows: int
    columns: int
    special: int

    @staticmethod
    def of(pixels: Tensor, rows: int, columns: int, special: int) -> Picture:
        """From what a model was given: (channels, height, width), one channel or three, of any range.

        What lies in 0 to 1 is taken as it is; other numbers, as a processor's normalisation leaves them, are spread
        over 0 to 1 from the least to the greatest.

        >>> Picture.of(torch.tensor([[[0.0, 1.0]]]), 1, 2, 0).pixels.tolist()
        [[[0, 0, 0], [255, 255, 255]]]
        """
        image = pixels.detach().float().cpu()
        low, high = float(image.min()), float(image.max())
        if low < 0 or high > 1:
            image = (image - low) / ((high - low) or 1.0)
        if max(image.shape[-2:]) > LARGEST:
            scale = LARGEST / max(image.shape[-2:])
            image = interpolate(image[None], scale_factor=scale, mode="area")[0]
        image = (image * 255).round().clamp(0, 255).to(torch.uint8)
        return Picture(image.expand(3, -1, -1).permute(1, 2, 0).contiguous(), rows, columns, special)
