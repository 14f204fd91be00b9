"""What says the places is no part of what is found there; the ends of detectors follow from that."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.prepare.choosing import split_arguments, written_by
from bitdial.prepare.dataflow import find_flow
from bitdial.prepare.ends import find_ends
from bitdial.prepare.weights import find_weights


def test_places_are_told_from_values() -> None:
    x, i = object(), object()
    for func, args, kwargs, places in (
        (torch.gather, (x, 1, i), {}, (i,)),
        (torch.gather, (x, 1), {"index": i}, (i,)),
        (torch.where, (i, x, x), {}, (i,)),
        (F.grid_sample, (x,), {"grid": i}, (i,)),
        (torch.add, (x, i), {}, ()),
    ):
        values, found = split_arguments(func, args, kwargs)
        assert tuple(found) == places
        assert (i in values[0]) == (places == ())
        assert x in values[0]


class TwoStages(nn.Module):
    """Proposals from one head, crops at the best of them, boxes and masks from the crops."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.neck = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.objectness, self.proposals = nn.Conv2d(4, 1, 1), nn.Conv2d(4, 2, 1)
        self.box_head, self.scores, self.boxes = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 2)
        self.mask_head, self.masks = nn.Linear(4, 4), nn.Linear(4, 3)

    def crops(self, x: Tensor, centres: Tensor) -> Tensor:
        return F.grid_sample(x, centres.tanh()[None, None], align_corners=False)[0, :, 0].T

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        x = torch.relu(self.neck(torch.relu(self.stem(torch.stack(images)[:1]))))
        best = self.objectness(x).flatten().topk(3).indices
        proposals = self.proposals(x)[0].flatten(1).T[best]
        read = torch.relu(self.box_head(self.crops(x, proposals)))
        boxes, scores = proposals + self.boxes(read), self.scores(read).amax(dim=1)
        kept = torch.tensor(scores.argsort().tolist())
        boxes, scores = boxes[scores.argsort()], scores[kept]
        masks = self.masks(torch.relu(self.mask_head(self.crops(x, boxes))))
        return [{"boxes": boxes, "scores": scores, "masks": masks}]


def test_the_last_layers_of_a_detector_are_all_its_predictors() -> None:
    torch.manual_seed(0)
    model = TwoStages().eval()
    layers: Any = {n: m for n, m in model.named_modules() if n}
    ends = find_ends(model, find_weights(model), layers, [torch.rand(3, 6, 6)])
    assert (ends.stems, ends.by_order) == (("stem",), ())
    assert set(ends.heads) == {"objectness", "proposals", "scores", "boxes", "masks"}


def test_what_is_written_into_is_told() -> None:
    x, y = torch.zeros(4, 2), torch.ones(2)
    for func, args, kwargs, written in (
        (Tensor.__setitem__, (x, 0, y), {}, (x,)),
        (Tensor.copy_, (x[0], y), {}, (None, x)),  # a view, and the tensor that has its values
        (Tensor.add_, (y, 1), {}, (y,)),
        (torch.add, (y, y), {"out": y}, (y,)),
        (torch.add, (x, y), {}, ()),
        (Tensor.__getitem__, (x, 0), {}, ()),
    ):
        found = written_by(func, args, kwargs)
        assert len(found) == len(written)
        assert all(a is b for a, b in zip(found, written, strict=True) if b is not None)


class Collected(nn.Module):
    """Crops of two levels, written into one tensor as torchvision does it; masks, written into an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.boxes, self.masks = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        batch = torch.zeros(len(images), 3, 6, 6)
        for place, image in enumerate(images):
            batch[place, :, : image.shape[1], : image.shape[2]].copy_(image)
        fine = torch.relu(self.stem(batch))
        levels, crops = (fine, torch.relu(self.deep(fine))), torch.zeros(4, 4)
        for place, level in enumerate(levels):
            crops[torch.arange(2) + 2 * place] = level[0, :, :2, 0].T
        canvas = torch.zeros(5, 5)
        canvas[:2, :2] = self.masks(crops).view(2, 2)
        return [{"boxes": self.boxes(crops), "masks": canvas}]


def test_what_was_written_into_a_tensor_is_followed() -> None:
    torch.manual_seed(0)
    model, images = Collected().eval(), [torch.rand(3, 5, 6)]
    layers: Any = {n: m for n, m in model.named_modules() if n}
    ends = find_ends(model, find_weights(model), layers, images)
    assert (ends.stems, ends.by_order) == (("stem",), ())
    assert set(ends.heads) == {"boxes", "masks"}
    flow = find_flow(model, layers, {}, images)
    assert flow.feeders == {"stem": None, "deep": "stem", "boxes": "deep", "masks": "deep"}
