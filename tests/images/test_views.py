import pytest
import torch

from bitdial import ImageViews
from bitdial.errors import ConfigError

IMAGES = [torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def test_views_come_after_the_images() -> None:
    views = ImageViews(IMAGES, 4)
    assert len(views) == 8
    assert views[0] is IMAGES[0]
    assert views[1] is IMAGES[1]
    assert torch.equal(views[2], IMAGES[0].flip(-1))
    assert [batch.shape for batch in views] == [batch.shape for batch in IMAGES * 4]
    assert torch.equal(views[-1], views[7])
    assert all(torch.equal(one, two) for one, two in zip(views[5:], [views[5], views[6], views[7]], strict=True))


def test_parts_are_of_the_image_and_repeat() -> None:
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    images = [torch.stack([rows, columns])[None].expand(64, -1, -1, -1)]  # pixels that say where they are
    parts = ImageViews(images, 3)[2]
    assert torch.equal(parts, ImageViews(images, 3)[2])
    assert not torch.equal(parts, ImageViews(images, 3, seed=1)[2])
    row, column = parts[:, 0], parts[:, 1]
    assert float(parts.min()) >= 0
    assert float(parts.max()) <= 31
    steps = row[:, 2:-1] - row[:, 1:-2]  # one pixel further is the side of the part, in pixels of the image
    side = steps.mean((1, 2))
    assert bool(((side > 0.7) & (side <= 1.001)).all())
    assert float(side.std()) > 0.03
    assert torch.allclose(steps, side[:, None, None].expand_as(steps), atol=0.02), "straight, and not stretched"
    across = (column[:, :, 2:-1] - column[:, :, 1:-2]).mean((1, 2))
    assert torch.allclose(across.abs(), side, atol=0.02), "as wide as high"
    mirrored = float((across < 0).double().mean())
    assert 0.25 < mirrored < 0.75


def test_one_view_is_the_images_themselves() -> None:
    assert [*ImageViews(IMAGES, 1)] == IMAGES


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_wrong_counts(count: int) -> None:
    with pytest.raises(ConfigError, match="views"):
        ImageViews(IMAGES, count)
