"""Scales for groups of inputs on every engine, against whole numbers and float32 steps by numpy.

Two levels: a float32 for each row times a whole number from 1 to 15 for each group, so that sums stay integer sums.
Plain: a float32 for each group.
"""

import copy
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    QuantConfig,
    code_exact,
    export_onnx,
    load,
    onnx_session_options,
    prepare,
    read_artifact,
    save,
    set_bits,
)
from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.errors import ConfigError
from bitdial.kernels.word_layout import nested_fields, pack_words
from bitdial.live.codes import CodeFacts, Codes, CodeScales, StoredCodes
from bitdial.live.engines.float import run_on_float
from bitdial.live.engines.integer import IntegerModel, convert
from bitdial.live.engines.packed import PackedEngine
from bitdial.live.engines.packed.words import NestedWords
from bitdial.live.layers import LiveLayer
from bitdial.nn.layer_kinds import KIND_OF

BITS = (8, 6, 4, 3, 2)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SCHEMES = ("double_rounding", "nested", "nested+8", "centred", "truncate", "adabits")
CONV = {"in_channels": 8, "out_channels": 6, "kernel_size": 3, "padding": 1, "stride": 2}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def float_layers() -> list[tuple[nn.Module, tuple[int, ...], int]]:
    """A float layer, the shape of an input, and its number of groups."""
    return [
        (nn.Linear(24, 5), (3, 24), 3),
        (nn.Conv2d(**CONV), (2, 8, 7, 6), 2),
        (nn.Conv2d(**CONV, groups=2, bias=False), (2, 8, 7, 6), 4),
    ]


def grouped(
    layer: nn.Module, groups: int, scheme: str, *, plain: bool = False, kind: str = "float", ties: str = "even"
) -> LiveLayer:
    """`layer` with random codes, random scales for `groups`, and no engine."""
    shape, generator = layer.weight.shape, seeded(1)
    phase = int(scheme.partition("+")[2] or 0)
    codes = torch.randint(-128 + phase, 128, shape, generator=generator, dtype=torch.int8)
    rows = torch.rand(1, shape[0], generator=generator) * 0.01 + 0.001
    multipliers = torch.randint(1, 16, (shape[0], groups), generator=generator, dtype=torch.uint8)
    weight = torch.rand(1, shape[0], groups, generator=generator) * 0.01 + 0.001 if plain else rows
    act = None if kind == "float" else torch.rand(len(BITS), generator=generator) * 0.1 + 0.02
    zero = torch.tensor([100, 20, 5, 3, 1], dtype=torch.uint8) if kind == "asymmetric" else None
    scales = CodeScales(weight, None if plain else multipliers, act, zero)
    made = Codes(CodeFacts(scheme, ties, BITS, kind), StoredCodes(codes, BITS[0]), scales)
    return LiveLayer(KIND_OF[type(layer)], layer, made, name="layer").eval().requires_grad_(False)


def on_float(layer: LiveLayer) -> nn.Sequential:
    model = nn.Sequential(copy.deepcopy(layer))
    run_on_float(model)
    return model


# --- the reference: numpy int64 and float32 -------------------------------------------------------


def codes_at(layer: LiveLayer, bits: int) -> np.ndarray:
    stored, shift = layer.codes.stored.numpy().astype(np.int64), BITS[0] - bits
    if layer.codes.scheme != "double_rounding" or shift == 0:
        return stored >> shift
    return np.clip(np.rint(stored / 2**shift).astype(np.int64), -(1 << bits - 1), (1 << bits - 1) - 1)


def offset_at(scheme: str, bits: int) -> float:
    """What is added to a code."""
    shift, phase = BITS[0] - bits, int(scheme.partition("+")[2] or 0)
    middle = scheme == "centred" or (scheme.startswith("nested") and shift > 0)
    return 0.5 * middle - phase / 2**shift


def by_inputs(scales: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(rows, groups) spread over the inputs of a weight."""
    each = np.repeat(scales, weight.shape[1] // scales.shape[1], axis=1)
    return each.reshape(*each.shape, *(1,) * (weight.ndim - 2))


def group_scales(layer: LiveLayer) -> np.ndarray:
    scale = layer.codes.scale.numpy()[0]
    if layer.codes.multipliers is None:
        return scale
    return scale[:, None] * layer.codes.multipliers.numpy().astype(np.float32)


def values_at(layer: LiveLayer, bits: int) -> np.ndarray:
    codes = codes_at(layer, bits).astype(np.float32) + np.float32(offset_at(layer.codes.scheme, bits))
    step = group_scales(layer) * np.float32(1 << BITS[0] - bits)
    return codes * by_inputs(step, codes)


def integers_at(layer: LiveLayer, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 weight integers, multipliers included, and the float32 steps: of rows, or of plain groups."""
    scheme, codes = layer.codes.scheme, codes_at(layer, bits)
    cell, scale = 1 << BITS[0] - bits, layer.codes.scale.numpy()[0]
    if scheme == "centred":
        codes, step = 2 * codes + 1, scale * np.float32(cell / 2)
    elif scheme.startswith("nested"):
        codes, step = codes * cell + cell // 2 - int(scheme.partition("+")[2] or 0), scale
    else:
        step = scale * np.float32(cell)
    if layer.codes.multipliers is not None:
        codes = codes * by_inputs(layer.codes.multipliers.numpy().astype(np.int64), codes)
    return codes, step


def product(layer: LiveLayer, a: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Exact sums, by float64 below 2^53; `test_exact.py` has them by numpy."""
    return layer.kind.product(layer, torch.from_numpy(a).double(), torch.from_numpy(w).double(), None).numpy()


def per_channel(values: np.ndarray, layer: LiveLayer) -> np.ndarray:
    return values.reshape(-1, 1, 1) if layer.kind.image_dims else values


def finished(layer: LiveLayer, y: np.ndarray) -> np.ndarray:
    assert y.dtype == np.float32
    return y if layer.bias is None else y + per_channel(layer.bias.numpy(), layer)


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype == np.float32 and np.array_equal(left, right)


# --- codes and layers -----------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
def test_values_and_integers_of_every_scheme_and_width(plain: bool) -> None:
    for scheme in SCHEMES:
        for float_layer, _, groups in float_layers():
            layer = grouped(float_layer, groups, scheme, plain=plain)
            assert layer.codes.groups == groups
            for bits in BITS:
                values, (integers, step) = layer.codes.weight_values(bits).numpy(), integers_at(layer, bits)
                assert same_bits(values, values_at(layer, bits)), (scheme, bits)
                assert np.array_equal(layer.codes.weight_integers(bits).numpy(), integers), (scheme, bits)
                assert same_bits(layer.codes.integer_step(bits).numpy(), step), (scheme, bits)
                some = slice(1, 4)
                assert np.array_equal(layer.codes.weight_integers(bits, some).numpy(), integers[some])


@pytest.mark.parametrize("kind", ["float", "unsigned"])
@pytest.mark.parametrize("plain", [False, True])
def test_float_kernels_multiply_with_these_values(plain: bool, kind: str) -> None:
    for float_layer, shape, groups in float_layers():
        layer = grouped(float_layer, groups, "nested+8", plain=plain, kind=kind)
        model, x = on_float(layer), torch.randn(shape, generator=seeded(2))
        for bits in BITS:
            set_bits(model, bits)
            a = layer.quantized_input(x) if kind == "float" else model[0].quantized_input(x)
            weight = torch.from_numpy(values_at(layer, bits))
            assert torch.equal(model(x), layer.kind.product(layer, a, weight, layer.bias)), bits


@pytest.mark.parametrize("kind", ["unsigned", "signed", "asymmetric"])
def test_exact_sums_of_two_levels_are_integer_sums(kind: str) -> None:
    for scheme in SCHEMES:
        for float_layer, shape, groups in float_layers():
            layer, x = grouped(float_layer, groups, scheme, kind=kind), torch.randn(shape, generator=seeded(2))
            exact = code_exact(on_float(layer))
            for bits, act_bits in ((8, 8), (6, 3), (3, 8), (2, 2)):
                set_bits(exact, (bits, act_bits))
                scale, zero = layer.codes.act_parameters(act_bits)
                a = bf.quantize_activation(x, scale, zero, bits=act_bits, kind=kind).numpy().astype(np.int64)
                a = a - (0 if zero is None else int(zero))
                integers, step = integers_at(layer, bits)
                y = product(layer, a, integers).astype(np.float32) * per_channel(scale.numpy() * step, layer)
                assert same_bits(exact(x).numpy(), finished(layer, y)), (scheme, bits)


@pytest.mark.parametrize("plain", [False, True])
def test_exact_sums_of_weight_only_layers(plain: bool) -> None:
    """Small whole numbers are their own fixed point; plain groups are added in float64, in their order."""
    for scheme in SCHEMES:
        for float_layer, shape, groups in float_layers():
            layer = grouped(float_layer, groups, scheme, plain=plain)
            exact, x = code_exact(on_float(layer)), torch.randint(-300, 300, shape, generator=seeded(3)).float()
            for bits in BITS:
                set_bits(exact, bits)
                integers, step = integers_at(layer, bits)
                if plain:
                    total, size = np.zeros(()), integers.shape[1] // groups
                    for group in range(groups):
                        own = np.zeros_like(integers)
                        own[:, group * size : (group + 1) * size] = integers[:, group * size : (group + 1) * size]
                        part = product(layer, x.numpy(), own) * per_channel(step[:, group].astype(np.float64), layer)
                        total = part if group == 0 else total + part
                    y = total.astype(np.float32)
                else:
                    y = product(layer, x.numpy(), integers).astype(np.float32) * per_channel(step, layer)
                assert same_bits(exact(x).numpy(), finished(layer, y)), (scheme, bits)


def test_exact_sums_are_those_of_the_values_to_rounding() -> None:
    for plain in (False, True):
        for float_layer, shape, groups in float_layers():
            layer = grouped(float_layer, groups, "centred", plain=plain)
            model, x = on_float(layer), torch.randn(shape, generator=seeded(4))
            torch.testing.assert_close(code_exact(model)(x), model(x), rtol=1e-5, atol=1e-4)


def test_plain_groups_beside_quantised_inputs_have_no_exact_sums() -> None:
    exact = code_exact(on_float(grouped(nn.Linear(24, 5), 3, "nested", plain=True, kind="unsigned")))
    with pytest.raises(ConfigError, match="layer 'layer' has plain float scales for groups and quantises its input"):
        exact(torch.rand(2, 24))


def test_integer_kernels_leave_groups_to_exact_sums_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    convert._say_once.cache_clear()
    plain_scale = Codes(
        CodeFacts("double_rounding", "even", BITS, "unsigned"),
        StoredCodes(torch.randint(-128, 128, (5, 5), generator=seeded(6), dtype=torch.int8), 8),
        CodeScales(torch.full((1, 5), 0.01), None, torch.full((5,), 0.05)),
    )
    head = nn.Linear(5, 5)
    served = LiveLayer(KIND_OF[nn.Linear], head, plain_scale, name="1").eval().requires_grad_(False)
    model = nn.Sequential(grouped(nn.Linear(24, 5), 3, "double_rounding", kind="unsigned"), served)
    run_on_float(model)
    with caplog.at_level(logging.WARNING):
        live, _ = IntegerModel(model), IntegerModel(model)
    assert caplog.messages == [
        "integer kernels do not serve 1 of 2 layers ('0'; layer '0': it has scales for groups of inputs); exact sums "
        "do, slowly"
    ]
    exact, x = code_exact(model), torch.rand(4, 24, generator=seeded(5))
    for setting in (8, (3, 6), 2):
        set_bits(live, setting)
        set_bits(exact, setting)
        assert torch.equal(live(x), exact(x))
    convert._say_once.cache_clear()


# --- packed words, files, exports -----------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True])
def test_packed_words_of_groups(plain: bool) -> None:
    """In float32 as near as float kernels are; in 16 bits the float64 product of the codes' values, rounded once."""
    for scheme in SCHEMES[1:]:
        stored = grouped(nn.Linear(96, 5), 3, scheme, plain=plain)
        packed = copy.deepcopy(stored)
        fields = nested_fields(BITS)
        packed.codes.source = NestedWords(pack_words(stored.codes.stored, fields), fields, (5, 96))
        packed.run_on(PackedEngine(packed))
        models = on_float(stored), nn.Sequential(packed)
        exact, again = (code_exact(model) for model in models)
        x = torch.randn(4, 96, generator=seeded(7))
        for bits in BITS:
            for model in (*models, exact, again):
                set_bits(model, bits)
            assert torch.equal(exact(x), again(x)), (scheme, bits)
            scales = stored.codes.scale[0].double()
            if stored.codes.multipliers is not None:
                scales = scales[:, None] * stored.codes.multipliers
            steps = torch.from_numpy(codes_at(stored, bits) + offset_at(scheme, bits)).double() * 2.0 ** (8 - bits)
            weight = steps * scales.repeat_interleave(32, dim=1)
            sizes = x.double().abs() @ weight.T.abs() + stored.bias.double().abs()
            for model in models:
                error = (model(x) - (x.double() @ weight.T + stored.bias.double())).abs()
                assert bool((error <= 96 * 2.0**-23 * sizes).all()), (scheme, bits)
            product = x.bfloat16().double() @ weight.T
            expected = (product + stored.bias.double()).bfloat16()
            if not torch.cuda.is_available() and not INTERPRETED:
                assert torch.equal(models[1](x.bfloat16()), expected), (scheme, bits)


def test_packed_words_refuse_small_groups(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Groups that are no multiple of 32 inputs run on float kernels, or are refused where no layer is left."""
    artifact = grouped_artifact(tmp_path, "float", size=16)
    with pytest.raises(ConfigError, match=r"layer 'up': its group_size=16 is no multiple of 32"):
        load(artifact, Net(), kernels="packed")


class Net(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def grouped_artifact(folder: Path, activations: str, *, plain: bool = False, size: int = 32) -> Artifact:
    """A file of Net whose scales were replaced by those of groups of `size` inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = QuantConfig(scheme="centred", bit_choices=BITS, activations=activations, keep_first_last=False)
        save(prepare(Net(), config, torch.rand(8, 64)), folder / "m")
    artifact = read_artifact(folder / "m")
    generator = seeded(8)
    for name, entry in artifact.layers.items():
        rows, groups = entry["shape"][0], entry["shape"][1] // size
        scale = artifact.tensors[f"{name}/weight_scale"]
        if plain:
            artifact.tensors[f"{name}/weight_scale"] = scale[:, :, None] * (
                torch.rand(rows, groups, generator=generator) + 0.5
            )
        else:
            artifact.tensors[f"{name}/weight_scale"] = scale / 8
            multipliers = torch.randint(1, 16, (rows, groups), generator=generator, dtype=torch.uint8)
            artifact.tensors[f"{name}/group_scale"] = multipliers
        entry["group_size"] = size
    return artifact


@pytest.mark.parametrize("plain", [False, True])
def test_files_with_groups_run_on_every_engine(tmp_path: Path, plain: bool) -> None:
    artifact, x = grouped_artifact(tmp_path, "float", plain=plain), torch.rand(3, 64, generator=seeded(9))
    live = {kernels: load(artifact, Net(), kernels=kernels) for kernels in ("float", "packed", "integer")}
    exact = {kernels: code_exact(model) for kernels, model in live.items()}
    for bits in BITS:
        for model in (*live.values(), *exact.values()):
            set_bits(model, bits)
        torch.testing.assert_close(live["packed"](x), live["float"](x), rtol=1e-4, atol=1e-4)
        assert torch.equal(live["integer"](x), exact["float"](x)), bits
        assert all(torch.equal(model(x), exact["float"](x)) for model in exact.values()), bits
        torch.testing.assert_close(exact["float"](x), live["float"](x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("activations", ["float", "unsigned"])
def test_onnx_files_have_blocks(tmp_path: Path, activations: str, plain: bool) -> None:
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    live = load(grouped_artifact(tmp_path, activations, plain=plain), Net())
    x = torch.rand(4, 64, generator=seeded(10))
    for bits in (8, 2):
        set_bits(live, bits)
        done = export_onnx(live, tmp_path / "m.onnx", x)
        nodes = [n for n in onnx.load(done.path).graph.node if n.op_type == "DequantizeLinear"]
        blocks = [{a.name: a.i for a in n.attribute}.get("block_size") for n in nodes]
        assert blocks.count(32) == 2, blocks
        session = runtime.InferenceSession(str(done.path), onnx_session_options(), providers=["CPUExecutionProvider"])
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        np.testing.assert_allclose(found, live(x).numpy(), rtol=1e-4, atol=1e-4)


def test_onnx_blocks_of_convolutions(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for scheme in ("double_rounding", "centred"):
        model = on_float(grouped(nn.Conv2d(**CONV), 2, scheme))
        x = torch.randn(2, 8, 7, 6, generator=seeded(11))
        set_bits(model, 4)
        done = export_onnx(model, tmp_path / "m.onnx", x)
        session = runtime.InferenceSession(str(done.path), onnx_session_options(), providers=["CPUExecutionProvider"])
        found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        np.testing.assert_allclose(found, model(x).numpy(), rtol=1e-4, atol=1e-4)
