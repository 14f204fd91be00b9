"""Attention whose products are quantised, all the way: training, the file, live models, exact sums, costs, ONNX."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bitdial import (
    BitPlan,
    QuantConfig,
    Rule,
    TrainConfig,
    code_exact,
    describe,
    export_onnx,
    hessian_trace,
    load,
    load_trainable,
    measure_costs,
    onnx_session_options,
    prepare,
    read_artifact,
    save,
    set_bits,
    view_at_bits,
)
from bitdial.artifact.sizes import sizes
from bitdial.nn import ActivationSite
from bitdial.nn.attention import SITES
from bitdial.train import JointStep, load_checkpoint, save_checkpoint
from bitdial.train.gpu.fuse import FastModel
from bitdial.train.gpu.plan_slots import unsupported_reason
from bitdial.train.optimizers import split_parameters

WIDTHS = (8, 4, 2)
ATTENTIONS = ("encoder.layers.0.self_attn", "pool")


class Reader(nn.Module):
    """An encoder under a causal mask, and an attention that pools, with added keys and its weights asked for."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True)
        self.stem, self.mid, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = self.encoder(self.stem(x), mask=mask, is_causal=True).transpose(0, 1)
        pooled, _ = self.pool(x[:1], x, x, key_padding_mask=padding)
        return self.head(torch.relu(self.mid(pooled[0])))


GENERATOR = torch.Generator().manual_seed(0)
PADDING = torch.zeros(8, 5, dtype=torch.bool)
PADDING[1, 3:] = True
BATCH = torch.randn(8, 5, 6, generator=GENERATOR), PADDING
TARGETS = torch.randint(0, 3, (8,), generator=GENERATOR)


def prepared(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = {"bit_choices": WIDTHS, "start": "3std", "attention": "quantized", **settings}
    return prepare(Reader(), QuantConfig(**config), BATCH)


def step_of(model: nn.Module, **settings: Any) -> JointStep:
    return JointStep(model, TrainConfig(epochs=1, lr=1e-2, **settings), steps_per_epoch=2)


@functools.cache
def trained(**settings: Any) -> nn.Module:
    model = prepared(**settings)
    step = step_of(model)
    for _ in range(2):
        step(BATCH, TARGETS)
    return model.eval()


def sites_of(model: nn.Module) -> dict[str, ActivationSite]:
    return {name: m for name, m in model.named_modules() if isinstance(m, ActivationSite)}


def plans() -> Iterator[Any]:
    """Every width; weights and activations apart; the products of one attention at other bits."""
    yield from WIDTHS
    yield 2, 8
    yield BitPlan({"pool.out_proj": (8, 2)}, default=(2, 4))


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """Bit for bit."""


class Products(TorchFunctionMode):
    """Keeps the operands of products of two batches of matrices, which no layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("matmul", "__matmul__"):
            self.operands += [each.detach() for each in args if each.dim() == 4]
        return func(*args, **(kwargs or {}))


def test_every_operand_is_on_the_grid_of_its_width() -> None:
    model = trained()
    for bits, most in ((2, 4), (4, 16)):
        set_bits(model, bits)
        with Products() as seen, torch.no_grad():
            model(*BATCH)
        assert len(seen.operands) == 4 * len(ATTENTIONS)
        for operand in seen.operands:
            assert 2 <= len(operand.unique()) <= most, (bits, operand.unique())
        for p in seen.operands[2::4]:
            assert float(p.min()) == 0.0, bits
    set_bits(plain := prepared(attention="float"), 2)
    with Products() as seen:
        plain(*BATCH)
    assert len(seen.operands) == 4  # of the attention whose weights are asked for: the other one has PyTorch's kernel
    assert all(len(operand.unique()) > 4 for operand in seen.operands)


def test_they_follow_the_activation_bits_of_out_proj() -> None:
    model = trained()
    assert list(sites_of(model)) == [f"{name}.{part}" for name in ATTENTIONS for part in SITES]
    set_bits(model, BitPlan({"pool.out_proj": (8, 2), "pool.q_proj": (2, 8)}, default=(2, 4)))
    for name, site in sites_of(model).items():
        assert site.act_bits == (2 if name.startswith("pool.") else 4), name
    outer = nn.ModuleDict({"inner": model})  # names are others there
    set_bits(outer, (4, 8))
    assert {site.act_bits for site in sites_of(model).values()} == {8}


def test_their_scales_are_learned_as_scales(tmp_path: Path) -> None:
    model = prepared()
    own = {f"{name}.{key}": p for name, s in sites_of(model).items() for key, p in s.named_parameters()}
    before = {name: p.detach().clone() for name, p in own.items()}
    assert len(own) == len(WIDTHS) * 4 * len(ATTENTIONS)
    scales, weights = split_parameters(model)
    assert set(own.values()) <= set(scales)
    assert not set(own.values()) & set(weights)
    step = step_of(model)
    assert set(own) <= set(step.guard.names)
    step(BATCH, TARGETS)
    assert not [name for name, p in own.items() if torch.equal(p, before[name])]
    assert all(bool((p > 0).all()) for p in own.values())
    save_checkpoint(tmp_path / "c", step)
    other = step_of(prepared())
    load_checkpoint(tmp_path / "c", other)
    for name, value in sites_of(other.model).items():
        assert torch.equal(value.quantizer.scales["4"], model.get_submodule(name).quantizer.scales["4"]), name


def test_they_have_an_adaptive_rate_of_their_own() -> None:
    """A gradient that fills its whole norm stops a scale, and no other."""
    model = prepared()
    own = [p for site in sites_of(model).values() for p in site.parameters()]
    for p in own:
        p.register_hook(lambda grad: torch.full_like(grad, 1e6))
    before = [p.detach().clone() for p in own]
    scale = model.mid.weight_quantizer.scale
    start = scale.detach().clone()
    step_of(model, alrs="layer")(BATCH, TARGETS)
    assert all(torch.equal(p, old) for p, old in zip(own, before, strict=True))
    assert not torch.equal(scale, start)


def test_slots_for_sampled_plans_refuse_them() -> None:
    model = prepared()
    reason = unsupported_reason(model, FastModel(model, fused=False), TrainConfig(epochs=1))
    assert reason == "the products of an attention are quantised"


def test_live_models_are_the_trained_ones_bit_for_bit(tmp_path: Path) -> None:
    for scheme in ("double_rounding", "lsq"):
        model = trained(scheme=scheme)
        save(model, tmp_path / "m")
        live, again = load(tmp_path / "m", Reader(), kernels="float"), load_trainable(tmp_path / "m", Reader()).eval()
        exact, integer = code_exact(live), load(tmp_path / "m", Reader(), kernels="integer")
        for plan in plans():
            for each in (model, live, again, exact, integer):
                set_bits(each, plan)
            with torch.no_grad():
                expected = model(*BATCH)
                assert torch.equal(live(*BATCH), expected), (scheme, plan)
                assert torch.equal(again(*BATCH), expected), (scheme, plan)
                assert torch.equal(view_at_bits(live, plan)(*BATCH), expected), (scheme, plan)
                near = torch.isclose(exact(*BATCH), expected, rtol=1e-3, atol=1e-3).all(dim=1)
                assert near.float().mean() >= 0.5, (scheme, plan)  # a code near its border may go either way
                assert torch.equal(integer(*BATCH), exact(*BATCH)), (scheme, plan)


def test_bytes_and_sensitivity(tmp_path: Path) -> None:
    model, plain = trained(), prepared(attention="float")
    save(model, tmp_path / "m")
    save(plain, tmp_path / "plain")
    found, former = sizes(read_artifact(tmp_path / "m")), sizes(read_artifact(tmp_path / "plain"))
    count = 4 * 4 * len(ATTENTIONS)  # bytes of a width
    assert found["scales"] - former["scales"] == count * len(WIDTHS)
    assert found["float"] == former["float"]
    assert describe(model).file_bytes == found["tensors"]
    costs, less = measure_costs(model, BATCH), measure_costs(plain, BATCH)
    for bits in WIDTHS:
        assert describe(model).width_bytes[bits] == found["separate"][bits] == former["separate"][bits] + count
        assert costs.of(BitPlan(default=bits))["bytes"] - less.of(BitPlan(default=bits))["bytes"] == count
        assert costs.of(BitPlan(default=bits))["bitops"] == less.of(BitPlan(default=bits))["bitops"]
    traces = hessian_trace(model, [(BATCH, TARGETS)], most_samples=2, tolerance=1.0, progress=False)  # not rounded
    assert set(traces.layers) == set(costs.layers)


def test_by_default_nothing_is_there(tmp_path: Path) -> None:
    plain = prepared(attention="float")
    assert not [key for key in plain.state_dict() if "quant_" in key]
    save(plain, tmp_path / "m")
    assert "sites" not in read_artifact(tmp_path / "m").manifest


def test_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    save(trained(), tmp_path / "m")
    live = load(tmp_path / "m", Reader(), kernels="float")
    export_onnx(live, tmp_path / "m.onnx", BATCH, bits=4)
    set_bits(live, 4)
    for options in (onnx_session_options(), None):
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx", options, providers=["CPUExecutionProvider"])
        names = [i.name for i in session.get_inputs()]
        (found,) = session.run(None, {key: value.numpy() for key, value in zip(names, BATCH, strict=True)})
        near = torch.isclose(torch.from_numpy(found), live(*BATCH), rtol=1e-4, atol=1e-4).all(dim=1)
        assert near.float().mean() >= 0.75


def test_products_have_the_width_of_a_layer_that_has_its_own(tmp_path: Path) -> None:
    model = prepared(rules=(Rule(pattern="pool.out_proj", bits=8),))
    save(model, tmp_path / "m")
    for each in (model, load(tmp_path / "m", Reader())):
        set_bits(each, 2)
        sites = {name: m.act_bits for name, m in each.named_modules() if isinstance(m, ActivationSite)}
        assert sites == {f"{name}.{site}": 8 if name == "pool" else 2 for name in ATTENTIONS for site in SITES}
