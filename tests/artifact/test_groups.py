"""Scales of groups of inputs in the file: what is stored, that it gives training's scales back, and what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitdial import QuantConfig, Rule, load_trainable, prepare, read_artifact, save, set_bits
from bitdial import functional as bf
from bitdial.artifact import amend, sizes
from bitdial.errors import ArtifactError, ConfigError
from bitdial.nn import QuantLayer
from bitdial.planning.cost import measure_costs

OpenFile = Callable[[Path], Any]
NARROWING = ("double_rounding", "nested", "nested+4", "centred", "truncate", "adabits")
KINDS: dict[str, dict[str, Any]] = {
    "integer": {"group_size": 2},
    "float": {"group_size": 2, "group_scales": "float", "activations": "float"},
}


def refused(path: Path, match: str) -> None:
    with pytest.raises(ArtifactError, match=match):
        read_artifact(path)


def layers_of(model: nn.Module) -> dict[str, QuantLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}


# --- what is stored -----------------------------------------------------------------------------


def test_manifest_and_tensors(saved: Callable[..., Path], open_file: OpenFile) -> None:
    """conv has 4 inputs, left and right 6 and one weight; depth has 2, which is one group: a scale per channel."""
    expected = {"conv": 2, "depth": None, "left": 2, "right": 2}
    for kind, config in KINDS.items():
        file = open_file(saved(**config))
        assert file.manifest["version"] == 2
        assert {n: entry["group_size"] for n, entry in file.manifest["layers"].items()} == expected
        scales = {
            n: (t.dtype.name, t.shape) for n, t in file.tensors.items() if n.endswith(("weight_scale", "group_scale"))
        }
        if kind == "float":
            assert scales == {
                "conv/weight_scale": ("float32", (1, 6, 2)),
                "depth/weight_scale": ("float32", (1, 6)),
                "left/weight_scale": ("float32", (1, 6, 3)),
            }
            continue
        assert scales == {
            "conv/weight_scale": ("float32", (1, 6)),
            "conv/group_scale": ("uint8", (6, 2)),
            "depth/weight_scale": ("float32", (1, 6)),
            "left/weight_scale": ("float32", (1, 6)),
            "left/group_scale": ("uint8", (6, 3)),
        }
        for name in ("conv/group_scale", "left/group_scale"):
            assert (file.tensors[name].max(axis=1) == 15).all()  # the largest of a row
            assert len(np.unique(file.tensors[name])) > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bit_choices", [(8, 6, 4, 2), (5, 3, 2)])
def test_the_file_has_the_codes_and_scales_of_training(
    tmp_path: Path, prepared: Callable[..., nn.Module], kind: str, bit_choices: tuple[int, ...]
) -> None:
    for scheme in NARROWING:
        model = prepared(scheme=scheme, bit_choices=bit_choices, **KINDS[kind])
        save(model, tmp_path / "m")
        artifact, high = read_artifact(tmp_path / "m"), bit_choices[0]
        for name, layer in layers_of(model).items():
            owner, quantizer, rows = artifact.owner(name), layer.weight_quantizer, layer.weight_rows()
            scale = artifact.weight_scale(owner)
            assert torch.equal(scale, quantizer.scale_of(rows, high)), (scheme, name)
            multipliers = artifact.group_scale(owner)
            assert (multipliers is not None) == (kind == "integer" and name != "depth")
            if multipliers is not None:
                assert torch.equal(scale, artifact.row_scale(owner)[:, None] * multipliers)
            stored = artifact.codes(owner)
            for bits in bit_choices:
                codes = bf.narrow(stored, high=high, low=bits, scheme=scheme)
                assert torch.equal(codes, quantizer.codes(rows, bits)), (scheme, name, bits)
                values = bf.dequantize(codes, scale, shift=high - bits, scheme=scheme)
                assert torch.equal(values, quantizer(rows, bits)), (scheme, name, bits)


def test_training_goes_on_from_a_file(
    tmp_path: Path, prepared: Callable[..., nn.Module], small: Any, inputs: Any
) -> None:
    for kind, config in KINDS.items():
        for scheme in NARROWING:
            model = prepared(scheme=scheme, **config)
            save(model, tmp_path / "m")
            if scheme == "adabits" and kind == "integer":
                with pytest.raises(
                    ArtifactError, match=r"'conv': adabits takes its scales from the weights.*checkpoint"
                ):
                    load_trainable(tmp_path / "m", small())
                continue
            again = load_trainable(tmp_path / "m", small()).eval()
            for name, layer in layers_of(again).items():
                twin = layers_of(model)[name]
                assert layer.weight_quantizer.scale_shape == twin.weight_quantizer.scale_shape
                assert torch.equal(*(each.weight_quantizer.codes(each.weight_rows(), 8) for each in (layer, twin)))
            for bits in (8, 6, 4, 2):
                set_bits(model, bits)
                set_bits(again, bits)
                if scheme != "adabits":  # its scale comes from the weights, through tanh
                    assert torch.equal(again(inputs), model(inputs)), (scheme, bits)
            if scheme != "adabits":
                save(again, tmp_path / "again")
                one, other = read_artifact(tmp_path / "m"), read_artifact(tmp_path / "again")
                assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)


def test_sizes_and_costs_count_four_bytes_a_row_and_one_a_group(
    saved: Callable[..., Path], prepared: Callable[..., nn.Module], inputs: Any
) -> None:
    for kind, config in KINDS.items():
        artifact = read_artifact(saved(**config))
        found = sizes(artifact)
        groups = {"integer": 6 * 4 + 12 + 6 * 4 + 18, "float": 4 * (12 + 18)}[kind]
        biases = 4 * (6 + 6 + 6)
        activations = 0 if kind == "float" else 4 * 4 * 4
        assert found["scales"] == groups + 6 * 4 + biases + activations
        assert found["tensors"] == sum(t.nbytes for t in artifact.tensors.values())
        costs = measure_costs(prepared(**config), inputs)
        for bits in (8, 6, 4, 2):
            assert costs.of(bits)["bytes"] == found["separate"][bits]
        assert costs.layers["conv"].scale_bytes - 4 * 6 - (activations and 4) == {"integer": 36, "float": 48}[kind]


def test_scales_too_small_to_split_are_not_written(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    model: Any = prepared(group_size=2)
    with torch.no_grad():
        model.left.weight_quantizer.scale[2] = 1e-44
        model.left.weight[2] = 1e-42
    with pytest.raises(ArtifactError, match=r"layer 'left'.*too small for scales of two levels.*not written"):
        save(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


# --- hostile files ------------------------------------------------------------------------------


def put(name: str, value: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file.tensors[name] = value(file.tensors[name]) if callable(value) else value

    return change


def at(name: str, place: int, value: float) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file.tensors[name].reshape(-1)[place] = value

    return change


def size_of(layer: str, value: Any) -> Callable[[Any], None]:
    return lambda file: file.manifest["layers"][layer].update(group_size=value)


def both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda file: [change(file) for change in changes] and None


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no group_size": (
        lambda file: file.manifest["layers"]["conv"].pop("group_size"),
        "'conv'.*'group_size' is missing",
    ),
    "group_size 0": (size_of("conv", 0), "layer 'conv': its 4 inputs cannot be groups of 0"),
    "group_size -2": (size_of("conv", -2), "layer 'conv': its 4 inputs cannot be groups of -2"),
    "group_size 3": (size_of("conv", 3), "layer 'conv': its 4 inputs cannot be groups of 3"),
    "group_size of all": (size_of("conv", 4), "layer 'conv': its 4 inputs cannot be groups of 4"),
    "group_size 8": (size_of("conv", 8), "layer 'conv': its 4 inputs cannot be groups of 8"),
    "group_size 2^70": (size_of("conv", 2**70), "layer 'conv': its 4 inputs cannot be groups of"),
    "group_size 1": (size_of("conv", 1), "'conv/group_scale'.*expected torch.uint8 of shape .6, 4."),
    "group_size true": (size_of("conv", True), "'conv'.*group_size is True"),
    "group_size 2.0": (size_of("conv", 2.0), "'conv'.*group_size is 2.0"),
    "group_size text": (size_of("conv", "2"), "'conv'.*group_size is '2'"),
    "no groups, but multipliers": (size_of("conv", None), "'conv/group_scale' belongs to nothing"),
    "groups without multipliers": (
        lambda file: file.tensors.pop("conv/group_scale"),
        "layer 'conv': its activations are quantised.*no 'conv/group_scale'",
    ),
    "multipliers where there are none": (
        lambda file: file.tensors.update({"depth/group_scale": np.ones((6, 1), np.uint8)}),
        "'depth/group_scale' belongs to nothing",
    ),
    "multipliers of a tied layer": (
        lambda file: file.tensors.update({"right/group_scale": file.tensors["left/group_scale"]}),
        "'right/group_scale' belongs to nothing",
    ),
    "a multiplier of 0": (at("conv/group_scale", 3, 0), "'conv/group_scale' has multipliers that are not from 1 to 15"),
    "a multiplier of 16": (
        at("left/group_scale", 0, 16),
        "'left/group_scale' has multipliers that are not from 1 to 15",
    ),
    "a multiplier of 255": (at("left/group_scale", 9, 255), "'left/group_scale' has multipliers that are not"),
    "int8 multipliers": (put("conv/group_scale", lambda t: t.astype(np.int8)), "'conv/group_scale' is torch.int8"),
    "float multipliers": (
        put("conv/group_scale", lambda t: t.astype(np.float32)),
        "'conv/group_scale' is torch.float32",
    ),
    "multipliers the other way": (put("left/group_scale", lambda t: t.T.copy()), "'left/group_scale'.*shape .3, 6."),
    "multipliers in one line": (put("left/group_scale", lambda t: t.reshape(-1)), "'left/group_scale'.*shape .18,."),
    "too few multipliers": (put("left/group_scale", lambda t: t[:, :2].copy()), "'left/group_scale'.*shape .6, 2."),
    "a scale for each group beside multipliers": (
        put("conv/weight_scale", np.ones((1, 6, 2), np.float32)),
        "'conv/weight_scale'.*expected torch.float32 of shape .1, 6.",
    ),
    "one scale for all rows": (
        put("conv/weight_scale", np.ones((1, 1), np.float32)),
        "'conv/weight_scale'.*shape .1, 6.",
    ),
    "a zero row scale": (at("conv/weight_scale", 1, 0.0), "'conv/weight_scale' is not positive"),
    "a negative row scale": (at("conv/weight_scale", 1, -1.0), "'conv/weight_scale' is not positive"),
    "a row scale that is NaN": (at("conv/weight_scale", 1, np.nan), "'conv/weight_scale' holds NaN"),
    "a row scale that overflows with its multiplier": (
        both(at("conv/weight_scale", 0, 1e36), at("conv/group_scale", 0, 15)),
        "'conv/weight_scale' is so large that values overflow",
    ),
    "a row scale that overflows": (at("conv/weight_scale", 0, 3e38), "'conv/weight_scale' is so large"),
    "tied with other groups": (
        size_of("right", 3),
        "'right': it is tied to 'left', which does not store such a weight",
    ),
    "tied without groups": (size_of("right", None), "'right': it is tied to 'left', which does not store such"),
    "a scheme without groups": (
        lambda file: file.manifest.update(scheme="lsq"),
        "layer 'conv': groups of inputs do not go with 'lsq'",
    ),
}


def test_bad_groups(saved: Callable[..., Path], open_file: OpenFile) -> None:
    for change, match in BAD.values():
        path = saved(group_size=2)
        file = open_file(path)
        read_artifact(file.write(path))  # signed by hand, it is good; only the change makes it bad
        change(file)
        refused(file.write(path), match)


def test_other_multipliers_are_as_good(saved: Callable[..., Path], open_file: OpenFile) -> None:
    path = saved(group_size=2)
    file = open_file(path)
    before = read_artifact(path)
    file.tensors["conv/group_scale"][:] = 15
    after = read_artifact(file.write(path))
    assert torch.equal(after.weight_scale("conv"), before.row_scale("conv")[:, None] * torch.full((6, 2), 15.0))


def test_bad_float_groups(saved: Callable[..., Path], open_file: OpenFile) -> None:
    cases: list[tuple[Callable[[Any], Any], str]] = [
        (put("conv/weight_scale", lambda t: t[:, :, :1].copy()), "'conv/weight_scale'.*expected.*shape .1, 6, 2."),
        (put("conv/weight_scale", lambda t: t[0].copy()), "'conv/weight_scale'.*expected.*shape .1, 6, 2."),
        (at("conv/weight_scale", 11, 0.0), "'conv/weight_scale' is not positive"),
        (at("left/weight_scale", 11, np.inf), "'left/weight_scale' holds NaN or infinity"),
        (at("left/weight_scale", 11, 3e38), "'left/weight_scale' is so large"),
        (size_of("conv", None), "'conv/weight_scale' is torch.float32 of shape .1, 6, 2."),
        (
            lambda file: (
                file.manifest["layers"]["right"].update(activations="signed"),
                file.tensors.update({"right/act_scale": np.ones(4, np.float32)}),
            ),
            "layer 'right': its activations are quantised.*no 'left/group_scale'",
        ),
    ]
    for change, match in cases:
        path = saved(**KINDS["float"])
        file = open_file(path)
        change(file)
        refused(file.write(path), match)


def test_a_file_of_others_runs_but_is_not_trained_on(
    saved: Callable[..., Path], open_file: OpenFile, small: Any
) -> None:
    """Multipliers need not reach 15; but training splits scales anew, by the largest."""
    path = saved(group_size=2)
    file = open_file(path)
    file.tensors["conv/group_scale"][2] = (3, 7)
    read_artifact(file.write(path))
    with pytest.raises(ArtifactError, match=r"layer 'conv': no multiplier of a row.*the file runs"):
        load_trainable(path, small())


# --- files of version 1 -------------------------------------------------------------------------


def as_version_1(file: Any) -> None:
    file.manifest["version"] = 1
    del file.manifest["graph"], file.manifest["report"]
    for entry in file.manifest["layers"].values():
        del entry["group_size"]


def test_files_of_version_1_keep_loading(saved: Callable[..., Path], open_file: OpenFile) -> None:
    path = saved()
    new, file = read_artifact(path), open_file(path)
    as_version_1(file)
    old = read_artifact(file.write(path))
    assert new.manifest.pop("graph")  # which version 1 did not have
    assert new.manifest.pop("report")
    assert old.manifest == new.manifest  # brought to the present version
    assert all(torch.equal(old.tensors[key], new.tensors[key]) for key in new.tensors)
    amend(path, metrics={"x": 1})
    again = read_artifact(path)
    assert open_file(path).manifest["version"] == 2
    assert again.layers == new.layers


def test_version_1_has_no_groups_and_two_kinds(saved: Callable[..., Path], open_file: OpenFile) -> None:
    for config, change in (
        ({}, lambda file: file.manifest["layers"]["conv"].update(group_size=None)),
        ({"group_size": 2}, lambda file: file.manifest["layers"]["conv"].update(group_size=2)),
        ({}, lambda file: file.manifest["layers"]["conv"].update(type="ConvTranspose2d", output_padding=[0, 0])),
    ):
        path = saved(**config)
        file = open_file(path)
        as_version_1(file)
        change(file)
        refused(file.write(path), "layer 'conv': version 1 has Conv2d and Linear, and no 'group_size'")
    path = saved(group_size=2)
    file = open_file(path)
    as_version_1(file)
    refused(file.write(path), "group_scale' belongs to nothing")


# --- what prepare makes of the settings ---------------------------------------------------------


def test_rules_set_and_take_away_groups(small: Any, inputs: Any) -> None:
    def shapes(*rules: Rule, **config: Any) -> list[tuple[int, ...]]:
        model: Any = prepare(small(), QuantConfig(start="3std", rules=rules, **config), inputs)
        return [getattr(model, name).weight_quantizer.scale_shape for name in ("conv", "depth", "left")]

    assert shapes() == [(6,), (6,), (6,)]
    assert shapes(group_size=2) == [(6, 2), (6,), (6, 3)]
    assert shapes(Rule(pattern="conv", group_size=0), group_size=2) == [(6,), (6,), (6, 3)]
    assert shapes(Rule(type="Conv2d", group_size=1)) == [(6, 4), (6, 2), (6,)]
    assert shapes(Rule(pattern="conv", per_channel=False), group_size=2) == [(1,), (6,), (6, 3)]
    assert shapes(Rule(pattern="conv", group_size=2), per_channel=False) == [(6, 2), (1,), (1,)]
    assert shapes(Rule(pattern="*", group_size=3), Rule(pattern="conv", group_size=4)) == [(6,), (6,), (6, 2)]
    with pytest.raises(ConfigError, match=r"layer 'conv': its 4 inputs are no multiple of group_size=3.*Rule\("):
        shapes(group_size=3)
    with pytest.raises(ConfigError, match=r"'right': it is tied to another layer, 'left'.*group_size"):
        shapes(Rule(pattern="right", group_size=3), group_size=2)


def test_float_group_scales_are_for_float_activations(small: Any, inputs: Any) -> None:
    config = {"group_size": 2, "group_scales": "float", "start": "3std"}
    with pytest.raises(ConfigError, match=r"layer 'conv': its activations are quantised.*group_scales='integer', or"):
        prepare(small(), QuantConfig(**config), inputs)
    rules = tuple(Rule(pattern=name, activations="float") for name in ("conv", "left", "right"))
    model: Any = prepare(small(), QuantConfig(**config, rules=rules), inputs)
    assert model.depth.act_quantizer is not None  # one group: a scale per channel
    assert model.conv.weight_quantizer.scale_shape == (6, 2)
