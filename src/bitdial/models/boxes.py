"""Boxes in plain PyTorch: overlap, suppression of duplicates, crops of feature maps, masks put back into images.

A box is (left, top, right, bottom) in pixels, with x to the right and y downwards; pixel 0 goes from 0 to 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """The intersection over union (n, m) of the boxes `first` (n, 4) with those of `second` (m, 4)."""
    corner = torch.maximum(first[:, None, :2], second[None, :, :2])
    other = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    shared = (other - corner).clamp(min=0).prod(dim=2)
    return shared / (_areas(first)[:, None] + _areas(second)[None] - shared).clamp(min=1e-9)


def _areas(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1)


def suppress(boxes: Tensor, scores: Tensor, labels: Tensor, most_overlap: float) -> Tensor:
    """The places of the boxes to keep, the best first: of two of one label that overlap more, only the better."""
    order = scores.argsort(descending=True, stable=True)
    clash = overlaps(boxes[order], boxes[order]) > most_overlap
    clash &= labels[order][:, None] == labels[order][None]
    gone = [False] * len(order)
    kept = []
    for place, row in enumerate(clash.tolist()):
        if not gone[place]:
            kept.append(place)
            gone = [was or hit for was, hit in zip(gone, row, strict=True)]
    return order[torch.tensor(kept, dtype=torch.int64, device=order.device)]


def crop(features: Tensor, boxes: Tensor, of: Tensor, size: int) -> Tensor:
    """Each of `boxes` (n, 4), in pixels of `features` (N, C, H, W), as a crop (n, C, size, size): RoIAlign.

    `of` (n,) says which image a box is in. Values are bilinear, at the centre of each of the crop's cells.
    """
    if len(boxes) == 0:
        return features.new_zeros(0, features.shape[1], size, size)
    height, width = features.shape[-2:]
    steps = (torch.arange(size, device=boxes.device) + 0.5) / size
    x = boxes[:, None, 0] + steps * (boxes[:, 2] - boxes[:, 0])[:, None]
    y = boxes[:, None, 1] + steps * (boxes[:, 3] - boxes[:, 1])[:, None]
    grid = torch.stack(
        [
            (2 * x / width - 1)[:, None, :].expand(-1, size, -1),
            (2 * y / height - 1)[:, :, None].expand(-1, -1, size),
        ],
        dim=3,
    )
    crops = [
        F.grid_sample(one[None].expand(len(places), -1, -1, -1), grid[places], padding_mode="border", align_corners=False)
        for number, one in enumerate(features)
        if len(places := (of == number).nonzero()[:, 0])
    ]
    order = torch.cat([(of == number).nonzero()[:, 0] for number in range(len(features))])
    return torch.cat(crops)[order.argsort()]


def paste(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """`masks` (n, 1, m, m), each that of a box, in an image of that (height, width): (n, 1, height, width)."""
    height, width = size
    if len(masks) == 0:
        return masks.new_zeros(0, 1, height, width)
    places = (torch.arange(extent, device=masks.device) + 0.5 for extent in (height, width))
    down, right = (
        2 * (place - boxes[:, low, None]) / (boxes[:, high, None] - boxes[:, low, None]).clamp(min=1e-6) - 1
        for place, low, high in zip(places, (1, 0), (3, 2), strict=True)
    )
    grid = torch.stack(
        [right[:, None, :].expand(-1, height, -1), down[:, :, None].expand(-1, -1, width)],
        dim=3,
    )
    inside = (grid.abs() <= 1).all(dim=3)[:, None]
    return F.grid_sample(masks, grid, padding_mode="border", align_corners=False) * inside
