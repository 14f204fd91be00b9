"""Accuracy by hand, and norm statistics against the plain mean over batches."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial.dial.dial import get_bits, set_bits
from bitdial.dial.plan import BitPlan
from bitdial.errors import ConfigError, PlanError, QuantizationError, TrainingError
from bitdial.models import build_model
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.train.config import TrainConfig
from bitdial.train.data import ArrayData
from bitdial.train.evaluate import accuracy, batched, evaluate, recalibrate_norms
from bitdial.train.steps import JointStep

MakeModel = Callable[..., nn.Module]
MakeImages = Callable[..., tuple[Tensor, Tensor]]
MIXED = BitPlan({"conv": (4, 2), "hidden": (2, 8)})


class Echo(nn.Module):
    """Its input is its output; counts what it saw, and in which mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.9)
        self.calls: list[tuple[int, bool, bool]] = []

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        self.calls.append((len(x), self.training, torch.is_grad_enabled()))
        return self.dropout(x) * factor


LOGITS = torch.tensor([[1.0, 2.0, 0.0], [5.0, 1.0, 1.0], [0.0, -1.0, -2.0], [0.1, 0.2, 0.3], [3.0, 2.0, 1.0]])


# --- accuracy -------------------------------------------------------------------------------------


def test_accuracy_by_hand() -> None:
    """Right: the first, the third and the last. Batches of unequal size count by sample."""
    targets = torch.tensor([1, 2, 0, 1, 0])
    for size in (1, 2, 4, 5, 100):
        assert accuracy(Echo(), batched(LOGITS, targets, size)) == 3 / 5


def test_accuracy_of_positions() -> None:
    logits, targets = LOGITS[:4].reshape(2, 2, 3), torch.tensor([[1, 0], [1, 2]])
    assert accuracy(Echo(), [(logits, targets)]) == 3 / 4


def test_accuracy_of_dense_outputs() -> None:
    """Classes may lie along any axis that the targets lack; where two fit, one has to be said."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 6, (4, 5), generator=generator)
    logits = torch.nn.functional.one_hot(targets, 6) + torch.rand(4, 5, 6, generator=generator) * 0.9
    right = accuracy(Echo(), [(logits, targets)])
    assert right == 1 == accuracy(Echo(), [(logits.mT.contiguous(), targets)])
    square, labels = logits[:, :, :5], targets % 5  # as many positions as classes
    with pytest.raises(TrainingError, match="the classes can lie along axis 1 or 2"):
        accuracy(Echo(), [(square, labels)])
    expected = float((square.argmax(2) == labels).float().mean())
    assert accuracy(Echo(), [(square, labels)], class_axis=-1) == pytest.approx(expected)
    assert accuracy(Echo(), [(square.mT, labels)], class_axis=1) == pytest.approx(expected)


def test_one_logit_is_refused() -> None:
    """Its largest is the only one: the class would be 0 for every sample."""
    for shape in ((5, 1), (5,)):
        with pytest.raises(TrainingError, match="a measure of your own"):
            accuracy(Echo(), [(LOGITS[:, 0].reshape(shape), torch.tensor([1, 0, 1, 1, 0]))])


def test_targets_that_do_not_count() -> None:
    targets = torch.tensor([1, -100, 0, 1, -100])
    with pytest.raises(TrainingError, match=r"leave such samples out: accuracy\(..., ignore=-100\)"):
        accuracy(Echo(), [(LOGITS, targets)])
    assert accuracy(Echo(), [(LOGITS, targets)], ignore=-100) == 2 / 3
    with pytest.raises(TrainingError, match="nothing to evaluate on: no batch was given, or no target that counts"):
        accuracy(Echo(), [(LOGITS, torch.full((5,), -100))], ignore=-100)


def test_accuracy_of_a_part_of_the_output() -> None:
    class Several(Echo):
        def forward(self, x: Tensor, factor: float = 1.0) -> Any:
            return {"loss": x.sum(), "logits": x, "both": (x * 0, x)}

    batches, targets = [(LOGITS, torch.tensor([1, 2, 0, 1, 0]))], 3 / 5
    assert accuracy(Several(), batches, output="logits") == targets
    assert accuracy(Several(), batches, output=lambda out: out["both"][1]) == targets
    with pytest.raises(TrainingError, match=r"a dict of 'loss', 'logits', 'both'; .*: output='logits'"):
        accuracy(Several(), batches)


def test_accuracy_takes_tuples_and_dicts() -> None:
    targets = torch.tensor([1, 0, 0, 2, 0])
    assert accuracy(Echo(), [((LOGITS, 2.0), targets), ({"x": LOGITS, "factor": -1.0}, targets)]) == 5 / 10


def test_accuracy_is_taken_in_eval_mode_without_gradients_and_gives_the_modes_back() -> None:
    echo = Echo().train()
    echo.dropout.eval()
    accuracy(echo, [(LOGITS, torch.zeros(5, dtype=torch.int64))])
    assert echo.calls == [(5, False, False)]
    assert echo.training
    assert not echo.dropout.training


def test_nothing_to_evaluate_on() -> None:
    with pytest.raises(TrainingError, match="no batch"):
        accuracy(Echo(), [])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_output_that_is_not_finite(value: float) -> None:
    with pytest.raises(QuantizationError, match="NaN or infinity"):
        accuracy(Echo(), [(LOGITS * value, torch.zeros(5, dtype=torch.int64))])


@pytest.mark.parametrize("label", [3, 12, -1, -100])
def test_a_label_of_no_class(label: int) -> None:
    targets = torch.tensor([1, 0, 0, 2, label])
    with pytest.raises(TrainingError, match=rf"the label {label} is none of the model's 3 classes, 0 to 2"):
        accuracy(Echo(), batched(LOGITS, targets, 2))
    with pytest.raises(TrainingError, match=f"the label {label} "):
        accuracy(Echo(), [(LOGITS.reshape(1, 5, 3), targets.to(torch.int32).reshape(1, 5))])


def test_targets_of_other_types() -> None:
    """Floats do as long as they are the numbers of classes: what is between them would never be right."""
    classes = torch.tensor([1, 0, 2, 1, 0])
    assert accuracy(Echo(), [(LOGITS, classes.double())]) == accuracy(Echo(), [(LOGITS, classes)])
    for odd in (0.5, -3.0, 7.0, float("nan")):
        with pytest.raises(TrainingError, match=f"the label {odd} is none of the model's 3 classes"):
            accuracy(Echo(), [(LOGITS, torch.tensor([1.0, 0.0, odd, 1.0, 0.0]))])
    assert accuracy(Echo(), [(LOGITS, torch.tensor([1.0, 0.0, -1.0, 1.0, 0.0]))], ignore=-1) > 0
    assert accuracy(Echo(), [(LOGITS[:, :2], torch.tensor([True, False, True, True, True]))]) == 3 / 5
    assert accuracy(Echo(), [(LOGITS[:0], torch.zeros(0, dtype=torch.int64)), (LOGITS[:1], torch.tensor([1]))]) == 1


NOT_PAIRS: dict[str, tuple[Any, str]] = {
    "two tensors": ((LOGITS, torch.zeros(5)), r"batch 0 is not a pair \(inputs, targets\) but a Tensor; batched\("),
    "inputs alone": ([LOGITS], "batch 0 is not a pair"),
    "three parts": ([(LOGITS, torch.zeros(5), torch.arange(5))], "but a tuple of 3"),
    "a dict": ([{"x": LOGITS}], "but a dict"),
}


@pytest.mark.parametrize("case", NOT_PAIRS)
def test_batches_that_are_not_pairs(case: str) -> None:
    batches, words = NOT_PAIRS[case]
    with pytest.raises(ConfigError, match=words):
        accuracy(Echo(), batches)


def test_outputs_and_targets_that_are_no_tensors() -> None:
    class Wrapped(Echo):
        def forward(self, x: Tensor, factor: float = 1.0) -> Any:
            return {"logits": x}

    with pytest.raises(TrainingError, match="a dict of 'logits'; say which part is meant: output='logits'"):
        accuracy(Wrapped(), [(LOGITS, torch.zeros(5))])
    with pytest.raises(TrainingError, match="the targets must be one tensor to compare, got list"):
        accuracy(Echo(), [(LOGITS, [0, 0, 0, 0, 0])])  # type: ignore[list-item]


def test_inputs_that_the_model_does_not_take() -> None:
    targets = torch.zeros(5, dtype=torch.int64)
    for inputs in ((LOGITS, 1.0, 2.0), {"x": LOGITS, "mask": None}, {"factor": 1.0}):
        with pytest.raises(ConfigError, match="the model does not take these inputs"):
            accuracy(Echo(), [(inputs, targets)])
    with pytest.raises(ConfigError, match=r"the model does not take a list \(.*\); give a tensor, a list of images"):
        accuracy(Echo(), [([LOGITS], targets)])
    with pytest.raises(TypeError, match="object"):  # the model's own affair
        accuracy(Echo(), [((LOGITS, object()), targets)])


def test_batched_keeps_order_and_everything() -> None:
    inputs, targets = torch.arange(10.0), torch.arange(10)
    parts = batched(inputs, targets, 4)
    assert [len(x) for x, _ in parts] == [4, 4, 2]
    assert torch.equal(torch.cat([x for x, _ in parts]), inputs)
    assert torch.equal(torch.cat([y for _, y in parts]), targets)


@pytest.mark.parametrize(
    ("inputs", "targets", "size", "words"),
    [
        (np.zeros((4, 2)), torch.zeros(4), 2, "inputs must be a torch tensor, got ndarray"),
        (torch.zeros(4, 2), [0, 1, 1, 0], 2, "targets must be a torch tensor, got list"),
        (torch.zeros(4, 2), torch.zeros(3), 256, "one length above 0, got 4 and 3"),
        (torch.zeros(4, 2), torch.zeros(4), 0, "batch_size=0 must be at least 1"),
    ],
)
def test_samples_that_cannot_be_batched(inputs: Any, targets: Any, size: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        batched(inputs, targets, size)
    with pytest.raises(ConfigError, match=words):
        ArrayData(inputs, targets, batch_size=size)


# --- evaluate -------------------------------------------------------------------------------------


@pytest.fixture
def trained(make_model: MakeModel, make_images: MakeImages) -> nn.Module:
    """A model with statistics that differ from width to width, and momenta that are not the default."""
    model = make_model()
    for i, norm in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.momentum = 0.2 + 0.01 * i
    step = JointStep(model, TrainConfig(epochs=1), steps_per_epoch=3)
    for batch in range(3):
        step(*make_images(8, seed=batch))
    return model.eval()


def test_evaluate_gives_the_accuracy_of_each_setting(trained: nn.Module, make_images: MakeImages) -> None:
    model, (inputs, targets) = trained, make_images(50, seed=5)
    with torch.no_grad():  # so that no class wins everywhere
        model.head.bias -= model(inputs).mean(dim=0)
    batches = batched(inputs, targets, 16)
    settings: list[Any] = [8, 4, 2, (4, 2), MIXED]
    found = evaluate(model, iter(batches), settings)  # an iterator: used once, for all settings
    assert list(found) == settings
    assert evaluate(model, batches, dict.fromkeys(settings)) == found  # whatever is iterated over
    for setting in settings:
        set_bits(model, setting)
        logits = torch.cat([model.eval()(x) for x, _ in batches])
        expected = float((logits.argmax(1) == torch.cat([y for _, y in batches])).float().mean())
        assert found[setting] == pytest.approx(expected)
    assert len({*found.values()}) > 1


def test_evaluate_by_a_measure_of_ones_own(make_model: MakeModel, make_images: MakeImages) -> None:
    """In eval mode, without gradients, at the setting; a number or a dict of them."""
    model, batches = make_model().train(), batched(*make_images(6), 4)
    seen: list[Any] = []

    def measure(model: Any, given: list[Any]) -> dict[str, Any]:
        seen.append((model.training, torch.is_grad_enabled(), len(given), model.conv.weight_bits))
        return {"bits": model.conv.weight_bits, "mean": model(given[0][0]).mean()}

    found = evaluate(model, batches, [4, 2], measure=measure)
    assert seen == [(False, False, 2, 4), (False, False, 2, 2)]
    assert [found[bits]["bits"] for bits in (4, 2)] == [4.0, 2.0]
    assert found[4]["mean"] != found[2]["mean"]
    assert all(type(value) is float for one in found.values() for value in one.values())
    assert evaluate(model, batches, [4], measure=lambda *_: 0.5) == {4: 0.5}
    assert model.training


def test_evaluate_puts_setting_and_mode_back(make_model: MakeModel, make_images: MakeImages) -> None:
    model = make_model().train()
    set_bits(model, MIXED)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    evaluate(model, batched(*make_images(6)), [2, 8])
    assert get_bits(model) == MIXED
    assert model.norm0.bits == 4  # the norms follow the weight bits of the layer they belong to
    assert model.training
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


def test_evaluate_puts_the_setting_back_after_an_error(make_model: MakeModel, make_images: MakeImages) -> None:
    model = make_model()
    set_bits(model, 4)
    inputs, targets = make_images(6)
    with pytest.raises(QuantizationError):
        evaluate(model, [(inputs * float("nan"), targets)], [2])
    with pytest.raises(PlanError):
        evaluate(model, [(inputs, targets)], [5])
    assert set(get_bits(model).values()) == {(4, 4)}


@pytest.mark.parametrize("setting", [8, "3.0 bits", MIXED])
def test_one_setting_that_is_not_in_a_list(make_model: MakeModel, setting: Any) -> None:
    with pytest.raises(PlanError, match=r"is one setting where several are taken; give a list: \["):
        evaluate(make_model(), [], setting)


# --- recalibrate_norms ----------------------------------------------------------------------------


def statistics(model: nn.Module, batches: list[Tensor], setting: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean over the batches of each norm's input mean and unbiased variance, norms using the batch's own statistics."""
    set_bits(model, setting)
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {"norm0": ([], []), "norm1": ([], [])}

    def normalise(name: str, x: Tensor) -> Tensor:
        norm = getattr(model, name)
        part = norm.sets[str(norm.bits)]
        mean, biased = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), correction=0)
        count = x.numel() // x.shape[1]
        found[name][0].append(mean)
        found[name][1].append(biased * count / (count - 1))
        shape = (1, -1, 1, 1)
        x = (x - mean.reshape(shape)) / (biased.reshape(shape) + part.eps).sqrt()
        return x * part.weight.reshape(shape) + part.bias.reshape(shape)

    with torch.no_grad():
        for batch in batches:
            x = normalise("norm0", model.stem(batch)).relu()
            normalise("norm1", model.conv(x))
    return {name: (torch.stack(m).mean(0), torch.stack(v).mean(0)) for name, (m, v) in found.items()}


@pytest.mark.parametrize("setting", [8, 2, (4, 2), MIXED], ids=str)
def test_recalibrated_statistics_are_the_plain_mean(setting: Any, trained: nn.Module, make_images: MakeImages) -> None:
    batches = [make_images(10, seed=20 + i)[0] for i in range(3)]
    set_bits(trained, 8)
    before = {n: v.clone() for n, v in trained.state_dict().items()}
    momenta = {n: m.momentum for n, m in trained.named_modules() if isinstance(m, nn.BatchNorm2d)}
    expected = statistics(trained, batches, setting)
    chosen = {name: getattr(trained, name).bits for name in expected}
    set_bits(trained, 8)
    recalibrate_norms(trained, iter(batches), setting)
    for name, (mean, var) in expected.items():
        own = getattr(trained, name).sets[str(chosen[name])]
        # Rounding: a code that falls the other way moves a value of the later norm by a quantisation step.
        torch.testing.assert_close(own.running_mean, mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own.running_var, var, rtol=1e-3, atol=1e-5)
        assert int(own.num_batches_tracked) == 3
    selected = {f"{name}.sets.{bits}.running_{part}" for name, bits in chosen.items() for part in ("mean", "var")}
    changed = {n for n, value in trained.state_dict().items() if not torch.equal(value, before[n])}
    assert {n for n in changed if not n.endswith("num_batches_tracked")} == selected
    assert momenta == {n: m.momentum for n, m in trained.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert set(get_bits(trained).values()) == {(8, 8)}
    assert not any(module.training for module in trained.modules())


def test_settings_take_turns(trained: nn.Module, make_images: MakeImages) -> None:
    """A set averages the batches of all settings that use it: here those of 4 bits everywhere and of a plan."""
    batches = [make_images(10, seed=40 + i)[0] for i in range(5)]
    parts = [statistics(trained, batches[i::3], setting) for i, setting in enumerate((4, MIXED, 2))]
    chosen = []
    for setting in (4, MIXED, 2):
        set_bits(trained, setting)
        chosen.append({name: str(getattr(trained, name).bits) for name in ("norm0", "norm1")})
    set_bits(trained, 8)
    recalibrate_norms(trained, iter(batches), [4, MIXED, 2])
    for name in ("norm0", "norm1"):
        for key in {one[name] for one in chosen}:
            using = [i for i in range(3) if chosen[i][name] == key]
            counts = [len(batches[i::3]) for i in using]
            own = getattr(trained, name).sets[key]
            mean = sum(parts[i][name][0] * n for i, n in zip(using, counts, strict=True)) / sum(counts)
            torch.testing.assert_close(own.running_mean, mean, rtol=1e-4, atol=1e-4)
            assert int(own.num_batches_tracked) == sum(counts)
    assert len({one["norm1"] for one in chosen}) < 3, "or no set is used by two settings"
    assert set(get_bits(trained).values()) == {(8, 8)}


@pytest.mark.parametrize(("settings", "words"), [([4, 2, 8], "2 batches for 3 settings"), ([], "at least one setting")])
def test_each_setting_needs_a_batch(
    settings: list[Any], words: str, trained: nn.Module, make_images: MakeImages
) -> None:
    before = {n: v.clone() for n, v in trained.state_dict().items()}
    with pytest.raises(TrainingError, match=words):
        recalibrate_norms(trained, [make_images(8, seed=i)[0] for i in range(2)], settings)
    assert [n for n, v in trained.state_dict().items() if not torch.equal(v, before[n])] == []


def test_recalibrating_again_forgets_the_first_time(trained: nn.Module, make_images: MakeImages) -> None:
    recalibrate_norms(trained, [make_images(10, seed=1)[0]], 4)
    first = trained.norm1.sets["4"].running_mean.clone()
    recalibrate_norms(trained, [make_images(10, seed=2)[0]] * 3, 4)
    assert not torch.equal(trained.norm1.sets["4"].running_mean, first)
    recalibrate_norms(trained, [make_images(10, seed=1)[0]], 4)
    assert torch.equal(trained.norm1.sets["4"].running_mean, first)


def test_recalibrating_helps_a_pair_that_was_not_trained(trained: nn.Module, make_images: MakeImages) -> None:
    """At w4a2 the trained 4-bit statistics are off; recalibrated, the norm's output is centred again."""
    batch = make_images(64, seed=30)[0]
    seen: list[Tensor] = []
    trained.norm1.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    part = trained.norm1.sets["4"]
    with torch.no_grad():
        part.bias.zero_()
        part.weight.fill_(1)
    set_bits(trained, (4, 2))
    trained(batch)
    recalibrate_norms(trained, [batch], (4, 2))
    trained(batch)
    before, after = seen[0], seen[-1]
    assert float(after.mean(dim=(0, 2, 3)).abs().max()) < 0.005
    assert float(before.mean(dim=(0, 2, 3)).abs().max()) > 0.05


def test_dropout_stays_off_while_recalibrating(make_model: MakeModel, make_images: MakeImages) -> None:
    model = make_model(dropout=0.5).train()
    state = torch.get_rng_state()
    recalibrate_norms(model, [make_images(8)[0]], 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.dropout.training


def test_an_error_gives_momentum_mode_and_setting_back(trained: nn.Module) -> None:
    set_bits(trained, MIXED)
    with pytest.raises(RuntimeError):
        recalibrate_norms(trained, [torch.zeros(2, 5, 4, 4)], 2)
    assert all(m.momentum is not None for m in trained.modules() if isinstance(m, nn.BatchNorm2d))
    assert get_bits(trained) == MIXED
    assert not any(module.training for module in trained.modules())


class Interrupted(BaseException):
    """Like KeyboardInterrupt, which pytest would take as its own."""


def interrupted(batch: Tensor) -> Iterator[Tensor]:
    yield batch
    raise Interrupted


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("bad", ["NaN", "infinity", "shape", "tuple", "interrupt"])
def test_an_error_in_the_middle_leaves_all_as_it_was(
    trained: nn.Module, make_images: MakeImages, bad: str, training: bool
) -> None:
    trained.train(training)
    before = {n: v.clone() for n, v in trained.state_dict().items()}
    norms = {n: m for n, m in trained.named_modules() if isinstance(m, nn.BatchNorm2d)}
    momenta = {n: m.momentum for n, m in norms.items()}
    good = make_images(8)[0]
    odd = good.clone()
    odd[3, 1, 2, 2] = float("nan" if bad == "NaN" else "inf")
    cases: dict[str, tuple[type[BaseException], str | None, Any]] = {
        "NaN": (QuantizationError, "batch 2 holds NaN or infinity", [good, odd]),
        "infinity": (QuantizationError, "batch 2 holds NaN or infinity", [good, odd]),
        "shape": (RuntimeError, "channels", [good, torch.zeros(2, 5, 4, 4)]),
        "tuple": (QuantizationError, "norm 'norm0': its new statistics", [good, (odd,)]),
        "interrupt": (Interrupted, None, interrupted(good)),
    }
    error, words, batches = cases[bad]
    with pytest.raises(error, match=words):
        recalibrate_norms(trained, batches, 4)
    assert [n for n, v in trained.state_dict().items() if not torch.equal(v, before[n])] == []
    assert momenta == {n: m.momentum for n, m in norms.items()}
    assert {module.training for module in trained.modules()} == {training}


class Masked(nn.Module):
    """Images and an additive mask of them, of which minus infinity hides a value."""

    def __init__(self, images: nn.Module) -> None:
        super().__init__()
        self.images, self.middle, self.last = images, nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.middle(self.images(x * mask.exp())))


def test_a_mask_may_hold_infinity(make_float: Callable[..., nn.Module], make_images: MakeImages) -> None:
    x = make_images(8)[0]
    mask = torch.zeros_like(x)
    mask[:, 0] = -float("inf")
    model = prepare(Masked(make_float()), QuantConfig(), (x, mask))
    recalibrate_norms(model, [(x, mask), {"x": x, "mask": mask}], 8)
    assert int(model.images.norm1.sets["8"].num_batches_tracked) == 2


@pytest.mark.parametrize("kind", ["tensor", "dict"])
def test_one_batch_stands_for_itself(trained: nn.Module, make_images: MakeImages, kind: str) -> None:
    x = make_images(8)[0]
    recalibrate_norms(trained, [x], 4)
    expected = trained.norm1.sets["4"].running_mean.clone()
    recalibrate_norms(trained, [make_images(8, seed=1)[0]], 4)
    assert not torch.equal(trained.norm1.sets["4"].running_mean, expected)
    batch: Any = {"tensor": x, "dict": {"input": x}}[kind]
    recalibrate_norms(trained, batch, 4)
    assert torch.equal(trained.norm1.sets["4"].running_mean, expected)


@pytest.mark.parametrize("form", [lambda x, y: (x, y), lambda x, y: [(x, y)], lambda x, y: [[x, y]]])
def test_targets_are_not_wanted(trained: nn.Module, make_images: MakeImages, form: Callable[..., Any]) -> None:
    before = {n: v.clone() for n, v in trained.state_dict().items()}
    with pytest.raises(ConfigError, match=r"leave out the targets: \[x for x, _ in batches\]"):
        recalibrate_norms(trained, form(*make_images(8)), 4)
    assert [n for n, v in trained.state_dict().items() if not torch.equal(v, before[n])] == []


def test_no_batches_is_an_error_that_leaves_the_statistics(trained: nn.Module) -> None:
    """A generator that was used up already must not cost the user the trained statistics."""
    before = {n: v.clone() for n, v in trained.state_dict().items()}
    with pytest.raises(TrainingError, match="at least one batch"):
        recalibrate_norms(trained, iter([]), 4)
    changed = [n for n, v in trained.state_dict().items() if not torch.equal(v, before[n])]
    assert changed == []


def test_a_model_without_switchable_norms(make_model: MakeModel, make_images: MakeImages) -> None:
    for model in (make_model(norms=False), make_model(switch_norms=False)):
        with pytest.raises(TrainingError, match="no switchable batch norm"):
            recalibrate_norms(model, [make_images(4)[0]], 8)


def test_norms_are_corrected_by_their_difference_to_the_float_model() -> None:
    """On a model that was not trained: nearer to the float model than an average over the same few samples."""
    torch.manual_seed(0)
    net = build_model("cifar_resnet", blocks=1, width=8)
    with torch.no_grad():
        for _ in range(30):
            net.train()(torch.randn(64, 3, 8, 8))
    net.eval()
    x, others = torch.randn(8, 3, 8, 8), torch.randn(256, 3, 8, 8)

    def error(method: str | None) -> float:
        model = prepare(net, QuantConfig(bit_choices=(8, 4), start="balanced"), x).eval()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if method is not None:
            recalibrate_norms(model, x, 4, method=method)
            changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
            assert changed
            assert all(".sets.4." in name for name in changed)
        set_bits(model, 4)
        with torch.no_grad():
            return float((model(others) - net(others)).square().mean())

    assert error("difference") < error(None)
    assert error("difference") < error("average")
    model = prepare(net, QuantConfig(), x)
    with pytest.raises(ConfigError, match="method='median'"):
        recalibrate_norms(model, x, 4, method="median")
