"""torchvision's own detectors all the way; see torchvision_ops.py for torchvision beside CPU torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial import (
    CalibrateConfig,
    OwnLosses,
    QuantConfig,
    TrainConfig,
    calibrate,
    code_exact,
    load,
    prepare,
    save,
    set_bits,
    train,
)
from bitdial.errors import ConfigError
from bitdial.prepare.report import REPORT
from bitdial.recipes.detectors import DetectorKind

from .scenes import WIDTHS, scenes
from .torchvision_ops import torchvision_or_none

torchvision: Any = torchvision_or_none()
pytestmark = pytest.mark.skipif(torchvision is None, reason="needs torchvision; see torchvision_ops.py")

NONE: dict[str, Any] = {"weights": None, "weights_backbone": None, "num_classes": 3, "min_size": 64, "max_size": 96}
FEW = {"box_score_thresh": 0.0, "box_detections_per_img": 4, "rpn_pre_nms_top_n_test": 20, "rpn_post_nms_top_n_test": 8}
DETECTORS: dict[str, tuple[dict[str, Any], set[str]]] = {  # arguments, and the predictors that must be last layers
    "maskrcnn_resnet50_fpn": (
        FEW,
        {
            "rpn.head.cls_logits", "rpn.head.bbox_pred", "roi_heads.box_predictor.cls_score",
            "roi_heads.box_predictor.bbox_pred", "roi_heads.mask_predictor.mask_fcn_logits",
        },
    ),
    "fasterrcnn_resnet50_fpn": (
        FEW,
        {
            "rpn.head.cls_logits", "rpn.head.bbox_pred", "roi_heads.box_predictor.cls_score",
            "roi_heads.box_predictor.bbox_pred",
        },
    ),
    "retinanet_resnet50_fpn": (
        {"score_thresh": 0.0, "detections_per_img": 4, "topk_candidates": 8},
        {"head.classification_head.cls_logits", "head.regression_head.bbox_reg"},
    ),
    "fcos_resnet50_fpn": (
        {"score_thresh": 0.0, "detections_per_img": 4, "topk_candidates": 8},
        {
            "head.classification_head.cls_logits", "head.regression_head.bbox_reg",
            "head.regression_head.bbox_ctrness",
        },
    ),
}  # fmt: skip


def found_by(model: Any, images: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [value for one in model(images) for value in one.values()]


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_of_torchvision_trains_ships_and_runs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings, predictors = DETECTORS[name]
    images, targets = scenes(1, 2)
    model = getattr(torchvision.models.detection, name)(**NONE, **settings).eval()
    prepared: Any = prepare(model, QuantConfig(bit_choices=WIDTHS, start="3std"), [images])
    report: Any = getattr(prepared, REPORT)
    assert report.first_layers == ("backbone.body.conv1",)
    assert set(report.last_layers) == predictors
    history = train(prepared, [[images, targets]], TrainConfig(epochs=1, lr=1e-5), loss=OwnLosses(), progress=False)
    assert (
        set(history.rows[0]["losses"]["2"]) >= {"loss_classifier"} or "classification" in history.rows[0]["losses"]["2"]
    )
    calibrate(prepared, [images], CalibrateConfig(round_jointly=False, equalize=False), progress=False)
    save(prepared, tmp_path / "m")
    live = load(tmp_path / "m", model)
    exact, integer = code_exact(live), load(tmp_path / "m", model, kernels="integer")
    for bits in WIDTHS:
        for each in (prepared, live, exact, integer):
            set_bits(each, bits)
        pairs = ((prepared, live), (exact, integer))
        for left, right in pairs:
            assert all(map(torch.equal, found_by(left, images), found_by(right, images)))


def test_frozen_norms_of_torchvision_are_known() -> None:
    from bitdial.nn.decompose import decomposition_of

    found = decomposition_of(torchvision.ops.FrozenBatchNorm2d(4))
    assert found is not None
    assert found.name == "FrozenBatchNorm2d"


def test_the_recipe_builds_every_detector_of_torchvision() -> None:
    """With the size, the number of detections and the means that it is asked for; but those of keypoints."""
    models = torchvision.models
    asked: dict[str, Any] = {"classes": 2, "size": 96, "max_detections": 7, "mean": (0.5,) * 3, "std": (0.2,) * 3}
    for name in models.list_models(module=models.detection):
        kind = DetectorKind(name=f"torchvision:{name}", **asked)
        if name.startswith("keypoint"):
            with pytest.raises(ConfigError, match="learns keypoints"):
                kind.build()
            continue
        model: Any = kind.build()
        change, heads = model.transform, getattr(model, "roi_heads", model)
        assert (heads.detections_per_img, change.image_mean, change.image_std) == (7, [0.5] * 3, [0.2] * 3)
        assert (change.min_size, change.max_size) == ((96,), 1333) or change.fixed_size is not None
        if "rcnn_resnet50" in name:
            assert model.rpn.anchor_generator.sizes == ((16,), (32,), (64,), (128,), (256,))
        with torch.no_grad():
            assert set(model([torch.rand(3, 40, 50)])[0]) >= {"boxes", "labels", "scores"}
