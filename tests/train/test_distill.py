"""Distillation: every kind against losses computed by hand, and tables keyed by sample."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.dial.dial import set_bits
from bitdial.errors import ConfigError, TrainingError
from bitdial.train.config import TrainConfig
from bitdial.train.distill import Distiller, class_axis_to_distill
from bitdial.train.soft_loss import soft_loss
from bitdial.train.steps import JointStep

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]])
OTHERS = torch.tensor([[0.0, 1.0, 0.0], [-2.0, 0.25, 1.0]])
HARD = torch.tensor(1.25)


def softmax(row: list[float], temperature: float) -> list[float]:
    powers = [math.exp(value / temperature) for value in row]
    return [power / sum(powers) for power in powers]


def divergence(student: Tensor, target: Tensor, temperature: float) -> float:
    """T^2 * KL(target || student), averaged over the rows, in plain Python."""
    total = 0.0
    for mine, wanted in zip(student.tolist(), target.tolist(), strict=True):
        pairs = zip(softmax(mine, temperature), softmax(wanted, temperature), strict=True)
        total += sum(p * math.log(p / q) for q, p in pairs)
    return temperature**2 * total / len(student)


def distiller(kind: str, *, teacher: nn.Module | None = None, samples: int | None = None, **config: Any) -> Distiller:
    return Distiller(TrainConfig(distill=kind, **config), teacher=teacher, samples=samples)


class Fixed(nn.Module):
    """A teacher with one answer per call, and a parameter."""

    def __init__(self, *answers: Tensor) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.answers = list(answers)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.answers.pop(0) * self.factor


# --- none, teacher, in place ----------------------------------------------------------------------


def test_none_returns_the_hard_loss() -> None:
    none = distiller("none")
    none.begin(torch.zeros(2, 1))
    assert none.loss(HARD, LOGITS, highest=True, index=None) is HARD
    assert none.loss(HARD, LOGITS, highest=False, index=None) is HARD


@pytest.mark.parametrize("weight, temperature", [(0.7, 1.0), (0.25, 3.0), (1.0, 2.0), (0.0, 1.0)])
def test_teacher_teaches_every_width(weight: float, temperature: float) -> None:
    teaching = distiller("teacher", teacher=Fixed(OTHERS), distill_weight=weight, temperature=temperature)
    teaching.begin(torch.zeros(2, 1))
    for highest, logits in [(True, LOGITS), (False, LOGITS - OTHERS)]:
        expected = (1 - weight) * 1.25 + weight * divergence(logits, OTHERS, temperature)
        got = float(teaching.loss(HARD, logits, highest=highest, index=None))
        assert got == pytest.approx(expected, rel=1e-5)


def test_the_teacher_is_asked_once_a_batch_and_for_each_batch() -> None:
    teaching = distiller("teacher", teacher=Fixed(OTHERS, LOGITS), distill_weight=1.0)
    for answer in (OTHERS, LOGITS):  # a third call would find no answer
        teaching.begin(torch.zeros(2, 1))
        for highest in (True, False, False):
            got = float(teaching.loss(HARD, LOGITS, highest=highest, index=None))
            assert got == pytest.approx(divergence(LOGITS, answer, 1.0), abs=1e-6)


def test_the_teacher_is_frozen_and_in_eval_mode() -> None:
    teacher = Fixed(OTHERS).train()
    teaching = distiller("teacher", teacher=teacher)
    assert not teacher.training
    teaching.begin(torch.zeros(2, 1))
    student = LOGITS.clone().requires_grad_()
    teaching.loss(HARD, student, highest=True, index=None).backward()
    assert teacher.factor.grad is None
    assert student.grad is not None


def test_in_place_the_highest_width_learns_the_truth_and_teaches_the_rest() -> None:
    inside = distiller("in_place", distill_weight=0.4, temperature=2.0)
    inside.begin(torch.zeros(2, 1))
    assert inside.loss(HARD, OTHERS, highest=True, index=None) is HARD
    expected = 0.6 * 1.25 + 0.4 * divergence(LOGITS, OTHERS, 2.0)
    assert float(inside.loss(HARD, LOGITS, highest=False, index=None)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["in_place", "cascade"])
def test_no_gradient_goes_to_the_highest_width(kind: str) -> None:
    inside = distiller(kind, teacher=Fixed(OTHERS) if kind == "cascade" else None)
    inside.begin(torch.zeros(2, 1))
    high, low = OTHERS.clone().requires_grad_(), LOGITS.clone().requires_grad_()
    inside.loss(HARD, high, highest=True, index=None)
    inside.loss(HARD, low, highest=False, index=None).backward()
    assert high.grad is None
    assert low.grad is not None


def test_in_a_cascade_the_teacher_teaches_the_highest_width_and_that_the_rest() -> None:
    own, weight = LOGITS + OTHERS, 0.4
    cascade = distiller("cascade", teacher=Fixed(OTHERS, LOGITS), distill_weight=weight, temperature=2.0)
    for answer in (OTHERS, LOGITS):  # of the teacher, once a batch
        cascade.begin(torch.zeros(2, 1))
        for highest, logits, target in ((True, own, answer), (False, LOGITS, own), (False, OTHERS, own)):
            expected = (1 - weight) * 1.25 + weight * divergence(logits, target, 2.0)
            got = float(cascade.loss(HARD, logits, highest=highest, index=None))
            assert got == pytest.approx(expected, rel=1e-5)


# --- progressive ----------------------------------------------------------------------------------


def see(progressive: Distiller, logits: Tensor, index: list[int]) -> float:
    return float(progressive.loss(HARD, logits, highest=True, index=torch.tensor(index)))


def test_the_first_epoch_has_no_soft_loss() -> None:
    progressive = distiller("progressive", samples=4, epochs=3)
    for index in ([0, 1], [2, 3], [0, 1]):
        assert see(progressive, LOGITS, index) == 1.25
        assert float(progressive.loss(HARD, OTHERS, highest=False, index=torch.tensor(index))) == 1.25


@pytest.mark.parametrize("epochs, temperature", [(2, 1.0), (4, 1.0), (4, 3.0)])
def test_the_weight_grows_to_its_full_share(epochs: int, temperature: float) -> None:
    """0.7 * (epoch + 1) / epochs, counted from 0: half of it in the second of four epochs, all in the last."""
    progressive = distiller("progressive", samples=2, epochs=epochs, temperature=temperature)
    see(progressive, OTHERS, [0, 1])
    progressive.end_epoch()
    for epoch in range(1, epochs):
        share = 0.7 * (epoch + 1) / epochs
        for highest in (True, False):
            expected = (1 - share) * 1.25 + share * divergence(LOGITS, OTHERS, temperature)
            got = progressive.loss(HARD, LOGITS, highest=highest, index=torch.tensor([0, 1]))
            assert float(got) == pytest.approx(expected, rel=1e-5)
        see(progressive, OTHERS, [0, 1])  # the last word of this epoch
        progressive.end_epoch()


def test_targets_are_those_of_the_epoch_just_before() -> None:
    progressive = distiller("progressive", samples=2, epochs=3, distill_weight=1.0)
    first, second, third = OTHERS, OTHERS * 2, OTHERS * 3
    see(progressive, first, [0, 1])
    progressive.end_epoch()
    expected = 1.25 / 3 + 2 / 3 * divergence(second, first, 1.0)
    assert see(progressive, second, [0, 1]) == pytest.approx(expected, rel=1e-5)
    progressive.end_epoch()
    assert see(progressive, third, [0, 1]) == pytest.approx(divergence(third, second, 1.0), rel=1e-5)


def test_targets_follow_the_sample_not_its_place_in_the_batch() -> None:
    torch.manual_seed(0)
    table, answers = torch.randn(6, 3), torch.randn(6, 3)

    def second_epoch(first: list[list[int]], second: list[int]) -> Tensor:
        progressive = distiller("progressive", samples=6, epochs=2, distill_weight=1.0)
        for batch in first:
            see(progressive, table[batch], batch)
        progressive.end_epoch()
        losses = [progressive.loss(HARD, answers[[i]], highest=False, index=torch.tensor([i])) for i in second]
        return torch.stack(losses)[torch.tensor(second).argsort()]

    straight = second_epoch([[0, 1, 2], [3, 4, 5]], [0, 1, 2, 3, 4, 5])
    permuted = second_epoch([[5, 2, 0], [4], [1, 3]], [3, 0, 5, 1, 4, 2])
    by_hand = [divergence(answers[[i]], table[[i]], 1.0) for i in range(6)]
    torch.testing.assert_close(straight, torch.tensor(by_hand))
    assert torch.equal(straight, permuted)


def test_only_the_highest_width_writes_the_table() -> None:
    progressive = distiller("progressive", samples=2, epochs=2)
    see(progressive, OTHERS, [0, 1])
    progressive.loss(HARD, LOGITS, highest=False, index=torch.tensor([0, 1]))
    progressive.end_epoch()
    assert progressive.previous is not None
    assert torch.equal(progressive.previous, OTHERS)


def test_samples_not_seen_before_have_no_soft_loss() -> None:
    """One of two samples is known: the soft loss is that one's, with half of the weight."""
    progressive = distiller("progressive", samples=3, epochs=2, distill_weight=0.8)
    see(progressive, OTHERS[:1], [2])
    progressive.end_epoch()
    assert see(progressive, LOGITS, [0, 1]) == 1.25
    expected = 0.6 * 1.25 + 0.4 * divergence(LOGITS[1:], OTHERS[:1], 1.0)
    assert see(progressive, LOGITS, [1, 2]) == pytest.approx(expected, rel=1e-5)


def test_a_sample_missed_by_one_epoch_is_unknown_in_the_next() -> None:
    progressive = distiller("progressive", samples=2, epochs=3, distill_weight=0.9)
    see(progressive, OTHERS, [0, 1])
    progressive.end_epoch()
    see(progressive, OTHERS[:1], [0])
    progressive.end_epoch()
    assert see(progressive, LOGITS[1:], [1]) == 1.25


def test_an_epoch_without_batches_forgets_the_targets() -> None:
    progressive = distiller("progressive", samples=2, epochs=3)
    see(progressive, OTHERS, [0, 1])
    progressive.end_epoch()
    progressive.end_epoch()
    assert see(progressive, LOGITS, [0, 1]) == 1.25


def test_the_table_holds_numbers_not_the_graph() -> None:
    progressive = distiller("progressive", samples=2, epochs=2)
    logits = LOGITS.clone().requires_grad_()
    progressive.loss(HARD, logits, highest=True, index=torch.tensor([0, 1]))
    assert progressive.current is not None
    assert not progressive.current.requires_grad
    assert progressive.current.dtype == torch.float32


def test_tensors_and_load_give_an_equal_distiller() -> None:
    one = distiller("progressive", samples=2, epochs=4)
    see(one, OTHERS, [0, 1])
    one.end_epoch()
    see(one, OTHERS * 2, [1, 0])
    two = distiller("progressive", samples=2, epochs=4)
    two.load({name: tensor.clone() for name, tensor in one.tensors().items()}, one.epoch)
    for distilling in (one, two):
        distilling.end_epoch()
    assert see(one, LOGITS, [0, 1]) == see(two, LOGITS, [0, 1]) != 1.25
    assert distiller("progressive", samples=2).tensors() == {}


# --- in a step ------------------------------------------------------------------------------------


def test_the_step_reports_the_mixed_loss(
    make_model: Callable[..., nn.Module],
    make_float: Callable[..., nn.Module],
    make_images: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    inputs, targets = make_images(8)
    teacher, model = make_float(seed=3), make_model(norms=False)
    config = TrainConfig(epochs=1, lr=1e-9, distill="teacher", temperature=2.0)
    report = JointStep(model, config, steps_per_epoch=1, teacher=teacher)(inputs, targets)
    expected_targets = teacher.eval()(inputs).detach()
    for bits in (8, 4, 2):  # the rate is too small to move anything
        set_bits(model, bits)
        logits = model(inputs).detach()
        hard = float(F.cross_entropy(logits, targets))
        expected = 0.3 * hard + 0.7 * divergence(logits, expected_targets, 2.0)
        assert float(report.loss[bits]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("autocast, dtype", [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_teacher_computes_in_the_type_of_the_student(
    autocast: str | None,
    dtype: torch.dtype,
    make_model: Callable[..., nn.Module],
    make_float: Callable[..., nn.Module],
    make_images: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    teacher = make_float(seed=3)
    seen: list[torch.dtype] = []
    teacher.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    config = TrainConfig(epochs=1, distill="teacher", autocast=autocast)
    JointStep(make_model(), config, steps_per_epoch=1, teacher=teacher)(*make_images(8))
    assert seen == [dtype]


# --- errors ---------------------------------------------------------------------------------------


def test_teacher_and_setting_go_together() -> None:
    for kind in ("teacher", "cascade"):
        with pytest.raises(ConfigError, match="teacher"):
            distiller(kind)
    for kind in ("none", "progressive", "in_place"):
        with pytest.raises(ConfigError, match="teacher"):
            distiller(kind, teacher=Fixed(OTHERS), samples=2)


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (2, 1, 3), (1, 3)])
def test_a_teacher_of_another_shape(shape: tuple[int, ...]) -> None:
    teaching = distiller("teacher", teacher=Fixed(torch.zeros(shape)))
    teaching.begin(torch.zeros(2))
    with pytest.raises(TrainingError, match=r"the teacher's outputs have shape .*, the model's \(2, 3\)"):
        teaching.loss(HARD, LOGITS, highest=True, index=None)


def test_a_teacher_that_returns_no_tensor() -> None:
    teacher = Fixed(OTHERS)
    teacher.register_forward_hook(lambda module, inputs, output: {"logits": output})
    with pytest.raises(TrainingError, match="a teacher that returns one tensor of logits, got dict"):
        distiller("teacher", teacher=teacher).begin(torch.zeros(2))


def test_a_model_is_not_its_own_teacher(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    for teacher in (model, nn.DataParallel(model)):
        with pytest.raises(ConfigError, match="the teacher is the model itself"):
            JointStep(model, TrainConfig(epochs=1, distill="teacher"), steps_per_epoch=1, teacher=teacher)
    assert all(parameter.requires_grad for parameter in model.parameters()), "it is not frozen"


def test_progressive_needs_the_number_of_samples() -> None:
    with pytest.raises(ConfigError, match="samples"):
        distiller("progressive")


def test_progressive_needs_indices() -> None:
    with pytest.raises(TrainingError, match="index"):
        distiller("progressive", samples=2).placed(None, torch.device("cpu"))
    assert distiller("in_place").placed(torch.tensor([7]), torch.device("cpu")) is None


@pytest.mark.parametrize("index", [[0, 2], [-1, 0]])
def test_an_index_out_of_range(index: list[int]) -> None:
    with pytest.raises(TrainingError, match=r"outside 0\.\.1"):
        distiller("progressive", samples=2).placed(torch.tensor(index), torch.device("cpu"))


def test_what_an_index_may_be() -> None:
    here, progressive = torch.device("cpu"), distiller("progressive", samples=2)
    placed = progressive.placed(torch.tensor([1, 0], dtype=torch.int32), here)
    assert placed is not None
    assert placed.dtype == torch.int64
    for wrong in (torch.tensor([0.0, 1.0]), torch.tensor([[0, 1]]), torch.tensor([], dtype=torch.int64)):
        with pytest.raises(TrainingError, match="whole numbers"):
            progressive.placed(wrong, here)


def test_the_step_checks_indices(
    make_model: Callable[..., nn.Module], make_images: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    step = JointStep(make_model(), TrainConfig(epochs=1, distill="progressive"), steps_per_epoch=1, samples=8)
    with pytest.raises(TrainingError, match="needs batches"):
        step(*make_images(8))
    with pytest.raises(TrainingError, match=r"outside 0\.\.7"):
        step(*make_images(8), torch.arange(1, 9))
    step(*make_images(8), torch.arange(8))


def test_large_tables_stay_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = torch.zeros(2, 3, device="meta")  # in place of a GPU
    for largest, home in ((8 * 4 * 3, "meta"), (8 * 4 * 3 - 1, "cpu")):
        monkeypatch.setattr(sys.modules[Distiller.__module__], "LARGEST_TABLES", largest)
        progressive = distiller("progressive", samples=4)
        assert [table.device.type for table in progressive._tables(meta)] == [home] * 2
        assert not progressive.recordable


@pytest.mark.parametrize("kind", ["progressive", "in_place"])
def test_an_output_that_is_no_tensor(kind: str) -> None:
    with pytest.raises(TrainingError, match="one tensor of logits"):
        distiller(kind, samples=2).loss(HARD, {"logits": LOGITS}, highest=True, index=torch.tensor([0, 1]))  # type: ignore[arg-type]


def test_the_classes_of_dense_outputs_lie_where_the_targets_say() -> None:
    """(samples, classes, positions) is distilled over the classes, as (samples, positions, classes) is."""
    student, target = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    teaching = distiller("teacher", teacher=Fixed(target), distill_weight=1.0)
    teaching.begin(torch.zeros(2, 1))
    axis = class_axis_to_distill(student, torch.zeros(2, 4))
    got = teaching.loss(HARD, student, highest=True, index=None, axis=axis)
    assert float(got) == pytest.approx(float(soft_loss(student.mT, target.mT, 1.0)), rel=1e-6)
    assert class_axis_to_distill(student.mT, torch.zeros(2, 4)) == 2
    with pytest.raises(TrainingError, match="cannot tell which axis of the output"):
        class_axis_to_distill(torch.zeros(2, 4, 4), torch.zeros(2, 4))
