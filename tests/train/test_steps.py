"""One batch at all widths: both algorithms against a plain re-implementation, and everything that must not move."""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.dial.dial import get_bits, set_bits
from bitdial.errors import ConfigError, PlanError, TrainingError
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.train import ArrayData, train
from bitdial.train.config import TrainConfig
from bitdial.train.guard import ScaleGuard
from bitdial.train.steps import JointStep, split_parameters

MakeModel = Callable[..., nn.Module]
MakeImages = Callable[..., tuple[Tensor, Tensor]]
MakeData = Callable[..., ArrayData]
BITS = (8, 4, 2)


# --- a second implementation, in plain sentences --------------------------------------------------


def reference_weight(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Double Rounding with straight-through gradients by the detach trick, and LSQ's gradient scale.

    A scale (rows, groups) is first rounded to 1 to 15 fifteenths of the largest of its row.
    """
    largest = 2 ** (bits - 1) - 1
    factor = 1 / math.sqrt(weight.numel() / scale.numel() * largest)
    scale = scale * factor + (scale - scale * factor).detach()
    if scale.dim() == 2:
        row = scale.max(dim=1, keepdim=True).values / 15
        scale = scale + (row * (scale / row).round().clamp(1, 15) - scale).detach()
    else:
        scale = scale[:, None]
    scale = scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)
    scale = scale.reshape(*weight.shape[:2], *(1,) * (weight.dim() - 2))
    width = scale * 2.0 ** (8 - bits)
    codes8 = (weight / scale).round().clamp(-128, 127)
    codes = (codes8 / 2 ** (8 - bits)).round().clamp(-largest - 1, largest).detach()
    inside = (weight / width).clamp(-largest - 1, largest)
    return width * (inside + (codes - inside).detach())


def reference_activation(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Unsigned activations: every quantised layer of the test net comes after a ReLU."""
    largest = 2**bits - 1
    factor = 1 / math.sqrt(x[0].numel() * largest)
    scale = scale * factor + (scale - scale * factor).detach()
    inside = (x / scale).clamp(0, largest)
    return scale * (inside + (inside.round() - inside).detach())


class Reference:
    """Algorithms A.1 and A.2 on clones of the model's tensors, with an optimizer written from its formula."""

    def __init__(self, model: nn.Module, config: TrainConfig, total_steps: int):
        self.parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        self.buffers = {n: b.clone() for n, b in model.named_buffers()}
        self.config, self.total_steps = config, total_steps
        self.state: dict[Any, dict[str, Any]] = {}
        self.step = 0

    def forward(self, x: Tensor, bits: int) -> Tensor:
        p = self.parameters

        def norm(name: str, x: Tensor) -> Tensor:
            own = f"{name}.sets.{bits}."
            self.buffers[own + "num_batches_tracked"] += 1
            mean, var = self.buffers[own + "running_mean"], self.buffers[own + "running_var"]
            return F.batch_norm(x, mean, var, p[own + "weight"], p[own + "bias"], training=True)

        def quantised(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
            x = reference_activation(x, p[f"{name}.act_quantizer.scales.{bits}"], bits)
            return x, reference_weight(p[f"{name}.weight"], p[f"{name}.weight_quantizer.scale"], bits)

        x = norm("norm0", F.conv2d(x, p["stem.weight"], p["stem.bias"], padding=1)).relu()
        x = norm("norm1", F.conv2d(*quantised("conv", x), padding=1)).relu().flatten(1)
        x = F.linear(*quantised("hidden", x), p["hidden.bias"]).relu()
        return F.linear(x, p["head.weight"], p["head.bias"])

    def rate(self) -> float:
        return self.config.lr * (1 + math.cos(math.pi * self.step / self.total_steps)) / 2

    def clipped(self, gradients: dict[str, Tensor], bits: int) -> list[dict[str, Tensor]]:
        """The gradients of each layer's two scales, so that the norm of both together is at most 1."""
        found = []
        for layer in ("conv", "hidden"):
            names = f"{layer}.weight_quantizer.scale", f"{layer}.act_quantizer.scales.{bits}"
            norm = float(torch.cat([gradients[name].reshape(-1) for name in names]).norm())
            found.append({name: gradients[name] / max(norm, 1.0) for name in names})
        return found

    def shares(self, gradients: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
        """What each scale takes of the rate: 1 less its layer's largest clipped gradient, or less its own."""
        found = {}
        for layer in self.clipped(gradients, bits) if self.config.alrs in ("layer", "channel") else []:
            largest = max(float(gradient.abs().max()) for gradient in layer.values())
            for name, gradient in layer.items():
                g = gradient.abs() if self.config.alrs == "channel" else torch.full_like(gradient, largest)
                found[name] = 1 - g
        return found

    def scale_rate(self, gradients: dict[str, Tensor], bits: int) -> float:
        rate = self.rate() * (self.config.scale_lr or self.config.lr) / self.config.lr
        if self.config.alrs == "off":
            return rate
        peaks = [float(max(g.abs().max() for g in layer.values())) for layer in self.clipped(gradients, bits)]
        mean = sum(peaks) / 2
        eta = {8: 1.0, 4: 0.01, 2: 0.001}[bits]
        if self.config.alrs in ("layer", "channel"):
            return eta * rate
        return eta * max(rate - mean, 0.0) if self.config.alrs == "literal" else eta * rate * (1 - mean)

    def change(self, key: Any, value: Tensor, gradient: Tensor, rate: float, decay: float) -> Tensor:
        """What the optimizer adds to `value`."""
        state = self.state.setdefault(key, {"t": 0, "m": torch.zeros_like(value), "v": torch.zeros_like(value)})
        state["t"] += 1
        t = state["t"]
        if self.config.optimizer != "adamw":
            gradient = gradient + decay * value
        if self.config.optimizer == "sgd" and "quantizer" not in str(key):  # scales have Adam
            state["m"] = gradient if t == 1 else 0.9 * state["m"] + gradient
            return -rate * state["m"]
        state["m"] = 0.9 * state["m"] + 0.1 * gradient
        state["v"] = 0.999 * state["v"] + 0.001 * gradient**2
        mean, square = state["m"] / (1 - 0.9**t), state["v"] / (1 - 0.999**t)
        decoupled = rate * decay * value if self.config.optimizer == "adamw" else 0.0
        return -rate * mean / (square.sqrt() + 1e-8) - decoupled

    def update(self, gradients: dict[str, Tensor], bits: int) -> None:
        scale_rate, shares = self.scale_rate(gradients, bits), self.shares(gradients, bits)
        weights = {n: g for n, g in gradients.items() if "quantizer" not in n}
        if self.config.clip_norm is not None:
            norm = math.sqrt(sum(float(g.square().sum()) for g in weights.values()))
            weights = {n: g * min(1.0, self.config.clip_norm / (norm + 1e-6)) for n, g in weights.items()}
        with torch.no_grad():
            for name, gradient in weights.items():
                value = self.parameters[name]
                value += self.change(name, value, gradient, self.rate(), self.config.weight_decay)
            for name, gradient in gradients.items():
                if "quantizer" in name:
                    value = self.parameters[name]
                    key = (name, bits) if self.config.scale_state == "per_bits" else name
                    step = self.change(key, value, gradient, scale_rate, 0.0) * shares.get(name, 1.0)
                    new = value * (1 + step) if self.config.scale_step == "relative" else value + step
                    value.copy_(torch.maximum(new, value / 2))

    def __call__(self, inputs: Tensor, targets: Tensor) -> dict[int, float]:
        losses, total = {}, {}
        for bits in BITS:
            loss = F.cross_entropy(self.forward(inputs, bits), targets)
            losses[bits] = float(loss.detach())
            found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
            gradients = {n: g for n, g in zip(self.parameters, found, strict=True) if g is not None}
            if self.config.update == "separate":
                self.update(gradients, bits)
            for name, gradient in gradients.items():
                total[name] = total[name] + gradient if name in total else gradient
        if self.config.update == "accumulated":
            self.update(total, BITS[0])
        self.step += 1
        return losses


PAPER: dict[str, Any] = {"scale_step": "absolute", "lr": 2e-3}
CASES: dict[str, dict[str, Any]] = {
    "A.2 without ALRS": PAPER | {"alrs": "off"},
    "A.2, relative ALRS": PAPER | {"alrs": "relative"},
    "A.2, literal ALRS, floored": PAPER | {"alrs": "literal"},
    "A.2, literal ALRS, above the floor": PAPER | {"alrs": "literal", "scale_lr": 0.5, "scale_step": "relative"},
    "A.2, relative steps": {"alrs": "relative", "lr": 2e-3},
    "A.2, a rate for each layer": PAPER | {"alrs": "layer"},
    "A.2, a rate for each layer, relative steps": {"alrs": "layer", "lr": 2e-3},
    "A.2, a rate for each channel": PAPER | {"alrs": "channel"},
    "A.2, a rate for each channel, relative steps": {"alrs": "channel", "lr": 2e-3},
    "A.2, a rate for each channel, state per width": {"alrs": "channel", "lr": 5e-3, "scale_state": "per_bits"},
    "A.2, a rate for each layer, SGD": PAPER | {"alrs": "layer", "optimizer": "sgd", "lr": 0.05, "scale_lr": 1e-2},
    "A.2, state per width": PAPER | {"alrs": "off", "scale_state": "per_bits"},
    "A.2, state per width, ALRS, relative steps": {"alrs": "relative", "lr": 5e-3, "scale_state": "per_bits"},
    "A.2, AdamW": PAPER | {"alrs": "off", "optimizer": "adamw", "weight_decay": 0.3},
    "A.2, SGD": PAPER | {"alrs": "relative", "optimizer": "sgd", "lr": 0.05, "scale_lr": 1e-3},
    "A.2, clipped": PAPER | {"alrs": "off", "optimizer": "sgd", "clip_norm": 0.1},
    "A.2, rate of the scales": PAPER | {"alrs": "off", "scale_lr": 1e-4},
    "A.1": PAPER | {"alrs": "off", "update": "accumulated"},
    "A.1, relative steps, clipped": {"alrs": "off", "update": "accumulated", "lr": 2e-3, "clip_norm": 0.2},
}


GROUPED = ("A.2, relative ALRS", "A.2, a rate for each layer", "A.2, a rate for each channel, relative steps", "A.1")


@pytest.mark.parametrize(("name", "group_size"), [(n, None) for n in CASES] + [(n, 2) for n in GROUPED])
def test_three_steps_equal_those_of_a_plain_implementation(
    name: str, group_size: int | None, make_model: MakeModel, make_images: MakeImages
) -> None:
    config = TrainConfig(**({"epochs": 2, "weight_decay": 0.02} | CASES[name]))
    model = make_model(BITS, dtype=torch.float64, group_size=group_size)
    assert model.hidden.weight_quantizer.scale.shape == ((6,) if group_size is None else (6, 32))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    step, reference = JointStep(model, config, steps_per_epoch=4), Reference(model, config, total_steps=8)
    for batch in range(3):
        inputs, targets = make_images(6, seed=batch)
        report = step(inputs.double(), targets)
        losses = reference(inputs.double(), targets)
        for bits in BITS:
            assert float(report.loss[bits]) == pytest.approx(losses[bits], rel=1e-5)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), reference.parameters[name].detach(), rtol=1e-6, atol=1e-8, msg=name)
        assert not torch.equal(value, start[name]) or config.alrs == "literal", name
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, reference.buffers[name], rtol=1e-6, atol=1e-8, msg=name)


def test_the_cases_differ(make_model: MakeModel, make_images: MakeImages) -> None:
    """The settings compared above do change the outcome, so that agreement means something."""
    outcomes = []
    for settings in CASES.values():
        model = make_model(BITS, dtype=torch.float64)
        step = JointStep(model, TrainConfig(epochs=2, **settings), steps_per_epoch=4)
        for batch in range(3):
            inputs, targets = make_images(6, seed=batch)
            step(inputs.double(), targets)
        outcomes.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    for i, one in enumerate(outcomes):
        for other in outcomes[:i]:
            assert float((one - other).abs().max()) > 1e-5


def test_the_report(make_model: MakeModel, make_images: MakeImages) -> None:
    """Losses, hits and gradient peaks are those of each pass; the model barely moves in between."""
    inputs, targets = make_images(10)
    model = make_model(BITS, dtype=torch.float64)
    twin = make_model(BITS, dtype=torch.float64)
    config = TrainConfig(epochs=1, lr=1e-12, alrs="relative")
    report = JointStep(model, config, steps_per_epoch=1)(inputs.double(), targets)
    twin.train()
    assert report.lr == 1e-12
    assert report.seen == 10
    for bits in BITS:
        set_bits(twin, bits)
        twin.zero_grad(set_to_none=True)
        output = twin(inputs.double())
        loss = F.cross_entropy(output, targets)
        loss.backward()
        assert float(report.loss[bits]) == pytest.approx(float(loss.detach()), rel=1e-6)
        assert int(report.correct[bits]) == int((output.argmax(1) == targets).sum())
        layers = [twin.conv, twin.hidden]
        weight = [float(layer.weight_quantizer.scale.grad.abs().max()) for layer in layers]
        act = [float(layer.act_quantizer.scales[str(bits)].grad.abs().max()) for layer in layers]
        assert report.weight_scale_peaks[bits].tolist() == pytest.approx(weight, rel=1e-5)
        assert report.act_scale_peaks[bits].tolist() == pytest.approx(act, rel=1e-5)
        assert 0 < report.scale_rate[bits] < 1e-12
    assert not report.loss[8].requires_grad


def test_the_model_is_left_in_train_mode_at_the_lowest_width(make_model: MakeModel, make_images: MakeImages) -> None:
    model = make_model(BITS).eval()
    JointStep(model, TrainConfig(epochs=1), steps_per_epoch=1)(*make_images(4))
    assert model.training
    assert set(get_bits(model).values()) == {(2, 2)}


def test_tuples_and_dicts_of_inputs(make_model: MakeModel, make_images: MakeImages) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, image: Tensor, factor: float = 1.0) -> Tensor:
            return self.inner(image * factor)

    inputs, targets = make_images(6)
    outcomes = []
    for batch in (inputs, (inputs / 4, 4.0), {"factor": 4.0, "image": inputs / 4}):
        model = Wrapped(make_model(BITS, norms=False))
        report = JointStep(model, TrainConfig(epochs=1), steps_per_epoch=1)(batch, targets)
        outcomes.append([float(v) for v in report.loss.values()])
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_outputs_with_positions_behind_the_classes() -> None:
    """cross_entropy takes (batch, classes, positions) with targets (batch, positions); so must the report."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1))
    model = prepare(net, QuantConfig(bit_choices=BITS), torch.randn(4, 2, 5, 4))
    step = JointStep(model, TrainConfig(epochs=1), steps_per_epoch=1)
    report = step(torch.randn(4, 2, 5, 4), torch.randint(0, 3, (4, 5, 4)))
    assert all(bool(torch.isfinite(loss)) for loss in report.loss.values())
    assert report.seen in (0, 4 * 5 * 4)  # no accuracy, or that of every position


@pytest.mark.parametrize("activations", ["auto", "asymmetric", "float"])
@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "truncate", "adabits", "lsq", "dorefa"])
def test_every_scheme_trains(scheme: str, activations: str, make_model: MakeModel, make_images: MakeImages) -> None:
    model = make_model(BITS, scheme=scheme, activations=activations)
    before = model.conv.weight.detach().clone()
    step = JointStep(model, TrainConfig(epochs=1), steps_per_epoch=2)
    for _ in range(2):
        report = step(*make_images(6))
        assert all(math.isfinite(rate) for rate in report.scale_rate.values())
    assert not torch.equal(model.conv.weight, before)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


# --- what must not move ---------------------------------------------------------------------------


@pytest.mark.parametrize("decay", ["adam", "adamw", "sgd"])
def test_weight_decay_does_not_touch_the_scales(decay: str, make_model: MakeModel, make_images: MakeImages) -> None:
    """One step for the sum of all widths: gradients are the same, so any difference is the decay's."""
    outcomes = []
    for weight_decay in (0.0, 0.5):
        model = make_model(BITS, activations="asymmetric")
        config = TrainConfig(
            epochs=1, lr=1e-2, update="accumulated", alrs="off", optimizer=decay, weight_decay=weight_decay
        )
        JointStep(model, config, steps_per_epoch=1)(*make_images(6))
        outcomes.append(model)
    scales, _ = zip(*map(split_parameters, outcomes), strict=True)
    assert len(scales[0]) == 2 * (1 + 3 + 3)  # two layers: a shared weight scale, activation scales and zero-points
    assert all(torch.equal(a, b) for a, b in zip(*scales, strict=True))
    for name in ("stem.weight", "conv.weight", "norm1.sets.2.weight", "hidden.weight", "head.bias"):
        assert not torch.equal(*(model.get_parameter(name) for model in outcomes)), name


def test_parameters_are_split_without_loss_or_repeat(make_model: MakeModel) -> None:
    model = make_model(BITS, activations="asymmetric")
    model.stem.weight.requires_grad_(False)
    scales, weights = split_parameters(model)
    names = {id(p): n for n, p in model.named_parameters()}
    assert sorted(names[id(p)] for p in scales) == sorted(n for n in names.values() if "quantizer" in n)
    wanted = [n for n in names.values() if "quantizer" not in n and n != "stem.weight"]
    assert [names[id(p)] for p in weights] == wanted


def snapshot(step: JointStep, model: nn.Module) -> dict[str, Tensor]:
    """Everything that training can change, by name: parameters, statistics, and the optimizers' states."""
    kept = {n: v.detach().clone() for n, v in model.state_dict().items()}
    names = {p: n for n, p in model.named_parameters()}
    optimizers = {"weights": step.weight_optimizer} | {f"scales {b}": o for b, o in step.scale_optimizers.items()}
    for key, optimizer in optimizers.items():
        for parameter, state in optimizer.state.items():
            for field, value in state.items():
                kept[f"{names[parameter]} {key} {field}"] = torch.as_tensor(value).clone()
    return kept


@pytest.mark.parametrize("scale_state", ["shared", "per_bits"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("active", BITS)
def test_a_pass_leaves_the_other_widths_alone(
    active: int, optimizer: str, scale_state: str, make_model: MakeModel, make_images: MakeImages
) -> None:
    """Pass by pass, with momentum built up: scales, zero-points, norm sets, statistics and moments of other widths."""
    model = make_model(BITS, activations="asymmetric")
    config = TrainConfig(epochs=1, lr=1e-2, weight_decay=0.1, optimizer=optimizer, scale_state=scale_state, alrs="off")
    step = JointStep(model, config, steps_per_epoch=5)
    for batch in range(2):
        step(*make_images(8, seed=batch))
    before = snapshot(step, model)
    step.bit_choices = (active,)
    step(*make_images(8, seed=7))
    after = snapshot(step, model)
    assert before.keys() == after.keys()

    def width(name: str) -> str | None:
        found = re.search(r"(?:scales|zero_points|sets)\.(\d)", name)
        return found[1] if found else None

    for name in before:
        mine = width(name) in (None, str(active))
        if scale_state == "per_bits" and (key := re.search(r" scales (\d)", name)):
            mine = mine and key[1] == str(active)
        if not mine:
            assert torch.equal(before[name], after[name]), f"{name} moved"
    moved = [n for n in before if width(n) == str(active) and not torch.equal(before[n], after[n])]
    for part in (f"act_quantizer.scales.{active}", f"sets.{active}.weight", f"sets.{active}.running_mean"):
        assert any(n.endswith(part) for n in moved), f"no {part} moved"
    assert any(n.startswith(f"conv.act_quantizer.scales.{active} ") for n in moved), "no moment moved"


def test_a_scale_without_a_gradient_never_gets_a_state(make_model: MakeModel, make_images: MakeImages) -> None:
    model = make_model(BITS)
    step = JointStep(model, TrainConfig(epochs=1), steps_per_epoch=1)
    step.bit_choices = (4,)
    step(*make_images(8))
    names = {p: n for n, p in model.named_parameters()}
    held = {names[p] for p in step.scale_optimizers[4].state}
    parts = ("weight_quantizer.scale", "act_quantizer.scales.4")
    assert held == {f"{layer}.{part}" for layer in ("conv", "hidden") for part in parts}


def test_state_per_bits_keeps_moments_apart(make_model: MakeModel, make_images: MakeImages) -> None:
    inputs, targets = make_images(8)
    separate = make_model(BITS, dtype=torch.float64)
    config = TrainConfig(epochs=1, lr=1e-12, alrs="off", scale_state="per_bits")
    step = JointStep(separate, config, steps_per_epoch=1)
    step(inputs.double(), targets)
    assert len({id(o) for o in step.scale_optimizers.values()}) == 3
    twin = make_model(BITS, dtype=torch.float64).train()
    for bits in BITS:
        set_bits(twin, bits)
        twin.zero_grad(set_to_none=True)
        F.cross_entropy(twin(inputs.double()), targets).backward()
        state = step.scale_optimizers[bits].state[separate.conv.weight_quantizer.scale]
        assert float(state["step"]) == 1
        torch.testing.assert_close(state["exp_avg"], 0.1 * twin.conv.weight_quantizer.scale.grad, rtol=1e-6, atol=0)
    shared = make_model(BITS, dtype=torch.float64)
    step = JointStep(shared, TrainConfig(epochs=1, lr=1e-12, alrs="off"), steps_per_epoch=1)
    step(inputs.double(), targets)
    assert len({id(o) for o in step.scale_optimizers.values()}) == 1
    assert float(step.scale_optimizers[8].state[shared.conv.weight_quantizer.scale]["step"]) == 3


# --- rates ----------------------------------------------------------------------------------------


def rates(step: JointStep) -> list[float]:
    found = []
    for number in range(step.total_steps):
        step.step = number
        found.append(step.learning_rate())
    return found


def test_cosine_by_hand(make_model: MakeModel) -> None:
    step = JointStep(make_model(), TrainConfig(epochs=2, lr=2.0), steps_per_epoch=4)
    half = math.sqrt(0.5)
    eighth = math.cos(math.pi / 8)
    other = math.sin(math.pi / 8)
    expected = [2.0, 1 + eighth, 1 + half, 1 + other, 1.0, 1 - other, 1 - half, 1 - eighth]
    assert rates(step) == pytest.approx(expected)


def test_warm_up_then_cosine_by_hand(make_model: MakeModel) -> None:
    step = JointStep(make_model(), TrainConfig(epochs=1, lr=1.0, warmup_steps=4), steps_per_epoch=8)
    assert rates(step) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.8535534, 0.5, 0.1464466])


def test_warm_up_then_constant(make_model: MakeModel) -> None:
    config = TrainConfig(epochs=1, lr=3.0, warmup_steps=3, schedule="constant")
    assert rates(JointStep(make_model(), config, steps_per_epoch=5)) == pytest.approx([1.0, 2.0, 3.0, 3.0, 3.0])


def test_a_warm_up_longer_than_the_run(make_model: MakeModel) -> None:
    config = TrainConfig(epochs=1, lr=1.0, warmup_steps=10)
    assert rates(JointStep(make_model(), config, steps_per_epoch=2)) == pytest.approx([0.1, 0.2])


def test_the_rate_reaches_the_optimizers(make_model: MakeModel, make_images: MakeImages) -> None:
    config = TrainConfig(epochs=1, lr=0.4, scale_lr=0.1, warmup_steps=4, alrs="off")
    step = JointStep(make_model(), config, steps_per_epoch=8)
    report = step(*make_images(4))
    assert report.lr == pytest.approx(0.1)
    assert step.weight_optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert report.scale_rate == pytest.approx(dict.fromkeys(BITS, 0.025))
    assert step.scale_optimizers[8].param_groups[0]["lr"] == pytest.approx(0.025)


def test_alrs_rates_fall_with_the_width(make_model: MakeModel, make_images: MakeImages) -> None:
    step = JointStep(make_model((8, 6, 4, 2)), TrainConfig(epochs=1, lr=1e-3), steps_per_epoch=1)
    found = step(*make_images(8)).scale_rate
    assert found[8] > found[6] > found[4] > found[2] > 0
    for bits, eta in {8: 1.0, 6: 0.1, 4: 0.01, 2: 0.001}.items():
        assert 0 < found[bits] <= eta * 1e-3


# --- rates of their own ---------------------------------------------------------------------------


def steep_loss(output: Tensor, targets: Tensor) -> Tensor:
    """So that the gradients of some layers are clipped and those of others are not."""
    return 5 * F.cross_entropy(output, targets)


def gradients_of(model: nn.Module, inputs: Tensor, targets: Tensor, bits: int) -> dict[str, Tensor]:
    """Gradients at `bits` by name; the model is left as it is."""
    twin = copy.deepcopy(model).train()
    set_bits(twin, bits)
    steep_loss(twin(inputs), targets).backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def by_hand(gradients: list[Tensor], reading: str) -> list[Tensor]:
    """1 - g of each scale of one layer."""
    norm = max(math.sqrt(sum(float(g.square().sum()) for g in gradients)), 1.0)
    largest = max(float(g.abs().max()) for g in gradients)
    if reading == "layer":
        return [torch.full_like(g, 1 - largest / norm) for g in gradients]
    return [1 - g.abs() / norm for g in gradients]


def first_step(gradient: Tensor) -> Tensor:
    """Adam's, at rate 1."""
    return -gradient / (gradient.abs() + 1e-8)


@pytest.mark.parametrize("scale_step", ["relative", "absolute"])
@pytest.mark.parametrize("reading", ["layer", "channel"])
def test_one_step_by_hand(reading: str, scale_step: str, make_model: MakeModel, make_images: MakeImages) -> None:
    """Each scale moves by its share of eta * lr; weights barely move, so every pass sees the same gradients."""
    inputs, targets = make_images(10)
    inputs = inputs.double()
    model = make_model(BITS, dtype=torch.float64)
    gradients = {bits: gradients_of(model, inputs, targets, bits) for bits in BITS}
    expected = {n: p.detach().clone() for n, p in model.named_parameters() if "quantizer" in n}
    rate = 1e-6 if scale_step == "relative" else 1e-8  # either way about 1e-6 of a scale, which flips no code
    means, used = {}, []
    for bits, eta in {8: 1.0, 4: 0.01, 2: 0.001}.items():
        taken = []
        for layer in ("conv", "hidden"):
            names = [f"{layer}.weight_quantizer.scale", f"{layer}.act_quantizer.scales.{bits}"]
            mine = [gradients[bits][name] for name in names]
            for name, gradient, share in zip(names, mine, by_hand(mine, reading), strict=True):
                step = rate * eta * share * first_step(gradient)
                expected[name] = expected[name] + step * (expected[name] if scale_step == "relative" else 1.0)
                taken.append(float(share.mean()))
                used.append(share)
        means[bits] = rate * eta * sum(taken) / 4
    assert 0 <= float(torch.cat(used).min()) < 0.5  # or the shares would hardly show
    assert 0.5 < float(torch.cat(used).max()) <= 1

    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = TrainConfig(epochs=1, lr=1e-12, scale_lr=rate, alrs=reading, scale_step=scale_step, scale_state="per_bits")
    report = JointStep(model, config, steps_per_epoch=1, loss=steep_loss)(inputs, targets)
    for name, value in expected.items():
        whole = rate * {"4": 0.01, "2": 0.001}.get(name[-1], 1.0) * (1.0 if scale_step == "absolute" else before[name])
        moved = (model.get_parameter(name).detach() - before[name]) / whole
        torch.testing.assert_close(moved, (value - before[name]) / whole, rtol=0, atol=1e-4, msg=name)
    assert {b: float(rate) for b, rate in report.scale_rate.items()} == pytest.approx(means, rel=1e-4)


class Twice(nn.Module):
    """Two layers of one weight, between a stem and a head in float."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two, self.head = (nn.Linear(6, 6, bias=False) for _ in range(4))
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return 50 * self.head(self.two(self.one(self.stem(x).relu()).relu()).relu())


@pytest.mark.parametrize("reading", ["layer", "channel"])
def test_a_scale_of_two_layers_goes_with_the_first(reading: str) -> None:
    torch.manual_seed(3)
    inputs, targets = torch.randn(12, 6).double(), torch.randint(0, 6, (12,))
    model = prepare(Twice(), QuantConfig(bit_choices=(2,)), inputs.float()).double()
    scales = {name: p for name, p in model.named_parameters() if "quantizer" in name}
    shared, first, second = "one.weight_quantizer.scale", "one.act_quantizer.scales.2", "two.act_quantizer.scales.2"
    assert list(scales) == [shared, first, second]
    assert model.two.weight_quantizer.scale is scales[shared]
    gradients = gradients_of(model, inputs, targets, 2)
    shares = [
        *by_hand([gradients[shared], gradients[first]], reading),
        *by_hand([gradients[second]], reading),
    ]
    wrong = by_hand([gradients[shared], gradients[second]], reading)[0]
    assert float((wrong - shares[0]).abs().max()) > 0.01  # to go with the second would be seen

    before = {name: p.detach().clone() for name, p in scales.items()}
    config = TrainConfig(epochs=1, lr=1e-12, scale_lr=1e-6, alrs=reading)
    report = JointStep(model, config, steps_per_epoch=1, loss=steep_loss)(inputs, targets)
    for (name, scale), share in zip(scales.items(), shares, strict=True):
        moved = (scale.detach() - before[name]) / before[name]
        torch.testing.assert_close(moved, 1e-6 * share * first_step(gradients[name]), rtol=1e-4, atol=1e-15, msg=name)
    assert float(report.scale_rate[2]) == pytest.approx(1e-6 * sum(float(s.mean()) for s in shares) / 3, rel=1e-4)


@pytest.mark.parametrize("reading", ["layer", "channel"])
def test_zero_points_take_the_rate_without_a_share(
    reading: str, make_model: MakeModel, make_images: MakeImages
) -> None:
    inputs, targets = make_images(10)
    model = make_model(BITS, dtype=torch.float64, activations="asymmetric")
    gradients = {bits: gradients_of(model, inputs.double(), targets, bits) for bits in BITS}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = TrainConfig(epochs=1, lr=1e-12, scale_lr=1e-6, alrs=reading)
    JointStep(model, config, steps_per_epoch=1, loss=steep_loss)(inputs.double(), targets)
    for bits, eta in {8: 1.0, 4: 0.01, 2: 0.001}.items():
        name = f"hidden.act_quantizer.zero_points.{bits}"
        moved = model.get_parameter(name).detach() - before[name]
        assert float(gradients[bits][name].abs()) > 1e-6
        torch.testing.assert_close(moved, 1e-6 * eta * first_step(gradients[bits][name]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("reading", ["layer", "channel"])
@pytest.mark.parametrize("activations", ["auto", "asymmetric", "float"])
@pytest.mark.parametrize("scheme", ["nested", "adabits", "lsq"])
def test_every_kind_of_scale_can_have_a_rate_of_its_own(
    scheme: str, activations: str, reading: str, make_model: MakeModel, make_images: MakeImages
) -> None:
    model = make_model(BITS, scheme=scheme, activations=activations)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step = JointStep(model, TrainConfig(epochs=1, alrs=reading), steps_per_epoch=2)
    for _ in range(2):
        report = step(*make_images(6))
        assert all(0 < float(rate) <= 5e-4 for rate in report.scale_rate.values())
    for name, value in model.named_parameters():
        assert bool(torch.isfinite(value).all())
        assert not torch.equal(value, before[name]) or "zero" in name, name


# --- scales kept where they start -----------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"alrs": "relative"},
        {"alrs": "channel", "scale_lr": 0.5},
        {"alrs": "off", "scale_step": "absolute", "optimizer": "sgd"},
        {"alrs": "off", "update": "accumulated"},
    ],
    ids=str,
)
def test_scales_that_are_not_learned_stay_and_the_rest_moves(
    settings: dict[str, Any], make_model: MakeModel, make_images: MakeImages
) -> None:
    model = make_model(BITS, activations="asymmetric")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    config = TrainConfig(epochs=1, lr=1e-2, weight_decay=0.1, learn_scales=False, **settings)
    step = JointStep(model, config, steps_per_epoch=4)
    for batch in range(4):
        report = step(*make_images(8, seed=batch))
        assert report.scale_rate[8] == 0
        assert config.update == "accumulated" or report.scale_rate == dict.fromkeys(BITS, 0.0)
        assert all(float(peaks.min()) > 0 for peaks in report.act_scale_peaks.values())  # gradients are still recorded
    for name, value in model.named_parameters():
        assert torch.equal(value, before[name]) == ("quantizer" in name), name


def test_scales_that_are_not_learned_in_the_history(make_model: MakeModel, make_data: MakeData) -> None:
    for settings, stopped in (({"learn_scales": False}, 1.0), ({}, 0.0), ({"alrs": "layer"}, 0.0)):
        model = make_model(BITS)
        scales = [s.detach().clone() for s in split_parameters(model)[0]]
        history = train(model, make_data(), TrainConfig(epochs=2, **settings), progress=False)
        for row in history.rows:
            assert row["stopped"] == dict.fromkeys(["8", "4", "2"], stopped)
            assert all((rate == 0) == bool(stopped) for rate in row["scale_rate"].values())
        same = [torch.equal(a, b) for a, b in zip(scales, split_parameters(model)[0], strict=True)]
        assert same == [bool(stopped)] * len(same)


# --- autocast -------------------------------------------------------------------------------------


def test_autocast_runs_and_reaches_the_float_layers(make_model: MakeModel, make_images: MakeImages) -> None:
    seen: dict[str, set[torch.dtype]] = {"conv": set(), "head": set(), "quantizer": set()}
    model = make_model(BITS)
    for name, module in (("conv", model.conv), ("head", model.head), ("quantizer", model.hidden.act_quantizer)):
        module.register_forward_hook(lambda m, args, out, name=name: seen[name].add(out.dtype))
    step = JointStep(model, TrainConfig(epochs=1, autocast="bfloat16"), steps_per_epoch=2)
    for _ in range(2):
        report = step(*make_images(8))
        assert all(bool(torch.isfinite(loss)) for loss in report.loss.values())
    assert seen == {"conv": {torch.bfloat16}, "head": {torch.bfloat16}, "quantizer": {torch.float32}}
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "dorefa"])
@pytest.mark.parametrize("bits", BITS)
def test_codes_are_the_same_under_autocast(
    bits: int, scheme: str, make_model: MakeModel, make_images: MakeImages
) -> None:
    layer = make_model(BITS, scheme=scheme).hidden
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).relu()
    for source in (x, x.bfloat16()):
        plain = layer.act_quantizer(source.float(), bits), layer.weight_quantizer(layer.weight, bits)
        with torch.autocast("cpu", torch.bfloat16):
            cast = layer.act_quantizer(source, bits), layer.weight_quantizer(layer.weight, bits)
        for one, other in zip(plain, cast, strict=True):
            assert other.dtype == torch.float32
            assert torch.equal(one, other)
    scale = layer.act_quantizer.scales[str(bits)].detach()
    values = layer.act_quantizer.codes(x, bits).float() * scale
    assert torch.equal(values, layer.act_quantizer(x, bits).detach())


# --- the guard of the scales ----------------------------------------------------------------------


def first_scale(model: nn.Module) -> nn.Parameter:
    return model.conv.weight_quantizer.scale


def test_relative_steps_by_hand(make_model: MakeModel) -> None:
    for relative in (True, False):
        model = make_model(BITS)
        guard, scale = ScaleGuard(model, relative=relative), first_scale(model)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        start = scale.detach().clone()
        steps = torch.tensor([0.25, -0.25, 0.0, -0.125])
        if not relative:
            steps = steps * start
        with guard.watch(guard.scales, step=0, bits=8), torch.no_grad():
            scale += steps
        torch.testing.assert_close(scale.detach(), start * torch.tensor([1.25, 0.75, 1.0, 0.875]))
        moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
        assert moved == ["conv.weight_quantizer.scale"]


@pytest.mark.parametrize("relative", [True, False])
def test_shares_of_a_step_by_hand(relative: bool, make_model: MakeModel) -> None:
    """One scale with a share for each channel, one with a share for all, one without: that takes all of its step."""
    model = make_model(BITS)
    guard = ScaleGuard(model, relative=relative)
    conv, hidden = model.conv.weight_quantizer.scale, model.hidden.weight_quantizer.scale
    free = model.conv.act_quantizer.scales["4"]
    start = [s.detach().clone() for s in (conv, hidden, free)]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    steps = [torch.tensor([0.4, -0.4, -0.8, -4.0]), torch.full((6,), 0.5), torch.tensor([-0.25])]
    shares = {conv: torch.tensor([0.5, 0.0, 0.5, 0.5]), hidden: torch.tensor(0.1)}
    with guard.watch(guard.scales, step=0, bits=8, shares=shares), torch.no_grad():
        for scale, step, begin in zip((conv, hidden, free), steps, start, strict=True):
            scale += step if relative else step * begin
    torch.testing.assert_close(conv.detach(), start[0] * torch.tensor([1.2, 1.0, 0.6, 0.5]))  # the last: halved
    assert float(conv.detach()[1]) == float(start[0][1])
    torch.testing.assert_close(hidden.detach(), start[1] * 1.05)
    torch.testing.assert_close(free.detach(), start[2] * 0.75)
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    names = ["conv.weight_quantizer.scale", "conv.act_quantizer.scales.4", "hidden.weight_quantizer.scale"]
    assert sorted(moved) == sorted(names)


def test_a_share_that_is_not_a_number_is_noticed(make_model: MakeModel) -> None:
    model = make_model(BITS)
    guard, scale = ScaleGuard(model, relative=True), first_scale(model)
    with (
        pytest.raises(TrainingError, match=r"step 3, 2 bits: .*'conv\.weight_quantizer\.scale'"),
        guard.watch(guard.scales, step=3, bits=2, shares={scale: torch.tensor(float("nan"))}),
        torch.no_grad(),
    ):
        scale *= 1.01


@pytest.mark.parametrize("relative", [True, False])
def test_an_update_at_most_halves(relative: bool, make_model: MakeModel) -> None:
    model = make_model(BITS)
    guard, scale = ScaleGuard(model, relative=relative), first_scale(model)
    start = scale.detach().clone()
    with guard.watch(guard.scales, step=0, bits=8), torch.no_grad():
        scale -= torch.tensor([0.6, 1.0, 100.0, 1e30])
    if relative:
        assert torch.equal(scale, start / 2)
    else:
        torch.testing.assert_close(scale.detach(), torch.maximum(start - torch.tensor([0.6, 1, 100, 1e30]), start / 2))
        assert torch.equal(scale[1:], start[1:] / 2)


def test_a_real_step_at_most_halves_and_does(make_model: MakeModel, make_images: MakeImages) -> None:
    model = make_model(BITS)
    step = JointStep(model, TrainConfig(epochs=1, scale_lr=50.0, alrs="off", scale_step="absolute"), steps_per_epoch=9)
    step.bit_choices = (4,)
    before = [s.detach().clone() for s in step.guard.scales]
    step(*make_images(8))
    shares = torch.cat([(s.detach() / b) for s, b in zip(step.guard.scales, before, strict=True)])
    assert float(shares.min()) == 0.5
    assert float(shares.max()) > 1


def test_a_collapsed_scale_is_named_with_the_step(make_model: MakeModel) -> None:
    """Halved ten times, it stands at 1/1024 of where it began: too small to be meant."""
    model = make_model(BITS)
    guard = ScaleGuard(model, relative=False)
    scale = model.hidden.act_quantizer.scales["4"]
    for step in range(9):
        with guard.watch(guard.scales, step=step, bits=4), torch.no_grad():
            scale.zero_()
    with (
        pytest.raises(TrainingError, match=r"step 9, 4 bits: .*'hidden\.act_quantizer\.scales\.4' collapsed"),
        guard.watch(guard.scales, step=9, bits=4),
        torch.no_grad(),
    ):
        scale.zero_()


def test_a_collapse_stops_a_run(make_model: MakeModel, make_images: MakeImages) -> None:
    model = make_model(BITS)
    step = JointStep(model, TrainConfig(epochs=1, scale_lr=1e3, alrs="off", scale_step="absolute"), steps_per_epoch=99)
    with pytest.raises(TrainingError, match=r"step \d+, [842] bits: the scale '(conv|hidden)\.\w+_quantizer\.scale"):  # noqa: PT012
        for _ in range(50):
            step(*make_images(8))
    assert step.step >= 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_named(value: float, make_model: MakeModel) -> None:
    model = make_model(BITS)
    guard = ScaleGuard(model, relative=True)
    with (
        pytest.raises(TrainingError, match=r"step 3, 2 bits: .*'conv\.weight_quantizer\.scale'"),
        guard.watch(guard.scales, step=3, bits=2),
        torch.no_grad(),
    ):
        first_scale(model)[1] = value


def test_the_guard_watches_every_scale_of_every_scheme(make_model: MakeModel) -> None:
    for scheme, weight_scales in {"double_rounding": 1, "lsq": 3, "dorefa": 0}.items():
        model = make_model(BITS, scheme=scheme, activations="asymmetric")
        guard = ScaleGuard(model, relative=True)
        names = dict(zip(guard.names, guard.scales, strict=True))
        expected = {n: p for n, p in model.named_parameters() if "quantizer" in n and "zero" not in n}
        assert names.keys() == expected.keys()
        assert all(names[n] is expected[n] for n in names)
        assert len(names) == 2 * (weight_scales + 3)


# --- NaN, and who began it ------------------------------------------------------------------------


@pytest.fixture
def running(make_model: MakeModel, make_images: MakeImages) -> tuple[JointStep, nn.Module, Tensor, Tensor]:
    """A run two steps in, with a batch for the third."""
    model = make_model(BITS)
    step = JointStep(model, TrainConfig(epochs=1), steps_per_epoch=9)
    for batch in range(2):
        step(*make_images(8, seed=batch))
    return step, model, *make_images(8, seed=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_input(running: tuple[JointStep, nn.Module, Tensor, Tensor], value: float) -> None:
    step, _, inputs, targets = running
    inputs[3, 1, 2, 2] = value
    with pytest.raises(TrainingError, match=r"step 2, 8 bits.*the input batch holds NaN or infinity"):
        step(inputs, targets)


@pytest.mark.parametrize("name", ["stem.bias", "conv.weight", "norm1.sets.8.weight", "hidden.weight", "head.bias"])
def test_a_bad_parameter(running: tuple[JointStep, nn.Module, Tensor, Tensor], name: str) -> None:
    step, model, inputs, targets = running
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = float("nan")
    with pytest.raises(TrainingError, match=f"step 2, 8 bits.*parameter '{re.escape(name)}'"):
        step(inputs, targets)


def test_a_bad_parameter_of_one_width(running: tuple[JointStep, nn.Module, Tensor, Tensor]) -> None:
    step, model, inputs, targets = running
    with torch.no_grad():
        model.get_parameter("norm1.sets.2.bias")[1] = float("nan")
    with pytest.raises(TrainingError, match=r"step 2, 2 bits.*parameter 'norm1\.sets\.2\.bias'"):
        step(inputs, targets)


@pytest.mark.parametrize("name", ["conv.weight_quantizer.scale", "hidden.act_quantizer.scales.2"])
def test_a_bad_scale(running: tuple[JointStep, nn.Module, Tensor, Tensor], name: str) -> None:
    step, model, inputs, targets = running
    with torch.no_grad():
        model.get_parameter(name).fill_(float("nan"))
    with pytest.raises(TrainingError, match=f"step 2, 8 bits.*'{re.escape(name)}'"):
        step(inputs, targets)


class Breaking(nn.Module):
    """Puts out NaN: always, or only in training."""

    def __init__(self, only_in_training: bool) -> None:
        super().__init__()
        self.only_in_training = only_in_training

    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan") if self.training or not self.only_in_training else x


@pytest.mark.parametrize("only_in_training", [False, True])
def test_a_layer_that_begins_it(running: tuple[JointStep, nn.Module, Tensor, Tensor], only_in_training: bool) -> None:
    """The second layer that breaks, and the plain ones after it, are not to blame."""
    step, model, inputs, targets = running
    model.relu1 = Breaking(only_in_training)
    model.relu2 = Breaking(only_in_training)
    with pytest.raises(TrainingError, match=r"step 2, 8 bits.*layer 'relu1' put out NaN or infinity"):
        step(inputs, targets)


def test_a_loss_that_begins_it(make_model: MakeModel, make_images: MakeImages) -> None:
    step = JointStep(
        make_model(BITS), TrainConfig(epochs=1), steps_per_epoch=1, loss=lambda out, y: out.sum() * float("inf")
    )
    with pytest.raises(TrainingError, match="step 0, 8 bits: the loss is inf; every layer's output is finite"):
        step(*make_images(4))


def test_a_stopped_step_changes_nothing(running: tuple[JointStep, nn.Module, Tensor, Tensor]) -> None:
    step, model, inputs, targets = running
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TrainingError):
        step(inputs * float("nan"), targets)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any(hook for module in model.modules() for hook in module._forward_hooks)


# --- models and settings that cannot be trained ---------------------------------------------------


class Packed(nn.Module):
    """A layer as a file loaded to run has it: it can be switched, and holds integers."""

    bit_choices = BITS
    weight_bits = act_bits = 8

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3, dtype=torch.int8))

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        self.weight_bits, self.act_bits = weight_bits, act_bits


def test_a_model_of_integers() -> None:
    model = nn.Sequential(Packed(), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="load_trainable"):
        JointStep(model, TrainConfig(epochs=1), steps_per_epoch=1)


def test_a_float_model(make_float: Callable[..., nn.Module]) -> None:
    with pytest.raises(PlanError, match="prepare"):
        JointStep(make_float(), TrainConfig(epochs=1), steps_per_epoch=1)


@pytest.mark.parametrize("steps", [0, -1])
def test_no_steps(steps: int, make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match="steps_per_epoch"):
        JointStep(make_model(), TrainConfig(epochs=1), steps_per_epoch=steps)


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"epochs": -1},
        {"epochs": 1.5},
        {"epochs": True},
        {"lr": 0.0},
        {"lr": -1e-3},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"lr": "fast"},
        {"scale_lr": 0.0},
        {"temperature": 0.0},
        {"clip_norm": -1.0},
        {"checkpoint_every": 0},
        {"checkpoint_every": 1.5},
        {"weight_decay": -1e-4},
        {"weight_decay": float("nan")},
        {"warmup_steps": -1},
        {"warmup_steps": 1.5},
        {"distill_weight": 1.1},
        {"distill_weight": -0.1},
        {"distill_weight": float("nan")},
        {"optimizer": "lion"},
        {"update": "both"},
        {"alrs": True},
        {"alrs": "row"},
        {"learn_scales": "no"},
        {"learn_scales": None},
        {"fused": "no"},
        {"scale_state": "none"},
        {"scale_step": "log"},
        {"schedule": "step"},
        {"distill": "self"},
        {"autocast": "float16"},
        {"update": "accumulated", "alrs": "relative"},
        {"update": "accumulated", "alrs": "layer"},
        {"update": "accumulated", "alrs": "off", "scale_state": "per_bits"},
    ],
    ids=str,
)
def test_settings_that_make_no_sense(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        TrainConfig(**settings)


def test_settings_round_trip_strictly() -> None:
    config = TrainConfig(epochs=3, lr=0.1, alrs="literal", clip_norm=1.0, distill="in_place", checkpoint_every=7)
    other = TrainConfig(alrs="channel", learn_scales=False, fused=False, cuda_graph=False)
    for settings in (config, other):
        assert TrainConfig.from_dict(settings.to_dict()) == settings
    with pytest.raises(ConfigError, match="momentum"):
        TrainConfig.from_dict(config.to_dict() | {"momentum": 0.9})


# --- what is counted as right ---------------------------------------------------------------------


def test_hits_are_counted_only_where_the_class_axis_is_known(make_images: MakeImages) -> None:
    """Dense outputs: along the one axis that the targets lack; nothing is said of one logit, or where two axes fit."""

    class Dense(nn.Module):
        def __init__(self, classes: int):
            super().__init__()
            self.stem, self.conv, self.head = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, classes, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(self.stem(x).relu()).relu()).flatten(2)

    inputs = make_images(6)[0]
    for classes, known in ((3, True), (16, False), (1, False)):
        model = prepare(Dense(classes), QuantConfig(bit_choices=(8, 4)), inputs)
        targets = torch.arange(6 * 16).reshape(6, 16) % classes
        twin = copy.deepcopy(model)
        report = JointStep(model, TrainConfig(epochs=1), steps_per_epoch=1)(inputs, targets)
        assert set(report.correct) == ({8, 4} if known else set()), classes
        if known:
            assert report.seen == 96
            assert int(report.correct[8]) == int((twin(inputs).argmax(1) == targets).sum())


# --- what losses count ----------------------------------------------------------------------------


def test_lower_widths_weigh_more(make_model: MakeModel, make_images: MakeImages) -> None:
    """The widths of (8, 4, 2) by 1, 3 and 9: in one plain step for all, and not in what is reported."""
    inputs, targets = make_images(6)
    gradients: dict[int, Tensor] = {}
    for bits in (8, 4, 2):
        model = make_model(norms=False)
        set_bits(model, bits)
        F.cross_entropy(model(inputs), targets).backward()
        weight: Any = next(module.weight for module in model.modules() if hasattr(module, "weight_quantizer"))
        gradients[bits] = weight.grad
    model = make_model(norms=False)
    weight = next(module.weight for module in model.modules() if hasattr(module, "weight_quantizer"))
    before = weight.detach().clone()
    config = TrainConfig(epochs=1, lr=0.1, weight_decay=0.0, update="accumulated", alrs="off", lower_weight=3.0)
    sgd = JointStep(
        model, config, steps_per_epoch=1, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
    )
    report = sgd(inputs, targets)
    expected = before - 0.1 * (gradients[8] + 3 * gradients[4] + 9 * gradients[2])
    torch.testing.assert_close(weight.detach(), expected)
    assert float(report.loss[2]) < 3 * float(report.loss[8])


@pytest.mark.parametrize(("kind", "called"), [("teacher", 0), ("cascade", 0), ("in_place", 1)])
def test_where_the_soft_loss_is_all_the_hard_one_is_not_computed(
    kind: str, called: int, make_model: MakeModel, make_images: MakeImages
) -> None:
    """In place, the highest width has no teacher."""
    calls: list[Tensor] = []

    def hard(output: Tensor, targets: Tensor) -> Tensor:
        calls.append(output)
        return F.cross_entropy(output, targets)

    teacher = make_model(seed=1) if kind != "in_place" else None
    config = TrainConfig(epochs=1, distill=kind, distill_weight=1.0)
    JointStep(make_model(), config, steps_per_epoch=1, loss=hard, teacher=teacher)(*make_images(4))
    assert len(calls) == called
