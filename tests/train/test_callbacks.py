"""Callbacks: when they are called, what they may do, and that a resumed run has theirs too."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.errors import BitdialError, CheckpointError, ConfigError
from bitdial.train import ArrayData, Callback, CsvLog, EarlyStopping, Ema, History, TrainConfig, accuracy, train

MakeModel = Callable[..., nn.Module]
MakeData = Callable[..., ArrayData]
EPOCHS, STEPS = 3, 3


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([value.detach().double().reshape(-1) for value in model.state_dict().values()])


class Diary(Callback):
    """Writes down what it is told; stops at a step or after an epoch."""

    def __init__(self, *, stop_step: int = 0, stop_epoch: int = -1):
        self.entries: list[Any] = []
        self.stop_step, self.stop_epoch = stop_step, stop_epoch

    def on_start(self, run: Any) -> None:
        self.entries.append(("start", run.step, run.total_steps))

    def on_step(self, run: Any) -> None:
        self.entries.append(("step", run.epoch, run.step, sorted(run.report.loss)))
        if run.step == self.stop_step:
            run.stop("enough")

    def on_epoch(self, run: Any) -> None:
        self.entries.append(("epoch", run.epoch, run.row is run.history.rows[-1]))
        if run.epoch == self.stop_epoch:
            run.stop("enough")

    def on_end(self, run: Any) -> None:
        self.entries.append(("end", run.step))


def test_the_hooks_are_called_in_order_and_change_nothing(make_model: MakeModel, make_data: MakeData) -> None:
    diary, model, plain = Diary(), make_model(), make_model()
    train(model, make_data(), TrainConfig(epochs=2), callbacks=[diary], progress=False)
    steps = [("step", e, 3 * e + s + 1, [2, 4, 8]) for e in range(2) for s in range(3)]
    assert diary.entries == [
        ("start", 0, 6), *steps[:3], ("epoch", 0, True), *steps[3:], ("epoch", 1, True), ("end", 6)
    ]  # fmt: skip
    train(plain, make_data(), TrainConfig(epochs=2), progress=False)
    assert torch.equal(parameters(model), parameters(plain))


def test_a_callback_ends_the_run(make_model: MakeModel, make_data: MakeData, tmp_path: Path) -> None:
    """After the step or the epoch in which it says so; the same call again finds the run at its end."""
    for name, diary, steps, rows in (
        ("step", Diary(stop_step=5), 5, 1), ("last", Diary(stop_step=6), 6, 2), ("epoch", Diary(stop_epoch=0), 3, 1)
    ):  # fmt: skip
        model = make_model()
        config, path = TrainConfig(epochs=4), tmp_path / name
        history = train(model, make_data(), config, callbacks=[diary], checkpoint=path, progress=False)
        assert history.ended == "enough"
        assert diary.entries[-1] == ("end", steps)
        assert len(history.rows) == rows
        assert not model.training
        again, later = make_model(seed=1), Diary()
        assert train(again, make_data(), config, callbacks=[later], checkpoint=path, progress=False) == history
        assert torch.equal(parameters(again), parameters(model))
        assert later.entries == [("start", steps, 12), ("end", steps)]


def test_callbacks_that_cannot_work_are_refused_before_training(make_model: MakeModel, make_data: MakeData) -> None:
    class Wrong(Callback):
        def on_epoch(self) -> None:  # type: ignore[override]
            pass

    for callbacks, words in (
        ([Wrong()], r"Wrong.on_epoch must take the run and nothing else"),
        ([print], "must be an object of a class that inherits from Callback"),
        (Diary(), "must be a list of Callback objects"),
        ([EarlyStopping(2)], "looks at the accuracy on evaluate_on, which this run lacks"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(make_model(), make_data(), TrainConfig(epochs=1), callbacks=callbacks, progress=False)  # type: ignore[arg-type]
    for make in (lambda: Ema(1.0), lambda: EarlyStopping(0)):
        with pytest.raises(ConfigError):
            make()


# --- the ready ones -------------------------------------------------------------------------------


class Weights(Callback):
    """The model after each step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_step(self, run: Any) -> None:
        self.seen.append({name: value.clone() for name, value in run.model.state_dict().items()})


def test_ema_is_the_average_of_the_models(make_model: MakeModel, make_data: MakeData) -> None:
    data, model, weights = make_data(), make_model(), Weights()
    held_out = [(data.inputs, data.targets)]
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    config = TrainConfig(epochs=EPOCHS, lr=1e-2)
    history = train(model, data, config, callbacks=[weights, Ema(0.4)], evaluate_on=held_out, progress=False)
    for n, seen in enumerate(weights.seen, start=1):
        decay = min(0.4, (1 + n) / (10 + n))
        for name, value in seen.items():
            expected[name] = decay * expected[name] + (1 - decay) * value if value.is_floating_point() else value
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(model.head.weight, weights.seen[-1]["head.weight"])
    assert history.rows[-1]["top1"]["8"] == accuracy(model, held_out)  # it was the average that was evaluated
    plain = Weights()
    train(make_model(), data, config, callbacks=[plain], progress=False)
    assert all(torch.equal(a["head.weight"], b["head.weight"]) for a, b in zip(plain.seen, weights.seen, strict=True))


def test_early_stopping_waits_for_something_better(make_model: MakeModel, make_data: MakeData) -> None:
    values = iter([1.0, 3.0, 2.0, float("nan"), 4.0, 4.0, 3.0, 9.0])
    stopping = EarlyStopping(2, of=lambda row: next(values))
    history = train(make_model(), make_data(), TrainConfig(epochs=8), callbacks=[stopping], progress=False)
    assert len(history.rows) == 4
    assert history.ended == "no better than 3.0 for 2 epochs"
    data = make_data()
    by_accuracy = [EarlyStopping(1)]
    config = TrainConfig(epochs=50, lr=1e-9, weight_decay=0)
    history = train(
        make_model(), data, config, callbacks=by_accuracy, evaluate_on=[(data.inputs, data.targets)], progress=False
    )
    assert history.ended is not None
    assert len(history.rows) < 50


def test_csv_has_a_line_for_each_epoch_and_width(make_model: MakeModel, make_data: MakeData, tmp_path: Path) -> None:
    data, path = make_data(), tmp_path / "logs" / "run.csv"
    history = train(
        make_model(), data, TrainConfig(epochs=2), callbacks=[CsvLog(path)], evaluate_on=[(data.inputs, data.targets)],
        measure=lambda model, batches: {"share": accuracy(model, batches)}, progress=False,
    )  # fmt: skip
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["epoch"], line["bits"]) for line in lines] == [(e, b) for e in "01" for b in ("8", "4", "2")]
    for line in lines:
        row = history.rows[int(line["epoch"])]
        assert float(line["loss"]) == row["loss"][line["bits"]]
        assert float(line["measured.share"]) == row["measured"][line["bits"]]["share"]
    with pytest.raises(BitdialError, match=r"this is a folder; name a file in it, such as .*log\.csv"):
        train(make_model(), data, TrainConfig(epochs=1), callbacks=[CsvLog(tmp_path)], progress=False)


# --- stop and resume ------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 3, 5, 7])
def test_a_resumed_run_has_the_callbacks_of_one_that_never_stopped(
    at: int, make_model: MakeModel, make_data: MakeData, stop_after: Any, tmp_path: Path
) -> None:
    stopping, stopped = stop_after
    config = TrainConfig(epochs=EPOCHS, lr=1e-2, checkpoint_every=1)

    def callbacks(name: str) -> list[Callback]:
        return [Ema(0.9), CsvLog(tmp_path / name), EarlyStopping(2, of=lambda row: row["epoch"] == 0)]

    def run(model: nn.Module, data: Any, name: str, checkpoint: Path | None) -> History:
        return train(model, data, config, callbacks=callbacks(name), checkpoint=checkpoint, progress=False)

    whole, model = make_model(), make_model()
    expected = run(whole, make_data(), "whole.csv", None)
    with pytest.raises(stopped):
        run(model, stopping(make_data(), at), "parts.csv", tmp_path / "c")
    model = make_model(seed=1)
    history = run(model, make_data(), "parts.csv", tmp_path / "c")
    assert torch.equal(parameters(model), parameters(whole))
    assert history.ended == expected.ended == "no better than 1.0 for 2 epochs"

    def lines(name: str) -> list[dict[str, str]]:
        with (tmp_path / name).open(newline="") as file:
            return [{k: v for k, v in line.items() if k != "seconds"} for line in csv.DictReader(file)]

    assert lines("parts.csv") == lines("whole.csv")
    with pytest.raises(CheckpointError, match=r"\['Ema', 'EarlyStopping'\] that keep a state, these are \['Ema'\]"):
        train(make_model(), make_data(), config, callbacks=[Ema(0.9)], checkpoint=tmp_path / "c", progress=False)
