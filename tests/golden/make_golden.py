"""Makes the golden files: tiny artifacts, and the logits that every engine gives for them.

The files here were made with version 997216b. `test_golden.py` proves that later versions read them, and give the same
logits bit for bit. To make them again, which is right only if the results are meant to change:

    PYTHONPATH=src OMP_NUM_THREADS=1 python tests/golden/make_golden.py

This sets parameters under the names that modules had in that version; use a checkout of it (git worktree add) to add
cases after those names have changed, and look at `git diff --stat` afterwards: the other files must stay as they are.

Two kinds of files. In an EXACT one, scales are powers of two and all other numbers multiples of small ones, so that
every product and every partial sum of a float kernel is exact in float32, in whatever order it adds: all engines give
the same logits on all machines. That is checked here, by bounds (`Bounds`) and by runs with other threads, libraries,
layouts and batches. An ODD one has arbitrary numbers, as training gives them. There the engines whose sums are those of
integers (code_exact, integer kernels) are held to the bits, and float kernels to a tolerance; `no_border_near` sees to
it that no activation lies so near to the border between two codes that a float sum could move it across. Inputs of the
network may lie on borders, since no sum is before them.
"""

import copy
import itertools
import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from networks import NETWORKS
from safetensors.torch import save_file
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    Rule,
    Sensitivity,
    add_transitions,
    build_model,
    code_exact,
    load,
    load_trainable,
    prepare,
    read_artifact,
    save,
    set_bits,
)

FOLDER = Path(__file__).resolve().parent
FILES = FOLDER / "files"
EXPECTED = FOLDER / "expected.safetensors"
VERSION = "997216b"
WIDE, FEW, TWO = (8, 6, 4, 3, 2), (4, 3, 2), (6, 4)
LARGEST = {"adabits": 0.5, "dorefa": 255 / 256, "dorefa_few": 105 / 128}  # of |tanh w|: scales without rounding
MARGIN = 2e-4  # in steps between codes; float32 sums here are off by a tenth of that at most


def case(network: str, bits: tuple[int, ...], scheme: str, **options: Any) -> dict[str, Any]:
    """What a file is made of; `options` of QuantConfig, and a few of `make`'s own."""
    own = {key: options.pop(key) for key in ("transitions", "odd", "levels", "largest", "shape") if key in options}
    config = QuantConfig(bit_choices=bits, scheme=scheme, **options)
    return {"network": network, "config": config, "shape": (3, 2, 8, 8), **own}


WHOLE = {"keep_first_last": False}
FLOAT = {"activations": "float", "keep_first_last": False}
CASES = {
    "double_rounding_even": case("convs", WIDE, "double_rounding", levels=1),
    "double_rounding_up": case("convs", WIDE, "double_rounding", ties="up", levels=1),
    "double_rounding_asymmetric": case(
        "convs_plain", WIDE, "double_rounding", activations="asymmetric", per_channel=False, **WHOLE
    ),
    "double_rounding_signed": case("dilated", FEW, "double_rounding", ties="up", activations="signed", **WHOLE),
    "transitions_full": case("convs", FEW, "double_rounding", transitions="full"),
    "transitions_statistics": case("dilated", TWO, "nested", transitions="statistics", **WHOLE),
    "norms_of_one_set": case("dilated", TWO, "double_rounding", switch_norms=False, per_channel=False),
    "nested": case("convs", WIDE, "nested", **WHOLE),
    "nested_asymmetric": case("dilated_plain", FEW, "nested", activations="asymmetric", per_channel=False),
    "truncate": case("convs", TWO, "truncate", activations="signed", per_channel=False),
    "truncate_asymmetric": case("dilated", WIDE, "truncate", activations="asymmetric", **WHOLE),
    "adabits": case("convs", FEW, "adabits"),
    "adabits_plain": case("dilated_plain", WIDE, "adabits", per_channel=False, **WHOLE),
    "lsq": case("convs", WIDE, "lsq", **WHOLE),
    "lsq_plain": case("dilated_plain", TWO, "lsq", activations="asymmetric", per_channel=False),
    "dorefa": case("dilated", (8, 4, 2), "dorefa", largest=LARGEST["dorefa"], **WHOLE),
    "dorefa_plain": case("convs_plain", FEW, "dorefa", largest=LARGEST["dorefa_few"], per_channel=False),
    "tied": case("tied", WIDE, "double_rounding", activations="signed", shape=(3, 8), **WHOLE),
    "tied_tokens": case("tied", FEW, "nested", activations="asymmetric", shape=(2, 3, 8)),
    "tied_lsq": case("tied", TWO, "lsq", shape=(3, 8), **WHOLE),
    "rules": case(
        "convs", FEW, "double_rounding",
        rules=(
            Rule(pattern="stem", quantize=True, activations="signed"), Rule(type="Linear", quantize=True),
            Rule(pattern="depthwise", quantize=False), Rule(pattern="grouped", activations="float", per_channel=False),
        ),
    ),
    "resnet": case(
        {"name": "cifar_resnet", "arguments": {"blocks": 1, "width": 2, "in_channels": 1, "num_classes": 3}},
        TWO, "double_rounding", shape=(3, 1, 8, 8),
    ),
    "weights_double_rounding": case("heads", WIDE, "double_rounding", shape=(4, 11), **FLOAT),
    "weights_up": case("tied", FEW, "double_rounding", ties="up", shape=(4, 8), **FLOAT),
    "weights_nested": case("heads", WIDE, "nested", shape=(4, 11), **FLOAT),
    "weights_truncate": case("tied", FEW, "truncate", shape=(2, 3, 8), per_channel=False, **FLOAT),
    "weights_adabits": case("heads", TWO, "adabits", shape=(4, 11), **FLOAT),
    "weights_mixed": case("mixed", FEW, "nested", **FLOAT),
    "weights_lsq": case("mixed", FEW, "lsq", **FLOAT),
    "odd_double_rounding": case("convs_usual", WIDE, "double_rounding", odd=True),
    "odd_nested": case("dilated_usual", WIDE, "nested", activations="asymmetric", odd=True, **WHOLE),
    "odd_adabits": case("tied", FEW, "adabits", shape=(3, 8), odd=True),
    "odd_lsq": case("dilated_usual", TWO, "lsq", activations="signed", odd=True, **WHOLE),
    "odd_dorefa": case("dilated_usual", WIDE, "dorefa", odd=True),
    "odd_weights": case("tied", WIDE, "nested", shape=(4, 8), odd=True, **FLOAT),
}  # fmt: skip


class Numbers:
    """Random numbers, the same wherever this runs: whole ones of torch's generator, and what is made of these."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def whole(self, low: int, high: int, shape: tuple[int, ...] = (1,)) -> Tensor:
        """Whole numbers from `low` to `high`, both included."""
        return torch.randint(low, high + 1, shape, generator=self.generator).float()

    def powers(self, low: int, high: int, shape: tuple[int, ...] = (1,)) -> Tensor:
        """Powers of two."""
        return torch.exp2(self.whole(low, high, shape))

    def real(self, low: float, high: float, shape: tuple[int, ...] = (1,)) -> Tensor:
        """Numbers with all bits of a float32."""
        return low + (high - low) * (self.whole(0, (1 << 24) - 1, shape) / (1 << 24))


def float_network(name: str | dict[str, Any]) -> nn.Module:
    """The network of a case."""
    return NETWORKS[name]() if isinstance(name, str) else build_model(name["name"], **name["arguments"])


# --- parameters -----------------------------------------------------------------------------------


@torch.no_grad()
def set_parameters(model: nn.Module, numbers: Numbers, *, odd: bool, levels: int, largest: float | None) -> None:
    """Give the prepared `model` parameters: of an ODD file, or of an EXACT one."""
    done: set[int] = set()  # tied weights, shared norm weights
    for module in model.modules():
        if hasattr(module, "weight_quantizer"):
            if id(module.weight) not in done:
                _set_weight(module, numbers, odd, largest)
            _set_activations(module.act_quantizer, numbers, odd)
            done.add(id(module.weight))
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            _set_norm(module, numbers, odd, done)
            continue
        elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear):
            shape = tuple(module.weight.shape)
            module.weight.copy_(numbers.real(-0.5, 0.5, shape) if odd else numbers.whole(-levels, levels, shape) / 2)
        else:
            continue
        if module.bias is not None:
            shape = tuple(module.bias.shape)
            module.bias.copy_(numbers.real(-0.5, 0.5, shape) if odd else numbers.whole(-8, 8, shape) / 8)


def _set_weight(layer: nn.Module, numbers: Numbers, odd: bool, largest: float | None) -> None:
    """Codes over the whole range, scales that differ from channel to channel."""
    quantizer, shape = layer.weight_quantizer, tuple(layer.weight.shape)
    high, channels = layer.bit_choices[0], quantizer.channels
    wide = (channels, *(1,) * (len(shape) - 1))
    if quantizer.rule.scale == "derived":
        layer.weight.copy_(_tanh_weight(layer, numbers, odd, largest))
        return
    codes = numbers.whole(-(1 << high - 1), (1 << high - 1) - 1, shape)
    for bits in layer.bit_choices if quantizer.rule.scale == "per_bits" else layer.bit_choices[:1]:
        scale = quantizer.learned_scale(bits)
        scale.copy_((numbers.real(0.3, 1.0, (channels,)) if odd else numbers.powers(-1, 0, (channels,))) * 2.0**-bits)
    layer.weight.copy_((codes + quantizer.rule.offset) * quantizer.learned_scale(high).view(wide))
    if odd:
        layer.weight.mul_(numbers.real(0.5, 1.0, shape))


def _tanh_weight(layer: nn.Module, numbers: Numbers, odd: bool, largest: float | None) -> Tensor:
    """A weight whose tanh has the same largest value in each channel, and lies far from all borders between codes."""
    scheme, widths, shape = layer.weight_quantizer.scheme, layer.bit_choices, tuple(layer.weight.shape)
    most = torch.full((shape[0], 1), largest or LARGEST[scheme], dtype=torch.float64)
    if odd:
        most = numbers.real(0.3, 0.9, (layer.weight_quantizer.channels, 1)).double().expand(shape[0], 1)

    def ratios(tanh: Tensor) -> Tensor:
        """By widths, the position among the codes; borders are whole numbers."""
        cells = torch.tensor([2.0 ** (b - 1) if scheme == "adabits" else (2.0**b - 1) / 2 for b in widths])
        return tanh / most * cells.double().view(-1, 1, 1)

    flat = torch.zeros(shape[0], layer.weight[0].numel(), dtype=torch.float64)
    near = torch.ones_like(flat, dtype=torch.bool)
    while bool(near.any()):
        drawn = numbers.real(-1, 1, tuple(flat.shape)).double() * most
        flat = torch.where(near, drawn, flat)
        at = ratios(flat)
        near = ((at - at.round()).abs() < 0.01).any(dim=0)
    sign = numbers.whole(0, 1, (shape[0], 1)).double() * 2 - 1
    flat[:, :1] = most * sign
    weight = flat.atanh().float()
    if not odd:
        assert torch.equal(weight[:, :1].double().tanh().float(), (most * sign).float())
    return weight.view(shape)


def _set_activations(quantizer: nn.Module | None, numbers: Numbers, odd: bool) -> None:
    for key, scale in {} if quantizer is None else quantizer.scales.items():
        bits = int(key)
        scale.copy_((numbers.real(0.8, 2.0) if odd else numbers.powers(0, 1)) * 2.0**-bits)
        if quantizer.kind == "asymmetric":
            quantizer.zero_points[key].copy_(numbers.real(0.0, 2.0 ** (bits - 1)))


def _set_norm(norm: nn.Module, numbers: Numbers, odd: bool, done: set[int]) -> None:
    shape = (norm.num_features,)
    if odd:
        parts = [numbers.real(0.5, 2.0, shape), numbers.real(-0.5, 0.5, shape)]
        mean, var = numbers.real(-0.5, 0.5, shape), numbers.real(0.25, 2.0, shape)
    else:
        parts = [numbers.powers(-1, 1, shape), numbers.whole(-4, 4, shape) / 4]
        if norm.eps == 1e-5:  # a network of build_model: the nearest that there is to a variance of 1 with this eps
            mean, var = torch.zeros(shape), torch.full(shape, 1 - 1e-5)
            assert torch.equal(var + 1e-5, torch.ones(shape))
        else:
            mean = numbers.whole(-4, 4, shape) / 8
            var = torch.where(numbers.whole(0, 1, shape) > 0, 3.75, 0.75)
    for parameter, values in zip((norm.weight, norm.bias), parts, strict=True):
        if id(parameter) not in done:
            parameter.copy_(values)
            done.add(id(parameter))
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(var)
    norm.num_batches_tracked.fill_(int(numbers.whole(1, 99)))


@torch.no_grad()
def set_on_borders(x: Tensor, layer: nn.Module, numbers: Numbers) -> None:
    """Put the inputs `x` of the network's first layer on the borders between its codes, sample by sample of a width.

    Which code is theirs depends on how x / scale is rounded: x * (1 / scale) gives others.
    """
    for sample, bits in zip(x, itertools.cycle(layer.bit_choices), strict=False):
        half = 1 << bits - 1
        position = numbers.whole(-half, half - 1, tuple(sample.shape)) + 0.5
        sample.copy_(position * layer.act_quantizer.scales[str(bits)])


# --- settings, plans, engines ---------------------------------------------------------------------


def plans_of(model: nn.Module, widths: tuple[int, ...], numbers: Numbers) -> dict[str, BitPlan]:
    """Two plans to store: bits for every layer, and bits for some with a default."""
    layers = [name for name, module in model.named_modules() if hasattr(module, "weight_quantizer")]

    def pick() -> int:
        return widths[int(numbers.whole(0, len(widths) - 1))]

    mixed = BitPlan({name: (pick(), pick()) for name in layers})
    return {"mixed": mixed, "2.5 bits": BitPlan({layers[-1]: (widths[0], widths[-1])}, default=widths[-1])}


def settings_of(plans: dict[str, BitPlan], widths: tuple[int, ...]) -> list[Any]:
    """What to set, as JSON values: widths, pairs, names of stored plans, a plan of our own."""
    own = BitPlan(dict(zip(reversed(list(plans["mixed"])), itertools.cycle(widths), strict=False)), default=widths[0])
    pairs = [[widths[0], widths[-1]], [widths[-1], widths[0]], [widths[1], widths[-1]]]
    return [*widths, *pairs, *plans, own.to_dict()]


def bits_of(setting: Any) -> Any:
    """A setting from its JSON form."""
    if isinstance(setting, dict):
        return BitPlan.from_dict(setting)
    return tuple(setting) if isinstance(setting, list) else setting


def engines_of(path: Path, entry: dict[str, Any]) -> dict[str, nn.Module]:
    """A model of each engine in float32."""
    network = (float_network(entry["network"]),) if isinstance(entry["network"], str) else ()
    return {
        "float": load(path, *network, kernels="float"),
        "exact": code_exact(load(path, *network, kernels="float")),
        "integer": load(path, *network, kernels="integer"),
        "trainable": load_trainable(path, *network).eval(),
    }


@torch.no_grad()
def logits_of(model: nn.Module, x: Tensor, settings: list[Any]) -> Tensor:
    """(settings, ...): the logits at each setting."""
    found = []
    for setting in settings:
        set_bits(model, bits_of(setting))
        found.append(model(x))
    return torch.stack(found)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """With so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def other_ways(model: nn.Module, x: Tensor, settings: list[Any]) -> Iterator[Tensor]:
    """The logits with two threads, without oneDNN, from another layout of memory, and sample by sample."""
    with threads(2):
        yield logits_of(model, x, settings)
    with warnings.catch_warnings(action="ignore"), torch.backends.mkldnn.flags(enabled=False):
        yield logits_of(model, x, settings)
        with threads(2):
            yield logits_of(model, x, settings)
    if x.dim() == 4:
        yield logits_of(model, x.to(memory_format=torch.channels_last), settings)
    yield torch.cat([logits_of(model, sample, settings) for sample in x.split(1)], dim=1)
    yield logits_of(copy.deepcopy(model), x.repeat(2, *(1,) * (x.dim() - 1)), settings)[:, len(x) :]


# --- proofs ---------------------------------------------------------------------------------------


def step_of(x: Tensor) -> float:
    """The largest power of two that all numbers are multiples of."""
    x = x.detach().double().abs().flatten()
    x = x[x > 0]
    if not len(x):
        return 1.0
    mantissa, exponent = torch.frexp(x)
    whole = (mantissa * 2.0**53).long()
    zeros = torch.log2((whole & -whole).double())
    return 2.0 ** float((exponent - 53 + zeros).min())


class Bounds:
    """Hooks on a trainable model that fail where a sum could be rounded in float32, in any order of its terms."""

    def __init__(self, model: nn.Module):
        self.tightest = 24.0
        for module in model.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Linear):
                module.register_forward_hook(self._layer)
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.register_forward_hook(self._norm)
            elif isinstance(module, nn.AdaptiveAvgPool2d):
                module.register_forward_hook(self._pool)

    def check(self, total: Tensor, step: float, what: str) -> None:
        bits = math.log2(max(float(total.max()) / step, 1))
        self.tightest = min(self.tightest, 24 - bits)
        assert bits <= 24, f"{what}: sums need {bits:.1f} bits"

    def _layer(self, layer: nn.Module, args: Any, y: Tensor) -> None:
        x, weight = args[0].double(), layer.weight.double()
        if hasattr(layer, "quantized"):
            x, weight = (t.double() for t in layer.quantized(args[0]))
        bias = torch.zeros(weight.shape[0]) if layer.bias is None else layer.bias
        forward = nn.functional.linear if isinstance(layer, nn.Linear) else layer._conv_forward
        assert torch.equal(forward(x, weight, bias.double()), y.double())
        rows = weight.flatten(1)
        step = step_of(x) * min(step_of(row) for row in rows)
        self.check(forward(x.abs(), weight.abs(), bias.double().abs()), min(step, step_of(bias)), repr(layer))

    def _norm(self, norm: nn.Module, args: Any, y: Tensor) -> None:
        (x,) = (t.double() for t in args)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        # Near 1 where eps is that of PyTorch; the bits of the network's output say that this made no difference.
        deviation = ((norm.running_var.double() + norm.eps).sqrt()).float().double()
        alpha = norm.weight.double() / deviation
        beta = norm.bias.double() - norm.running_mean.double() * alpha
        assert torch.equal(x * alpha.view(shape) + beta.view(shape), y.double())
        self.check((x * alpha.view(shape)).abs() + beta.abs().view(shape), min(step_of(y), step_of(beta)), repr(norm))

    def _pool(self, pool: nn.Module, args: Any, y: Tensor) -> None:
        assert torch.equal(args[0].double().mean(dim=(2, 3), keepdim=True), y.double())
        self.check(args[0].abs().double().sum(dim=(2, 3)), step_of(args[0]), repr(pool))


@torch.no_grad()
def no_border_near(model: nn.Module, x: Tensor, settings: list[Any]) -> bool:
    """Whether all activations of the trainable `model` keep MARGIN from borders between codes, or are beyond them."""
    near: list[bool] = []

    def hook(layer: nn.Module, args: Any) -> None:
        if args[0] is x:  # no sum made these
            return
        bits, quantizer = layer.act_bits, layer.act_quantizer
        move = MARGIN * quantizer.scales[str(bits)]
        near.append(not torch.equal(quantizer.codes(args[0] - move, bits), quantizer.codes(args[0] + move, bits)))

    for layer in model.modules():
        if getattr(layer, "act_quantizer", None) is not None:
            layer.register_forward_pre_hook(hook)
    logits_of(model, x, [setting for setting in settings if not isinstance(setting, str)])
    return not any(near)


# --- the files ------------------------------------------------------------------------------------


def make(name: str, entry: dict[str, Any], seed: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Write one file; its expected tensors and what there is to say of it. None if another seed must be tried."""
    numbers, odd, config = Numbers(seed), entry.get("odd", False), entry["config"]
    widths, weights_only = config.bit_choices, config.activations == "float"
    shape = entry["shape"]
    x = numbers.real(-1, 1, shape) if odd else numbers.whole(-8, 8, shape) / 8
    torch.manual_seed(seed)
    model = prepare(float_network(entry["network"]), config, x)
    if "transitions" in entry:
        model = add_transitions(model, entry["transitions"])
    set_parameters(model, numbers, odd=odd, levels=entry.get("levels", 4), largest=entry.get("largest"))
    if odd and hasattr(getattr(model, "wide", None), "act_quantizer"):
        set_on_borders(x, model.wide, numbers)
    plans = plans_of(model, widths, numbers)
    settings = settings_of(plans, widths)
    if odd and not no_border_near(copy.deepcopy(model).eval(), x, [*settings, *(p.to_dict() for p in plans.values())]):
        return None
    layers = {n: m.weight.numel() for n, m in model.named_modules() if hasattr(m, "weight_quantizer")}
    sensitivity = Sensitivity(
        layers={n: {"trace": 1.5 / (i + 3), "error": 0.1 / (i + 1), "parameters": size, "samples": 5}
                for i, (n, size) in enumerate(layers.items())},
        images=7,
    )  # fmt: skip
    sensitivity = sensitivity if seed // 1000 % 2 == 0 else None
    path = FILES / f"{name}.safetensors"
    new = path.with_suffix(".new")
    digest = save(model, new, plans=plans, metrics={"seed": seed}, sensitivity=sensitivity)
    if path.exists() and read_artifact(path).digest == digest:
        new.unlink()  # the order of a header's entries may differ
    else:
        new.replace(path)

    engines = engines_of(path, entry)
    expected = logits_of(engines["exact"], x, settings)
    differences = {}
    for engine, live in engines.items():
        found = logits_of(live, x, settings)
        if odd and engine in ("float", "trainable"):
            differences[engine] = float((found - expected).abs().max())
            continue
        assert torch.equal(found, expected), (name, engine)
        for again in other_ways(live, x, settings):
            assert torch.equal(again, expected), (name, engine, "another way")
    tensors = {f"{name}/x": x, f"{name}/logits": expected}
    said = {
        "network": entry["network"], "odd": odd, "settings": settings, "digest": digest, "scheme": config.scheme,
        "ties": config.ties, "bit_choices": list(widths), "plans": {n: p.to_dict() for n, p in plans.items()},
        "sensitivity": None if sensitivity is None else sensitivity.to_dict(), "packed": [],
    }  # fmt: skip
    trainable = engines["trainable"]
    if odd:
        said["largest"] = float(expected.abs().max())
        assert max(differences.values()) <= 4e-6 * said["largest"], differences
    else:
        bounds = Bounds(trainable)
        assert torch.equal(logits_of(trainable, x, settings), expected)
        said["spare bits"] = round(bounds.tightest, 2)
    if weights_only and config.scheme not in ("lsq", "dorefa"):
        for dtype in (torch.bfloat16, torch.float16):
            live = load(path, float_network(entry["network"]), kernels="packed", dtype=dtype)
            key = str(dtype).removeprefix("torch.")
            tensors[f"{name}/{key}"] = packed = logits_of(live, x.to(dtype), settings)
            for again in other_ways(live, x.to(dtype), settings):
                assert torch.equal(again, packed), (name, dtype)
            said["packed"].append(key)
    assert expected.flatten(1).abs().amax(dim=1).min() > 0, name
    different = len(expected.flatten(1).unique(dim=0))
    print(
        f"{name:28} {path.stat().st_size:6} bytes, {different} of {len(settings)} settings differ, "
        f"{said.get('spare bits', differences)}, logits to {float(expected.abs().max()):.3g}"
    )
    return tensors, said


def main(names: list[str]) -> None:
    """Make all files, or try those that are named without writing what is expected."""
    torch.set_num_threads(1)
    FILES.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    said: dict[str, Any] = {}
    for number, (name, entry) in enumerate(CASES.items()):
        if names and name not in names:
            continue
        made = next(filter(None, (make(name, entry, 1000 * number + attempt) for attempt in range(50))))
        tensors |= made[0]
        said[name] = made[1]
    if not names:
        golden = {"made_with": VERSION, "cases": said}
        save_file(tensors, EXPECTED, metadata={"golden": json.dumps(golden, sort_keys=True)})
        print(f"expected: {EXPECTED.stat().st_size} bytes; all: {sum(f.stat().st_size for f in FILES.iterdir())} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
