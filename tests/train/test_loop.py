"""train(): one call from the first step to the last, whatever the data comes as."""

import builtins
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bitdial.dial.dial import get_bits, set_bits
from bitdial.errors import ConfigError, TrainingError
from bitdial.train import ArrayData, History, TrainConfig, accuracy, train
from bitdial.train.data import Sample
from bitdial.train.guard import LabelGuard
from bitdial.train.progress import BarProgress, LogProgress, describe, make_progress

MakeModel = Callable[..., nn.Module]
MakeData = Callable[..., ArrayData]
BITS = (8, 4, 2)


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


# --- one call -------------------------------------------------------------------------------------


def test_one_call(make_model: MakeModel, make_data: MakeData) -> None:
    model, data = make_model(BITS), make_data(samples=20, batch_size=8)
    validation = [(data.inputs[:10], data.targets[:10]), (data.inputs[10:], data.targets[10:])]
    set_bits(model, 2)
    history = train(model, data, TrainConfig(epochs=4, lr=1e-2), evaluate_on=validation, progress=False)
    assert isinstance(history, History)
    assert history.layers == ["conv", "hidden"]
    assert [row["epoch"] for row in history.rows] == [0, 1, 2, 3]
    for row in history.rows:
        for name in ("loss", "train_top1", "top1", "scale_rate", "stopped"):
            assert list(row[name]) == ["8", "4", "2"], name
        assert row["seconds"] > 0
        assert all(0 <= share <= 1 for name in ("train_top1", "top1", "stopped") for share in row[name].values())
        assert row["scale_rate"]["8"] > row["scale_rate"]["4"] > row["scale_rate"]["2"] > 0
    rates = [row["lr"] for row in history.rows]
    assert rates == sorted(rates, reverse=True)
    assert json.loads(json.dumps(history.to_dict(), allow_nan=False)) == history.to_dict()
    assert History(**json.loads(json.dumps(history.to_dict()))) == history
    assert all(history.rows[-1]["loss"][b] < history.rows[0]["loss"][b] for b in ("8", "4", "2"))
    assert set(get_bits(model).values()) == {(8, 8)}
    assert not any(module.training for module in model.modules())
    for bits in BITS:
        set_bits(model, bits)
        assert history.rows[-1]["top1"][str(bits)] == accuracy(model, validation)


def test_rows_are_means_over_the_epoch(make_model: MakeModel, make_data: MakeData) -> None:
    """Of the steps' losses, and of the samples' hits, though the last batch is smaller."""
    data, losses = make_data(samples=20, batch_size=8), []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(output, targets)
        losses.append((float(value.detach()), int((output.argmax(1) == targets).sum())))
        return value

    history = train(make_model(BITS), data, TrainConfig(epochs=2), loss=loss, progress=False)
    for epoch in range(2):
        mine = losses[9 * epoch : 9 * epoch + 9]
        for place, bits in enumerate(BITS):
            assert history.rows[epoch]["loss"][str(bits)] == pytest.approx(sum(v for v, _ in mine[place::3]) / 3)
            assert history.rows[epoch]["train_top1"][str(bits)] == sum(n for _, n in mine[place::3]) / 20


def test_rates_in_the_history(make_model: MakeModel, make_data: MakeData) -> None:
    literal = TrainConfig(epochs=1, alrs="literal")
    row = train(make_model(BITS), make_data(), literal, progress=False).rows[0]
    assert row["stopped"] == {"8": 1.0, "4": 1.0, "2": 1.0}  # the paper's rate, floored, stands still
    assert row["scale_rate"] == {"8": 0.0, "4": 0.0, "2": 0.0}
    off = TrainConfig(epochs=1, alrs="off", lr=0.25, schedule="constant", scale_lr=0.125)
    row = train(make_model(BITS), make_data(), off, progress=False).rows[0]
    assert row["lr"] == 0.25
    assert row["scale_rate"] == {"8": 0.125, "4": 0.125, "2": 0.125}
    assert row["stopped"] == {"8": 0.0, "4": 0.0, "2": 0.0}


def test_gradient_samples(make_model: MakeModel, make_data: MakeData) -> None:
    """Every step of a short epoch; about eight of a long one."""
    history = train(make_model(BITS), make_data(), TrainConfig(epochs=2), progress=False)
    assert list(history.gradients) == ["8", "4", "2"]
    for entries in history.gradients.values():
        assert [entry["step"] for entry in entries] == [0, 1, 2, 3, 4, 5]
        assert all(len(entry["weight"]) == len(entry["act"]) == 2 for entry in entries)
        assert all(value > 0 for entry in entries for value in (*entry["weight"], *entry["act"]))
    long = train(make_model((4,)), make_data(samples=18, batch_size=1), TrainConfig(epochs=1), progress=False)
    assert [entry["step"] for entry in long.gradients["4"]] == list(range(0, 18, 2))


def test_the_same_call_gives_the_same_model(make_model: MakeModel, make_data: MakeData) -> None:
    outcomes = []
    for seed in (0, 0, 1):
        model = make_model(BITS)
        train(model, make_data(seed=seed), TrainConfig(epochs=2), progress=False)
        outcomes.append(parameters(model))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


def test_a_single_width(make_model: MakeModel, make_data: MakeData) -> None:
    history = train(make_model((4,)), make_data(), TrainConfig(epochs=1), progress=False)
    assert list(history.rows[0]["loss"]) == ["4"]


@pytest.mark.parametrize("distill", ["progressive", "teacher", "in_place", "cascade"])
def test_distillation(
    distill: str, make_model: MakeModel, make_data: MakeData, make_float: Callable[..., nn.Module]
) -> None:
    teacher = make_float(seed=4) if distill in ("teacher", "cascade") else None
    plain, taught = make_model(BITS), make_model(BITS)
    train(plain, make_data(), TrainConfig(epochs=2), progress=False)
    history = train(taught, make_data(), TrainConfig(epochs=2, distill=distill), teacher=teacher, progress=False)
    assert len(history.rows) == 2
    assert not torch.equal(parameters(plain), parameters(taught))


def test_outside_the_main_thread(make_model: MakeModel, make_data: MakeData) -> None:
    """Signals can only be handled in the main thread; a run elsewhere does without."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(train(make_model(BITS), make_data(), TrainConfig(epochs=1), progress=False))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert isinstance(outcome[0], History), outcome


def test_divergence_keeps_the_last_checkpoint(make_model: MakeModel, make_data: MakeData, tmp_path: Path) -> None:
    data = make_data()
    calls = iter(range(1000))

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output, targets) * (float("nan") if next(calls) >= 13 else 1.0)

    config = TrainConfig(epochs=3, checkpoint_every=1)
    with pytest.raises(TrainingError, match="step 4, 4 bits: the loss is nan"):
        train(make_model(BITS), data, config, loss=loss, checkpoint=tmp_path / "c", progress=False)
    history = train(make_model(BITS), data, config, checkpoint=tmp_path / "c", progress=False)
    assert len(history.rows) == 3
    assert all(math.isfinite(v) for row in history.rows for v in row["loss"].values())


# --- outputs and measures of one's own -------------------------------------------------------------


class Named(nn.Module):
    """Returns a dict, as the models of transformers do."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x, "logits": self.inner(x)}


@pytest.mark.parametrize("distill", ["none", "cascade"])
def test_a_part_of_the_output(
    distill: str, make_model: MakeModel, make_data: MakeData, make_float: Callable[..., nn.Module]
) -> None:
    """Training, its accuracy, distillation and evaluation are those of a model that returns its logits alone."""
    data, config = make_data(), TrainConfig(epochs=2, distill=distill)
    outcomes, histories = [], []
    for wrap, output in ((lambda m: m, None), (Named, "logits"), (Named, lambda out: out["logits"])):
        model = make_model(BITS)
        teacher = wrap(make_float(seed=4)) if distill != "none" else None
        histories.append(
            train(wrap(model), data, config, output=output, teacher=teacher,
                  evaluate_on=[(data.inputs, data.targets)], progress=False)
        )  # fmt: skip
        outcomes.append(parameters(model))
    assert all(torch.equal(outcomes[0], other) for other in outcomes)
    for name in ("loss", "train_top1", "top1"):
        assert all(h.rows[-1][name] == histories[0].rows[-1][name] for h in histories)
    if distill != "none":  # a teacher may return its logits as they are
        train(Named(make_model(BITS)), data, config, output="logits", teacher=make_float(seed=4), progress=False)
    with pytest.raises(ConfigError, match="the model returns a dict of 'hidden', 'logits'"):
        train(Named(make_model(BITS)), data, config, output="logit", teacher=teacher, progress=False)


def test_a_measure_of_ones_own(make_model: MakeModel, make_data: MakeData, tmp_path: Path) -> None:
    data, seen = make_data(), []

    def measure(model: nn.Module, batches: list[Any]) -> dict[str, float]:
        seen.append((set(get_bits(model).values()), model.training, len(batches), torch.rand(1).item()))
        return {"share": accuracy(model, batches), "worst": float("inf")}

    held_out = [(data.inputs[:4], data.targets[:4]), (data.inputs[4:], data.targets[4:])]
    model, plain = make_model(BITS), make_model(BITS)
    history = train(
        model, data, TrainConfig(epochs=1), evaluate_on=held_out, measure=measure, checkpoint=tmp_path / "c",
        progress=False,
    )  # fmt: skip
    assert [(*bits, mode, count) for bits, mode, count, _ in seen] == [
        ((8, 8), False, 1), ((8, 8), False, 2), ((4, 4), False, 2), ((2, 2), False, 2)
    ]  # fmt: skip  # a trial on the first batch, then each width
    expected = train(plain, data, TrainConfig(epochs=1), evaluate_on=held_out, progress=False)
    shares = {bits: value["share"] for bits, value in history.rows[0]["measured"].items()}
    assert shares == expected.rows[0]["top1"]
    assert history.rows[0]["measured"]["2"]["worst"] is None  # JSON knows no infinity
    assert "worst None" in describe(history.rows[0])
    assert torch.equal(parameters(model), parameters(plain))


def test_mistakes_show_before_the_first_epoch(make_model: MakeModel, make_data: MakeData) -> None:
    data, steps = make_data(), []

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        steps.append(1)
        return F.cross_entropy(output, targets)

    def broken(model: nn.Module, batches: list[Any]) -> float:
        raise ZeroDivisionError("mine")

    good = [(data.inputs, data.targets)]
    for held_out, measure, error in (
        (good, broken, ZeroDivisionError),
        (good, lambda *_: None, ConfigError),
        ([(data.inputs, data.targets + 9)], accuracy, TrainingError),
        (iter(good), accuracy, ConfigError),
        ([], accuracy, ConfigError),
    ):
        random_state = torch.get_rng_state()
        with pytest.raises(error):
            train(make_model(BITS), data, TrainConfig(epochs=1), loss=loss, evaluate_on=held_out,  # type: ignore[arg-type]
                  measure=measure, progress=False)  # fmt: skip
        assert torch.equal(torch.get_rng_state(), random_state)
    assert steps == []
    with pytest.raises(TrainingError, match=r"the loss must be one number, the mean over the batch; got a tensor of"):
        train(make_model(BITS), data, TrainConfig(epochs=1), loss=lambda x, y: x.sum(1), progress=False)


# --- data in other forms --------------------------------------------------------------------------


def test_lists_and_loaders_give_what_arrays_give(make_model: MakeModel, make_data: MakeData) -> None:
    data = make_data(samples=16, batch_size=8)
    batches = [(b.inputs, b.targets) for b in data.batches(0)]
    order = torch.cat([b.index for b in data.batches(0) if b.index is not None])
    dataset = TensorDataset(data.inputs[order], data.targets[order])
    outcomes = []
    for source in (data, batches, tuple(batches), [list(b) for b in batches], DataLoader(dataset, batch_size=8)):
        model = make_model(BITS)
        history = train(model, source, TrainConfig(epochs=1), progress=False)
        assert len(history.rows) == 1
        outcomes.append(parameters(model))
    assert all(torch.equal(outcomes[0], other) for other in outcomes)


def test_a_shuffling_loader_over_epochs(make_model: MakeModel, make_data: MakeData) -> None:
    data = make_data()
    loader = DataLoader(TensorDataset(data.inputs, data.targets), batch_size=8, shuffle=True)
    history = train(make_model(BITS), loader, TrainConfig(epochs=3), progress=False)
    assert len(history.rows) == 3
    assert history.rows[-1]["train_top1"]["8"] > 0


def test_progressive_distillation_from_a_loader_with_indices(make_model: MakeModel, make_data: MakeData) -> None:
    """As LoaderData says, batches may be (inputs, targets, index)."""
    data = make_data()
    loader = DataLoader(TensorDataset(data.inputs, data.targets, torch.arange(20)), batch_size=8)
    config = TrainConfig(epochs=2, distill="progressive")
    history = train(make_model(BITS), loader, config, progress=False)
    plain = train(make_model(BITS), loader, TrainConfig(epochs=2), progress=False)
    assert history.rows[0]["loss"] == plain.rows[0]["loss"]
    assert history.rows[1]["loss"] != plain.rows[1]["loss"]


def test_inputs_as_tuples_and_dicts(make_model: MakeModel, make_data: MakeData) -> None:
    data = make_data(samples=16, batch_size=8)
    outcomes = []
    for pack in (lambda x: x, lambda x: (x,), lambda x: {"input": x}):
        model = make_model(BITS)
        batches = [(pack(b.inputs), b.targets) for b in data.batches(0)]
        train(model, batches, TrainConfig(epochs=1), evaluate_on=batches, progress=False)
        outcomes.append(parameters(model))
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


@pytest.mark.parametrize("batch", [torch.zeros(2, 2, 4, 4), (torch.zeros(2, 2, 4, 4),), {"x": 1, "y": 2}])
def test_a_batch_of_another_shape(batch: Any, make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"\(inputs, targets\)"):
        train(make_model(BITS), [batch], TrainConfig(epochs=1), progress=False)


LOSSES = [F.cross_entropy, nn.CrossEntropyLoss(ignore_index=7)]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("label", [3, 50, -1])
def test_labels_of_no_class(label: int, loss: Any, make_model: MakeModel, make_data: MakeData) -> None:
    """Of arrays, all at once before the first update; of a loader, each batch before it is trained on."""
    words = rf"the label {label} is none of the model's 3 classes, 0 to 2"
    data, config = make_data(), TrainConfig(epochs=1)
    data.targets[-1] = label
    model = make_model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    with pytest.raises(TrainingError, match=words):
        train(model, data, config, loss=loss, progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())
    for at in (0, 2):
        batches = [(batch.inputs, batch.targets % 3) for batch in make_data().batches(0)]
        batches[at][1][0] = label
        with pytest.raises(TrainingError, match=words):
            train(make_model(), batches, config, loss=loss, progress=False)


def test_labels_that_are_left_out_or_no_labels(make_model: MakeModel, make_data: MakeData) -> None:
    data, config = make_data(), TrainConfig(epochs=1)
    for loss, ignored in zip(LOSSES, (-100, 7), strict=True):
        data.targets[-1] = ignored
        train(make_model(), data, config, loss=loss, progress=False)
    data.targets = F.one_hot(make_data().targets, 3) * 1.0
    train(make_model(), data, config, progress=False)
    data.targets = torch.full((len(data.inputs),), 50)  # a loss of one's own knows what its targets are
    train(
        make_model(), data, config, loss=lambda output, targets: (output.mean() - targets).abs().mean(), progress=False
    )


def test_outputs_that_are_no_tensor_are_named_before_anything_is_trained(
    make_model: MakeModel, make_data: MakeData
) -> None:
    model = make_model()
    model.register_forward_hook(lambda module, args, out: {"features": out, "logits": out})
    before = {name: value.clone() for name, value in model.state_dict().items() if "weight" in name}
    with pytest.raises(
        TrainingError, match=r"a dict of 'features', 'logits'; say which part is meant: output='logits'"
    ):
        train(model, make_data(), TrainConfig(epochs=1), progress=False)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    train(model, make_data(), TrainConfig(epochs=1), output="logits", progress=False)


def test_a_gpu_is_not_waited_for_at_every_step() -> None:
    """Labels there are looked at in the first batch of an epoch, and not again if all of them have been."""

    class There(Tensor):
        is_cuda = True

    guard, logits = LabelGuard(F.cross_entropy), torch.zeros(2, 3)
    good, bad = (torch.tensor(labels).as_subclass(There) for labels in ([0, 2], [0, 3]))
    guard.learn(logits, good)
    guard.check(bad, epoch_begins=False)
    with pytest.raises(TrainingError, match="the label 3 "):
        guard.check(bad, epoch_begins=True)
    guard = LabelGuard(F.cross_entropy)
    guard.everything = bad
    with pytest.raises(TrainingError, match="the label 3 "):
        guard.learn(logits, good)
    guard.check(bad, epoch_begins=True)


def test_data_without_a_length(make_model: MakeModel, make_data: MakeData) -> None:
    with pytest.raises(ConfigError, match="length"):
        train(make_model(BITS), iter([]), TrainConfig(epochs=1), progress=False)


def test_empty_data(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="empty"):
        train(make_model(BITS), [], TrainConfig(epochs=1), progress=False)


class Lying(list[Any]):
    """Batches whose number is not what the length says."""

    def __init__(self, batches: list[Any], length: int):
        super().__init__(batches)
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("length", [2, 4])
def test_a_loader_that_lies_about_its_length(length: int, make_model: MakeModel, make_data: MakeData) -> None:
    batches = [(b.inputs, b.targets) for b in make_data().batches(0)]
    with pytest.raises(TrainingError, match=f"epoch 1 gave 3 batches instead of the {length}"):
        train(make_model(BITS), Lying(batches, length), TrainConfig(epochs=2), progress=False)


def test_a_loader_that_is_used_up(make_model: MakeModel, make_data: MakeData) -> None:
    class Once:
        def __init__(self, batches: list[Any]):
            self.batches_left, self.length = iter(batches), len(batches)

        def __len__(self) -> int:
            return self.length

        def __iter__(self) -> Iterator[Any]:
            return self.batches_left

    batches = [(b.inputs, b.targets) for b in make_data().batches(0)]
    with pytest.raises(TrainingError, match="epoch 2 gave 0 batches instead of the 3"):
        train(make_model(BITS), Once(batches), TrainConfig(epochs=2), progress=False)


def test_data_of_ones_own(make_model: MakeModel, make_data: MakeData) -> None:
    """Anything with `batches` is taken as TrainingData."""
    asked = []

    class Own:
        resumable = True
        samples = 20

        def __len__(self) -> int:
            return 3

        def batches(self, epoch: int, *, start: int = 0, rank: int = 0, world: int = 1) -> Iterator[Sample]:
            asked.append((epoch, start, rank, world))
            return make_data().batches(epoch, start=start)

    own, array = make_model(BITS), make_model(BITS)
    train(own, Own(), TrainConfig(epochs=2), progress=False)
    train(array, make_data(), TrainConfig(epochs=2), progress=False)
    assert asked == [(0, 0, 0, 1), (1, 0, 0, 1)]
    assert torch.equal(parameters(own), parameters(array))


# --- what it shows --------------------------------------------------------------------------------


def test_the_bar(make_model: MakeModel, make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    bars: list[Any] = []
    real = BarProgress.__init__

    def remember(self: BarProgress, epochs: int, total_steps: int) -> None:
        real(self, epochs, total_steps)
        bars.append(self)

    monkeypatch.setattr(BarProgress, "__init__", remember)
    shown, silent = make_model(BITS), make_model(BITS)
    train(shown, make_data(), TrainConfig(epochs=2), progress=True)
    train(silent, make_data(), TrainConfig(epochs=2), progress=False)
    (bar,) = bars
    (task,) = bar._bar.tasks
    assert (task.completed, task.total) == (6, 6)
    assert task.description == "epoch 2/2"
    assert all(f"{bits}b " in task.fields["status"] for bits in BITS)
    assert bar._bar.finished
    assert torch.equal(parameters(shown), parameters(silent))


def test_the_bar_comes_down_after_an_error(make_model: MakeModel) -> None:
    rich = pytest.importorskip("rich")
    with pytest.raises(ConfigError):
        train(make_model(BITS), [3], TrainConfig(epochs=1), progress=True)
    assert not rich.get_console()._live_stack  # no display is left running


def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)


def test_without_rich_there_are_lines_of_log(
    make_model: MakeModel, make_data: MakeData, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_rich(monkeypatch)
    model, data = make_model(BITS), make_data()
    with caplog.at_level(logging.INFO, "bitdial"):
        train(
            model,
            data,
            TrainConfig(epochs=2),
            evaluate_on=[(data.inputs, data.targets)],
            progress=True,
        )
    first, *epochs = [record.getMessage() for record in caplog.records]
    assert "rich is not installed" in first
    assert "bitdial[cli]" in first
    assert [line[:10] for line in epochs] == ["epoch 1/2 ", "epoch 2/2 "]
    assert all(f"{bits}b " in line for line in epochs for bits in BITS)


def test_which_view_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_progress(False, 1, 1), LogProgress)
    pytest.importorskip("rich")
    assert isinstance(make_progress(True, 1, 1), BarProgress)
    without_rich(monkeypatch)
    assert isinstance(make_progress(True, 1, 1), LogProgress)


def test_describe() -> None:
    row = {"loss": {"8": 0.5, "2": 1.25}, "train_top1": {"8": 0.75}, "top1": {"8": 0.5, "2": 0.125}}
    assert describe(row) == "8b 0.500 75.0%/50.0%  2b 1.250 12.5%"
    assert describe({"loss": {"8": 0.5}, "train_top1": {}}) == "8b 0.500"
