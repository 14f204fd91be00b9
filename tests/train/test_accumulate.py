"""Batches in parts: the same step as with the whole batch, in exact arithmetic."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError, TrainingError
from bitdial.train import ArrayData, JointStep, TrainConfig, train
from bitdial.train.accumulate import split_batch

MakeModel = Callable[..., nn.Module]
MakeImages = Callable[..., tuple[Tensor, Tensor]]
BITS = (8, 4, 2)


def test_parts_have_nearly_one_size_and_all_samples() -> None:
    inputs = {"x": torch.arange(7.0), "mask": [torch.arange(7), None], "factor": 2.0, "zero": torch.tensor(3)}
    for count, sizes in ((1, [7]), (2, [4, 3]), (3, [3, 3, 1]), (7, [1] * 7), (20, [1] * 7)):
        parts = split_batch(inputs, torch.arange(7) * 2, torch.arange(7) + 5, count)
        assert [len(part.targets) for part in parts] == sizes
        assert sum(part.share for part in parts) == pytest.approx(1)
        assert [part.share for part in parts] == pytest.approx([size / 7 for size in sizes])
        given: list[Any] = [part.inputs for part in parts]
        assert torch.equal(torch.cat([one["x"] for one in given]), inputs["x"])  # type: ignore[arg-type]
        assert torch.equal(torch.cat([part.targets for part in parts]), torch.arange(7) * 2)
        assert torch.equal(torch.cat([part.index for part in parts if part.index is not None]), torch.arange(7) + 5)
        assert all(one["factor"] == 2.0 and one["zero"] == 3 and one["mask"][1] is None for one in given)


@pytest.mark.parametrize("inputs", [torch.zeros(3, 2), (torch.zeros(4, 2), torch.zeros(5))])
def test_tensors_of_several_lengths_are_not_split(inputs: Any) -> None:
    with pytest.raises(TrainingError, match=r"accumulate=2 splits a batch along .*, of length \[\d, \d\]"):
        split_batch(inputs, torch.zeros(4), None, 2)
    with pytest.raises(ConfigError, match="accumulate=0"):
        TrainConfig(accumulate=0)


@pytest.mark.parametrize("update", ["separate", "accumulated"])
@pytest.mark.parametrize("distill", ["none", "progressive", "teacher", "in_place", "cascade"])
def test_a_step_in_parts_is_the_step_of_the_whole_batch(
    update: str, distill: str, make_model: MakeModel, make_images: MakeImages, make_float: Callable[..., nn.Module]
) -> None:
    """Without batch norms, up to rounding, which in later steps tips a code over; also with a smaller last part.

    All is in float64, but the soft loss is taken in float32.
    """
    settings: dict[str, Any] = {"lr": 1e-2, "update": update, "distill": distill, "clip_norm": 1.0}
    if update == "accumulated":
        settings["alrs"] = "off"
    outcomes = []
    for accumulate in (1, 3):
        model = make_model(BITS, norms=False, dtype=torch.float64)
        teacher = make_float(norms=False, seed=4).double() if distill in ("teacher", "cascade") else None
        config = TrainConfig(epochs=2, accumulate=accumulate, **settings)
        step = JointStep(model, config, steps_per_epoch=1, teacher=teacher, samples=10)
        reports = []
        for _ in range(2):
            inputs, targets = make_images(10)
            reports.append(step(inputs.double(), targets, torch.arange(10)))
            step.end_epoch()
        values = [p.detach() for p in model.parameters()]
        values += [report.loss[b] for report in reports for b in BITS]
        values += [report.weight_scale_peaks[b] for report in reports for b in BITS]
        outcomes.append((values, [(r.seen, *(int(r.correct[b]) for b in BITS)) for r in reports]))
    assert outcomes[0][1] == outcomes[1][1]
    close = {"rtol": 1e-9, "atol": 1e-12} if distill == "none" else {"rtol": 1e-6, "atol": 1e-8}
    for whole, parts in zip(outcomes[0][0], outcomes[1][0], strict=True):
        torch.testing.assert_close(whole, parts, **close)


def test_a_run_in_parts(make_model: MakeModel, make_data: Callable[..., ArrayData]) -> None:
    """With batch norms too; the last batch of an epoch has four samples, so four parts."""
    history = train(make_model(), make_data(), TrainConfig(epochs=2, accumulate=5), progress=False)
    plain = train(make_model(), make_data(), TrainConfig(epochs=2), progress=False)
    assert history.rows[0]["loss"]["8"] == pytest.approx(plain.rows[0]["loss"]["8"], rel=0.5)
    assert history.rows[0]["loss"] != plain.rows[0]["loss"]


def test_lists_of_samples_are_split_as_such() -> None:
    """Three channels, three boxes and three images are not taken for one another."""
    images = [torch.full((3, 2, 2), float(n)) for n in range(3)]
    targets = [{"boxes": torch.full((3, 4), float(n))} for n in range(3)]
    for inputs in (images, (images,), {"images": images}):
        parts = split_batch(inputs, targets, torch.arange(3), 2)
        assert [part.share for part in parts] == [2 / 3, 1 / 3]
        for part, count in zip(parts, (2, 1), strict=True):
            given = (
                part.inputs
                if inputs is images
                else part.inputs[0]
                if isinstance(inputs, tuple)
                else part.inputs["images"]
            )
            assert len(given) == len(part.targets) == len(part.index) == count  # type: ignore[arg-type]
            assert all(image.shape == (3, 2, 2) for image in given)
        assert torch.equal(parts[1].targets[0]["boxes"], targets[2]["boxes"])
    with pytest.raises(TrainingError, match="its lists"):
        split_batch(images, targets[:2], None, 2)
