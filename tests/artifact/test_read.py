"""Reading: files that are damaged, wrong or hostile, and models that do not fit. Each is refused by ArtifactError."""

import copy
import functools
import json
import operator
import os
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bitdial
from bitdial import (
    BitPlan,
    JointStep,
    TrainConfig,
    build_model,
    load,
    load_trainable,
    prepare,
    read_artifact,
    save,
    set_bits,
)
from bitdial.errors import ArtifactError, BitdialError
from bitdial.prepare.config import QuantConfig
from bitdial.train import save_checkpoint

OpenFile = Callable[[Path], Any]
HERE = {**os.environ, "PYTHONPATH": str(Path(bitdial.__file__).parent.parent)}  # other processes test this tree too


def refused(path: Path, match: str, model: nn.Module | None = None) -> None:
    """Refused with the file's name and `match` in the message; with `model`, by load."""
    with pytest.raises(ArtifactError, match=match) as caught:
        read_artifact(path) if model is None else load(path, model)
    assert type(caught.value) is ArtifactError
    if model is None:
        assert str(path) in str(caught.value)


# --- the frame --------------------------------------------------------------------------------------


def test_truncated(saved: Callable[..., Path]) -> None:
    path = saved()
    data = path.read_bytes()
    for length in (*range(0, len(data), 97), len(data) - 1):
        path.unlink()  # ext4 waits for the disk where a file is written over
        path.write_bytes(data[:length])
        refused(path, "truncated or damaged")


def test_a_flipped_bit_in_each_tensor(saved: Callable[..., Path], open_file: OpenFile) -> None:
    path = saved()
    file = open_file(path)
    data = path.read_bytes()
    for entry in file.entries.values():
        flipped = bytearray(data)
        flipped[file.header_bytes + entry["data_offsets"][0]] ^= 1
        path.write_bytes(flipped)
        refused(path, "damaged")


def test_another_version(saved: Callable[..., Path], open_file: OpenFile) -> None:
    path = saved()
    file = open_file(path)
    for version in (0, -1, 3, 999, 10**400, "1", "2", None, 1.0, 2.0, True, [1], [2], {}):
        file.manifest["version"] = version
        refused(file.write(path), "version")
    del file.manifest["version"]
    refused(file.write(path), "version is None, this bitdial reads 1 and 2; use the release of bitdial that wrote it")


@pytest.mark.parametrize("bit_choices", [(8, 4, 2), (6, 4, 2)])
def test_codes_that_a_phase_leaves_out(saved: Callable[..., Path], open_file: OpenFile, bit_choices: Any) -> None:
    """With a phase of 8 the lowest 8 codes stand for values below all weight integers: no file has them."""
    path = saved(scheme="nested+8", bit_choices=bit_choices)
    file, least = open_file(path), -(2 ** (bit_choices[0] - 1)) + 8
    read_artifact(file.write(path))
    codes = file.tensors["depth/codes"].reshape(-1)
    if bit_choices[0] == 8:
        assert codes.min() >= least
        codes[3] = least - 1
    else:
        codes[0] = codes[0] & 0xC0 | (least - 1) & 0x3F  # the first 6 bits of the stream are code 0
    refused(file.write(path), f"layer 'depth': code {least - 1} is below {least}")
    for scheme, problem in (("nested+33", "a phase of 33 does not fit"), ("nested+08", "is not known"),
                            ("nested+" + "9" * 5000, "is not known")):  # fmt: skip
        file.manifest["scheme"] = scheme
        refused(file.write(path), problem)


def test_a_checkpoint(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    step = JointStep(prepared(), TrainConfig(epochs=1), steps_per_epoch=1)
    save_checkpoint(tmp_path / "checkpoint", step)
    refused(tmp_path / "checkpoint", "not an artifact .a checkpoint")


@pytest.mark.parametrize(
    "lie",
    [
        {"shape": [6, 4, 3, 4]},
        {"shape": [6, 4, 9]},
        {"shape": [4, 6, 3, 3]},
        {"shape": [2**62, 4]},
        {"dtype": "U8"},
        {"dtype": "F32"},
        {"data_offsets": [0, 2**40]},
    ],
    ids=str,
)
def test_a_header_that_lies(saved: Callable[..., Path], open_file: OpenFile, lie: dict[str, Any]) -> None:
    path = saved()
    file = open_file(path)
    header = {"__metadata__": file.metadata, **file.entries}
    header["conv/codes"] = {**header["conv/codes"], **lie}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + file.buffer)
    refused(path, ".")


@pytest.mark.parametrize("depth", [10, 500, 900, 990, 1000, 1100, 5_000, 200_000])
@pytest.mark.parametrize("field", ["version", "written_by", "scheme", "bit_choices", "layers", "plans", "metrics"])
def test_a_deeply_nested_manifest(saved: Callable[..., Path], open_file: OpenFile, field: str, depth: int) -> None:
    path = saved()
    file = open_file(path)
    file.manifest[field] = {"x": {"layers": {"conv": "@"}, "default": None}} if field == "plans" else {"x": "@"}
    for opening, closing in (("[", "]"), ('{"x":', "}")):
        text = json.dumps(file.manifest).replace('"@"', opening * depth + "1" + closing * depth)
        file.write(path, text=text)
        if field != "metrics" or depth > 1000:
            refused(path, ".")
        elif depth < 900:
            read_artifact(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "1", '"artifact"', "{", "{}", '{"kind":"artifact"', "9" * 5000])
def test_a_manifest_that_is_no_object(saved: Callable[..., Path], open_file: OpenFile, text: str) -> None:
    path = saved()
    refused(open_file(path).write(path, text=text), "manifest|not an artifact")


# --- the content: each change alone, signed anew, named in the refusal --------------------------------


def set_tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], None]:
    def apply(file: Any) -> None:
        file.tensors[name] = change(file.tensors[name])

    return apply


def set_value(name: str, value: float, at: int = 0) -> Callable[[Any], None]:
    def apply(file: Any) -> None:
        file.tensors[name].reshape(-1)[at] = value

    return apply


def set_field(*path: Any, to: Any) -> Callable[[Any], None]:
    def apply(file: Any) -> None:
        entry = file.manifest
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = to

    return apply


def drop_tensor(name: str) -> Callable[[Any], None]:
    return lambda file: file.tensors.pop(name)


def add_tensor(name: str) -> Callable[[Any], None]:
    def apply(file: Any) -> None:
        file.tensors[name] = np.ones(3, np.float32)

    return apply


def drop_field(*path: Any) -> Callable[[Any], None]:
    def apply(file: Any) -> None:
        entry = file.manifest
        for key in path[:-1]:
            entry = entry[key]
        del entry[path[-1]]

    return apply


def plan(layers: dict[str, Any], default: Any = None) -> Callable[[Any], None]:
    return set_field("plans", "night", to={"layers": layers, "default": default})


BAD: dict[str, tuple[Callable[[Any], None], str]] = {
    "codes missing": (drop_tensor("conv/codes"), "'conv/codes' is missing"),
    "scale missing": (drop_tensor("left/weight_scale"), "'left/weight_scale' is missing"),
    "bias missing": (drop_tensor("right/bias"), "'right/bias' is missing"),
    "act scale missing": (drop_tensor("depth/act_scale"), "'depth/act_scale' is missing"),
    "zero-point missing": (drop_tensor("depth/act_zero_point"), "'depth/act_zero_point' is missing"),
    "variance missing": (drop_tensor("norm/running_var"), "'norm/running_var' is missing"),
    "extra tensor": (add_tensor("conv/extra"), "'conv/extra' belongs to nothing"),
    "extra bias": (add_tensor("depth/bias"), "'depth/bias' belongs to nothing"),
    "tied codes": (add_tensor("right/codes"), "'right/codes' belongs to nothing"),
    "float copy": (add_tensor("conv/weight"), "'conv/weight' belongs to nothing"),
    "tensor without a name": (add_tensor(""), "'' belongs to nothing"),
    "codes int16": (set_tensor("conv/codes", lambda t: t.astype(np.int16)), "'conv/codes'.*int16"),
    "codes uint8": (set_tensor("conv/codes", lambda t: t.view(np.uint8)), "'conv/codes'.*uint8"),
    "codes float": (set_tensor("conv/codes", lambda t: t.astype(np.float32)), "'conv/codes'.*float32"),
    "codes flat": (set_tensor("conv/codes", lambda t: t.reshape(-1)), r"'conv/codes'.*\(216,\)"),
    "codes transposed": (set_tensor("conv/codes", lambda t: t.swapaxes(0, 1)), r"'conv/codes'.*\(4, 6, 3, 3\)"),
    "scale double": (set_tensor("conv/weight_scale", lambda t: t.astype(np.float64)), "'conv/weight_scale'.*float64"),
    "scale flat": (set_tensor("conv/weight_scale", lambda t: t[0]), "'conv/weight_scale'"),
    "scale twice": (set_tensor("conv/weight_scale", lambda t: np.repeat(t, 2, 0)), "'conv/weight_scale'"),
    "five scales": (set_tensor("conv/weight_scale", lambda t: t[:, :5]), "'conv'.*5 weight scales for 6"),
    "no scales": (set_tensor("conv/weight_scale", lambda t: t[:, :0]), "'conv'.*0 weight scales for 6"),
    "act scale short": (set_tensor("left/act_scale", lambda t: t[:3]), "'left/act_scale'"),
    "bias long": (set_tensor("left/bias", lambda t: np.append(t, t[:1])), "'left/bias'"),
    "mean short": (set_tensor("norm/running_mean", lambda t: t[:3]), "'norm/running_mean'"),
    "batches int8": (set_tensor("norm/num_batches_tracked", lambda t: t.astype(np.int8)), "'norm/num_batches"),
    "zero scale": (set_value("conv/weight_scale", 0.0), "scale 'conv/weight_scale' is not positive"),
    "negative zero scale": (set_value("conv/weight_scale", -0.0), "scale 'conv/weight_scale' is not positive"),
    "negative scale": (set_value("left/weight_scale", -1e-3, at=5), "scale 'left/weight_scale' is not positive"),
    "NaN scale": (set_value("conv/weight_scale", np.nan, at=2), "'conv/weight_scale' holds NaN"),
    "infinite scale": (set_value("conv/weight_scale", np.inf), "'conv/weight_scale' holds NaN or infinity"),
    "zero act scale": (set_value("depth/act_scale", 0.0, at=3), "scale 'depth/act_scale' is not positive"),
    "negative act scale": (set_value("depth/act_scale", -1.0), "scale 'depth/act_scale' is not positive"),
    "NaN act scale": (set_value("depth/act_scale", np.nan), "'depth/act_scale' holds NaN"),
    "NaN bias": (set_value("conv/bias", np.nan), "'conv/bias' holds NaN"),
    "infinite mean": (set_value("norm/running_mean", -np.inf), "'norm/running_mean' holds NaN or infinity"),
    "NaN norm weight": (set_value("norm/weight", np.nan), "'norm/weight' holds NaN"),
    "negative variance": (set_value("norm/running_var", -1e-9, at=7), "norm 'norm'.*variance is negative"),
    "NaN variance": (set_value("norm/running_var", np.nan), "'norm/running_var' holds NaN"),
    "NaN in a float layer": (set_value(".float/head.weight", np.nan), r"head\.weight"),
    "2-bit zero-point 4": (set_value("left/act_zero_point", 4, at=3), "'left'.*zero-point 4 does not fit 2 bits"),
    "6-bit zero-point 64": (set_value("left/act_zero_point", 64, at=1), "'left'.*zero-point 64 does not fit 6 bits"),
    "unknown scheme": (set_field("scheme", to="pickle"), "scheme='pickle' is not known"),
    "scheme that cannot narrow": (set_field("scheme", to="lsq"), "'conv/weight' is missing"),
    "unknown ties": (set_field("ties", to="down"), "tie rule 'down' is not known"),
    "unknown activations": (set_field("layers", "left", "activations", to="ternary"), "'left'.*'ternary'"),
    "activations without zero-point": (set_field("layers", "left", "activations", to="signed"), "act_zero_point"),
    "no activations": (set_field("layers", "left", "activations", to="float"), "'left/act_"),
    "no layers": (set_field("layers", to={}), "no quantised layer"),
    "layer without tensors": (
        lambda file: file.manifest["layers"].update(ghost=file.manifest["layers"]["left"]),
        "'ghost/codes' is missing",
    ),
    "layer dropped": (drop_field("layers", "depth"), "'depth/act_scale' belongs to nothing|follows|fed by 'depth'"),
    "three widths": (set_field("bit_choices", to=[8, 6, 4]), "'conv/act_scale'"),
    "other widths": (set_field("bit_choices", to=[6, 5, 4, 2]), "'conv/codes'"),
    "ascending widths": (set_field("bit_choices", to=[2, 4, 6, 8]), "descending"),
    "16 bits": (set_field("bit_choices", to=[16, 6, 4, 2]), "whole numbers from 2 to 8"),
    "no widths": (set_field("bit_choices", to=[]), "bit_choices"),
    "other shape": (set_field("layers", "conv", "shape", to=[6, 4, 3, 4]), "'conv/codes'"),
    "shape of three": (set_field("layers", "conv", "shape", to=[6, 4, 9]), "'conv'.*not the shape of a Conv2d"),
    "shape of zero": (set_field("layers", "conv", "shape", to=[0, 4, 3, 3]), "'conv'.*not the shape"),
    "negative shape": (set_field("layers", "conv", "shape", to=[-6, -4, 3, 3]), "'conv'.*not the shape"),
    "huge shape": (set_field("layers", "left", "shape", to=[2**31, 2**31]), "'left'.*not the shape"),
    "Bilinear": (set_field("layers", "conv", "type", to="Bilinear"), "'conv'.*'Bilinear' is not one of Conv1d, Conv2d"),
    "a list for a type": (set_field("layers", "conv", "type", to=["Conv2d"]), "'conv'.*is not one of Conv1d, Conv2d"),
    "conv called Linear": (set_field("layers", "conv", "type", to="Linear"), "'conv'"),
    "negative stride": (set_field("layers", "conv", "stride", to=[-1, 1]), "'conv'.*stride"),
    "huge dilation": (set_field("layers", "conv", "dilation", to=[2**31, 1]), "'conv'.*dilation"),
    "follows nothing": (set_field("norms", "norm", "follows", to="stem"), "norm 'norm'.*'stem'"),
    "negative eps": (set_field("norms", "norm", "eps", to=-1e-5), "norm 'norm'.*eps"),
    "NaN eps": (set_field("norms", "norm", "eps", to=float("nan")), "norm 'norm'.*eps|NaN"),
    "other features": (set_field("norms", "norm", "num_features", to=7), "'norm/weight'"),
    "huge features": (set_field("norms", "norm", "num_features", to=2**40), "norm 'norm'.*num_features"),
    "not affine": (set_field("norms", "norm", "affine", to=False), "'norm/bias' belongs to nothing"),
    "tied nowhere": (set_field("layers", "right", "tied_to", to="ghost"), "'right'.*tied to 'ghost'"),
    "tied to itself": (set_field("layers", "right", "tied_to", to="right"), "'right'.*tied to 'right'"),
    "tied to another shape": (set_field("layers", "right", "tied_to", to="conv"), "'right'.*tied to 'conv'"),
    "tied in a circle": (set_field("layers", "left", "tied_to", to="right"), "'left'.*tied to 'right'"),
    "alias to nowhere": (set_field("aliases", "same_gain", to="loss"), "alias 'same_gain' of 'loss' leads nowhere"),
    "alias to itself": (set_field("aliases", "same_gain", to="same_gain"), "alias 'same_gain'"),
    "alias of a stored tensor": (set_field("aliases", "gain", to="head.bias"), "alias 'gain'"),
    "alias to a layer": (set_field("aliases", "same_gain", to="conv.weight"), "alias 'same_gain'"),
    "plan for no such layer": (plan({"stem": [8, 8]}, [8, 8]), "plan 'night'"),
    "plan at no such width": (plan({"conv": [5, 8]}, [8, 8]), "plan 'night'"),
    "plan default at no such width": (plan({}, [3, 3]), "plan 'night'"),
    "plan that is not whole": (plan({"conv": [8, 8]}), "plan 'night' does not cover"),
    "empty plan": (plan({}), "plan 'night'"),
    "plan of three": (plan({"conv": [8, 8, 8]}, [8, 8]), "plan 'night'"),
    "plan at 8.0": (plan({"conv": [8.0, 8]}, [8, 8]), "plan 'night'"),
    "plan at true": (plan({"conv": [True, True]}, [8, 8]), "plan 'night'"),
    "decomposed list": (set_field("decomposed", to=[]), "decomposed is .* not of the right type"),
    "unknown decomposition": (
        set_field("decomposed", to={"left": "Mamba"}),
        "'left': 'Mamba' is not one of Multi",
    ),
    "decomposed number": (set_field("decomposed", to={"left": 1}), "module 'left': 1 is not one of"),
    "unknown entry": (set_field("run_this", to="rm"), "'run_this' is unknown"),
    "missing entry": (drop_field("metrics"), "'metrics' is missing"),
    "unknown layer entry": (set_field("layers", "conv", "hook", to="os.system"), "'conv'.*'hook' is unknown"),
    "missing layer entry": (drop_field("layers", "conv", "groups"), "'conv'.*'groups' is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_content(saved: Callable[..., Path], open_file: OpenFile, case: str) -> None:
    path = saved(activations="asymmetric", plans={"day": BitPlan(default=8)})
    change, match = BAD[case]
    file = open_file(path)
    read_artifact(file.write(path))  # signed by hand, it is good; only the change makes it bad
    change(file)
    refused(file.write(path), match)


@pytest.mark.parametrize("layer", ["depth", "left"])
def test_codes_with_nonzero_padding(saved: Callable[..., Path], open_file: OpenFile, layer: str) -> None:
    path = saved(bit_choices=(3, 2))
    file = open_file(path)
    for bit in range(4, 8):  # 324 and 108 bits: half of the last byte is padding
        data = file.tensors[f"{layer}/codes"].copy()
        file.tensors[f"{layer}/codes"][-1] |= 1 << bit
        refused(file.write(path), "padding")
        file.tensors[f"{layer}/codes"] = data


def test_the_refusal_of_nonzero_padding_names_the_layer(saved: Callable[..., Path], open_file: OpenFile) -> None:
    path = saved(bit_choices=(3, 2))
    file = open_file(path)
    file.tensors["left/codes"][-1] |= 0x80
    refused(file.write(path), "left")


@pytest.mark.parametrize("change", [lambda t: t[:-1], lambda t: np.append(t, t[:1]), lambda t: t[None]])
def test_packed_codes_of_another_size(saved: Callable[..., Path], open_file: OpenFile, change: Any) -> None:
    path = saved(bit_choices=(3, 2))
    file = open_file(path)
    file.tensors["depth/codes"] = change(file.tensors["depth/codes"])
    refused(file.write(path), "'depth/codes'")


def test_a_shape_whose_product_overflows(saved: Callable[..., Path], open_file: OpenFile) -> None:
    """2^64 weights are not 0 weights."""
    path = saved(bit_choices=(3, 2))
    file = open_file(path)
    file.manifest["layers"]["depth"]["shape"] = [65536] * 4
    file.tensors["depth/codes"] = np.zeros(0, np.uint8)
    file.tensors["depth/weight_scale"] = np.ones((1, 1), np.float32)
    refused(file.write(path), "depth")


@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "nested+8", "centred"])
def test_a_scale_that_overflows_at_the_lowest_width(
    saved: Callable[..., Path], small: Callable[..., nn.Module], open_file: OpenFile, scheme: str
) -> None:
    """Finite in the file, but 2^6 times that is not, and 0 times infinity is NaN; refused, or never seen by a model."""
    path = saved(scheme=scheme)
    file = open_file(path)
    file.tensors["conv/weight_scale"][0, 0] = 3e38
    file.write(path)
    try:
        live = load(path, small())
    except ArtifactError:
        return
    for bits in (8, 6, 4, 2):
        set_bits(live, bits)
        assert bool(torch.isfinite(live.conv.engine.active).all()), bits


# --- hostile types: every field of the manifest, every kind of value ----------------------------------

WRONG: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**63),
    10**400,
    0.5,
    -1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "conv",
    "Linear",
    "\x00",
    "\ud800",
    "../../etc/passwd",
    "x" * 10_000,
    [],
    [None],
    [[]],
    [8, [4]],
    ["8", "4"],
    [2**63] * 4,
    {},
    {"": None},
    {"type": "Linear"},
    {"layers": {}, "default": None},
]


FIELDS = ["kind", "version", "written_by", "scheme", "ties", "bit_choices", "layers", "norms", "aliases"]
FIELDS += ["architecture", "plans", "metrics"]


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every entry in a JSON value, inner ones too."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*before, key)
        yield from paths(inner, (*before, key))


def harmless(path: tuple[Any, ...], value: Any) -> bool:
    """Whether a file with `value` at `path` may be accepted."""
    if path[:1] == ("norms",) and path[2:] == ("momentum",):
        return value is None or type(value) is float
    if path[:1] == ("layers",) and path[2:] == ("fed_by",):
        return value in (None, "") or (value == "conv" and path[1] != "conv")  # none, not known, another layer
    if path == ("version",):
        return type(value) is int and value == 1  # such a file may be one of version 1
    if path == ("written_by",):
        return isinstance(value, str)
    if path == ("metrics",):
        return isinstance(value, dict)
    if path == ("architecture",):
        return value is None or isinstance(value, dict)
    return (path[0] == "plans" and value == {}) or path[0] in ("metrics", "architecture")


def outcome(path: Path, model: nn.Module | None) -> str:
    try:
        load(path, model)
    except ArtifactError as problem:
        return "refused" if type(problem) is ArtifactError else repr(problem)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:200]
    return "accepted"


def attack(path: Path, file: Any, model: nn.Module, where: tuple[Any, ...], value: Any) -> str | None:
    """None where `value` at `where` in the manifest is met as it should be, else what happened."""
    before = functools.reduce(operator.getitem, where, file.manifest)
    if type(before) is type(value) and before == value:
        return None
    set_field(*where, to=value)(file)
    file.write(path)
    set_field(*where, to=before)(file)
    found = outcome(path, model)
    if found == "refused" or (found == "accepted" and harmless(where, value)):
        return None
    return f"{where} = {str(value)[:60]!r}: {found}"


@pytest.mark.parametrize(("field", "config"), [*((f, {}) for f in FIELDS), ("layers", {"group_size": 2})])
def test_wrong_types_everywhere(
    saved: Callable[..., Path], small: Callable[..., nn.Module], open_file: OpenFile, field: str, config: dict[str, Any]
) -> None:
    plans = {"day": BitPlan({"conv": (8, 4)}, default=8)}
    path = saved(activations="asymmetric", plans=plans, metrics={"x": [1]}, **config)
    file, model = open_file(path), small()
    spots = [(field, *inner) for inner in paths(file.manifest[field])]
    problems = [p for where in [(field,), *spots] for value in WRONG if (p := attack(path, file, model, where, value))]
    assert problems == []


@pytest.mark.parametrize("config", [{}, {"group_size": 2}], ids=str)
def test_every_entry_is_needed(
    saved: Callable[..., Path], small: Callable[..., nn.Module], open_file: OpenFile, config: dict[str, Any]
) -> None:
    plans = {"day": BitPlan({"conv": (8, 4)}, default=8)}
    path = saved(activations="asymmetric", plans=plans, metrics={"x": [1]}, **config)
    file, model = open_file(path), small()
    problems = []
    for where in paths(file.manifest):
        changed = copy.deepcopy(file)
        drop_field(*where)(changed)
        changed.write(path)
        found = outcome(path, model)
        fine = where in (("plans", "day"), ("metrics", "x"), ("metrics", "x", 0), ("plans", "day", "layers", "conv"))
        fine |= where in (("graph",), ("report",)) or (where[0] == "report" and len(where) == 3)  # of one of its lists
        if found != ("accepted" if fine else "refused"):
            problems.append(f"{where}: {found}")
    assert problems == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_json_anywhere(
    saved: Callable[..., Path], small: Callable[..., nn.Module], open_file: OpenFile, data: st.DataObject
) -> None:
    path = saved(activations="asymmetric", plans={"day": BitPlan({"conv": (8, 4)}, default=8)}, metrics={"x": [1]})
    file = open_file(path)
    where = data.draw(st.sampled_from(sorted(paths(file.manifest), key=str)))
    set_field(*where, to=data.draw(JSON))(file)
    assert outcome(file.write(path), small()) in ("refused", "accepted")


# --- hostile architectures ----------------------------------------------------------------------------


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    """The file of a model that bitdial can build by itself."""
    path = tmp_path / "shipped"
    model = build_model("cifar_resnet", blocks=1, width=4, in_channels=1, num_classes=3)
    save(prepare(model, QuantConfig(start="3std"), torch.randn(2, 1, 8, 8)), path)
    return path


@pytest.mark.parametrize(
    "architecture",
    [
        {},
        {"name": "cifar_resnet"},
        {"arguments": {}},
        {"name": "os.system", "arguments": {"command": "id"}},
        {"name": "__class__", "arguments": {}},
        {"name": ["cifar_resnet"], "arguments": {}},
        {"name": {}, "arguments": {}},
        {"name": None, "arguments": {}},
        {"name": "cifar_resnet", "arguments": None},
        {"name": "cifar_resnet", "arguments": [1, 2]},
        {"name": "cifar_resnet", "arguments": "width"},
        {"name": "cifar_resnet", "arguments": {"name": "resnet50"}},
        {"name": "cifar_resnet", "arguments": {"self": 1}},
        {"name": "cifar_resnet", "arguments": {"": 1}},
        {"name": "cifar_resnet", "arguments": {"width": "4"}},
        {"name": "cifar_resnet", "arguments": {"width": 4.0}},
        {"name": "cifar_resnet", "arguments": {"width": True}},
        {"name": "cifar_resnet", "arguments": {"width": [4]}},
        {"name": "cifar_resnet", "arguments": {"width": 0}},
        {"name": "cifar_resnet", "arguments": {"width": -4}},
        {"name": "cifar_resnet", "arguments": {"width": 5}},
        {"name": "cifar_resnet", "arguments": {"width": 10**400}},
        {"name": "mobilenet_v2", "arguments": {"dropout": 5.0}},
        {"name": "mobilenet_v2", "arguments": {"width_mult": 1.7e308}},
        {"name": "mobilenet_v2", "arguments": {"width_mult": 0.0}},
        {"name": "tiny_transformer", "arguments": {"heads": 3}},
        {"name": "tiny_transformer", "arguments": {"heads": 2**62}},
        {"name": "cifar_resnet", "arguments": {}, "code": "import os"},
    ],
    ids=lambda a: str(a)[:70],
)
def test_hostile_architectures(shipped: Path, open_file: OpenFile, architecture: Any) -> None:
    file = open_file(shipped)
    file.manifest["architecture"] = architecture
    file.write(shipped)
    model = build_model("cifar_resnet", blocks=1, width=4, in_channels=1, num_classes=3)
    assert outcome(shipped, None) == "refused"
    assert outcome(shipped, model) == "accepted"  # who brings a model does not need the file's word for it


def test_architectures_of_endless_depth(shipped: Path, open_file: OpenFile) -> None:
    """Layers without memory still take time, and a billion of them for ever."""
    deep = [
        ("cifar_resnet", {"blocks": 10**9, "width": 4}),
        ("tiny_transformer", {"depth": 10**9, "width": 4, "heads": 1}),
    ]
    script = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (12, 12))  # seconds of this process, whatever else the machine does
from bitdial import load
from bitdial.errors import ArtifactError
for path in sys.argv[1:]:
    try:
        load(path)
    except ArtifactError:
        print("refused")
"""
    file = open_file(shipped)
    for i, (name, arguments) in enumerate(deep):
        file.manifest["architecture"] = {"name": name, "arguments": arguments}
        file.write(shipped.parent / str(i))
    command = [sys.executable, "-c", script, *(str(shipped.parent / str(i)) for i in range(len(deep)))]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=HERE)
    assert run.stdout.split() == ["refused"] * len(deep), (run.returncode, run.stderr)


def test_huge_architectures_take_no_memory(shipped: Path, open_file: OpenFile) -> None:
    """Each would take gigabytes if it were built before it is compared with the file."""
    wide = [
        ("cifar_resnet", {"blocks": 1, "width": 700, "in_channels": 1, "num_classes": 3}),
        ("cifar_resnet", {"blocks": 1, "width": 4, "in_channels": 10**8, "num_classes": 3}),
        ("cifar_resnet", {"blocks": 1, "width": 4, "in_channels": 1, "num_classes": 10**9}),
        ("tiny_transformer", {"vocab": 10**8, "width": 16}),
        ("tiny_transformer", {"max_length": 10**8, "width": 16}),
        ("mobilenet_v2", {"width_mult": 30.0}),
        ("cifar_resnet", {"width": 10**12}),
    ]
    for i, (name, arguments) in enumerate(wide):
        file = open_file(shipped)
        file.manifest["architecture"] = {"name": name, "arguments": arguments}
        file.write(shipped.parent / str(i))
    script = """
import resource, sys
from bitdial import load
from bitdial.errors import ArtifactError
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
load(sys.argv[1])
before = peak()
for path in sys.argv[2:]:
    try:
        load(path)
    except ArtifactError:
        print((peak() - before) // 1024)
"""
    good = shipped.parent / "good"
    file = open_file(shipped)
    file.write(good)
    arguments = [str(good), *(str(shipped.parent / str(i)) for i in range(len(wide)))]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, env=HERE
    )
    assert run.returncode == 0, run.stderr
    grown = [int(line) for line in run.stdout.split()]
    assert len(grown) == len(wide)
    assert max(grown) < 200, grown  # MiB


# --- damage at random -----------------------------------------------------------------------------------


def corrupt(data: bytes, header: int, rng: random.Random) -> bytes:
    """`data` with one random change somewhere."""
    raw = bytearray(data)
    start = rng.randrange(len(raw))
    length = rng.choice((1, 2, 4, 8, 16, 100))
    match rng.randrange(9):
        case 0:
            for _ in range(rng.randint(1, 8)):
                raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        case 1:
            raw[rng.randrange(header)] = rng.randrange(256)
        case 2:
            del raw[start:]
        case 3:
            raw[start:start] = rng.randbytes(length)
        case 4:
            del raw[start : start + length]
        case 5:
            other = rng.randrange(len(raw))
            length = min(length, len(raw) - max(start, other))
            raw[start : start + length], raw[other : other + length] = (
                raw[other : other + length],
                raw[start : start + length],
            )
        case 6:
            raw[start : start + length] = bytes(len(raw[start : start + length]))
        case 7:
            raw[:8] = struct.pack(
                "<Q", rng.choice((0, 1, header, header - 9, rng.getrandbits(12), rng.getrandbits(64)))
            )
        case 8:
            text = raw[8:header].decode()
            digits = [i for i, c in enumerate(text) if c in '0123456789,:{}[]"\\ ']
            at = rng.choice(digits)
            new = rng.choice(
                ["", "9", "-1", "0", ",", "{", "}", "[", "]", '"', "1e9", "null", " ", "\\u0000", "\\ud800"]
            )
            head = (text[:at] + new + text[at + 1 :]).encode()
            raw[:header] = struct.pack("<Q", len(head)) + head
    return bytes(raw)


DAMAGED: list[dict[str, Any]] = [
    {"bit_choices": (3, 2), "activations": "asymmetric"},
    {},
    {"group_size": 2},
    {"group_size": 2, "group_scales": "float", "activations": "float", "bit_choices": (6, 3)},
]


@pytest.mark.parametrize("seed", range(4))
def test_random_damage(
    saved: Callable[..., Path], small: Callable[..., nn.Module], open_file: OpenFile, seed: int
) -> None:
    """Refused, or exactly what it was; 4 x 1000 changes."""
    path = saved(**DAMAGED[seed])
    data, file, model = path.read_bytes(), open_file(path), small()
    good, rng = read_artifact(path), random.Random(seed)
    counts, problems, slowest = {"refused": 0, "same": 0}, [], 0.0
    for _ in range(1000):
        changed = corrupt(data, file.header_bytes, rng)
        path.unlink()  # ext4 waits for the disk where a file is written over
        path.write_bytes(changed)
        begin = time.process_time()
        try:
            found = read_artifact(path)
        except BitdialError:
            counts["refused"] += 1
        except Exception as problem:
            problems.append(repr(problem))
        else:
            counts["same"] += 1
            assert (found.manifest, found.digest, found.plans) == (good.manifest, good.digest, good.plans)
            assert found.tensors.keys() == good.tensors.keys()
            for name, tensor in found.tensors.items():
                assert tensor.dtype == good.tensors[name].dtype
                assert torch.equal(tensor, good.tensors[name])
            load(found, model)
        slowest = max(slowest, time.process_time() - begin)
    assert problems == []
    assert counts["refused"] > 900  # the changes do reach something
    assert slowest < 5.0


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_under_a_good_signature(
    saved: Callable[..., Path], small: Callable[..., nn.Module], open_file: OpenFile, seed: int
) -> None:
    """What somebody with a text editor and the digest's formula can do: refused, or a model that loads."""
    path = saved(**DAMAGED[seed])
    file, model, rng = open_file(path), small(), random.Random(seed)
    found: dict[str, int] = {}
    for _ in range(400):
        changed = copy.deepcopy(file)
        for _ in range(rng.randint(1, 2)):
            name = rng.choice(sorted(changed.tensors))
            tensor = changed.tensors[name]
            match rng.randrange(8):
                case 0:
                    del changed.tensors[name]
                case 1:
                    changed.tensors[rng.choice((f"{name}x", "conv/weight", ".float/x", "", "/", "a/"))] = tensor
                case 2:
                    other = rng.choice(sorted(changed.tensors))
                    changed.tensors[name], changed.tensors[other] = changed.tensors[other], tensor
                case 3:
                    kinds = (np.float32, np.float64, np.int8, np.uint8, np.int64, np.int16)
                    with np.errstate(all="ignore"):
                        changed.tensors[name] = tensor.astype(rng.choice(kinds))
                case 4:
                    shapes = ((-1,), (1, -1), (-1, 1), (1, *tensor.shape), tensor.shape[::-1])
                    changed.tensors[name] = tensor.reshape(rng.choice(shapes))
                case 5:
                    raw = np.frombuffer(rng.randbytes(tensor.nbytes), tensor.dtype)
                    changed.tensors[name] = raw.reshape(tensor.shape)
                case 6:
                    changed.tensors[name] = tensor[:-1] if tensor.ndim else tensor
                case 7:
                    spots = list(paths(changed.manifest))
                    set_field(*rng.choice(spots), to=rng.choice(WRONG))(changed)
        result = outcome(changed.write(path), model)
        found[result] = found.get(result, 0) + 1
    assert found.keys() <= {"refused", "accepted"}
    assert found["refused"] > 200


# --- a file that changes after it was read ----------------------------------------------------------------


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    """The digest was checked once; an overwrite in place must not slip other content under it."""
    save(prepared(), tmp_path / "one")
    other = prepared()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter *= 1.25
    save(other, tmp_path / "two")
    one, two = (tmp_path / "one").read_bytes(), (tmp_path / "two").read_bytes()
    assert len(one) == len(two)
    artifact = read_artifact(tmp_path / "one")
    before = {name: tensor.clone() for name, tensor in artifact.tensors.items()}
    with (tmp_path / "one").open("r+b") as file:
        file.write(two)
    changed = [name for name, tensor in artifact.tensors.items() if not torch.equal(tensor, before[name])]
    assert changed == []


# --- models that do not fit ---------------------------------------------------------------------------------


def other_shape(model: nn.Module) -> None:
    model.conv = nn.Conv2d(4, 7, 3, padding=1)


def other_kernel(model: nn.Module) -> None:
    model.conv = nn.Conv2d(4, 6, 1, padding=1)


def other_stride(model: nn.Module) -> None:
    model.depth.stride = (1, 1)


def other_padding(model: nn.Module) -> None:
    model.conv = nn.Conv2d(4, 6, 3, padding="same")


def other_padding_mode(model: nn.Module) -> None:
    model.conv = nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular")


def other_dilation(model: nn.Module) -> None:
    model.conv = nn.Conv2d(4, 6, 3, padding=1, dilation=2)


def other_groups(model: nn.Module) -> None:
    model.depth = nn.Conv2d(12, 6, 3, stride=2, padding=1, groups=6, bias=False)  # the weight has the same shape


def with_bias(model: nn.Module) -> None:
    model.depth.bias = nn.Parameter(torch.zeros(6))


def without_bias(model: nn.Module) -> None:
    model.conv.bias = None


def linear_for_conv(model: nn.Module) -> None:
    model.conv = nn.Linear(4, 6)


def something_else(model: nn.Module) -> None:
    model.depth = nn.MaxPool2d(2)


def missing_layer(model: nn.Module) -> None:
    del model.depth


def other_eps(model: nn.Module) -> None:
    model.norm.eps = 1e-3


def other_features(model: nn.Module) -> None:
    model.norm = nn.BatchNorm2d(7)


def norm_1d(model: nn.Module) -> None:
    model.norm = nn.BatchNorm1d(6)


def layer_norm(model: nn.Module) -> None:
    model.norm = nn.GroupNorm(2, 6)


def no_norm(model: nn.Module) -> None:
    del model.norm


def not_affine(model: nn.Module) -> None:
    model.norm = nn.BatchNorm2d(6, affine=False)


def float_shape(model: nn.Module) -> None:
    model.head = nn.Linear(6, 4)


def float_type(model: nn.Module) -> None:
    model.seen = model.seen.float()


def float_more(model: nn.Module) -> None:
    model.stem.bias = nn.Parameter(torch.zeros(4))


def float_less(model: nn.Module) -> None:
    model.head.bias = None


def extra_layer(model: nn.Module) -> None:
    model.extra = nn.Linear(2, 2)


def no_alias(model: nn.Module) -> None:
    del model.same_gain


def alias_apart(model: nn.Module) -> None:
    model.same_gain = nn.Parameter(torch.ones(5))


def alias_elsewhere(model: nn.Module) -> None:
    model.same_gain = model.head.bias


def more_aliases(model: nn.Module) -> None:
    model.third_gain = model.gain


MISFITS: dict[Callable[[nn.Module], None], str] = {
    other_shape: r"layer 'conv': shape is \[6, 4, 3, 3\] in the file and \[7, 4, 3, 3\] in the model",
    other_kernel: "layer 'conv': shape",
    other_stride: r"layer 'depth': stride is \[2, 2\] in the file and \[1, 1\] in the model",
    other_padding: "layer 'conv': padding",
    other_padding_mode: "layer 'conv': padding_mode",
    other_dilation: "layer 'conv': dilation",
    other_groups: "layer 'depth': groups",
    with_bias: "layer 'depth': bias",
    without_bias: "layer 'conv': bias",
    linear_for_conv: "layer 'conv': ",
    something_else: "layer 'depth' is a MaxPool2d",
    missing_layer: "layer 'depth' of the file is not in the model",
    other_eps: "norm 'norm': eps is 1e-05 in the file and 0.001 in the model",
    other_features: "norm 'norm': num_features",
    norm_1d: "norm 'norm': type",
    layer_norm: "norm 'norm': the model has a GroupNorm",
    no_norm: "norm 'norm' of the file is not in the model",
    not_affine: "norm 'norm': affine",
    float_shape: r"'head\.(weight|bias)'",
    float_type: "'seen' is int64 .* in the file and float32",
    float_more: r"only the model has the float tensor 'stem\.bias'",
    float_less: r"only the file has the float tensor 'head\.bias'",
    extra_layer: r"only the model has the float tensor 'extra\.",
    no_alias: "shares other tensors",
    alias_apart: "'same_gain'|shares other tensors",
    alias_elsewhere: r"shares other tensors|'same_gain'|'head\.bias'",
    more_aliases: "shares other tensors",
}


@pytest.mark.parametrize("change", MISFITS, ids=lambda f: f.__name__)
def test_a_model_that_does_not_fit(
    saved: Callable[..., Path], small: Callable[..., nn.Module], change: Callable[[nn.Module], None]
) -> None:
    path, model = saved(), small()
    load(path, model)
    change(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused(path, MISFITS[change], model)
    with pytest.raises(ArtifactError, match=MISFITS[change]):
        load_trainable(path, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Pair(nn.Module):
    """Two layers that are one module ('one'), share a weight ('tied'), or are apart ('apart')."""

    def __init__(self, how: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.start = nn.Linear(5, 6)
            self.first = nn.Linear(6, 6)
            self.second = self.first if how == "one" else nn.Linear(6, 6)
            self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(2))
            self.end = nn.Linear(6, 3)
        if how == "tied":
            self.second.weight = self.first.weight
        if how == "one norm":
            self.norms[1] = self.norms[0]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.first(torch.relu(self.start(x)))))
        return self.end(self.norms[1](self.second(x)))


@pytest.mark.parametrize("file", ["one", "tied", "apart", "one norm"])
@pytest.mark.parametrize("model", ["one", "tied", "apart", "one norm"])
@pytest.mark.parametrize("loader", [load, load_trainable])
def test_other_ties_are_refused_or_of_no_effect(tmp_path: Path, file: str, model: str, loader: Any) -> None:
    """The result is what was saved, or there is none; it is never something else."""
    x = torch.randn(32, 5, generator=torch.Generator().manual_seed(4))
    ready = prepare(Pair(file), QuantConfig(start="3std"), x)
    step = JointStep(ready, TrainConfig(epochs=1, lr=0.05), steps_per_epoch=1)
    step(x, torch.arange(32) % 3)
    save(ready.eval(), tmp_path / "m")
    try:
        loaded = loader(tmp_path / "m", Pair(model)).eval()
    except ArtifactError:
        assert file != model
        return
    with torch.no_grad():
        for bits in (8, 4, 2):
            set_bits(ready, bits)
            set_bits(loaded, bits)
            assert torch.equal(ready(x), loaded(x))


@pytest.mark.parametrize("loader", [load, load_trainable])
def test_the_users_model_stays_as_it_is(
    saved: Callable[..., Path], small: Callable[..., nn.Module], inputs: Tensor, loader: Any
) -> None:
    path, model = saved(), small(seed=9).train()
    model.head.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    types = {name: type(module) for name, module in model.named_modules()}
    modules = {name: id(module) for name, module in model.named_modules()}
    loaded = loader(path, model)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
        loaded(inputs)
    assert {name: type(module) for name, module in model.named_modules()} == types
    assert {name: id(module) for name, module in model.named_modules()} == modules
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["head.weight"]


def test_a_file_without_architecture_needs_a_model(saved: Callable[..., Path]) -> None:
    with pytest.raises(ArtifactError, match=r"pass it: load\(path, model\)"):
        load(saved())


def test_no_file(tmp_path: Path, small: Callable[..., nn.Module]) -> None:
    refused(tmp_path / "absent", "there is no file")
    refused(tmp_path / "absent", "there is no file", small())


def test_infinity_in_a_float_parameter_is_refused_by_load(
    saved: Callable[..., Path], small: Callable[..., nn.Module], open_file: OpenFile
) -> None:
    """In a buffer (an attention mask) it may be meant; in a parameter it never is."""
    path = saved()
    file = open_file(path)
    set_value(".float/gain", np.inf)(file)
    file.write(path)
    refused(path, "'gain' holds infinity", small())
