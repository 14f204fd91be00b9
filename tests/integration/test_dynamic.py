"""A network whose activations have a scale for each token, through the whole path."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    ArrayData,
    BitPlan,
    Callback,
    JointStep,
    QuantConfig,
    Rule,
    TrainConfig,
    code_exact,
    load,
    load_trainable,
    prepare,
    read_artifact,
    save,
    set_bits,
    train,
    view_at_bits,
)
from bitdial import functional as bf
from bitdial.errors import ConfigError, QuantizationError, TrainingError
from bitdial.live.engines.integer.engine import IntegerEngine
from bitdial.live.layers import LiveLayer
from bitdial.nn import QuantLayer

WIDTHS = (8, 6, 4, 3, 2)
CONFIGS: list[dict[str, Any]] = [
    {"scheme": "double_rounding"},
    {"scheme": "double_rounding", "group_size": 16, "ties": "up"},
    {"scheme": "nested", "per_channel": False},
    {"scheme": "nested+8", "group_size": 16},
    {"scheme": "centred"},
    {"scheme": "lsq"},
]
PLANS: tuple[Any, ...] = (*WIDTHS, (4, 8), (8, 3), BitPlan({"up": (2, 8), "head": (6, 4)}, default=3))


class Block(nn.Module):
    """A norm, a residual, layers with and without bias; tokens on any number of axes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.inner = nn.Linear(32, 32)
            self.norm = nn.LayerNorm(32)
            self.up = nn.Linear(32, 48, bias=False)
            self.down = nn.Linear(48, 32)
            self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.inner(x))
        return self.head(x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(24, 7, 32, generator=GENERATOR) * torch.exp(2 * torch.randn(24, 7, 1, generator=GENERATOR))
INPUTS[3, 2] = 0  # a token of zeros
TARGETS = torch.randint(0, 5, (24, 7), generator=GENERATOR)


def loss(out: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), wanted.flatten())


def made(**settings: Any) -> nn.Module:
    wanted = {"activations": "dynamic", "bit_choices": WIDTHS, "start": "3std", "keep_first_last": False}
    return prepare(Block(), QuantConfig(**(wanted | settings)), INPUTS)


def trained(**settings: Any) -> nn.Module:
    """Prepared and trained for two steps."""
    model = made(**settings)
    step = JointStep(model, TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=2, loss=loss)
    for _ in range(2):
        step(INPUTS, TARGETS)
    return model.eval()


def layers_of(model: nn.Module) -> dict[str, QuantLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """Bit for bit."""


# --- one arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_engine_has_the_numbers_of_training(tmp_path: Path, config: dict[str, Any]) -> None:
    model = trained(**config)
    save(model, tmp_path / "m")
    live, integer = load(tmp_path / "m", Block(1)), load(tmp_path / "m", Block(1), kernels="integer")
    again, exact = load_trainable(tmp_path / "m", Block(1)).eval(), code_exact(live)
    kernels = [m.engine for m in integer.modules() if isinstance(m, LiveLayer)]
    assert all(isinstance(engine, IntegerEngine) != ("group_size" in config) for engine in kernels)
    for plan in PLANS:
        for each in (model, live, integer, again, exact):
            set_bits(each, plan)
        with torch.no_grad():
            wanted, by_integers = model(INPUTS), exact(INPUTS)
            assert torch.equal(live(INPUTS), wanted), plan
            assert torch.equal(again(INPUTS), wanted), plan
            assert torch.equal(integer(INPUTS), by_integers), plan
            assert torch.equal(view_at_bits(live, plan)(INPUTS), wanted), plan
            assert torch.equal(integer(INPUTS[:1, :1]), by_integers[:1, :1]), "a token depends on no other"
        different = (by_integers - wanted).abs().amax() / wanted.abs().amax()
        assert different < 2e-2, "float sums move a value over the border between two codes now and then"


def test_exact_sums_are_integer_sums_times_both_scales(tmp_path: Path) -> None:
    for config in ({"scheme": "double_rounding", "group_size": 16}, {"scheme": "centred"}):
        save(trained(**config), tmp_path / "m")
        artifact = read_artifact(tmp_path / "m")
        exact = code_exact(load(artifact, Block(1)))
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        for name in artifact.layers:
            exact.get_submodule(name).register_forward_hook(
                lambda m, args, out, name=name, seen=seen: seen.update({name: (args[0], out)})
            )
        for place, bits in enumerate(WIDTHS):
            set_bits(exact, bits)
            exact(INPUTS)
            for name, (x, out) in seen.items():
                assert torch.equal(by_hand(artifact, name, x, bits, place), out), (config, name, bits)


def by_hand(artifact: Any, name: str, x: Tensor, bits: int, place: int) -> Tensor:
    """A layer by Python's own integers, then one float32 operation after the other."""
    factor, addend = bf.scheme_of(artifact.scheme).integers(8 - bits)
    codes = bf.narrow(artifact.codes(name), high=8, low=bits, scheme=artifact.scheme)
    integers = (codes.long() * factor + addend).numpy().astype(object)
    if (multipliers := artifact.group_scale(name)) is not None:
        integers *= multipliers.repeat_interleave(16, dim=1).long().numpy().astype(object)
    high = np.float32(2 ** (bits - 1) - 1)
    ratio = np.float32(artifact.tensors[f"{name}/act_clip_ratio"][place])
    scale = np.maximum(np.abs(x.numpy()).max(axis=-1, keepdims=True) * (ratio / high), np.float32(2.0**-100))
    a = np.clip(np.rint(x.numpy() / scale), -high - 1, high).astype(int).astype(object)
    sums = torch.tensor((a @ integers.T).astype(float)).float()
    out = sums * (artifact.row_scale(name) * 2.0 ** (8 - bits) / factor) * torch.from_numpy(scale)
    bias = artifact.part(name, "bias")
    return out if bias is None else out + bias


def test_input_that_is_not_finite_is_refused_or_stays_visible(tmp_path: Path) -> None:
    model = made().eval()
    save(model, tmp_path / "m")
    for bad in (float("nan"), float("inf")):
        x = INPUTS.clone()
        x[1, 2, 3] = bad
        with torch.no_grad():
            out = model(x)
        assert bool(out[1, 2].isnan().all())
        out[1, 2] = 0
        assert bool(out.isfinite().all())
        for kernels in ("float", "integer"):
            with pytest.raises(QuantizationError, match="NaN or infinity"):
                load(tmp_path / "m", Block(1), kernels=kernels)(x)


def test_a_bfloat16_model_goes_through_in_float32(tmp_path: Path) -> None:
    config = QuantConfig(activations="dynamic", bit_choices=WIDTHS, start="3std", keep_first_last=False)
    model = prepare(Block().bfloat16(), config, INPUTS.bfloat16()).eval()
    save(model, tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "m", Block(1).bfloat16())(INPUTS), model(INPUTS))
    with pytest.raises(ConfigError, match=r"weight-only models, but layer 'inner' quantises its activations"):
        load(tmp_path / "m", Block(1), dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"packed kernels serve no layer.*its activations are quantised"):
        load(tmp_path / "m", Block(1), kernels="packed")


# --- training -------------------------------------------------------------------------------------


def test_training_learns_a_ratio_for_each_width_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    data = ArrayData(INPUTS, TARGETS, batch_size=8, seed=3)
    config = TrainConfig(epochs=2, lr=5e-3, checkpoint_every=1)

    class Killed(Callback):
        def on_step(self, run: Any) -> None:
            if run.step == 4:
                raise InterruptedError

    def ratios(model: nn.Module) -> Tensor:
        return torch.cat([p.detach() for n, p in model.named_parameters() if "act_quantizer" in n])

    whole, parts = made(), made()
    start = ratios(whole)
    assert start.tolist() == pytest.approx([0.9, 0.9, 0.9, 1.0, 1.0] * 4)  # 2, 3, 4, 6, 8 bits
    train(whole, data, config, loss=loss, progress=False)
    assert bool((ratios(whole) != start).all())
    with pytest.raises(InterruptedError):
        train(parts, data, config, loss=loss, progress=False, checkpoint=tmp_path / "c", callbacks=[Killed()])
    assert not torch.equal(ratios(parts), ratios(whole))
    resumed = made()
    assert (tmp_path / "c").exists()
    train(resumed, data, config, loss=loss, progress=False, checkpoint=tmp_path / "c")
    assert torch.equal(ratios(resumed), ratios(whole))


def test_a_ratio_that_collapses_stops_the_run() -> None:
    model = made()
    step = JointStep(model, TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=2, loss=loss)
    with torch.no_grad():
        layers_of(model)["up"].act_quantizer.scales["4"].fill_(1e-5)  # type: ignore[union-attr]
    with pytest.raises(TrainingError, match=r"the scale 'up.act_quantizer.scales.4' collapsed"):
        step(INPUTS, TARGETS)


def test_a_ratio_beyond_1_is_stored_as_1(tmp_path: Path) -> None:
    model = made().eval()
    with torch.no_grad():
        layers_of(model)["up"].act_quantizer.scales["8"].fill_(1.2)  # type: ignore[union-attr]
        wanted = model(INPUTS)
    save(model, tmp_path / "m")
    assert float(read_artifact(tmp_path / "m").tensors["up/act_clip_ratio"][0]) == 1.0
    assert torch.equal(load(tmp_path / "m", Block(1))(INPUTS), wanted)


def test_rows_of_another_kind_beside_it(tmp_path: Path) -> None:
    model = made(rules=(Rule(pattern="down", activations="auto"), Rule(pattern="head", activations="float"))).eval()
    kinds = {name: layer.act_quantizer and layer.act_quantizer.kind for name, layer in layers_of(model).items()}
    assert kinds == {"inner": "dynamic", "up": "dynamic", "down": "signed", "head": None}
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Block(1))
    integer, exact = load(tmp_path / "m", Block(1), kernels="integer"), code_exact(live)
    for bits in WIDTHS:
        for each in (model, live, integer, exact):
            set_bits(each, bits)
        with torch.no_grad():
            assert torch.equal(live(INPUTS), model(INPUTS))
            assert torch.equal(integer(INPUTS), exact(INPUTS))
