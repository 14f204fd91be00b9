"""Norms of any class through the whole path: a set per width, trained, saved, loaded, on every engine."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import (
    JointStep,
    QuantConfig,
    TrainConfig,
    add_transitions,
    at_bits,
    code_exact,
    export_onnx,
    load,
    load_trainable,
    onnx_session_options,
    prepare,
    read_artifact,
    recalibrate_norms,
    save,
    set_bits,
)
from bitdial.errors import ArtifactError, ConfigError
from bitdial.files.container import read_container, write_container
from bitdial.nn import SwitchableBatchNorm

BITS = (8, 4, 2)
CONFIG = QuantConfig(bit_choices=BITS, start="3std")
IMAGES = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(8) % 3


class PlainNorm(nn.BatchNorm2d):
    """Changes nothing."""


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: a forward of its own, with an activation in it."""

    def __init__(self, features: int, act: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__(features)
        self.drop, self.act = nn.Identity(), act()

    def forward(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, factor, self.eps
        )
        return self.act(self.drop(x))


def learned_act(features: int) -> nn.Module:
    """With a parameter besides those of a batch norm, and a buffer."""
    norm = NormAct(features, lambda: nn.PReLU(features))
    norm.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
    return norm


class Conditional(nn.BatchNorm2d):
    """Takes more than its input, and has a layer inside."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.shift = nn.Linear(features, features)

    def forward(self, x: Tensor, given: Tensor | None = None) -> Tensor:
        given = x.amax(dim=(2, 3)) if given is None else given
        return super().forward(x) + self.shift(given)[:, :, None, None]


class OwnNorm(nn.Module):
    """Keeps statistics, and is not derived from a norm of PyTorch."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, None, self.training)


MAKES: dict[str, Callable[[int], nn.Module]] = {
    "subclass": PlainNorm,
    "with activation": NormAct,
    "with state": learned_act,
    "with a layer": Conditional,
    "sync": nn.SyncBatchNorm,
    "instance": lambda features: nn.InstanceNorm2d(features, affine=True, track_running_stats=True),
}
if "bias" in inspect.signature(nn.BatchNorm2d).parameters:  # in torch 2.13, and not in 2.11
    MAKES["without bias"] = lambda features: nn.BatchNorm2d(features, bias=False)


class Net(nn.Module):
    """Two quantised convolutions between a stem and a head; norms of one class behind both."""

    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.a = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm_a = make(4)
        self.b = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm_b = make(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_a(self.a(torch.relu(self.stem(x))))
        x = self.norm_b(self.b(x))
        return self.head(x.amax(dim=(2, 3)))


def trained(make: Callable[[int], nn.Module], transitions: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    model = prepare(Net(make), CONFIG, IMAGES)
    if transitions is not None:
        model = add_transitions(model, transitions)
    step = JointStep(model, TrainConfig(epochs=1, lr=2e-2), steps_per_epoch=2)
    for _ in range(2):
        step(IMAGES, TARGETS)
    return model.eval()


def sets(model: nn.Module) -> dict[str, SwitchableBatchNorm]:
    return {name: m for name, m in model.named_modules() if isinstance(m, SwitchableBatchNorm)}


def outputs(model: nn.Module) -> dict[int, Tensor]:
    found = {}
    for bits in BITS:
        with at_bits(model, bits), torch.no_grad():
            found[bits] = model(IMAGES)
    return found


@pytest.mark.parametrize("name", MAKES)
def test_a_norm_of_any_class_has_a_set_per_width_everywhere(name: str, tmp_path: Path) -> None:
    """Trained = live, and integer kernels = exact sums, bit for bit, at each width."""
    make = MAKES[name]
    model = trained(make)
    assert sorted(sets(model)) == ["norm_a", "norm_b"]
    for norm in sets(model).values():
        assert {type(each) for each in norm.sets.values()} == {type(make(4))}
        means = [each.running_mean for each in norm.sets.values()]
        assert not any(torch.equal(means[0], other) for other in means[1:]), "each width has statistics of its own"
    digest = save(model, tmp_path / "model.safetensors")
    live = load(tmp_path / "model.safetensors", Net(make))
    integer = load(tmp_path / "model.safetensors", Net(make), kernels="integer")
    exact = code_exact(live)
    for bits, expected in outputs(model).items():
        assert torch.equal(outputs(live)[bits], expected), bits
        assert torch.equal(outputs(integer)[bits], outputs(exact)[bits]), bits
        torch.testing.assert_close(outputs(integer)[bits], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(outputs(code_exact(integer))[bits], outputs(exact)[bits]), bits
    assert save(load_trainable(tmp_path / "model.safetensors", Net(make)), tmp_path / "again.safetensors") == digest


def test_an_export_has_what_a_norm_of_the_users_own_computes(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    save(trained(learned_act), tmp_path / "model.safetensors")
    live = load(tmp_path / "model.safetensors", Net(learned_act))
    for bits in (8, 2):
        export_onnx(live, tmp_path / "model.onnx", IMAGES, bits=bits)
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", onnx_session_options())
        (found,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), outputs(live)[bits], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transitions", ["full", "statistics"])
def test_transitions_of_a_norm_with_state_of_its_own(transitions: str, tmp_path: Path) -> None:
    """With shared parameters, those that a batch norm does not have are shared too, and buffers are not."""
    model = trained(learned_act, transitions)
    norm = sets(model)["norm_b"]
    pairs = {key: each.get_parameter("act.weight") for key, each in norm.sets.items()}
    assert (pairs["8-4"] is pairs["2-4"]) == (transitions == "statistics")
    assert norm.sets["8-4"].seen is not norm.sets["2-4"].seen
    save(model, tmp_path / "model.safetensors")
    rows = read_artifact(tmp_path / "model.safetensors").tensors["norm_b/act.weight"]
    assert len(rows) == (3 if transitions == "statistics" else 9)
    live = load(tmp_path / "model.safetensors", Net(learned_act))
    for bits, expected in outputs(model).items():
        assert torch.equal(outputs(live)[bits], expected)


def test_recalibration_averages_whatever_the_class(tmp_path: Path) -> None:
    """An instance norm takes a momentum of None as "never"; a norm's own dropout stays off."""

    class Dropping(NormAct):
        def __init__(self, features: int) -> None:
            super().__init__(features)
            self.drop = nn.Dropout(0.9)

    for make in (nn.BatchNorm2d, Dropping, MAKES["instance"]):
        model = trained(make)
        model.norm_a.sets["4"].momentum = 0.3
        seen: list[Tensor] = []
        with at_bits(model, 4):
            hook = model.norm_a.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0]))
            recalibrate_norms(model, [IMAGES[:4], IMAGES[4:]], 4)
            hook.remove()
        norm = model.norm_a.sets["4"]
        expected = torch.stack([x.mean(dim=(0, 2, 3)) for x in seen]).mean(dim=0)
        torch.testing.assert_close(norm.running_mean, expected, rtol=1e-5, atol=1e-6)
        assert norm.momentum == 0.3
        assert not norm.training
        assert not norm._forward_pre_hooks


def test_a_file_of_one_class_does_not_load_into_another(tmp_path: Path) -> None:
    for name, other, words in (
        ("with activation", "subclass", "type is 'NormAct' in the file and 'PlainNorm' in the model"),
        ("with activation", "sync", "type is 'NormAct'"),
        ("with state", "with activation", r"state is \['act.weight'"),
        ("without bias", "subclass", r"state is \[.*'weight'\] in the file and None"),
    ):
        if name not in MAKES:
            continue
        save(trained(MAKES[name]), tmp_path / "model.safetensors")
        with pytest.raises(ArtifactError, match=f"norm 'norm_a': {words}"):
            load(tmp_path / "model.safetensors", Net(MAKES[other]))
    save(trained(nn.BatchNorm2d), tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match="state is None in the file and"):
        load(tmp_path / "model.safetensors", Net(MAKES["with state"]))
    load(tmp_path / "model.safetensors", Net(nn.SyncBatchNorm))
    save(trained(learned_act), tmp_path / "model.safetensors")
    other = Net(learned_act)
    other.norm_a.act = nn.PReLU(1)
    with pytest.raises(ArtifactError, match=r"its act.weight is \(3, 4\) in the file, and \(3, 1\) in the model"):
        load(tmp_path / "model.safetensors", other)


def test_norms_that_cannot_be_switched_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Objects(nn.BatchNorm2d):
        def get_extra_state(self) -> Any:
            return {"a": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    class Wide(nn.BatchNorm2d):
        def __init__(self, features: int) -> None:
            super().__init__(features)
            self.running_mean = torch.zeros(1, features)

        def forward(self, x: Tensor) -> Tensor:
            return x

    for make, words in ((OwnNorm, "derive it"), (Objects, "get_extra_state"), (Wide, r"shape (1, 4)")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "bitdial"):
            assert not sets(prepare(Net(make), CONFIG, IMAGES))
        (said,) = [r.getMessage() for r in caplog.records]
        assert "'norm_a', 'norm_b'" in said
        assert words in said

    class Apart(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.alone(x).sum()

    model = Apart(PlainNorm)
    model.alone = nn.BatchNorm2d(2)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bitdial"):
        assert sorted(sets(prepare(model, CONFIG, IMAGES))) == ["norm_a", "norm_b"]
    assert "1 norms ('alone')" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "bitdial"):
        prepare(model, QuantConfig(bit_choices=BITS, start="3std", switch_norms=False), IMAGES)
    assert not caplog.text


def test_a_layer_inside_a_norm_stays_with_it() -> None:
    model = prepare(Net(Conditional), CONFIG, IMAGES)
    assert {type(each.shift) for each in model.norm_a.sets.values()} == {nn.Linear}


def test_lazy_modules_are_refused_with_the_way_out() -> None:
    model = Net(lambda features: nn.LazyBatchNorm2d())
    with pytest.raises(ConfigError, match=r"'norm_a' is a LazyBatchNorm2d.*run the model on a batch once"):
        prepare(model, CONFIG, IMAGES)
    model(IMAGES)
    set_bits(prepare(model, CONFIG, IMAGES), 2)


def test_a_hostile_state_is_refused(tmp_path: Path) -> None:
    save(trained(learned_act), tmp_path / "model.safetensors")
    tensors, manifest, _ = read_container(tmp_path / "model.safetensors", error=ArtifactError)
    state = manifest["norms"]["norm_a"]["state"]
    for wrong, words in (
        ([*state, 3], "3 in its state is no name"),
        ([*state, "more"], "'more' is missing"),
        ([part for part in state if part != "seen"], "'norm_a/seen' belongs to nothing"),
        ("act.weight", "state is 'act.weight'"),
    ):
        manifest["norms"]["norm_a"]["state"] = wrong
        write_container(tmp_path / "odd.safetensors", tensors, manifest, error=ArtifactError)
        with pytest.raises(ArtifactError, match=words):
            read_artifact(tmp_path / "odd.safetensors")
    manifest["norms"]["norm_a"]["state"] = state
    tensors["norm_a/act.weight"] = tensors["norm_a/act.weight"][:2]
    write_container(tmp_path / "odd.safetensors", tensors, manifest, error=ArtifactError)
    with pytest.raises(ArtifactError, match="does not hold its sets"):
        read_artifact(tmp_path / "odd.safetensors")
