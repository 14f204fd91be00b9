"""A model that cannot be traced is calibrated by those of its modules that can, with every call of what is shared."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import CalibrateConfig, QuantConfig, build_model, calibrate, prepare, relative_error, set_bits
from bitdial.calibrate.blocks import find_blocks
from bitdial.calibrate.calibrate import correct_norms
from bitdial.calibrate.parts import find_parts
from bitdial.dial.plan import BitPlan
from bitdial.errors import QuantizationError
from bitdial.models.detector import freeze_norms, padded
from bitdial.nn import SwitchableBatchNorm

WIDTHS = (8, 3)


def images(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(3, 32, 24 + 8 * (n % 2), generator=generator) for n in range(count)]


def detector(**settings: Any) -> nn.Module:
    """With norms that have seen something; frozen ones, too."""
    torch.manual_seed(0)
    frozen = settings.pop("frozen_norms", False)
    settings = {"width": 4, "score_threshold": 0.0, "most_detections": 3, "head_norm": True, **settings}
    model = build_model("tiny_detector", **settings)
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.train().momentum = None  # the plain average
        model.head(model.backbone(torch.rand(4, 3, 32, 32)))  # type: ignore[operator,union-attr]
    if frozen:
        freeze_norms(model.backbone)  # type: ignore[arg-type]
    return model.eval()


def prepared(model: nn.Module) -> nn.Module:
    return prepare(model, QuantConfig(bit_choices=WIDTHS, start="3std"), [images()]).eval()


def heads(model: Any) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = model.head(model.backbone(padded(images())))
    return found


def test_the_parts_of_a_detector() -> None:
    model = prepared(detector())
    parts = {part.name: part for part in find_parts(model, images())}
    assert list(parts) == ["backbone", "head", "mask_branch"]
    assert all(part.once for part in parts.values())
    assert [name for name, part in parts.items() if part.chosen] == ["mask_branch"]  # it reads crops at found boxes
    assert len(parts["head"].reads) == 3  # the levels
    layers = {name for part in parts.values() for block in part.blocks for name in block.layers}
    assert {"backbone.stages.0.0.conv1", "backbone.output.2", "head.tower.3", "mask_branch.up"} < layers


def test_calls_of_a_shared_norm_stand_together() -> None:
    model = prepared(detector())
    (block,) = (b for part in find_parts(model, images()) if part.name == "head" for b in part.blocks)
    places = [n for n, node in enumerate(block.nodes) if node.target == "head.tower.1"]
    assert places == list(range(places[0], places[0] + 3))
    assert block.norms == ("head.tower.1", "head.tower.4")

    class Again(nn.Module):
        """A norm that reads what it gave cannot have its inputs together."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = SwitchableBatchNorm(nn.BatchNorm2d(3), bit_choices=(8,), follows="x")

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.norm(x) + 1)

    ours: Any = find_blocks(Again())[0]
    assert [str(node.target) for node in ours.nodes if node.op == "call_module"] == ["norm", "norm"]


def test_a_shared_norm_goes_by_all_levels() -> None:
    """Its mean moves by what the mean over all levels has moved; that of one level alone is another."""
    model: Any = prepared(detector())
    plain = copy.deepcopy(model.head.tower[1].sets["8"])
    seen: list[Tensor] = []
    norm = model.head.tower[1]
    correct_norms(model, [images()], [BitPlan(default=3)])
    norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))
    means = []
    for layer_bits in (None, 3):
        seen.clear()
        other = detector() if layer_bits is None else model
        if layer_bits is None:
            other.head.tower[1].register_forward_pre_hook(lambda m, args: seen.append(args[0].detach()))  # type: ignore[union-attr,index]
        else:
            set_bits(model, layer_bits)
        with torch.no_grad():
            other(images())
        assert len(seen) == 3
        rows = torch.cat([x.transpose(0, 1).flatten(1) for x in seen], dim=1).double()
        means.append(rows.mean(dim=1))
    wanted = plain.running_mean + (means[1] - means[0]).float()
    one_level = plain.running_mean
    found = norm.sets["3"].running_mean
    assert float((found - wanted).norm()) < 0.3 * float((found - one_level).norm())  # pixels of high energy count less


def test_calibration_brings_every_width_nearer(caplog: pytest.LogCaptureFixture) -> None:
    plain: Any = detector(frozen_norms=True)
    model: Any = prepared(plain)
    with torch.no_grad():
        wanted = plain.backbone(padded(images())), *heads(plain)[1:]

    def errors() -> list[float]:
        found = []
        for bits in WIDTHS:
            set_bits(model, bits)
            with torch.no_grad():
                now = model.backbone(padded(images())), *heads(model)[1:]
            found.append(relative_error(now, wanted))
        return found

    before = errors()
    with caplog.at_level(logging.INFO):
        report = calibrate(model, [images(), images(2)], progress=False)
    after = errors()
    assert after[0] < 0.3 * before[0]
    assert after[1] < 0.8 * before[1]
    assert report.samples == 5
    assert "part by part: backbone, head, mask_branch" in caplog.text
    assert not any("layer by layer" in text for text in report.warnings)
    last = model.backbone.stages[2][0].bn2.sets
    assert not torch.equal(last["8"].running_mean, last["3"].running_mean)  # frozen ones are corrected as well


def test_blocks_learn_from_all_that_they_give() -> None:
    model: Any = prepared(detector(masks=False))
    start = copy.deepcopy(model.backbone.output.state_dict())
    config = CalibrateConfig(
        effort="full",
        iterations=2,
        batch_size=2,
        round_jointly=False,
        choose_scales=False,
        equalize=False,
        tolerance=1.0,
    )
    report = calibrate(model, [images(2)], config, progress=False)
    (block,) = (one for one in report.blocks if "backbone.output.0" in one.layers)
    assert set(block.error_before) == set(WIDTHS)
    if block.error != block.error_before:  # what was learned has stayed
        now = model.backbone.output.state_dict()
        assert all(not torch.equal(start[f"{n}.weight"], now[f"{n}.weight"]) for n in range(3))


def test_a_run_goes_on_after_its_last_block(tmp_path: Any) -> None:
    one, two = (prepared(detector(masks=False)) for _ in range(2))
    config = CalibrateConfig(round_jointly=False, equalize=False)
    calibrate(one, [images(2)], config, progress=False)
    calibrate(two, [images(2)], config, checkpoint=tmp_path / "c", progress=False)
    three = prepared(detector(masks=False))
    report = calibrate(three, [images(2)], config, checkpoint=tmp_path / "c", progress=False)
    assert report.resumed == len(report.blocks)
    for a, b in ((one, two), (one, three)):
        assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_images_in_which_nothing_is_found_cannot_calibrate_the_mask_branch() -> None:
    model: Any = prepared(detector())
    model.score_threshold = 2.0
    with pytest.raises(QuantizationError, match=r"mask_branch.*score_threshold = 0"):
        calibrate(model, [images(2)], progress=False)


def test_crops_that_are_collected_in_one_tensor_were_chosen_too() -> None:
    class Collected(nn.Module):
        """Writes what it finds at its best places into a tensor, as torchvision does level by level."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU())
            self.scores = nn.Conv2d(4, 1, 1)
            self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

        def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
            x = self.stem(torch.stack(images))
            best = self.scores(x).flatten(1).topk(2).indices
            crops = torch.zeros(2, len(images), 4)
            for place, rows in enumerate(crops):
                rows.copy_(x.flatten(2)[torch.arange(len(images)), :, best[:, place]])
            return [{"boxes": self.head(crops)[:, number]} for number in range(len(images))]

    torch.manual_seed(0)
    few = [torch.rand(3, 8, 8) for _ in range(2)]
    model = prepare(Collected(), QuantConfig(bit_choices=WIDTHS, start="3std", keep_first_last=False), [few])
    assert {part.name: part.chosen for part in find_parts(model, few)} == {"stem": False, "scores": False, "head": True}
