"""What is in the file, byte for byte: integer codes and no float copy of them, read back without bitdial's help."""

import hashlib
import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial import build_model, prepare, read_artifact, save
from bitdial.errors import ArtifactError
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.prepare.config import QuantConfig

INTEGER_SCHEMES = ("double_rounding", "nested", "centred", "truncate", "adabits")
FLOAT_SCHEMES = ("lsq", "dorefa")
CHOICES = ((8, 6, 4, 2), (4, 3, 2), (7, 5), (3, 2))


def quantised(model: nn.Module) -> dict[str, QuantLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}


def expected_bytes(model: nn.Module, bit_choices: tuple[int, ...], *, per_channel: bool, floats: bool = False) -> int:
    """Bytes of all tensors, counted from the model alone."""
    total, counted, inside = 0, set(), []
    for name, layer in quantised(model).items():
        weight, channels = layer.weight, layer.weight.shape[0]
        if weight not in counted:
            scales = channels if per_channel else 1
            if floats:
                total += 4 * weight.numel() + 4 * scales * len(bit_choices)
            else:
                total += math.ceil(weight.numel() * bit_choices[0] / 8) + 4 * scales
        counted.add(weight)
        total += 0 if layer.bias is None else 4 * channels
        if layer.act_quantizer is not None:
            total += len(bit_choices) * (5 if layer.act_quantizer.kind == "asymmetric" else 4)
        inside.append(f"{name}.")
    for name, norm in model.named_modules():
        if isinstance(norm, SwitchableBatchNorm):
            features = next(iter(norm.sets.values())).num_features
            total += len(bit_choices) * (4 * 4 * features + 8)
            inside.append(f"{name}.")
    seen = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if not name.startswith(tuple(inside)) and value not in seen:
            seen.add(value)
            total += value.numel() * value.element_size()
    return total


def float_tensors(file: Any) -> dict[str, tuple[int, ...]]:
    return {n: tuple(e["shape"]) for n, e in file.entries.items() if e["dtype"] in ("F16", "BF16", "F32", "F64")}


@pytest.mark.parametrize("scheme", INTEGER_SCHEMES)
@pytest.mark.parametrize("bit_choices", CHOICES)
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("activations", ["auto", "asymmetric", "float"])
def test_codes_and_nothing_else(
    tmp_path: Path,
    prepared: Callable[..., nn.Module],
    open_file: Callable[[Path], Any],
    scheme: str,
    bit_choices: tuple[int, ...],
    per_channel: bool,
    activations: str,
) -> None:
    model = prepared(scheme=scheme, bit_choices=bit_choices, per_channel=per_channel, activations=activations)
    save(model, tmp_path / "m")
    file = open_file(tmp_path / "m")
    assert len(file.buffer) == expected_bytes(model, bit_choices, per_channel=per_channel)
    assert len(file.buffer) == sum(tensor.nbytes for tensor in file.tensors.values())  # no gaps, nothing twice
    shapes = float_tensors(file).values()
    for name, layer in quantised(model).items():
        assert not [s for s in shapes if math.prod(s) == layer.weight.numel() or s == tuple(layer.weight.shape)], name
    codes = {n: e["dtype"] for n, e in file.entries.items() if n.endswith("/codes")}
    assert codes == dict.fromkeys(("conv/codes", "depth/codes", "left/codes"), "I8" if bit_choices[0] == 8 else "U8")


@pytest.mark.parametrize("scheme", FLOAT_SCHEMES)
def test_schemes_that_cannot_narrow_keep_float_weights(
    tmp_path: Path, prepared: Callable[..., nn.Module], open_file: Callable[[Path], Any], scheme: str
) -> None:
    model = prepared(scheme=scheme, bit_choices=(8, 4, 2))
    save(model, tmp_path / "m")
    file = open_file(tmp_path / "m")
    for name in ("conv", "depth", "left"):
        weight = model.get_submodule(name).weight
        assert np.array_equal(file.tensors[f"{name}/weight"], weight.detach().numpy())
        assert file.tensors[f"{name}/weight_scale"].shape == (3, 6)
        assert f"{name}/codes" not in file.tensors
    assert len(file.buffer) == expected_bytes(model, (8, 4, 2), per_channel=True, floats=True)


@pytest.mark.parametrize("name", ["resnet20", "resnet18", "mobilenet_v2"])
def test_the_header_is_small_and_the_sum_of_bytes_holds_for_real_models(tmp_path: Path, name: str) -> None:
    bit_choices = (8, 6, 4, 2)
    config = QuantConfig(bit_choices=bit_choices, start="lsq")
    model = prepare(build_model(name), config, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    save(model, tmp_path / "m")
    size = (tmp_path / "m").stat().st_size
    with (tmp_path / "m").open("rb") as file:
        header = 8 + struct.unpack("<Q", file.read(8))[0]
    assert header <= max(0.02 * size, 64_000)
    assert size - header == expected_bytes(model, bit_choices, per_channel=True)
    floats = sum(p.numel() * 4 for p in build_model(name).parameters())
    assert size - header < {"resnet20": 0.4, "resnet18": 0.32, "mobilenet_v2": 0.65}[name] * floats


# --- a reader that knows the docstrings only --------------------------------------------------------
# container.py for the frame and the digest, packing.py for the bytes, functional.py for the values. It uses struct,
# json, hashlib and numpy and nothing else; keep it so.


def unpack(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    stream = [(int(byte) >> i) & 1 for byte in data for i in range(8)]
    codes = []
    for i in range(count):
        code = sum(stream[i * bits + j] << j for j in range(bits))
        codes.append(code - (1 << bits) if code >> (bits - 1) else code)
    assert not any(stream[count * bits :])
    return np.array(codes, np.int64)


def half_to_even(code: int, shift: int) -> int:
    low, rest = divmod(code, 1 << shift)
    double, whole = 2 * rest, 1 << shift
    return low + int(double > whole or (double == whole and low % 2 == 1))


def half_up(code: int, shift: int) -> int:
    return (2 * code + (1 << shift)) // (2 << shift)


def narrowed(code: int, high: int, low: int, scheme: str, ties: str) -> int:
    shift = high - low
    if scheme != "double_rounding" or shift == 0:
        return code // (1 << shift)
    rounded = half_to_even(code, shift) if ties == "even" else half_up(code, shift)
    return max(-(1 << low - 1), min((1 << low - 1) - 1, rounded))


def read_weights(data: bytes, bits: int) -> tuple[dict[str, np.ndarray], str]:
    """The float32 weight of each quantised layer at `bits`, and the digest of the content."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata, buffer = header.pop("__metadata__"), data[8 + size :]
    assert set(metadata) == {"manifest", "digest"}
    total = hashlib.sha256(metadata["manifest"].encode())
    for name in sorted(header):
        begin, end = header[name]["data_offsets"]
        shape = "x".join(map(str, header[name]["shape"]))
        total.update(f"\n{name} {header[name]['dtype']} {shape}\n".encode() + buffer[begin:end])

    def tensor(name: str) -> np.ndarray:
        kinds = {"I8": "<i1", "U8": "<u1", "F32": "<f4"}
        begin, end = header[name]["data_offsets"]
        return np.frombuffer(buffer[begin:end], kinds[header[name]["dtype"]]).reshape(header[name]["shape"])

    manifest = json.loads(metadata["manifest"])
    high = manifest["bit_choices"][0]
    weights = {}
    for name, entry in manifest["layers"].items():
        owner, shape = entry.get("tied_to", name), entry["shape"]
        stored = tensor(f"{owner}/codes").reshape(-1)
        codes = stored.astype(np.int64) if high == 8 else unpack(stored, high, math.prod(shape))
        low = [narrowed(int(c), high, bits, manifest["scheme"], manifest["ties"]) for c in codes]
        scheme, _, phase = manifest["scheme"].partition("+")
        if manifest["version"] == 1 and scheme == "nested":
            scheme = "centred"
        middle = 0.5 if scheme == "centred" or (scheme == "nested" and bits < high) else 0.0
        offset = np.float32(middle - int(phase or 0) / 2 ** (high - bits))
        step = tensor(f"{owner}/weight_scale")[0] * np.float32(2 ** (high - bits))
        values = np.array(low, np.float32).reshape(shape) + offset
        weights[name] = values * step.reshape(-1, *(1,) * (len(shape) - 1))
    return weights, total.hexdigest()


@pytest.mark.parametrize(
    ("scheme", "ties"),
    [("double_rounding", "even"), ("double_rounding", "up"), ("nested", "even"), ("nested+2", "even"),
     ("centred", "even"), ("truncate", "even")],
)  # fmt: skip
@pytest.mark.parametrize("bit_choices", [(8, 6, 4, 2), (4, 3, 2), (7, 5, 4, 3)])
@pytest.mark.parametrize("per_channel", [True, False])
def test_an_independent_reader_gets_the_weights_and_the_digest(
    tmp_path: Path,
    prepared: Callable[..., nn.Module],
    scheme: str,
    bit_choices: tuple[int, ...],
    ties: str,
    per_channel: bool,
) -> None:
    model = prepared(scheme=scheme, bit_choices=bit_choices, ties=ties, per_channel=per_channel)
    digest = save(model, tmp_path / "m")
    data = (tmp_path / "m").read_bytes()
    for bits in bit_choices:
        weights, found = read_weights(data, bits)
        assert found == digest
        assert weights.keys() == {"conv", "depth", "left", "right"}
        for name, values in weights.items():
            layer = model.get_submodule(name)
            expected = layer.weight_quantizer(layer.weight, bits).detach().numpy()
            assert values.dtype == np.float32
            assert np.array_equal(values, expected), (name, bits)


def test_a_file_of_version_1_that_says_nested_is_one_of_version_2_that_says_centred(
    tmp_path: Path, prepared: Callable[..., nn.Module], open_file: Callable[[Path], Any]
) -> None:
    """The same tensors; this is how files that the first versions wrote keep their meaning."""
    model = prepared(scheme="centred")
    digest = save(model, tmp_path / "new")
    file = open_file(tmp_path / "new")
    assert (file.manifest["version"], file.manifest["scheme"]) == (2, "centred")
    file.manifest.update(version=1, scheme="nested")
    del file.manifest["graph"], file.manifest["report"]
    for entry in file.manifest["layers"].values():
        entry.pop("group_size", None)  # which version 1 did not have
    file.write(tmp_path / "old")
    new, old = read_artifact(tmp_path / "new"), read_artifact(tmp_path / "old")
    assert (new.scheme, old.scheme) == ("centred", "centred")
    assert old.digest != new.digest == digest  # of the files as they are
    for bits in (8, 6, 4, 2):
        weights, _ = read_weights((tmp_path / "old").read_bytes(), bits)
        for name, values in weights.items():
            layer = model.get_submodule(name)
            assert np.array_equal(values, layer.weight_quantizer(layer.weight, bits).detach().numpy()), (name, bits)
    for version, scheme, meaning in ((1, "truncate", "truncate"), (1, "double_rounding", "double_rounding"),
                                     (2, "nested", "nested"), (2, "nested+8", "nested+8")):  # fmt: skip
        file.manifest.update(version=version, scheme=scheme)
        for entry in file.manifest["layers"].values():
            entry.update({"group_size": None} if version == 2 else {})
        assert read_artifact(file.write(tmp_path / "other")).scheme == meaning


def test_the_tie_rules_differ_on_these_weights(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    """Else the test above could not tell them apart."""
    save(prepared(ties="even"), tmp_path / "even")
    save(prepared(ties="up"), tmp_path / "up")
    even, up = (read_weights((tmp_path / name).read_bytes(), 6)[0] for name in ("even", "up"))
    assert any(not np.array_equal(even[name], up[name]) for name in even)


# --- the manifest -----------------------------------------------------------------------------------


GRAPH = """\
'stem'(in0; kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), output_padding=(0, 0), dilation=(1, 1), groups=1, \
padding_mode='zeros')
'stem_norm'(%0)
relu(%1)
'conv'(%2)
'norm'(%3)
relu(%4)
'depth'(%5)
relu(%6)
mean(%7, dim=(2, 3))
'left'(%8)
relu(%9)
'right'(%10)
'head'(%11)
mul(%12, 'gain')
output(%13)"""


def test_the_manifest(saved: Callable[..., Path], open_file: Callable[[Path], Any]) -> None:
    manifest = open_file(saved(activations="asymmetric")).manifest
    assert manifest.pop("written_by").startswith("bitdial ")
    lines = GRAPH.split("\n")
    digest = hashlib.sha256(GRAPH.encode()).hexdigest()
    assert manifest.pop("graph") == {"digest": digest, "count": 15, "lines": [line[:160] for line in lines]}
    assert manifest.pop("report")["quantised_layers"] == ["conv", "depth", "left", "right"]
    linear = {"type": "Linear", "shape": [6, 6], "bias": True, "activations": "asymmetric", "group_size": None}
    norm = {"type": "BatchNorm2d", "eps": 1e-5, "momentum": 0.1, "affine": True, "track_running_stats": True}
    conv = {"type": "Conv2d", "dilation": [1, 1], "padding": [1, 1], "padding_mode": "zeros"}
    conv |= {"activations": "asymmetric", "group_size": None}
    assert manifest == {
        "kind": "artifact",
        "version": 2,
        "scheme": "double_rounding",
        "ties": "even",
        "bit_choices": [8, 6, 4, 2],
        "layers": {
            "conv": {**conv, "shape": [6, 4, 3, 3], "stride": [1, 1], "groups": 1, "bias": True, "fed_by": None},
            "depth": {**conv, "shape": [6, 2, 3, 3], "stride": [2, 2], "groups": 3, "bias": False, "fed_by": "conv"},
            "left": {**linear, "fed_by": "depth"},
            "right": {**linear, "fed_by": "left", "tied_to": "left"},
        },
        "norms": {
            "stem_norm": {**norm, "num_features": 4, "follows": "conv", "fed_by": None},
            "norm": {**norm, "num_features": 6, "follows": "conv", "fed_by": None},
        },
        "aliases": {"same_gain": "gain"},
        "architecture": None,
        "plans": {},
        "metrics": {},
        "sensitivity": None,
    }


def test_the_tensors(saved: Callable[..., Path], open_file: Callable[[Path], Any]) -> None:
    found = {n: (t.dtype.name, t.shape) for n, t in open_file(saved(activations="asymmetric")).tensors.items()}
    expected: dict[str, Any] = {
        ".float/gain": ("float32", (5,)),
        ".float/seen": ("int64", (2,)),
        ".float/stem.weight": ("float32", (4, 2, 3, 3)),
        ".float/head.weight": ("float32", (5, 6)),
        ".float/head.bias": ("float32", (5,)),
        "conv/codes": ("int8", (6, 4, 3, 3)),
        "depth/codes": ("int8", (6, 2, 3, 3)),
        "left/codes": ("int8", (6, 6)),
    }
    for name in ("conv", "depth", "left", "right"):
        expected[f"{name}/act_scale"] = ("float32", (4,))
        expected[f"{name}/act_zero_point"] = ("uint8", (4,))
        if name != "right":
            expected[f"{name}/weight_scale"] = ("float32", (1, 6))
        if name != "depth":
            expected[f"{name}/bias"] = ("float32", (6,))
    for name, features in (("stem_norm", 4), ("norm", 6)):
        for part in ("weight", "bias", "running_mean", "running_var"):
            expected[f"{name}/{part}"] = ("float32", (4, features))
        expected[f"{name}/num_batches_tracked"] = ("int64", (4,))
    assert found == expected


def test_the_tensors_are_the_models(
    tmp_path: Path, prepared: Callable[..., nn.Module], open_file: Callable[[Path], Any]
) -> None:
    model = prepared(activations="asymmetric")
    save(model, tmp_path / "m")
    tensors = open_file(tmp_path / "m").tensors

    def same(name: str, values: Tensor) -> bool:
        return np.array_equal(tensors[name], values.detach().numpy())

    assert same(".float/gain", model.gain)
    assert same(".float/stem.weight", model.stem.weight)
    assert same("conv/bias", model.conv.bias)
    assert same("conv/weight_scale", model.conv.weight_quantizer.scale[None])
    for i, bits in enumerate((8, 6, 4, 2)):
        act = model.depth.act_quantizer
        assert tensors["depth/act_scale"][i] == act.scales[str(bits)].item()
        whole = min(max(round(act.zero_points[str(bits)].item()), 0), 2**bits - 1)
        assert tensors["depth/act_zero_point"][i] == whole
        for part, value in model.norm.sets[str(bits)].state_dict().items():
            assert np.array_equal(tensors[f"norm/{part}"][i], value.numpy())


def test_the_artifact_in_memory(saved: Callable[..., Path]) -> None:
    path = saved(metrics={"top1": 0.5})
    artifact = read_artifact(path)
    assert (artifact.scheme, artifact.bit_choices) == ("double_rounding", (8, 6, 4, 2))
    assert list(artifact.layers) == ["conv", "depth", "left", "right"]
    assert set(artifact.norms) == {"stem_norm", "norm"}
    assert artifact.metrics == {"top1": 0.5}
    assert artifact.file_bytes == path.stat().st_size
    assert artifact.part("conv", "codes").dtype == torch.int8
    assert artifact.part("right", "codes") is None


def test_names_with_slashes_do_not_collide(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({k: nn.Linear(3, 3) for k in ("in", "a", "a/bias", "a/codes", "a/b", "out")})

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts.values():
                x = part(x)
            return x

    model = prepare(Odd(), QuantConfig(start="3std"), torch.randn(4, 3))
    save(model, tmp_path / "m")
    artifact = read_artifact(tmp_path / "m")
    for name in ("a", "a/bias", "a/codes", "a/b"):
        layer = model.get_submodule(f"parts.{name}")
        assert torch.equal(artifact.part(f"parts.{name}", "codes"), layer.weight_quantizer.codes(layer.weight, 8))


def test_other_layers_are_not_for_artifacts() -> None:
    from bitdial.artifact import layer_table_entry

    with pytest.raises(ArtifactError, match=r"layer 'x' is a Bilinear; an artifact holds Conv1d, Conv2d"):
        layer_table_entry("x", nn.Bilinear(2, 2, 1))
