"""A detector all the way: prepare, train, resume, the file, live models, exact and integer kernels, ONNX, costs."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    Callback,
    OwnLosses,
    QuantConfig,
    Rule,
    TrainConfig,
    code_exact,
    describe,
    export_onnx,
    load,
    load_trainable,
    measure_costs,
    onnx_session_options,
    prepare,
    save,
    set_bits,
    train,
)
from bitdial.dial.dial import dialled_layers
from bitdial.errors import QuantizationError, TrainingError
from bitdial.nn import SwitchableBatchNorm
from bitdial.prepare.report import REPORT

from .scenes import WIDTHS, detector, prepared, scenes

HEADS = ("head.classes", "head.offsets", "mask_branch.masks")


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """Bit for bit."""


def batches() -> list[list[Any]]:
    """As a DataLoader with a collate of lists gives them."""
    return [list(scenes(0, 2)), list(scenes(3, 1, 0))]


def found_by(model: nn.Module, images: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        found: Any = model(images)
    return [value for one in found for value in one.values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_prepare_finds_stem_and_predictors_and_sees_every_level() -> None:
    model, (images, _) = prepared(frozen_norms=True, head_norm=True), scenes(1, 2)
    report: Any = getattr(model, REPORT)
    assert (report.first_layers, report.last_layers, report.ends_by_order) == (("backbone.conv1",), HEADS, ())
    assert report.warnings == ()
    assert {"backbone.bn1", "head.tower.1", "head.tower.4"} < set(report.switched_norms)
    assert dialled_layers(model)["mask_branch.conv"].fed_by == "backbone.output.0"  # not what made the boxes
    kept = prepare(detector(), QuantConfig(bit_choices=WIDTHS, start="3std", keep_first_last=8), [images])
    assert {n: m.fixed_bits for n, m in dialled_layers(kept).items() if m.fixed_bits} == dict.fromkeys(
        ("backbone.conv1", *HEADS), 8
    )

    whole: Any = detector()
    most = QuantConfig(bit_choices=WIDTHS, start="max")
    layer: Any = dialled_layers(prepare(whole, most, [images]))["head.tower.0"]
    seen: list[float] = []
    whole.head.tower.register_forward_pre_hook(lambda m, args: seen.append(float(args[0].detach().abs().max())))
    whole(images)
    assert len(seen) == 3
    torch.testing.assert_close(127.0 * float(layer.act_quantizer.scales["8"].detach()), max(seen), rtol=1e-5, atol=0.0)


def test_costs_count_all_levels() -> None:
    model, images = prepared(masks=False), [torch.rand(3, 32, 48)]
    costs = measure_costs(model, images)
    channels, pixels = 8, sum((32 // s) * (48 // s) for s in (4, 8, 16))
    assert costs.layers["head.tower.0"].macs == pixels * channels * channels * 9
    assert costs.layers["head.tower.0"].inputs == pixels * channels


def test_trained_is_live_at_every_width_and_integer_kernels_are_exact(tmp_path: Path) -> None:
    model = prepared(frozen_norms=True, head_norm=True)
    frozen = {k: v.clone() for k, v in model.backbone.state_dict().items() if ".sets." in k}  # type: ignore[union-attr]
    learned = {k: v.clone() for k, v in model.head.state_dict().items() if ".sets." in k}  # type: ignore[union-attr]
    history = train(model, batches(), TrainConfig(epochs=1, lr=1e-3), loss=OwnLosses(), progress=False)
    row = history.rows[-1]
    assert set(row["loss"]) == {"8", "4", "2"}
    for bits, loss in row["loss"].items():
        assert set(row["losses"][bits]) == {"loss_classes", "loss_boxes", "loss_masks"}
        assert sum(row["losses"][bits].values()) == pytest.approx(loss)
    after = model.backbone.state_dict()  # type: ignore[union-attr]
    assert frozen
    assert all(torch.equal(value, after[key]) for key, value in frozen.items())
    for bits in WIDTHS:  # all sets of the shared head have learned
        mine = {k: v for k, v in learned.items() if f".sets.{bits}." in k}
        now = model.head.state_dict()  # type: ignore[union-attr]
        assert all(not torch.equal(v, now[k]) for k, v in mine.items())

    save(model, tmp_path / "m.safetensors")
    live = load(tmp_path / "m.safetensors")
    exact, integer = code_exact(live), load(tmp_path / "m.safetensors", kernels="integer")
    again = load_trainable(tmp_path / "m.safetensors").eval()
    fused: Any = integer._fused[0]  # type: ignore[index]
    assert fused.names == ["backbone", "head.tower", "mask_branch"]
    images, _ = scenes(2, 0, 3)
    for bits in WIDTHS:
        for each in (model, live, exact, integer, again):
            set_bits(each, bits)
        wanted = found_by(model, images)
        assert same(found_by(live, images), wanted)
        assert same(found_by(again, images), wanted)
        assert same(found_by(integer, images), found_by(exact, images))
        x = torch.rand(2, 3, 21, 34)
        with torch.no_grad():
            assert same(fused.made.backbone(x), exact.backbone(x))  # type: ignore[operator]


def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_step(self, run: Any) -> None:
            if run.step == 3:
                raise KeyboardInterrupt

    config = TrainConfig(epochs=2, lr=1e-3, checkpoint_every=1, accumulate=2)
    start = prepared(masks=False)
    one, two, three = (copy.deepcopy(start) for _ in range(3))
    settings: dict[str, Any] = {"loss": OwnLosses(), "progress": False}
    train(one, batches(), config, **settings)
    with pytest.raises(KeyboardInterrupt):
        train(two, batches(), config, checkpoint=tmp_path / "run.ckpt", callbacks=[Stop()], **settings)
    train(three, batches(), config, checkpoint=tmp_path / "run.ckpt", **settings)
    assert same(list(one.state_dict().values()), list(three.state_dict().values()))


def test_images_of_all_sorts(tmp_path: Path) -> None:
    """Without objects, of one pixel, with 500 objects, of odd sizes; and what is refused."""
    model = prepared()
    images, targets = scenes(0, 0)
    images.append(torch.rand(3, 1, 1))
    box = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    targets.append({"boxes": box, "labels": torch.tensor([2]), "masks": torch.ones(1, 1, 1)})
    crowd, many = scenes(500)
    train(
        model, [[images[:2], targets[:2]], [images, targets], [crowd, many]], TrainConfig(epochs=1),
        loss=OwnLosses(), progress=False,
    )  # fmt: skip
    save(model, tmp_path / "m")
    exact, integer = code_exact(load(tmp_path / "m")), load(tmp_path / "m", kernels="integer")
    for each in (model, exact, integer):
        for threshold in (0.0, 2.0):  # all boxes, none
            each.score_threshold = threshold  # type: ignore[assignment]
            kept = each([*images, torch.rand(3, 1, 37)])
            assert [len(one["boxes"]) for one in kept] == ([4] * 4 if threshold == 0 else [0] * 4)
            assert kept[2]["masks"].shape[1:] == (1, 1, 1)


def test_what_training_refuses() -> None:
    model, (images, targets) = prepared(), scenes(1, 1)

    def attempt(data: Any, **settings: Any) -> None:
        config = TrainConfig(epochs=1, **{k: settings.pop(k) for k in ("distill",) if k in settings})
        train(model, data, config, progress=False, **{"loss": OwnLosses(), **settings})

    pairs = [[images, targets]]
    for problem, data, settings in (
        ("one for each of 2 images", [[images, targets[:1]]], {}),
        ("has 1 channels.*expand", [[[image[:1] for image in images], targets]], {}),
        ("needs class logits", pairs, {"distill": "in_place"}),
        ("leave it out", pairs, {"output": "loss_boxes"}),
        ("pass loss=OwnLosses", pairs, {"loss": OwnLosses}),
        ("no loss 'loss_mask'", pairs, {"loss": OwnLosses(weights={"loss_mask": 2.0})}),
        ("list of targets", pairs, {"loss": lambda output, targets: output}),
        ("a measure of your own", pairs, {"evaluate_on": pairs}),
    ):
        with pytest.raises((TrainingError, ValueError), match=problem):
            attempt(data, **settings)
    with pytest.raises(QuantizationError, match=r"mask_branch.conv.*score_threshold"):
        blind: Any = detector()
        blind.score_threshold = 2.0
        prepare(blind, QuantConfig(), [images])


def test_onnx_of_backbone_and_pyramid(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    save(prepared(masks=False), tmp_path / "m")
    live = load(tmp_path / "m")
    exact = code_exact(live)
    set_bits(exact, 4)
    export_onnx(live, tmp_path / "b.onnx", torch.rand(1, 3, 32, 48), bits=4, part="backbone")
    x = torch.rand(2, 3, 32, 48)
    found = onnxruntime.InferenceSession(tmp_path / "b.onnx", onnx_session_options()).run(None, {"x": x.numpy()})
    with torch.no_grad():
        wanted = exact.backbone(x)  # type: ignore[operator]
    assert len(found) == 3
    for got, level in zip(found, wanted, strict=True):
        torch.testing.assert_close(torch.from_numpy(got), level, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="names no module"):
        export_onnx(live, tmp_path / "c.onnx", x, part="trunk")


def test_rules_and_the_report() -> None:
    images, _ = scenes(1, 1)
    rule = Rule(pattern="head.classes", bits=8)
    model = prepare(detector(), QuantConfig(bit_choices=WIDTHS, start="3std", rules=(rule,)), [images])
    assert dialled_layers(model)["head.classes"].fixed_bits == 8
    assert "head.classes" in str(describe(model))
    assert not [m for m in model.modules() if isinstance(m, SwitchableBatchNorm) and m.follows.startswith("head")]
