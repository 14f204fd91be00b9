"""torchvision beside a torch that its compiled operators cannot be loaded into, such as the CPU build of torch.

    unzip torchvision-0.28.0-*.whl -d FOLDER      # the version that fits torch; not installed
    PYTHONPATH=FOLDER pytest tests/integration/test_torchvision_detectors.py

Its Python files import once a few operators exist, and its models call two of them: `nms` and `roi_align`. They are
here, in plain PyTorch, for the CPU, and with the derivatives that autograd finds.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def torchvision_or_none() -> ModuleType | None:
    """torchvision; with the operators of this file where its own cannot be loaded. None where it is not installed."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    if "torchvision" not in sys.modules and not _loads(Path(found.origin).parent):
        for name in ("nms", "qnms"):  # the second, of quantised tensors, is only named
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library.define(
            "torchvision::roi_align",
            "(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, int sampling_ratio, "
            "bool aligned) -> Tensor",
        )
        torch.library.impl("torchvision::nms", "CPU", nms)
        torch.library.impl("torchvision::roi_align", "CompositeImplicitAutograd", roi_align)
        importlib.import_module("torchvision")
        for name in ("torchvision.extension", "torchvision.ops.roi_align"):
            module: Any = sys.modules[name]
            module._has_ops = lambda: True
    return importlib.import_module("torchvision")


def _loads(folder: Path) -> bool:
    """Whether the compiled operators in `folder` can be loaded."""
    try:
        for library in folder.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        return False
    return hasattr(torch.ops.torchvision, "nms")


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The places of the boxes (n, 4) to keep, the best first: of two that overlap more than so, only the better."""
    order = scores.detach().argsort(descending=True, stable=True)
    boxes = dets.detach()[order]
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    alive = torch.ones(len(boxes), dtype=torch.bool)
    kept = []
    for place in range(len(boxes)):
        if alive[place]:
            kept.append(place)
            corner = torch.maximum(boxes[place, :2], boxes[:, :2])
            shared = (torch.minimum(boxes[place, 2:], boxes[:, 2:]) - corner).clamp(min=0).prod(dim=1)
            alive &= ~(shared / (areas[place] + areas - shared) > iou_threshold)
    return order[torch.tensor(kept, dtype=torch.int64)]


def roi_align(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Crops (n, C, pooled_height, pooled_width) of `input` (N, C, H, W) at `rois` (n, 5): an image's number and a box.

    A cell is the mean of bilinear samples, `sampling_ratio` along each axis; without it as many as the cell has pixels.
    So a crop is a product of matrices: one of rows on the left, the image, one of columns on the right.
    """
    height, width = input.shape[2:]
    boxes = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    rows, columns = (
        _shares(boxes[:, first], boxes[:, first + 2], cells, extent, sampling_ratio, least=0.0 if aligned else 1.0)
        for first, cells, extent in ((1, pooled_height, height), (0, pooled_width, width))
    )
    crops = input.new_zeros(len(rois), input.shape[1], pooled_height, pooled_width)
    for number, image in enumerate(input):
        mine = (rois[:, 0] == number).nonzero()[:, 0]
        if len(mine):
            wide = torch.einsum("chw,nqw->nchq", image, columns[mine])
            crops = crops.index_copy(0, mine, torch.einsum("nph,nchq->ncpq", rows[mine], wide))
    return crops


def _shares(low: Tensor, high: Tensor, cells: int, extent: int, ratio: int, *, least: float) -> Tensor:
    """What each of `extent` pixels adds to each cell between `low` (n,) and `high` (n,): (n, cells, extent).

    Pixels have their centres at whole numbers. A sample up to one pixel outside has the value at the edge, one further
    outside is 0.
    """
    side = (high - low).clamp(min=least)
    counts = torch.full_like(side, ratio) if ratio > 0 else (side / cells).ceil().clamp(min=1)
    number = torch.arange(int(counts.max())) if len(counts) else torch.arange(0)
    steps = (number + 0.5) / counts[:, None]  # of each sample in its cell
    at = low[:, None, None] + (torch.arange(cells)[:, None] + steps[:, None]) * (side / cells)[:, None, None]
    counted = (number < counts[:, None])[:, None] & (at >= -1) & (at <= extent)
    weights = (1 - (at.clamp(0, extent - 1)[..., None] - torch.arange(extent)).abs()).clamp(min=0)
    return (weights * counted[..., None]).sum(dim=2) / counts[:, None, None]
