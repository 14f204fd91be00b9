"""The operators that stand in for torchvision's, against their definitions, value by value."""

import math

import torch
from torch import Tensor

from .torchvision_ops import nms, roi_align


def overlap(a: list[float], b: list[float]) -> float:
    across, down = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    return across * down / (sum(areas) - across * down)


def test_nms_keeps_what_no_better_box_covers() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, 40):
        corners = torch.rand(count, 2, generator=generator) * 8
        boxes = torch.cat([corners, corners + 1 + 4 * torch.rand(count, 2, generator=generator)], dim=1)
        scores = torch.rand(count, generator=generator)
        kept: list[int] = []
        for place in sorted(range(count), key=lambda i: -float(scores[i])):
            if all(overlap(boxes[place].tolist(), boxes[other].tolist()) <= 0.3 for other in kept):
                kept.append(place)
        assert nms(boxes, scores, 0.3).tolist() == kept
        assert count < 40 or len(kept) not in (1, count)


def sample(image: list[list[float]], y: float, x: float) -> float:
    """Bilinear; the edge's value up to a pixel outside, 0 beyond."""
    height, width = len(image), len(image[0])
    if not (-1 <= y <= height and -1 <= x <= width):
        return 0.0
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = math.floor(y), math.floor(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    first, second = (
        image[row][left] * (1 - (x - left)) + image[row][right] * (x - left) for row in (top, bottom)
    )  # fmt: skip
    return first * (1 - (y - top)) + second * (y - top)


def cell(
    image: list[list[float]], box: list[float], place: tuple[int, int], cells: tuple[int, int], ratio: int
) -> float:
    """The mean of the samples of a cell of `box`, at the row and column of `place`."""
    sides = (box[3] - box[1]) / cells[0], (box[2] - box[0]) / cells[1]
    counts = [ratio if ratio > 0 else max(1, math.ceil(side)) for side in sides]
    found = [
        sample(
            image,
            box[1] + sides[0] * (place[0] + (i + 0.5) / counts[0]),
            box[0] + sides[1] * (place[1] + (j + 0.5) / counts[1]),
        )
        for i in range(counts[0])
        for j in range(counts[1])
    ]
    return sum(found) / len(found)


def crops(images: Tensor, rois: Tensor, scale: float, cells: tuple[int, int], ratio: int, *, aligned: bool) -> Tensor:
    made = torch.zeros(len(rois), images.shape[1], *cells, dtype=torch.double)
    for number, (of, *corners) in enumerate(rois.tolist()):
        box = [value * scale - (0.5 if aligned else 0.0) for value in corners]
        if not aligned:
            box[2:] = [max(box[2], box[0] + 1), max(box[3], box[1] + 1)]
        for channel, image in enumerate(images[int(of)].tolist()):
            for row in range(cells[0]):
                for column in range(cells[1]):
                    made[number, channel, row, column] = cell(image, box, (row, column), cells, ratio)
    return made


def test_roi_align_is_the_mean_of_bilinear_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 2, 5, 7, generator=generator, dtype=torch.double, requires_grad=True)
    rois = torch.tensor(
        [[1, 2.2, 1.4, 9.0, 7.6], [0, -6.0, -5.0, 3.0, 4.0], [1, 4.0, 4.0, 4.1, 4.1], [0, 8.0, 3.0, 25.0, 17.0]],
        dtype=torch.double,
    )
    for scale, cells, ratio, aligned in ((0.5, (2, 3), 2, False), (0.5, (3, 2), -1, True), (1.0, (2, 2), -1, False)):
        found = roi_align(images, rois, scale, *cells, ratio, aligned)
        wanted = crops(images.detach(), rois, scale, cells, ratio, aligned=aligned)
        torch.testing.assert_close(found.detach(), wanted)
        assert wanted.count_nonzero() > wanted.numel() // 2
    assert roi_align(images, rois[:0], 1.0, 2, 2, 2, False).shape == (0, 2, 2, 2)
    assert torch.autograd.gradcheck(lambda x: roi_align(x, rois, 0.5, 2, 2, 2, False), images)
