"""The small detector: it learns, its masks lie in its boxes, frozen norms, and what it refuses."""

from typing import Any

import pytest
import torch

from bitdial import build_model
from bitdial.errors import ConfigError
from bitdial.models.boxes import overlaps
from bitdial.models.detector import STRIDES, Anchors, FrozenBatchNorm2d, anchors_of, padded


def square(side: int, left: int, top: int, label: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    image, mask = torch.zeros(3, 32, 32), torch.zeros(1, 32, 32)
    image[label - 1, top : top + side, left : left + side] = 1.0
    mask[0, top : top + side, left : left + side] = 1.0
    box = torch.tensor([[left, top, left + side, top + side]], dtype=torch.float32)
    return image, {"boxes": box, "labels": torch.tensor([label]), "masks": mask}


def test_it_learns_to_find_squares() -> None:
    torch.manual_seed(0)
    model: Any = build_model("tiny_detector", width=8)
    made = [square(10 + n, 3 * n, 2 * n, 1 + n % 2) for n in range(4)]
    images, targets = [image for image, _ in made], [target for _, target in made]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(60):
        loss = sum(model(images, targets).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for found, target in zip(model.eval()(images), targets, strict=True):
        assert int(found["labels"][0]) == int(target["labels"][0])
        assert float(overlaps(found["boxes"][:1], target["boxes"]).detach()) > 0.5
        hit = (found["masks"][0, 0] > 0.5) == (target["masks"][0] > 0.5)
        assert float(hit.float().mean()) > 0.9
        assert set(found) == {"boxes", "labels", "scores", "masks"}


def test_anchors_say_boxes_and_back() -> None:
    levels = [torch.zeros(1, 2, 32 // stride, 48 // stride) for stride in STRIDES]
    anchors = anchors_of(levels)
    assert len(anchors.centres) == 8 * 12 + 4 * 6 + 2 * 3
    boxes = torch.rand(len(anchors.centres), 4) * 10
    boxes[:, 2:] += boxes[:, :2] + 1
    torch.testing.assert_close(anchors.boxes_of(anchors.offsets_of(boxes)), boxes, rtol=1e-4, atol=1e-3)
    small = torch.tensor([[20.4, 9.6, 20.9, 9.9]])
    (place,) = (anchors.owners(small) == 0).nonzero()[:, 0].tolist()  # the nearest of the finest level
    assert anchors.centres[place].tolist() == [22.0, 10.0]
    assert (anchors.owners(torch.zeros(0, 4)) == -1).all()
    both = anchors.owners(torch.tensor([[0.0, 0.0, 20.0, 20.0], [4.0, 4.0, 14.0, 14.0]]))
    assert set(both.tolist()) == {-1, 0, 1}
    assert isinstance(anchors, Anchors)


def test_frozen_norms_are_buffers_and_images_are_padded() -> None:
    model: Any = build_model("tiny_detector", frozen_norms=True, head_norm=True, masks=False)
    assert not [m for m in model.backbone.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert any(isinstance(m, FrozenBatchNorm2d) for m in model.backbone.modules())
    assert sum(isinstance(m, torch.nn.BatchNorm2d) for m in model.head.modules()) == 2
    images = [torch.ones(3, 5, 20), torch.ones(3, 17, 1)]
    batch = padded(images)
    assert batch.shape == (2, 3, 32, 32)
    assert float(batch.sum()) == 3 * (5 * 20 + 17)


def test_what_it_refuses() -> None:
    model: Any = build_model("tiny_detector", width=4)
    image, target = square(8, 4, 4, 1)
    for problem, images, targets in (
        ("takes a list of images", torch.zeros(1, 3, 32, 32), None),
        ("image 0 has 1 channels.*expand", [image[:1]], None),
        ("image 1 is torch.uint8", [image, image.to(torch.uint8)], None),
        ("one for each of 1 images", [image], None),
        ("'masks' is missing", [image], [{key: target[key] for key in ("boxes", "labels")}]),
        (r"'masks' is \(1, 32, 32\)", [image[:, :16]], [target]),
        ("without an area", [image], [{**target, "boxes": torch.tensor([[4.0, 4.0, 4.0, 9.0]])}]),
        ("classes 1 to 2", [image], [{**target, "labels": torch.tensor([3])}]),
    ):
        with pytest.raises(ConfigError, match=problem):
            model.train()(images, targets)
