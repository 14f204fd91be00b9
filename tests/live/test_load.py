"""The live model is the trained model, bit for bit, at every width and every plan; and it holds integers only."""

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    JointStep,
    QuantConfig,
    Rule,
    TrainConfig,
    at_bits,
    build_model,
    code_exact,
    evaluate,
    get_bits,
    load,
    load_trainable,
    prepare,
    read_artifact,
    save,
    set_bits,
    view_at_bits,
)
from bitdial.errors import BitdialError, ConfigError, PlanError, QuantizationError
from bitdial.live.layers import LiveLayer
from bitdial.live.plain import plain_copy
from bitdial.nn import QuantLayer

SCHEMES = ("double_rounding", "nested", "truncate", "adabits", "lsq", "dorefa")
INTEGER_SCHEMES = SCHEMES[:4]
CHOICES = ((8, 6, 4, 2), (4, 3, 2), (8, 7, 5, 3))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(seed: int = 1, channels: int = 2, count: int = 16, size: int = 8) -> Tensor:
    return torch.randn(count, channels, size, size, generator=seeded(seed))


class Net(nn.Module):
    """A 3x3, a grouped, a depth-wise and a 1x1 convolution and a linear layer between a float stem and a float head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem = nn.Conv2d(2, 6, 3, padding=1, bias=False)
            self.stem_norm = nn.BatchNorm2d(6)
            self.conv = nn.Conv2d(6, 8, 3, stride=2, padding=1)
            self.norm = nn.BatchNorm2d(8)
            self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
            self.depthwise = nn.Conv2d(8, 8, (3, 1), padding=(1, 0), groups=8, dilation=1)
            self.point = nn.Conv2d(8, 7, 1, bias=False)
            self.point_norm = nn.BatchNorm2d(7)
            self.hidden = nn.Linear(7 * 16, 9)
            self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.norm(self.conv(x)))
        x = self.grouped(x) + x
        x = torch.relu(self.point_norm(self.point(self.depthwise(x))))
        return self.head(self.hidden(x.flatten(1)).abs())


class Padding(nn.Module):
    """Every padding mode, and a padding in words."""

    def __init__(self) -> None:
        super().__init__()
        modes = ("zeros", "reflect", "replicate", "circular")
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=(1, 2), padding_mode=m, stride=(1, 2)) for m in modes)
        self.same = nn.Conv2d(4, 4, (2, 3), padding="same", padding_mode="reflect", dilation=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = sum(conv(x) for conv in self.convs)
        return self.head(self.same(x).square().mean(dim=(2, 3)))


class Twice(nn.Module):
    """One module in two places, and two layers on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 5, 3, padding=1)
        self.conv = nn.Conv2d(5, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.again = self.conv
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5)
        self.right.weight = self.left.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.norm(self.conv(x)))
        x = self.again(x).square().mean(dim=(2, 3))
        return self.head(self.right(self.left(x).abs()))


class Encoder(nn.Module):
    """PyTorch's own encoder layer, whose fast path would read float weights, behind a convolution over an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 2, stride=2)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.stem(x).flatten(2).transpose(1, 2)).square().mean(dim=1))


class Keywords(nn.Module):
    """Two inputs and a tuple of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, *, shift: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x + shift)))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "padding": Padding,
    "twice": Twice,
    "encoder": Encoder,
    "resnet20": lambda: build_model("resnet20", width=4, in_channels=2, num_classes=3),
    "mobilenet_v2": lambda: build_model(
        "mobilenet_v2", width_mult=0.1, in_channels=2, num_classes=3, small_input=True, dropout=0.1
    ),
    "tiny_transformer": lambda: build_model(
        "tiny_transformer", vocab=11, width=8, depth=1, heads=2, num_classes=3, max_length=8
    ),
}


def batch_for(name: str, seed: int = 1) -> Tensor:
    if name == "tiny_transformer":
        return torch.randint(0, 11, (16, 8), generator=seeded(seed))
    return images(seed)


def trained(model: nn.Module, x: Any, *, steps: int = 2, **config: Any) -> nn.Module:
    """Prepared and trained for a few large steps, so that no two widths have the same norms and scales."""
    ready = prepare(model, QuantConfig(**{"start": "3std", **config}), x)
    step = JointStep(ready, TrainConfig(epochs=1, lr=0.005, weight_decay=0.0), steps_per_epoch=steps)
    count = len(next(iter(x.values()))) if isinstance(x, dict) else len(x)
    for _ in range(steps):
        step(x, torch.arange(count) % 3)
    return ready.eval()


def random_plan(model: nn.Module, rng: random.Random) -> BitPlan:
    """Weight and activation bits of every layer, drawn separately."""
    layers = {n: m for n, m in model.named_modules() if hasattr(m, "select_bits")}
    return BitPlan({n: (rng.choice(m.bit_choices), rng.choice(m.bit_choices)) for n, m in layers.items()})


@torch.no_grad()
def differences(one: nn.Module, other: nn.Module, x: Tensor, *, plans: int = 3, seed: int = 0) -> list[Any]:
    """The settings at which the two models do not give the same bits: each width, and random plans."""
    rng = random.Random(seed)
    choices = next(m.bit_choices for m in one.modules() if hasattr(m, "select_bits"))
    found, outputs = [], set()
    for bits in (*choices, *(random_plan(one, rng) for _ in range(plans))):
        set_bits(one, bits)
        set_bits(other, bits)
        y = one(x)
        assert bool(torch.isfinite(y).all())
        assert outputs or bool((y != y[0]).any())  # it does tell samples apart
        outputs.add(tuple(y.flatten().tolist()))
        if not torch.equal(y, other(x)):
            found.append(bits)
    assert len(outputs) >= len(choices)  # the settings do differ
    return found


# --- equal to the trained model -------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_the_live_model_is_the_trained_model(tmp_path: Path, name: str, scheme: str) -> None:
    torch.manual_seed(0)
    x = batch_for(name)
    model = trained(MODELS[name](), x, scheme=scheme, steps=1)
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", MODELS[name]())
    assert differences(model, live, batch_for(name, seed=2)) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bit_choices", CHOICES)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("activations", ["unsigned", "signed", "asymmetric", "float"])
def test_every_scheme_width_and_kind(
    tmp_path: Path, scheme: str, bit_choices: tuple[int, ...], per_channel: bool, activations: str
) -> None:
    config = {"scheme": scheme, "bit_choices": bit_choices, "per_channel": per_channel, "activations": activations}
    model = trained(Net(), images(), steps=1, **config)
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Net(seed=5))
    assert differences(model, live, images(2)) == []


def test_kinds_mixed_by_rules(tmp_path: Path) -> None:
    rules = (
        Rule(pattern="conv", activations="asymmetric"),
        Rule(pattern="grouped", activations="float"),
        Rule(pattern="point", per_channel=False, activations="signed"),
        Rule(pattern="stem", quantize=True),
        Rule(pattern="hidden", quantize=False),
    )
    model = trained(Net(), images(), rules=rules, ties="up")
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Net())
    assert {n for n, m in live.named_modules() if isinstance(m, LiveLayer)} == {
        "stem",
        "conv",
        "grouped",
        "depthwise",
        "point",
    }
    assert differences(model, live, images(2), plans=6) == []


class Transposed(nn.Module):
    """An unquantised head, and a quantised layer without a bias, on views of what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.lstm = nn.Linear(6, 16), nn.LSTM(16, 12, batch_first=True)
        self.middle, self.head = nn.Linear(12, 24, bias=False), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.lstm(self.stem(x).relu())[0])
        return self.head(x.transpose(0, 1).relu())


def test_views_of_other_strides_give_the_same_bits(tmp_path: Path) -> None:
    """PyTorch multiplies a transposed view in another order once the weight wants no gradient."""
    torch.manual_seed(0)
    x = torch.randn(5, 7, 6)
    config = QuantConfig(bit_choices=(8, 4, 2))
    for batch in (x, x[:1]):
        model = prepare(Transposed(), config, batch).eval()
        save(model, tmp_path / "net.safetensors")
        live = load(tmp_path / "net.safetensors", Transposed())
        for bits in config.bit_choices:
            set_bits(model, bits)
            set_bits(live, bits)
            with torch.no_grad():
                expected = model(batch)
            assert torch.equal(live(batch), expected)
            assert torch.equal(model(batch), expected)  # with gradients
            assert torch.equal(view_at_bits(live, bits)(batch), expected)
    assert isinstance(live.head, nn.Linear)
    assert type(plain_copy(live).head) is nn.Linear
    assert torch.isfinite(code_exact(live)(x)).all()


def test_norms_that_are_not_switched(tmp_path: Path) -> None:
    model = trained(Net(), images(), switch_norms=False)
    save(model, tmp_path / "m")
    assert differences(model, load(tmp_path / "m", Net()), images(2)) == []


def test_inputs_by_keyword(tmp_path: Path) -> None:
    x = {"x": torch.randn(16, 4, generator=seeded(1)), "shift": torch.randn(16, 4, generator=seeded(2))}
    model = trained(Keywords(), x)
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Keywords())
    with torch.no_grad():
        for bits in (8, 6, 4, 2):
            set_bits(model, bits)
            set_bits(live, bits)
            assert torch.equal(model(**x), live(**x))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_codes_are_the_trained_models(tmp_path: Path, scheme: str) -> None:
    model = trained(Net(), images(), scheme=scheme)
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Net())
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLayer):
            for bits in (8, 6, 4, 2):
                codes = live.get_submodule(name).codes.weight_codes(bits)
                assert codes.dtype == torch.int8
                assert torch.equal(codes, layer.weight_quantizer.codes(layer.weight, bits))
                assert int(codes.min()) >= -(2 ** (bits - 1))
                assert int(codes.max()) < 2 ** (bits - 1)


@pytest.mark.parametrize(
    "name, arguments, shape",
    [
        ("cifar_resnet", {"blocks": 1, "width": 4, "in_channels": 1}, (4, 1, 8, 8)),
        ("resnet20", {"width": 4}, (4, 3, 8, 8)),
        ("resnet56", {"width": 2}, (4, 3, 8, 8)),
        ("mobilenet_v2", {"width_mult": 0.1, "num_classes": 5}, (4, 3, 32, 32)),
        ("tiny_transformer", {"width": 16, "vocab": 9}, None),
        ("resnet18", {"num_classes": 4}, (4, 3, 32, 32)),
    ],
)
def test_shipped_models_load_by_themselves(tmp_path: Path, name: str, arguments: Any, shape: Any) -> None:
    x = torch.randint(0, 9, (4, 6), generator=seeded(1)) if shape is None else torch.randn(shape, generator=seeded(1))
    model = prepare(build_model(name, **arguments), QuantConfig(start="lsq"), x).eval()
    save(model, tmp_path / "m")
    live, given = load(tmp_path / "m"), load(tmp_path / "m", build_model(name, **arguments))
    with torch.no_grad():
        for bits in (8, 2):
            for m in (model, live, given):
                set_bits(m, bits)
            assert torch.equal(model(x), live(x))
            assert torch.equal(model(x), given(x))


@pytest.mark.parametrize("loader", [load, load_trainable])
def test_a_model_without_memory(tmp_path: Path, loader: Any) -> None:
    """Its weights do not matter, so somebody will leave them out: that works, or an error says that it does not."""
    model = trained(Net(), images(), steps=1)
    save(model, tmp_path / "m")
    try:
        loaded = loader(tmp_path / "m", Net().to("meta"))
    except BitdialError:
        return
    assert {t.device.type for t in (*loaded.parameters(), *loaded.buffers())} == {"cpu"}
    assert differences(model, loaded.eval(), images(2)) == []


# --- what it is made of -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["float", "integer", "packed"])
def test_a_model_loaded_in_inference_mode_switches_outside(tmp_path: Path, kernels: str) -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    activations = "float" if kernels == "packed" else "unsigned"
    config = QuantConfig(bit_choices=(8, 4, 2), activations=activations, keep_first_last=False)
    x = torch.rand(3, 6, generator=seeded(5))
    save(prepare(model, config, x), tmp_path / "m.safetensors")
    usual = load(tmp_path / "m.safetensors", model, kernels=kernels)
    with torch.inference_mode():
        live = load(tmp_path / "m.safetensors", model, kernels=kernels)
        set_bits(live, 2)
    for bits in (4, 8):
        set_bits(live, bits)
        set_bits(usual, bits)
        assert torch.equal(live(x), usual(x))


@pytest.mark.parametrize("scheme", INTEGER_SCHEMES)
@pytest.mark.parametrize("bit_choices", [(8, 4), (4, 2)])
def test_no_float_master(tmp_path: Path, scheme: str, bit_choices: tuple[int, ...]) -> None:
    model = trained(Net(), images(), scheme=scheme, bit_choices=bit_choices, activations="asymmetric")
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Net())
    quantised = {n: m for n, m in live.named_modules() if isinstance(m, LiveLayer)}
    assert quantised.keys() == {"conv", "grouped", "depthwise", "point", "hidden"}
    state = live.state_dict()
    for name, layer in quantised.items():
        mine = {k.removeprefix(f"{name}."): v for k, v in state.items() if k.startswith(f"{name}.")}
        biased = {"bias"} if layer.bias is not None else set()
        held = {f"codes.{part}" for part in ("source.stored", "scale", "act_scale", "act_zero_point")}
        assert mine.keys() == held | biased
        original = model.get_submodule(name).weight
        assert mine["codes.source.stored"].dtype == torch.int8
        assert mine["codes.source.stored"].shape == original.shape
        floats = [v for v in mine.values() if v.is_floating_point()] + list(layer.parameters())
        assert all(v.numel() < original.numel() for v in floats)
        assert [k for k, _ in layer.named_parameters()] == sorted(biased)
        assert not isinstance(layer.weight, Tensor)  # no numbers behind it
    assert not any(p.requires_grad for p in live.parameters())
    assert not any(m.training for m in live.modules())


@pytest.mark.parametrize("scheme", ["lsq", "dorefa"])
def test_schemes_that_cannot_narrow_keep_the_float_weight(tmp_path: Path, scheme: str) -> None:
    model = trained(Net(), images(), scheme=scheme)
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Net())
    assert torch.equal(live.conv.codes.stored, model.conv.weight.detach())
    assert live.conv.codes.scale.shape == (4, 8)


def test_sharing_survives(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save(trained(Twice(), images()), tmp_path / "m")
    live, again = load(tmp_path / "m", Twice()), load_trainable(tmp_path / "m", Twice())
    assert live.conv is live.again
    assert live.left.codes.stored.data_ptr() == live.right.codes.stored.data_ptr()
    assert again.conv is again.again
    assert again.left.weight is again.right.weight
    assert again.left.weight_quantizer is again.right.weight_quantizer


# --- the dial -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "lsq"])
def test_any_sequence_of_settings_ends_like_a_fresh_load(tmp_path: Path, scheme: str) -> None:
    save(trained(Net(), images(), scheme=scheme), tmp_path / "m")
    live, rng, x = load(tmp_path / "m", Net()), random.Random(0), images(2)
    with torch.no_grad():
        for _ in range(12):
            for _ in range(rng.randint(1, 6)):
                last = rng.choice((8, 6, 4, 2, (8, 2), (2, 8), random_plan(live, rng), BitPlan({"conv": 2}, default=8)))
                set_bits(live, last)
                if rng.random() < 0.5:
                    live(x)
            fresh = load(tmp_path / "m", Net())
            set_bits(fresh, last)
            assert get_bits(fresh) == get_bits(live)
            assert torch.equal(fresh(x), live(x))


def test_back_and_forth(tmp_path: Path) -> None:
    save(trained(Net(), images()), tmp_path / "m")
    live, x = load(tmp_path / "m", Net()), images(2)
    with torch.no_grad():
        first = {}
        for bits in (8, 2, 8, 4, 6, 2, 2, 8, 6, 4):
            set_bits(live, bits)
            y = live(x)
            assert torch.equal(y, first.setdefault(bits, y))
        with at_bits(live, 2):
            assert torch.equal(live(x), first[2])
        assert torch.equal(live(x), first[4])
    assert len({tuple(y.flatten().tolist()) for y in first.values()}) == 4


def test_a_refused_setting_changes_nothing(tmp_path: Path) -> None:
    save(trained(Net(), images()), tmp_path / "m")
    live, x = load(tmp_path / "m", Net()), images(2)
    set_bits(live, 4)
    with torch.no_grad():
        before = live(x)
        for bad in (
            5,
            BitPlan({"conv": 2, "head": 2}, default=8),
            BitPlan({"conv": 2}),
            BitPlan({"hidden": 3}, default=2),
        ):
            with pytest.raises(PlanError):
                set_bits(live, bad)
        assert torch.equal(live(x), before)
    assert get_bits(live) == BitPlan(dict.fromkeys(get_bits(live), 4))


def test_a_fresh_load_is_at_the_highest_width(tmp_path: Path) -> None:
    model = trained(Net(), images(), bit_choices=(6, 3))
    save(model, tmp_path / "m")
    live = load(tmp_path / "m", Net())
    assert set(dict(get_bits(live)).values()) == {(6, 6)}
    assert {m.bits for m in live.modules() if hasattr(m, "follows")} == {6}
    set_bits(model, 6)
    with torch.no_grad():
        assert torch.equal(live(images(2)), model(images(2)))


# --- plans that the file names ------------------------------------------------------------------


PLANS = {
    "3.0 bits": BitPlan({"conv": 8, "hidden": (2, 4)}, default=3),
    "small, für später": BitPlan(default=(2, 8)),
    "4": BitPlan({"point": 8}, default=4),
}


@pytest.mark.parametrize("loader", [load, load_trainable])
def test_stored_plans_by_name(tmp_path: Path, loader: Any) -> None:
    model = trained(Net(), images(), bit_choices=(8, 4, 3, 2))
    save(model, tmp_path / "m", plans=PLANS)
    live, x = loader(tmp_path / "m", Net()).eval(), images(2)
    for name, plan in PLANS.items():
        set_bits(live, plan)
        resolved, expected = get_bits(live), live(x)
        set_bits(live, 8)
        with at_bits(live, name):
            assert get_bits(live) == resolved
            assert torch.equal(live(x), expected)
        assert get_bits(live) == BitPlan(dict.fromkeys(resolved, 8))
    for same in (copy.deepcopy(live), nn.DataParallel(copy.deepcopy(live))):  # which moves its module to a GPU
        set_bits(same, "3.0 bits")
        assert get_bits(same)["conv"] == (8, 8)
    assert evaluate(live, [(x, torch.zeros(len(x), dtype=torch.long))], ["4"])["4"] >= 0
    assert set(live.state_dict()) == set(loader(tmp_path / "m", Net()).state_dict())


def test_a_plan_that_is_not_stored(tmp_path: Path) -> None:
    model = trained(Net(), images(), bit_choices=(8, 4, 3, 2))
    save(model, tmp_path / "with", plans=PLANS)
    save(model, tmp_path / "without")
    live = load(tmp_path / "with", Net())
    set_bits(live, "3.0 bits")
    before = get_bits(live)
    with pytest.raises(PlanError, match=r"'5.0 bits' is not .* stored plans are '3.0 bits', 'small, für später', '4'"):
        set_bits(live, "5.0 bits")
    assert get_bits(live) == before
    for bare in (load(tmp_path / "without", Net()), model, nn.Sequential(live)):
        with pytest.raises(PlanError, match=r"this model has no stored plans \(save\(..., plans="):
            set_bits(bare, "3.0 bits")


def test_loads_do_not_share_their_plans(tmp_path: Path) -> None:
    save(trained(Net(), images(), bit_choices=(8, 4, 3, 2)), tmp_path / "m", plans=PLANS)
    artifact = read_artifact(tmp_path / "m")
    live = load(artifact, Net())
    artifact.plans.clear()
    set_bits(live, "4")
    assert get_bits(live)["point"] == (8, 8)


# --- on from here: load_trainable ----------------------------------------------------------------------------


def codes_of(model: nn.Module) -> dict[tuple[str, int], Tensor]:
    return {
        (name, bits): layer.weight_quantizer.codes(layer.weight, bits)
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLayer)
        for bits in layer.bit_choices
    }


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bit_choices", [*CHOICES, (2,)])
@pytest.mark.parametrize("per_channel", [True, False])
def test_trainable_again_with_the_same_codes(
    tmp_path: Path, scheme: str, bit_choices: tuple[int, ...], per_channel: bool
) -> None:
    config = {"scheme": scheme, "bit_choices": bit_choices, "per_channel": per_channel, "activations": "asymmetric"}
    model = trained(Net(), images(), steps=1, **config)
    digest = save(model, tmp_path / "m")
    again = load_trainable(tmp_path / "m", Net(seed=5)).eval()
    before, after = codes_of(model), codes_of(again)
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    second = save(again, tmp_path / "again")
    one, two = read_artifact(tmp_path / "m").tensors, read_artifact(tmp_path / "again").tensors
    assert one.keys() == two.keys()
    for name in one:
        if scheme == "adabits" and name.endswith("/weight_scale"):  # from tanh and back: within an ulp
            above = torch.nextafter(one[name], torch.full_like(one[name], torch.inf))
            below = torch.nextafter(one[name], torch.zeros_like(one[name]))
            assert bool(((two[name] >= below) & (two[name] <= above)).all()), name
        else:
            assert torch.equal(one[name], two[name]), name
    if scheme != "adabits":
        assert second == digest
        assert differences(model, again, images(2), plans=0 if bit_choices == (2,) else 2) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_trained_on_and_saved_again(tmp_path: Path, scheme: str) -> None:
    save(trained(Net(), images(), scheme=scheme), tmp_path / "m")
    again = load_trainable(tmp_path / "m", Net())
    assert all(p.requires_grad for p in again.parameters())
    before = codes_of(again)
    step = JointStep(again, TrainConfig(epochs=1, lr=0.05), steps_per_epoch=2)
    losses = [sum(step(images(), torch.arange(16) % 3).loss.values()).item() for _ in range(2)]
    assert all(torch.isfinite(torch.tensor(losses)))
    after = codes_of(again)
    assert any(not torch.equal(before[key], after[key]) for key in before)
    save(again.eval(), tmp_path / "again")
    assert differences(again, load(tmp_path / "again", Net()), images(2)) == []


def test_trainable_adabits_weights_stay_finite(tmp_path: Path) -> None:
    """tanh of 12 is 1 in float32, and atanh of 1 is infinite."""
    model = Net()
    with torch.no_grad():
        model.conv.weight[0, 0, 0, 0] = 12.0
    ready = prepare(model, QuantConfig(scheme="adabits"), images())
    save(ready, tmp_path / "m")
    again = load_trainable(tmp_path / "m", Net())
    assert bool(torch.isfinite(again.conv.weight).all())
    assert torch.equal(codes_of(ready)["conv", 8], codes_of(again)["conv", 8])


def test_a_channel_of_zeros(tmp_path: Path) -> None:
    for scheme in SCHEMES:
        model = Net()
        with torch.no_grad():
            model.conv.weight[2] = 0.0
            model.grouped.weight.zero_()
        ready = prepare(model, QuantConfig(scheme=scheme, start="3std"), images()).eval()
        save(ready, tmp_path / "m")
        assert differences(ready, load(tmp_path / "m", Net()), images(2), plans=0) == [], scheme
        before, after = codes_of(ready), codes_of(load_trainable(tmp_path / "m", Net()))
        assert [key for key in before if not torch.equal(before[key], after[key])] == [], scheme


# --- like any other module -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("activations", ["auto", "asymmetric", "float"])
def test_inputs_that_are_not_finite(tmp_path: Path, activations: str, bad: float) -> None:
    save(trained(Net(), images(), activations=activations), tmp_path / "m")
    live, x = load(tmp_path / "m", Net()), images(2)
    x[3, 1, 2, 2] = bad
    with torch.no_grad(), pytest.raises(QuantizationError, match=r"^layer 'conv': its input holds NaN or infinity"):
        live(x)
    x[3] = 0.0
    with torch.no_grad():
        assert bool(torch.isfinite(live(x)).all())


def test_deepcopy_is_independent(tmp_path: Path) -> None:
    save(trained(Twice(), images()), tmp_path / "m")
    live, x = load(tmp_path / "m", Twice()), images(2)
    twin = copy.deepcopy(live)
    with torch.no_grad():
        before = live(x)
        assert torch.equal(twin(x), before)
        set_bits(twin, 2)
        assert not torch.equal(twin(x), before)
        assert torch.equal(live(x), before)
    assert twin.conv is twin.again
    assert twin.left.codes.stored.data_ptr() == twin.right.codes.stored.data_ptr() != live.left.codes.stored.data_ptr()


def test_to_a_device(tmp_path: Path) -> None:
    save(trained(Net(), images()), tmp_path / "m")
    live, x = load(tmp_path / "m", Net(), device=torch.device("cpu")), images(2)
    set_bits(live, 4)
    with torch.no_grad():
        before = live(x)
        assert live.to(torch.device("cpu")) is live
        assert torch.equal(live(x), before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")], ids=str)
def test_a_gpu_that_is_not_there(tmp_path: Path, device: Any) -> None:
    save(trained(Net(), images(), steps=1), tmp_path / "m")
    with pytest.raises(ConfigError, match="PyTorch finds no GPU here"):
        load(tmp_path / "m", Net(), device=device)


def test_one_gpu_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    save(trained(model, images(), steps=1), tmp_path / "m")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device cuda:2: PyTorch finds 2 GPUs here, counted from 0"):
        load(tmp_path / "m", model, device="cuda:2")


@pytest.mark.parametrize("device", ["gpu", "", None, 1.5], ids=str)
def test_what_is_no_device(tmp_path: Path, device: Any) -> None:
    save(trained(Net(), images(), steps=1), tmp_path / "m")
    with pytest.raises(ConfigError, match="is not a device"):
        load(tmp_path / "m", Net(), device=device)


@pytest.mark.parametrize("loader", [load, load_trainable])
@pytest.mark.parametrize(("model", "words"), [(Net, "got the class Net; make one"), ("net", "got str")], ids=str)
def test_what_is_no_model(tmp_path: Path, loader: Any, model: Any, words: str) -> None:
    save(trained(Net(), images(), steps=1), tmp_path / "m")
    with pytest.raises(ConfigError, match=words):
        loader(tmp_path / "m", model)


def test_state_dict_round_trip(tmp_path: Path) -> None:
    save(trained(Net(), images()), tmp_path / "m")
    live, x = load(tmp_path / "m", Net()), images(2)
    state = copy.deepcopy(live.state_dict())
    with torch.no_grad():
        set_bits(live, 2)
        expected = live(x)
        live.load_state_dict(state)
        assert torch.equal(live(x), expected)


def test_a_state_dict_of_another_file(tmp_path: Path) -> None:
    """The integers that a model holds and those that it runs are the same ones, however they came there."""
    save(trained(Net(), images()), tmp_path / "one")
    save(trained(Net(seed=7), images()), tmp_path / "two")
    one, two, x = load(tmp_path / "one", Net()), load(tmp_path / "two", Net()), images(2)
    for live in (one, two):
        set_bits(live, 4)
    one.load_state_dict(two.state_dict())
    with torch.no_grad():
        assert torch.equal(one.conv.codes.stored, two.conv.codes.stored)
        assert torch.equal(one(x), two(x))


def test_threads_agree(tmp_path: Path) -> None:
    save(trained(Net(), images()), tmp_path / "m")
    live = load(tmp_path / "m", Net())
    set_bits(live, BitPlan({"conv": (4, 8), "point": 2}, default=6))
    batches = [images(seed) for seed in range(8)]

    def run(i: int) -> Tensor:
        with torch.no_grad():
            return live(batches[i % 8])

    alone = [run(i) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, range(64)))
    assert [i for i, y in enumerate(together) if not torch.equal(y, alone[i % 8])] == []


def test_an_empty_batch(tmp_path: Path) -> None:
    save(trained(Net(), images()), tmp_path / "m")
    with torch.no_grad():
        assert load(tmp_path / "m", Net())(images()[:0]).shape == (0, 3)


# --- one file, many models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [load, load_trainable])
def test_loads_share_no_memory(tmp_path: Path, loader: Any) -> None:
    save(trained(Net(), images(), activations="asymmetric"), tmp_path / "m")
    artifact, model = read_artifact(tmp_path / "m"), Net()

    def addresses(tensors: Any) -> set[int]:
        return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}

    one, two = loader(artifact, model), loader(artifact, model)
    groups = [addresses([*m.parameters(), *m.buffers()]) for m in (one, two)]
    assert groups[0].isdisjoint(groups[1])
    assert groups[0].isdisjoint(addresses(artifact.tensors.values()))
    assert groups[0].isdisjoint(addresses([*model.parameters(), *model.buffers()]))


def test_nothing_keeps_the_file_in_memory(tmp_path: Path) -> None:
    """One copy of the weights, and each tensor where PyTorch's own memory begins: products of floats depend on it."""
    for bit_choices in ((8, 4), (4, 2)):
        save(trained(Net(), images(), bit_choices=bit_choices), tmp_path / "m")
        size = (tmp_path / "m").stat().st_size
        for kernels in ("float", "integer"):
            for source in (tmp_path / "m", read_artifact(tmp_path / "m")):
                live = load(source, Net(), kernels=kernels)
                held = [t for t in (*live.parameters(), *live.buffers()) if t.numel()]
                assert size not in {t.untyped_storage().nbytes() for t in held}
                assert all(t.data_ptr() % 64 == 0 for t in live.parameters() if t.numel())


def test_a_live_model_does_not_change_with_its_file(tmp_path: Path) -> None:
    """A new version copied over the old file in place is not a new version of the models that are running."""
    model = trained(Net(), images())
    save(model, tmp_path / "one")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.25
    save(model, tmp_path / "two")
    two = (tmp_path / "two").read_bytes()
    live, x = load(tmp_path / "one", Net()), images(2)
    with torch.no_grad():
        before = live(x)
        with (tmp_path / "one").open("r+b") as file:
            file.write(two)
        assert torch.equal(live(x), before)
