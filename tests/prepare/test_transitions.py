"""Transitional batch norms in a model: which layer feeds which, what set_bits selects, and what a file keeps."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    JointStep,
    QuantConfig,
    TrainConfig,
    add_transitions,
    build_model,
    code_exact,
    load,
    load_trainable,
    measure_costs,
    prepare,
    read_artifact,
    recalibrate_norms,
    save,
    set_bits,
)
from bitdial.artifact import sizes
from bitdial.errors import ArtifactError, CheckpointError, ConfigError
from bitdial.files.container import read_container, write_container
from bitdial.nn import UNKNOWN, QuantLayer, SwitchableBatchNorm, TransitionalBatchNorm
from bitdial.train.checkpoint import load_checkpoint, save_checkpoint

FORMS = ("full", "statistics")


def feeders(model: nn.Module) -> dict[str, str | None]:
    return {name: m.fed_by for name, m in model.named_modules() if isinstance(m, QuantLayer)}


def images(count: int = 2, size: int = 8) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(0))


def small_resnet(bit_choices: tuple[int, ...] = (4, 2)) -> nn.Module:
    torch.manual_seed(0)
    return prepare(build_model("cifar_resnet", blocks=2, width=4), QuantConfig(bit_choices=bit_choices), images())


def test_feeding_layers_of_a_residual_network() -> None:
    """The rule: of the layers that reach it, the one that ran last; through additions and skip convolutions."""
    assert feeders(small_resnet()) == {
        "layer1.0.conv1": None,  # the float stem
        "layer1.0.conv2": "layer1.0.conv1",
        "layer1.1.conv1": "layer1.0.conv2",  # the addition of the stem and of this
        "layer1.1.conv2": "layer1.1.conv1",
        "layer2.0.conv1": "layer1.1.conv2",
        "layer2.0.conv2": "layer2.0.conv1",
        "layer2.0.downsample.0": "layer1.1.conv2",
        "layer2.1.conv1": "layer2.0.downsample.0",  # ran after conv2
        "layer2.1.conv2": "layer2.1.conv1",
        "layer3.0.conv1": "layer2.1.conv2",
        "layer3.0.conv2": "layer3.0.conv1",
        "layer3.0.downsample.0": "layer2.1.conv2",
        "layer3.1.conv1": "layer3.0.downsample.0",
        "layer3.1.conv2": "layer3.1.conv1",
    }


class Branches(nn.Module):
    """A concatenation, and a layer that works on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.joint, self.norm = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)
        self.token, self.lift = nn.Parameter(torch.ones(1, 4)), nn.Linear(4, 4)
        self.lift_norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.norm(self.joint(torch.cat([self.left(x), self.right(x)], dim=1))).mean(dim=(2, 3))
        return self.head(x + self.lift_norm(self.lift(self.token).expand(len(x), 4)))


def test_a_concatenation_and_an_input_that_cannot_be_followed() -> None:
    model = prepare(Branches(), QuantConfig(bit_choices=(4, 2)), images())
    assert feeders(model) == {"left": None, "right": None, "joint": "right", "lift": UNKNOWN}
    with pytest.raises(ConfigError, match=r"norm 'lift_norm'.*what feeds layer 'lift'"):
        add_transitions(model)


@pytest.mark.parametrize("transitions", FORMS)
def test_transitions_change_no_output_at_first(transitions: str) -> None:
    model = small_resnet().eval()
    with torch.no_grad():
        for number, module in enumerate(m for m in model.modules() if isinstance(m, SwitchableBatchNorm)):
            module.sets["2"].bias.fill_(0.1 * number)
    mixed = add_transitions(model, transitions)
    names = list(feeders(model))
    kinds = {name: type(m) for name, m in mixed.named_modules() if isinstance(m, SwitchableBatchNorm)}
    assert [n for n, kind in kinds.items() if kind is SwitchableBatchNorm] == ["bn1", "layer1.0.bn1"]  # behind the stem
    assert not any(isinstance(m, TransitionalBatchNorm) for m in model.modules())
    plans = [4, 2, BitPlan({name: (4, 2)[i % 2] for i, name in enumerate(names)})]
    for plan in plans:
        set_bits(model, plan)
        set_bits(mixed, plan)
        assert torch.equal(model(images()), mixed(images()))


def test_set_bits_selects_by_both_layers() -> None:
    mixed = add_transitions(small_resnet())
    set_bits(mixed, BitPlan({"layer1.1.conv2": 2, "layer2.0.downsample.0": 2}, default=4))
    chosen = {n: m.key for n, m in mixed.named_modules() if isinstance(m, TransitionalBatchNorm)}
    assert chosen["layer1.1.bn2"] == "4-2"
    assert chosen["layer2.0.bn1"] == "2-4"
    assert chosen["layer2.0.downsample.1"] == "2-2"
    assert chosen["layer2.1.bn1"] == "2-4"
    assert chosen["layer3.0.bn2"] == "4-4"
    outer = nn.Sequential(mixed)  # inside another module names are longer
    set_bits(outer, BitPlan({"0.layer1.1.conv2": 2}, default=4))
    assert mixed.get_submodule("layer1.1.bn2").key == "4-2"  # type: ignore[union-attr]


def test_a_model_without_switchable_norms() -> None:
    with pytest.raises(ConfigError, match="no switchable batch norm"):
        add_transitions(
            prepare(build_model("cifar_resnet", blocks=1, width=4), QuantConfig(switch_norms=False), images())
        )


def test_transitions_are_added_once_and_of_a_known_kind() -> None:
    model = small_resnet()
    with pytest.raises(ConfigError, match="have transitions already"):
        add_transitions(add_transitions(model), "statistics")
    with pytest.raises(ConfigError, match="transitions='affine' is not known"):
        add_transitions(model, "affine")


# --- in a file ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transitions", FORMS)
def test_a_file_keeps_the_pairs(tmp_path: Path, transitions: str) -> None:
    model = small_resnet((8, 4, 2))
    mixed = add_transitions(model, transitions).eval()
    generator = torch.Generator().manual_seed(1)
    for module in mixed.modules():
        if isinstance(module, TransitionalBatchNorm):
            for norm in module.sets.values():
                norm.running_mean.normal_(generator=generator).mul_(0.1)  # type: ignore[union-attr, operator]
                nn.init.normal_(norm.bias, std=0.1, generator=generator)  # type: ignore[arg-type]
    save(mixed, tmp_path / "mixed.safetensors")
    save(model, tmp_path / "plain.safetensors")
    live, trainable = load(tmp_path / "mixed.safetensors"), load_trainable(tmp_path / "mixed.safetensors").eval()
    names = list(feeders(mixed))
    for seed in range(4):
        drawn = torch.randint(0, 3, (len(names),), generator=torch.Generator().manual_seed(seed)).tolist()
        plan = BitPlan({name: (8, 4, 2)[i] for name, i in zip(names, drawn, strict=True)})
        expected = None
        for each in (mixed, live, trainable):
            set_bits(each, plan)
            out = each(images())
            expected = out if expected is None else expected
            assert torch.equal(out, expected)
    assert feeders(trainable) == feeders(mixed)
    assert len(list(trainable.parameters())) == len(list(mixed.parameters()))
    again = add_transitions(load_trainable(tmp_path / "plain.safetensors"))
    assert {n for n, m in again.named_modules() if isinstance(m, TransitionalBatchNorm)} == {
        n for n, m in mixed.named_modules() if isinstance(m, TransitionalBatchNorm)
    }


def test_both_forms_give_the_same_numbers_where_they_hold_the_same(tmp_path: Path) -> None:
    """Live and code-exact."""
    model = small_resnet((8, 4, 2)).eval()
    statistics, full = add_transitions(model, "statistics"), add_transitions(model)
    generator = torch.Generator().manual_seed(1)
    for name, value in statistics.state_dict().items():
        if ".sets." in name and value.is_floating_point():
            value.add_(torch.rand(value.shape, generator=generator))
    full.load_state_dict(statistics.state_dict())
    plan = BitPlan({name: (8, 4, 2)[i % 3] for i, name in enumerate(feeders(model))})
    found = []
    for number, each in enumerate((statistics, full)):
        save(each, tmp_path / f"{number}.safetensors")
        live = load(tmp_path / f"{number}.safetensors")
        set_bits(live, plan)
        found.append((live(images()), code_exact(live)(images())))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_what_transitions_cost(tmp_path: Path) -> None:
    """Norms of 4 + 8 + 16 channels: three sets of four numbers and a count before, nine after, behind fed layers."""
    model = small_resnet((8, 4, 2))
    forms = {"none": model} | {form: add_transitions(model, form) for form in FORMS}
    found = {}
    for form, each in forms.items():
        save(each, tmp_path / f"{form}.safetensors")
        found[form] = sizes(read_artifact(tmp_path / f"{form}.safetensors"))
    plain, mixed = found["none"], found["full"]
    norms = {"bn1": 4, "layer1": [4] * 4, "layer2": [8] * 5, "layer3": [16] * 5}
    total = 2 * (4 * 4 * 4 + 8) + 3 * (4 * 4 * 4 + 8) + 5 * (4 * 4 * 8 + 8) + 5 * (4 * 4 * 16 + 8)
    assert sum(len(v) if isinstance(v, list) else 1 for v in norms.values()) == 15
    assert plain["norms"] == 3 * total
    unpaired = 2 * (4 * 4 * 4 + 8)  # the norm of the stem, and that of the layer which the stem feeds
    assert mixed["norms"] == 9 * (total - unpaired) + 3 * unpaired
    paired_statistics = 3 * (2 * 4 * 4 + 8) + 5 * (2 * 4 * 8 + 8) + 5 * (2 * 4 * 16 + 8)
    assert found["statistics"]["norms"] == 3 * total + (9 - 3) * paired_statistics
    for form, each in forms.items():
        assert found[form]["separate"] == plain["separate"]
        assert measure_costs(each, images(1)).of(4)["bytes"] == plain["separate"][4]
        assert found[form]["norms_by_transitions"] == {name: each["norms"] for name, each in found.items()}


@pytest.mark.parametrize(("name", "noted", "of_the_codes"), [
    ("mobilenet_v2", 1.25, {"none": 0.50, "statistics": 1.25, "full": 1.99}),
    ("resnet18", 0.105, {"none": 0.028, "statistics": 0.069, "full": 0.110}),
])  # fmt: skip
def test_what_transitions_cost_networks_of_imagenet(
    tmp_path: Path, name: str, noted: float, of_the_codes: dict[str, float]
) -> None:
    """At four widths: 16 sets of 4 numbers a channel, 125 % of MobileNetV2's parameters as int8, 10 % of ResNet18's.

    The file's own share is that of its codes, which leave the first and the last layer out: half of MobileNetV2's.
    """
    torch.manual_seed(0)
    model = build_model(name)
    channels = sum(m.num_features for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert 16 * 4 * 4 * channels / sum(p.numel() for p in model.parameters()) == pytest.approx(noted, abs=0.005)
    save(prepare(model, QuantConfig(start="3std"), images(1, 32)), tmp_path / "plain.safetensors")
    found = sizes(read_artifact(tmp_path / "plain.safetensors"))
    shares = {form: value / found["codes"] for form, value in found["norms_by_transitions"].items()}
    assert shares == pytest.approx(of_the_codes, abs=0.005)


@pytest.mark.parametrize(("place", "wrong", "problem"), [
    ("norms", "nowhere", "goes by 'nowhere'"), ("norms", None, "expected torch.float32 of shape"),
    ("layers", "nowhere", "fed by 'nowhere'"), ("layers", 3, "fed_by"),
])  # fmt: skip
def test_a_file_that_lies_about_transitions(tmp_path: Path, place: str, wrong: object, problem: str) -> None:
    path = tmp_path / "mixed.safetensors"
    save(add_transitions(small_resnet()), path)
    tensors, manifest, _ = read_container(path, error=ArtifactError)
    name = "layer1.1.bn1" if place == "norms" else "layer1.1.conv1"
    manifest[place][name]["fed_by"] = wrong
    write_container(path, tensors, manifest, error=ArtifactError)
    with pytest.raises(ArtifactError, match=problem):
        read_artifact(path)


@pytest.mark.parametrize(("change", "problem"), [
    ({"transitions": "full"}, "expected 'statistics'"), ({"transitions": "half"}, "transitions='half'"),
    ({"transitions": 3}, "transitions is 3"), ({"fed_by": None}, "transitions='statistics' with fed_by=None"),
    (None, "layer1.1.bn1/weight.*expected torch.float32 of shape"),
])  # fmt: skip
def test_a_file_that_lies_about_what_pairs_share(
    tmp_path: Path, change: dict[str, object] | None, problem: str
) -> None:
    path = tmp_path / "mixed.safetensors"
    save(add_transitions(small_resnet(), "statistics"), path)
    tensors, manifest, _ = read_container(path, error=ArtifactError)
    if change is None:
        del manifest["norms"]["layer1.1.bn1"]["transitions"]
    else:
        manifest["norms"]["layer1.1.bn1"] |= change
    write_container(path, tensors, manifest, error=ArtifactError)
    with pytest.raises(ArtifactError, match=problem):
        read_artifact(path)


def test_transitions_of_statistics_learn_what_plain_norms_learn() -> None:
    """In training mode a norm looks at the batch, so only the statistics that it leaves behind differ."""
    plain = small_resnet((8, 4, 2))
    mixed = add_transitions(plain, "statistics")
    config = TrainConfig(sampling="random", sigma=1.0, sigma_warmup=0, epochs=1, alrs="off")
    steps = [JointStep(each, config, steps_per_epoch=4) for each in (plain, mixed)]
    for _ in range(3):
        for step in steps:
            step(images(8), torch.arange(8) % 10)
    theirs = dict(plain.named_parameters())
    for name, parameter in mixed.named_parameters():
        assert torch.equal(parameter, theirs.pop(name.replace(".sets.8-", ".sets."))), name
    assert not theirs
    plan = BitPlan({"layer1.1.conv2": 2}, default=4)
    set_bits(plain.eval(), plan)
    set_bits(mixed.eval(), plan)
    assert not torch.equal(plain(images()), mixed(images()))


def test_a_checkpoint_of_other_transitions_is_refused(tmp_path: Path) -> None:
    config = TrainConfig(sampling="random", epochs=1)
    full, statistics = (JointStep(add_transitions(small_resnet(), f), config, steps_per_epoch=2) for f in FORMS)
    save_checkpoint(tmp_path / "c", full)
    with pytest.raises(CheckpointError, match=r"other layers.*\['statistics'\] now"):
        load_checkpoint(tmp_path / "c", statistics)


def test_training_moves_the_pairs_that_its_plans_use() -> None:
    mixed = add_transitions(small_resnet((8, 4, 2)))
    config = TrainConfig(sampling="random", sigma=1.0, sigma_warmup=0, epochs=1, alrs="off")
    step = JointStep(mixed, config, steps_per_epoch=4)
    norms = {name: m for name, m in mixed.named_modules() if isinstance(m, TransitionalBatchNorm)}
    before = {n: {key: copy.deepcopy(s.state_dict()) for key, s in m.sets.items()} for n, m in norms.items()}
    used: dict[str, set[str]] = {name: set() for name in norms}
    for _ in range(2):
        for plan in step.plans().values():
            for name, norm in norms.items():
                used[name].add(f"{plan[norm.fed_by][0]}-{plan[norm.follows][0]}")
        step(images(8), torch.arange(8) % 10)
    for name, norm in norms.items():
        moved = {k for k, s in norm.sets.items() if not torch.equal(before[name][k]["running_mean"], s.running_mean)}
        learnt = {k for k, s in norm.sets.items() if not torch.equal(before[name][k]["weight"], s.weight)}
        assert moved == learnt == used[name]
    assert any(key not in ("8-8", "4-4", "2-2") for keys in used.values() for key in keys)


def test_recalibration_re_estimates_the_pairs_of_a_plan() -> None:
    mixed = add_transitions(small_resnet())
    before = copy.deepcopy(mixed.state_dict())
    plan = BitPlan({"layer1.1.conv2": 2}, default=4)
    recalibrate_norms(mixed, [images(8)], plan)
    changed = {key for key, value in mixed.state_dict().items() if not torch.equal(value, before[key])}
    assert "layer1.1.bn2.sets.4-2.running_mean" in changed
    assert "layer2.0.bn1.sets.2-4.running_mean" in changed
    assert not {"layer1.1.bn2.sets.4-4.running_mean", "layer2.0.bn1.sets.4-4.running_mean"} & changed
