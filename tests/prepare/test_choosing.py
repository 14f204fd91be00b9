"""What says the places is no part of what is found there; the ends of detectors follow from that."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.prepare.choosing import split_arguments
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
