"""Every kind of layer through the whole path: prepare, train, save, load, the dial, exact sums, costs, search, ONNX."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    JointStep,
    QuantConfig,
    Rule,
    TrainConfig,
    code_exact,
    hessian_trace,
    load,
    load_trainable,
    prepare,
    read_artifact,
    save,
    search,
    set_bits,
)
from bitdial import functional as bf
from bitdial.nn import KINDS, QuantLayer
from bitdial.planning.cost import measure_costs

WIDTHS = (8, 6, 4, 3, 2)
NARROWING = ("double_rounding", "nested", "nested+8", "centred", "truncate", "adabits")
OTHERS = ("lsq", "dorefa")


class Signal(nn.Module):
    """(batch, 2, 12) to 3 scores by Conv1d."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(2, 4, 3, padding=1)
        self.mid = nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=2, groups=2)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Conv1d(6, 6, 2, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.mid(torch.relu(self.stem(x)))))
        return self.head(torch.relu(self.last(x)).amax(dim=-1))


class Volume(nn.Module):
    """(batch, 2, 4, 5, 6) to 3 scores by Conv3d."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(2, 4, 1)
        self.mid = nn.Conv3d(4, 4, (1, 2, 3), padding=(0, 1, 1), groups=2)
        self.norm = nn.BatchNorm3d(4)
        self.last = nn.Conv3d(4, 6, 2, stride=2)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.mid(torch.relu(self.stem(x)))))
        return self.head(torch.relu(self.last(x)).flatten(2).amax(dim=-1))


class Upscale(nn.Module):
    """(batch, 2, 5, 6) to 3 scores by ConvTranspose2d: plain, with groups, depthwise; odd paddings, signed inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.plain = nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=(1, 0))
        self.norm = nn.BatchNorm2d(6)
        self.grouped = nn.ConvTranspose2d(6, 4, 3, groups=2, dilation=(1, 2), bias=False)
        self.depthwise = nn.ConvTranspose2d(4, 4, 2, stride=(1, 2), groups=4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(torch.relu(self.norm(self.plain(torch.relu(self.stem(x))))))
        return self.head(self.depthwise(x).flatten(2).amax(dim=-1))


class Tokens(nn.Module):
    """Tokens (batch, length) to 3 scores by Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=1)
        self.places = nn.Embedding(6, 8)
        self.stem = nn.Linear(8, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(6, device=tokens.device).expand(tokens.shape)
        x = torch.relu(self.stem(self.words(tokens) + self.places(places)))
        return self.head(torch.relu(self.mid(x)).amax(dim=1))


class Tied(nn.Module):
    """Tokens (batch, length) to 20 scores: the head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.mid = nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.mid(self.words(tokens))).amax(dim=1))


GENERATOR = torch.Generator().manual_seed(0)
WORDS = torch.randint(0, 20, (8, 6), generator=GENERATOR)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "Conv1d": (Signal, torch.randn(8, 2, 12, generator=GENERATOR)),
    "Conv3d": (Volume, torch.randn(8, 2, 4, 5, 6, generator=GENERATOR)),
    "ConvTranspose2d": (Upscale, torch.randn(8, 2, 5, 6, generator=GENERATOR)),
    "Embedding": (Tokens, WORDS),
    "Embedding and Linear": (Tied, WORDS),
}
TARGETS = torch.randint(0, 3, (8,), generator=GENERATOR)
EMBEDDINGS = Rule(type="Embedding", quantize=True)
LAYERS = {
    "Conv1d": ["mid", "last"],
    "Conv3d": ["mid", "last"],
    "ConvTranspose2d": ["plain", "grouped", "depthwise"],
    "Embedding": ["words", "places", "stem", "mid"],
    "Embedding and Linear": ["words", "mid", "head"],
}


def settings_of(name: str, **settings: Any) -> QuantConfig:
    tied = {"keep_first_last": False} if name == "Embedding and Linear" else {}
    rules = (EMBEDDINGS,) if "Embedding" in name else ()
    return QuantConfig(**{"bit_choices": WIDTHS, "start": "3std", "rules": rules, **tied, **settings})


def trained(name: str, **settings: Any) -> nn.Module:
    """The prepared network of that name after a step of training, in eval mode."""
    torch.manual_seed(0)
    make, batch = NETWORKS[name]
    model = prepare(make(), settings_of(name, **settings), batch)
    JointStep(model, TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=2)(batch, TARGETS)
    return model.eval()


def layers_of(model: nn.Module) -> dict[str, QuantLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}


def plans_of(name: str) -> Iterator[Any]:
    """Every width; weights and activations apart; a mixed plan."""
    yield from WIDTHS
    yield 4, 8
    first, *rest = LAYERS[name]
    yield BitPlan({first: (2, 8)}, default=6)
    yield BitPlan(dict.fromkeys(rest, (3, 6)), default=(8, 4))


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """Bit for bit."""


def test_every_kind_is_here() -> None:
    here = {type(layer).__name__ for make, _ in NETWORKS.values() for layer in make().modules()}
    assert here >= {*KINDS} - {"RecurrentWeight"}  # the part of another module: test_decompositions.py


def test_training_moves_weights_and_scales() -> None:
    for name, (make, batch) in NETWORKS.items():
        torch.manual_seed(0)
        before = prepare(make(), settings_of(name), batch)
        after = trained(name)
        assert list(layers_of(after)) == LAYERS[name]
        for (layer, old), new in zip(layers_of(before).items(), layers_of(after).values(), strict=True):
            assert not torch.equal(new.weight, old.weight), (name, layer)
            assert not torch.equal(new.weight_quantizer.scale, old.weight_quantizer.scale), (name, layer)
            assert (new.act_quantizer is None) == new.kind.gathers


def own_order(layer: QuantLayer, values: Tensor) -> Tensor:
    """`values` by output channel, at each weight of `layer` in PyTorch's own order; written out for each kind."""
    weight = layer.weight
    if isinstance(layer, nn.ConvTranspose2d):
        inputs, outputs = weight.shape[:2]
        group = torch.arange(inputs) // (inputs // layer.groups)
        channel = group[:, None] * outputs + torch.arange(outputs)
        return values[channel][..., None, None].expand_as(weight)
    return values.view(-1, *(1,) * (weight.dim() - 1)).expand_as(weight)


def float_product(layer: QuantLayer, x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's own product, by its own names."""
    call: Any = layer
    if isinstance(layer, nn.Embedding):
        return F.embedding(x, weight, layer.padding_idx)
    if isinstance(layer, nn.ConvTranspose2d):
        shape = (call.stride, call.padding, call.output_padding, call.groups, call.dilation)
        return F.conv_transpose2d(x, weight, layer.bias, *shape)
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    convolve: Any = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv3d
    return convolve(x, weight, layer.bias, call.stride, call.padding, call.dilation, call.groups)


def test_values_and_gradients_from_first_principles() -> None:
    """Round by hand in PyTorch's own order; pass gradients straight through where nothing is clipped."""
    for name, (_, batch) in NETWORKS.items():
        model = trained(name)
        seen: dict[str, Tensor] = {}
        layers = layers_of(model)
        for n, layer in layers.items():
            layer.register_forward_hook(lambda m, args, out, n=n, seen=seen: seen.update({n: args[0].detach()}))
        model(batch)
        for n, layer in layers.items():
            for bits in WIDTHS:
                layer.select_bits(bits, 8)
                layer.zero_grad()
                if name == "Embedding and Linear":
                    layer.weight.grad = None
                factor, scale = 2 ** (8 - bits), layer.weight_quantizer.scale.detach()
                x = seen[n]
                if layer.act_quantizer is not None:
                    x = layer.act_quantizer(x, 8).detach()
                ratio = layer.weight.detach() / own_order(layer, scale)
                code = (ratio.round().clamp(-128, 127) / factor).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
                value = (code * own_order(layer, scale * factor)).requires_grad_()
                expected = float_product(layer, x, value)
                out = layer(seen[n])
                assert torch.equal(out, expected), (name, n, bits)
                direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(bits))
                (expected * direction).sum().backward()
                (out * direction).sum().backward()
                reach = ratio / factor
                inside = (reach > -(2 ** (bits - 1))) & (reach < 2 ** (bits - 1) - 1)
                torch.testing.assert_close(layer.weight.grad, value.grad * inside)
                slope = value.grad * torch.where(inside, code - reach, code) * factor
                at = own_order(layer, torch.arange(len(scale))).reshape(-1)
                expected_scale = torch.zeros(len(scale)).index_add(0, at, slope.reshape(-1))
                terms = torch.zeros(len(scale)).index_add(0, at, slope.abs().reshape(-1))
                lsq = (layer.weight.numel() / len(scale) * (2 ** (bits - 1) - 1)) ** -0.5
                error = (layer.weight_quantizer.scale.grad - expected_scale * lsq).abs()
                assert (error <= terms * lsq * 1e-5).all(), (name, n, bits)  # float32 sums of such terms


def test_codes_in_the_file_are_those_of_training_at_every_width(tmp_path: Path) -> None:
    for name in NETWORKS:
        for scheme in NARROWING:
            model = trained(name, scheme=scheme)
            save(model, tmp_path / "m")
            artifact = read_artifact(tmp_path / "m")
            for n, layer in layers_of(model).items():
                rows, stored = layer.weight_rows(), artifact.codes(artifact.owner(n))
                assert list(rows.shape) == artifact.layers[n]["shape"]
                for bits in WIDTHS:
                    narrowed = bf.narrow(stored, high=8, low=bits, scheme=scheme)
                    assert torch.equal(narrowed, layer.weight_quantizer.codes(rows, bits)), (name, scheme, n, bits)


def test_tied_layers_store_their_codes_once(tmp_path: Path) -> None:
    save(trained("Embedding and Linear"), tmp_path / "m")
    artifact = read_artifact(tmp_path / "m")
    assert artifact.layers["head"]["tied_to"] == "words"
    assert artifact.layers["words"]["type"] == "Embedding"
    assert not [name for name in artifact.tensors if name.startswith("head/codes")]
    assert not [name for name in artifact.tensors if "words" in name and name.startswith(".float/")]


def test_a_file_can_be_trained_on_from(tmp_path: Path) -> None:
    for name, (make, batch) in NETWORKS.items():
        for scheme in (*NARROWING, *OTHERS):
            model = trained(name, scheme=scheme)
            save(model, tmp_path / "m")
            again = load_trainable(tmp_path / "m", make()).eval()
            if scheme == "adabits":  # takes its scale anew from the weights, through tanh: the codes are the same
                for old, new in zip(layers_of(model).values(), layers_of(again).values(), strict=True):
                    codes = [each.weight_quantizer.codes(each.weight_rows(), 8) for each in (old, new)]
                    assert torch.equal(*codes), (name, scheme)
                continue
            for plan in plans_of(name):
                set_bits(model, plan)
                set_bits(again, plan)
                assert torch.equal(again(batch), model(batch)), (name, scheme, plan)
            save(again, tmp_path / "again")
            first, second = read_artifact(tmp_path / "m"), read_artifact(tmp_path / "again")
            assert first.tensors.keys() == second.tensors.keys()
            assert all(torch.equal(first.tensors[key], second.tensors[key]) for key in first.tensors), (name, scheme)
            JointStep(again, TrainConfig(epochs=1), steps_per_epoch=1)(batch, TARGETS)


def test_costs_and_search() -> None:
    for name, (_, batch) in NETWORKS.items():
        model = trained(name)
        costs = measure_costs(model, batch[:1])
        for n, layer in layers_of(model).items():
            assert (costs.layers[n].macs == 0) == layer.kind.gathers, n
            assert costs.layers[n].weights == layer.weight.numel()
            assert costs.layers[n].out_channels == len(layer.weight_rows())
        sensitivity = hessian_trace(model, [(batch, TARGETS)], most_samples=4, tolerance=1.0, progress=False)
        assert {n: s.parameters for n, s in sensitivity.layers.items()} == {
            n: layer.weight.numel() for n, layer in layers_of(model).items()
        }
        found = search(model, sensitivity, costs, {"average_bits": 4})
        assert costs.of(found.plan)["average_bits"] <= 4
        set_bits(model, found.plan)
        assert torch.isfinite(model(batch)).all()


# --- live models --------------------------------------------------------------------------------


def test_live_models_are_the_trained_ones_bit_for_bit(tmp_path: Path) -> None:
    for name, (make, batch) in NETWORKS.items():
        for scheme in (*NARROWING, *OTHERS):
            model = trained(name, scheme=scheme)
            save(model, tmp_path / "m")
            live = load(tmp_path / "m", make(), kernels="float")
            for plan in plans_of(name):
                set_bits(model, plan)
                set_bits(live, plan)
                assert torch.equal(live(batch), model(batch)), (name, scheme, plan)


def test_exact_sums_are_near_and_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    for name, (make, batch) in NETWORKS.items():
        for scheme in (*NARROWING, *OTHERS):
            save(trained(name, scheme=scheme), tmp_path / "m")
            live = load(tmp_path / "m", make(), kernels="float")
            exact = code_exact(live)
            for plan in plans_of(name):
                set_bits(live, plan)
                set_bits(exact, plan)
                one, other = exact(batch), live(batch)
                assert torch.equal(torch.cat([exact(x[None]) for x in batch]), one), (name, scheme, plan)
                near = torch.isclose(one, other, rtol=1e-4, atol=1e-4).all(dim=1)
                assert near.float().mean() >= 0.5, (name, scheme, plan)  # a code near its border may go the other way


def test_integer_kernels_are_the_exact_sums(tmp_path: Path) -> None:
    for name, (make, batch) in NETWORKS.items():
        save(trained(name), tmp_path / "m")
        live = load(tmp_path / "m", make(), kernels="integer")
        exact = code_exact(load(tmp_path / "m", make(), kernels="float"))
        for plan in plans_of(name):
            set_bits(live, plan)
            set_bits(exact, plan)
            assert torch.equal(live(batch), exact(batch)), (name, plan)


@pytest.mark.slow
def test_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from bitdial import export_onnx

    for name, (make, batch) in NETWORKS.items():
        save(trained(name), tmp_path / "m")
        live = load(tmp_path / "m", make(), kernels="float")
        plan = BitPlan({layer: (8, 4)[i % 2] for i, layer in enumerate(LAYERS[name])})  # each kind in both integers
        export_onnx(live, tmp_path / "m.onnx", batch, bits=plan)
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        set_bits(live, plan)
        near = torch.isclose(torch.from_numpy(found), live(batch), rtol=1e-3, atol=1e-3).all(dim=1)
        assert near.float().mean() >= 0.5, name
