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
    load,
    load_trainable,
    prepare,
    read_artifact,
    recalibrate_norms,
    save,
    set_bits,
)
from bitdial.artifact import sizes
from bitdial.container import read_container, write_container
from bitdial.errors import ArtifactError, ConfigError
from bitdial.nn import UNKNOWN, QuantLayer, SwitchableBatchNorm, TransitionalBatchNorm


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


def test_transitions_change_no_output_at_first() -> None:
    model = small_resnet().eval()
    with torch.no_grad():
        for number, module in enumerate(m for m in model.modules() if isinstance(m, SwitchableBatchNorm)):
            module.sets["2"].bias.fill_(0.1 * number)
    mixed = add_transitions(model)
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
    once = add_transitions(small_resnet())
    copy.deepcopy(once)


# --- in a file ----------------------------------------------------------------------------------


def test_a_file_keeps_the_pairs(tmp_path: Path) -> None:
    model = small_resnet((8, 4, 2))
    mixed = add_transitions(model).eval()
    generator = torch.Generator().manual_seed(1)
    for module in mixed.modules():
        if isinstance(module, TransitionalBatchNorm):
            for norm in module.sets.values():
                norm.running_mean.normal_(generator=generator).mul_(0.1)  # type: ignore[union-attr, operator]
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
    again = add_transitions(load_trainable(tmp_path / "plain.safetensors"))
    assert {n for n, m in again.named_modules() if isinstance(m, TransitionalBatchNorm)} == {
        n for n, m in mixed.named_modules() if isinstance(m, TransitionalBatchNorm)
    }


def test_what_transitions_cost(tmp_path: Path) -> None:
    """Norms of 4 + 8 + 16 channels: three sets of four numbers and a count before, nine after, behind fed layers."""
    model = small_resnet((8, 4, 2))
    for name, each in (("plain", model), ("mixed", add_transitions(model))):
        save(each, tmp_path / f"{name}.safetensors")
    plain, mixed = (sizes(read_artifact(tmp_path / f"{name}.safetensors")) for name in ("plain", "mixed"))
    norms = {"bn1": 4, "layer1": [4] * 4, "layer2": [8] * 5, "layer3": [16] * 5}
    total = 2 * (4 * 4 * 4 + 8) + 3 * (4 * 4 * 4 + 8) + 5 * (4 * 4 * 8 + 8) + 5 * (4 * 4 * 16 + 8)
    assert sum(len(v) if isinstance(v, list) else 1 for v in norms.values()) == 15
    assert plain["norms"] == 3 * total
    unpaired = 2 * (4 * 4 * 4 + 8)  # the norm of the stem, and that of the layer which the stem feeds
    assert mixed["norms"] == 9 * (total - unpaired) + 3 * unpaired
    assert mixed["separate"] == plain["separate"]


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
