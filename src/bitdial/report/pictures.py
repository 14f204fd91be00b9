"""Pictures of what a detector finds, beside what the float model finds on the same image.

What both find is drawn in blue, what the float model does not find in orange, and what only it finds as an empty box
in magenta. Two objects are the same where their boxes have an IoU of at least a half.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bitdial.errors import ConfigError
from bitdial.images.decode import picture_uri

BOTH, ADDED, MISSED = (45, 140, 255), (255, 150, 20), (255, 60, 190)
SHOWN = 0.5  # the score from which objects are drawn
SAME = 0.5  # the IoU of boxes from which objects are the same
SIDE = 480  # pixels of the longer side, to which small images are enlarged
TINT = 0.35  # of the inside of a mask

Found = Mapping[str, Tensor]


@dataclass(frozen=True)
class Panel:
    """One picture: its name, a data URI, and how many objects are found, added and missed against the float model."""

    name: str
    uri: str
    found: int
    added: int
    missed: int


def panel(name: str, image: Tensor, found: Found, reference: Found | None = None) -> Panel:
    """`found` on `image` (3, height, width; 0 to 1), compared with what the float model found, if that is given.

    `found` has `boxes` (n, 4), `scores` (n) and, of detectors with masks, `masks` (n, 1, height, width).
    """
    if image.dim() != 3 or image.shape[0] != 3:
        raise ConfigError(f"an image of shape {tuple(image.shape)} cannot be drawn; give (3, height, width)")
    mine, theirs = _shown(found), None if reference is None else _shown(reference)
    same = torch.ones(len(mine["boxes"]), dtype=torch.bool)
    missed = torch.zeros(0, 4)
    if theirs is not None:
        same, known = _matched(mine["boxes"], theirs["boxes"])
        missed = theirs["boxes"][~known]
    factor = max(1, round(SIDE / max(image.shape[1:])))
    height, width = (factor * side for side in image.shape[1:])
    canvas = F.interpolate(image[None].float().cpu(), size=(height, width), mode="bilinear")[0].clamp(0, 1) * 255
    for chosen, colour in ((same, BOTH), (~same, ADDED)):
        if "masks" in mine and bool(chosen.any()):
            canvas = _with_masks(canvas, mine["masks"][chosen], colour)
        for box in mine["boxes"][chosen]:
            _outline(canvas, box * factor, colour, thick=2)
    for box in missed:
        _outline(canvas, box * factor, MISSED, thick=3)
    uri = picture_uri(canvas.round().to(torch.uint8))
    return Panel(name, uri, len(same), int((~same).sum()), len(missed))


def _shown(found: Found) -> dict[str, Tensor]:
    """The objects with a sure score, on the CPU; masks are bool (n, height, width)."""
    kept = found["scores"].detach().cpu() >= SHOWN
    shown = {"boxes": found["boxes"].detach().cpu().float()[kept]}
    if "masks" in found:
        shown["masks"] = found["masks"].detach().cpu()[kept].flatten(0, 1) >= 0.5
    return shown


def _matched(found: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Which of `found` (n, 4) have a partner in `reference` (m, 4), and which of those are one; best pairs first."""
    mine, theirs = torch.zeros(len(found), dtype=torch.bool), torch.zeros(len(reference), dtype=torch.bool)
    overlaps = _iou(found, reference)
    for place in overlaps.flatten().argsort(descending=True).tolist():
        i, j = divmod(place, len(reference))
        if overlaps[i, j] < SAME:
            break
        if not mine[i] and not theirs[j]:
            mine[i] = theirs[j] = True
    return mine, theirs


def _iou(a: Tensor, b: Tensor) -> Tensor:
    """The overlap of boxes (n, 4) and (m, 4) as shares of what both cover: (n, m)."""
    corners = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (corners[1] - corners[0]).clamp(min=0).prod(dim=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(dim=1) for boxes in (a, b)]
    return common / (areas[0][:, None] + areas[1][None] - common).clamp(min=1e-9)


def _with_masks(canvas: Tensor, masks: Tensor, colour: tuple[int, int, int]) -> Tensor:
    """`canvas` (3, height, width) with the insides of masks (n, h, w) tinted and their edges drawn."""
    size = canvas.shape[1:]
    inside = F.interpolate(masks.any(0)[None, None].float(), size=size, mode="nearest")[0, 0] > 0
    edges = torch.zeros_like(inside)
    for mask in masks:
        large = F.interpolate(mask[None, None].float(), size=size, mode="nearest")[0]
        edges |= (large - (1 - F.max_pool2d(1 - large, 3, stride=1, padding=1)))[0] > 0
    paint = torch.tensor(colour, dtype=canvas.dtype)[:, None, None]
    canvas = torch.where(inside, (1 - TINT) * canvas + TINT * paint, canvas)
    return torch.where(edges, paint.expand_as(canvas), canvas)


def _outline(canvas: Tensor, box: Tensor, colour: tuple[int, int, int], *, thick: int) -> None:
    """Draw the edges of a box on `canvas`, in place."""
    height, width = canvas.shape[1:]
    left, right = (min(max(round(float(box[k])), 0), width - 1) for k in (0, 2))
    top, bottom = (min(max(round(float(box[k])), 0), height - 1) for k in (1, 3))
    paint = torch.tensor(colour, dtype=canvas.dtype)[:, None, None]
    canvas[:, top : top + thick, left : right + 1] = paint
    canvas[:, max(bottom - thick + 1, 0) : bottom + 1, left : right + 1] = paint
    canvas[:, top : bottom + 1, left : left + thick] = paint
    canvas[:, top : bottom + 1, max(right - thick + 1, 0) : right + 1] = paint
