"""Small scenes for detectors: coloured rectangles, their boxes, labels and masks; images differ in size."""

from typing import Any

import torch
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, prepare

WIDTHS = (8, 4, 2)


def scene(objects: int, height: int, width: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """An image with that many rectangles, each in the channel of its label, and its target."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    image = torch.rand(3, height, width, generator=generator) * 0.2
    boxes, labels = [], []
    masks = torch.zeros(objects, height, width, dtype=torch.uint8)
    for number in range(objects):
        across, down, label = draw(6, 16), draw(6, 16), draw(1, 3)
        x, y = draw(0, width - across), draw(0, height - down)
        image[label - 1, y : y + down, x : x + across] += 0.8
        masks[number, y : y + down, x : x + across] = 1
        boxes.append([x, y, x + across, y + down])
        labels.append(label)
    target = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "masks": masks,
    }
    return image, target


def scenes(*objects: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images with so many objects each, of odd and even sizes, and their targets."""
    sizes = ((32, 40), (27, 33))
    made = [scene(count, *sizes[number % 2], seed=number) for number, count in enumerate(objects)]
    images, targets = zip(*made, strict=True)
    return list(images), list(targets)


def detector(**settings: Any) -> nn.Module:
    """An untrained one that keeps boxes whatever their scores, so that its mask branch runs."""
    torch.manual_seed(0)
    return build_model("tiny_detector", width=4, score_threshold=0.0, most_detections=4, **settings).eval()


def prepared(**settings: Any) -> nn.Module:
    return prepare(detector(**settings), QuantConfig(bit_choices=WIDTHS, start="3std"), [scenes(1, 2)[0]])
