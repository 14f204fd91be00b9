"""Augmentation: the image and its map move alike, and the generator alone decides."""

import numpy as np
import pytest
import torch

from bitdial.errors import ConfigError
from bitdial.images import InstanceAugment


def picture(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An image whose brightness is the number of the object there, so that one shows the other."""
    instances = torch.arange(height * width // 16).reshape(height // 4, width // 4).repeat_interleave(4, 0)
    instances = instances.repeat_interleave(4, 1).int()
    return instances.to(torch.uint8).expand(3, height, width), instances


def test_without_scaling_the_map_is_where_the_image_is() -> None:
    seen = set()
    for seed in range(40):
        augment = InstanceAugment(crop=16, scale=(1.0, 1.0), turn=True)
        image, instances = augment(*picture(24, 40), np.random.default_rng(seed))
        assert image.shape == (3, 16, 16)
        assert torch.equal((255 * image[0]).round().long(), instances)
        seen.add(tuple(instances[[0, 0, -1, -1], [0, -1, 0, -1]].tolist()))
    assert len(seen) > 30, "parts, mirrored and turned, differ"


def test_scaling_keeps_both_together_and_sides_within_the_crop() -> None:
    sizes = set()
    for seed in range(20):
        augment = InstanceAugment(crop=32, scale=(0.5, 2.0))
        image, instances = augment(*picture(24, 40), np.random.default_rng(seed))
        assert image.shape[1:] == instances.shape
        assert max(instances.shape) <= 32
        assert ((255 * image[0]) - instances).abs().median() < 1.5, "most pixels are inside of an object"
        assert image.min() >= 0
        assert image.max() <= 1
        sizes.add(tuple(instances.shape))
    assert len(sizes) > 5


def test_the_generator_decides_everything() -> None:
    augment, at = InstanceAugment(crop=20, turn=True), picture(24, 40)
    first, second = (augment(*at, np.random.default_rng((1, 2))) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    others = [augment(*at, np.random.default_rng((1, seed)))[0] for seed in range(3, 9)]
    assert any(other.shape != first[0].shape or not torch.equal(other, first[0]) for other in others)


def test_one_pixel_and_odd_sizes() -> None:
    for height, width in ((1, 1), (1, 7), (5, 3)):
        for seed in range(10):
            image, instances = InstanceAugment(crop=4, scale=(0.1, 3.0), turn=True)(
                torch.full((3, height, width), 255, dtype=torch.uint8),
                torch.ones(height, width).int(),
                np.random.default_rng(seed),
            )
            assert instances.unique().tolist() == [1]
            assert torch.allclose(image, torch.ones_like(image))


def test_what_is_no_use_is_refused() -> None:
    for wrong in ({"crop": 0}, {"smallest": 0}, {"scale": (2.0, 1.0)}, {"scale": (0.0, 1.0)}):
        with pytest.raises(ConfigError):
            InstanceAugment(**wrong)  # type: ignore[arg-type]
