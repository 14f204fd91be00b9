"""Every module that is taken apart, all the way: training, the file, live models, exact sums, costs, ONNX."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

from bitdial import (
    BitPlan,
    QuantConfig,
    Rule,
    TrainConfig,
    code_exact,
    export_onnx,
    hessian_trace,
    load,
    load_trainable,
    measure_costs,
    prepare,
    read_artifact,
    save,
    search,
    set_bits,
)
from bitdial.errors import ArtifactError, ExportError
from bitdial.nn import QuantLayer
from bitdial.nn.decompose import DECOMPOSITIONS, decompose
from bitdial.prepare.model_call import Batch, call
from bitdial.train import JointStep

WIDTHS = (8, 4, 2)
pytestmark = [  # torch's own
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"),
]


class Translator(nn.Module):
    """PyTorch's own encoder and decoder, with padding and causal masks."""

    def __init__(self, *, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0}
        self.batch_first, self.stem, self.head = batch_first, nn.Linear(6, 8), nn.Linear(8, 3)
        form: dict[str, Any] = {"batch_first": batch_first, "norm_first": norm_first}
        encoder = nn.TransformerEncoderLayer(**sizes, **form)
        self.encoder = nn.TransformerEncoder(encoder, 1, enable_nested_tensor=batch_first and not norm_first)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes, **form), 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        x = self.stem(x) if self.batch_first else self.stem(x).transpose(0, 1)
        known = self.encoder(x, src_key_padding_mask=padding)
        x = self.decoder(x, known, tgt_mask=causal, tgt_is_causal=True, memory_key_padding_mask=padding)
        return self.head(x.mean(dim=1 if self.batch_first else 0))


class Conv1D(nn.Module):
    """GPT-2's layer as transformers has it: a Linear whose weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf) * 0.3), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"  # by which it is known


class Transposed(nn.Module):
    """A block as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.c_fc, self.c_proj, self.head = nn.Linear(6, 8), Conv1D(16, 8), Conv1D(8, 16), nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.c_proj(nn.functional.gelu(self.c_fc(x)[..., : self.c_proj.nx]))
        return self.head((x * ~padding[..., None]).mean(dim=1))


class Reader(nn.Module):
    """A recurrent network over sentences, which may be packed as their lengths say."""

    def __init__(self, network: type[nn.RNNBase], *, packs: bool = False, **arguments: Any) -> None:
        super().__init__()
        self.packs, self.stem, self.network = packs, nn.Linear(6, 8), network(8, 7, batch_first=True, **arguments)
        sides = 2 if self.network.bidirectional else 1
        self.mid, self.head = nn.Linear(sides * (self.network.proj_size or 7), 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.stem(x)
        if self.packs:
            lengths = (~padding).sum(dim=1)
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x = pad_packed_sequence(self.network(packed)[0], batch_first=True)[0]
        else:
            x = self.network(x)[0] * ~padding[..., None]
        return self.head(torch.relu(self.mid(x)).amax(dim=1))


GENERATOR = torch.Generator().manual_seed(0)
PADDING = torch.zeros(8, 5, dtype=torch.bool)
PADDING[1, 3:] = True
SENTENCES = torch.randn(8, 5, 6, generator=GENERATOR), PADDING
TARGETS = torch.randint(0, 3, (8,), generator=GENERATOR)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "MultiheadAttention": (Translator, SENTENCES),
    "MultiheadAttention, length first": (lambda: Translator(batch_first=False, norm_first=True), SENTENCES),
    "Conv1D": (Transposed, SENTENCES),
    "LSTM": (lambda: Reader(nn.LSTM, num_layers=2, bidirectional=True), SENTENCES),
    "LSTM, packed": (lambda: Reader(nn.LSTM, packs=True), SENTENCES),
    "LSTM, projected": (lambda: Reader(nn.LSTM, proj_size=5), SENTENCES),
    "GRU": (lambda: Reader(nn.GRU), SENTENCES),
    "RNN": (lambda: Reader(nn.RNN, packs=True, num_layers=2, nonlinearity="relu"), SENTENCES),
}


def trained(name: str, **settings: Any) -> nn.Module:
    """The prepared network of that name after a step of training, in eval mode."""
    torch.manual_seed(0)
    make, batch = NETWORKS[name]
    config = QuantConfig(**{"bit_choices": WIDTHS, "start": "3std", **settings})
    model = prepare(make().train(), config, batch)
    JointStep(model, TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=2)(batch, TARGETS)
    return model.eval()


def layers_of(model: nn.Module) -> dict[str, QuantLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}


def plans_of(model: nn.Module) -> Iterator[Any]:
    """Every width; weights and activations apart; a mixed plan."""
    yield from WIDTHS
    yield 4, 8
    yield BitPlan(dict.fromkeys(list(layers_of(model))[::2], (2, 8)), default=8)


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """Bit for bit."""


def test_every_decomposition_is_here(tmp_path: Path) -> None:
    found: set[str] = set()
    for name in NETWORKS:
        save(trained(name), tmp_path / "m")
        found |= set(read_artifact(tmp_path / "m").manifest["decomposed"].values())
    assert {*found, "FrozenBatchNorm2d"} == set(DECOMPOSITIONS)  # a norm: tests/integration/test_detectors.py


def test_training_moves_all_weights_and_scales() -> None:
    for name, (make, batch) in NETWORKS.items():
        torch.manual_seed(0)
        before = prepare(make(), QuantConfig(bit_choices=WIDTHS, start="3std"), batch)
        for (layer, old), new in zip(layers_of(before).items(), layers_of(trained(name)).values(), strict=True):
            assert not torch.equal(new.weight, old.weight), (name, layer)
            assert not torch.equal(new.weight_quantizer.scale, old.weight_quantizer.scale), (name, layer)


def test_taken_apart_it_is_the_float_model() -> None:
    for name, (make, batch) in NETWORKS.items():
        torch.manual_seed(0)
        model = make()
        apart = copy.deepcopy(model)
        assert set(decompose(apart).values()) <= {name.partition(",")[0]}
        torch.testing.assert_close(call(apart, batch), call(model, batch), rtol=1e-5, atol=1e-6, msg=name)
        kinds = {type(module) for module in copy.deepcopy(apart).modules()}
        assert not any(how.recognises(kind) for kind in kinds for how in DECOMPOSITIONS.values()), name


def test_rules_may_name_the_whole() -> None:
    for name, (make, batch) in NETWORKS.items():
        whole = name.partition(",")[0]
        for quantize in (True, False):
            rules = (Rule(pattern="*", quantize=not quantize), Rule(type=whole, quantize=quantize))
            if not quantize:
                rules += (Rule(pattern="head", quantize=True),)  # something must be left
            prepared = prepare(make(), QuantConfig(bit_choices=(8, 4), start="3std", rules=rules), batch)
            names = [n for n, m in decomposed_parts(prepared)]
            assert names, name
            assert all((n in layers_of(prepared)) == quantize for n in names), name


def decomposed_parts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers inside modules that were taken apart."""
    return [(n, m) for n, m in model.named_modules() if "part_of" in vars(m) and hasattr(m, "weight")]


def test_live_models_are_the_trained_ones_bit_for_bit(tmp_path: Path) -> None:
    for name, (make, batch) in NETWORKS.items():
        for scheme in ("double_rounding", "nested", "lsq"):
            model = trained(name, scheme=scheme)
            save(model, tmp_path / "m")
            live, again = load(tmp_path / "m", make(), kernels="float"), load_trainable(tmp_path / "m", make()).eval()
            exact, integer = code_exact(live), load(tmp_path / "m", make(), kernels="integer")
            for plan in plans_of(model):
                for each in (model, live, again, exact, integer):
                    set_bits(each, plan)
                with torch.no_grad():
                    expected = call(model, batch)
                    assert torch.equal(call(live, batch), expected), (name, scheme, plan)
                    assert torch.equal(call(again, batch), expected), (name, scheme, plan)
                    near = torch.isclose(call(exact, batch), expected, rtol=1e-3, atol=1e-3).all(dim=1)
                    assert near.float().mean() >= 0.5, (name, scheme, plan)  # a code near its border may go either way
                    assert torch.equal(call(integer, batch), call(exact, batch)), (name, scheme, plan)


def test_weight_only_models_run_on_packed_kernels(tmp_path: Path) -> None:
    for name, (make, batch) in NETWORKS.items():
        model = trained(name, activations="float")
        save(model, tmp_path / "m")
        live = load(tmp_path / "m", make(), kernels="packed")
        for bits in WIDTHS:
            set_bits(live, bits)
            set_bits(model, bits)
            with torch.no_grad():
                torch.testing.assert_close(call(live, batch), call(model, batch), rtol=1e-4, atol=1e-4)


def test_costs_sensitivity_and_search() -> None:
    for name, (make, batch) in NETWORKS.items():
        model = trained(name)
        costs = measure_costs(model, batch)
        config = QuantConfig(bit_choices=(8, 4), start="max", keep_first_last=False)
        everything = measure_costs(prepare(make(), config, batch), batch)
        with FlopCounterMode(display=False) as counter:  # in float32 a whole LSTM is one operator, which is not counted
            call(make().double(), (batch[0].double(), batch[1]))  # type: ignore[index]
        counts = counter.get_flop_counts()["Global"]
        products = sum(flops for operator, flops in counts.items() if str(operator) in ("aten.addmm", "aten.mm"))
        assert 2 * sum(layer.macs for layer in everything.layers.values()) == products, name
        sensitivity = hessian_trace(model, [(batch, TARGETS)], most_samples=4, tolerance=1.0, progress=False)
        found = search(model, sensitivity, costs, {"average_bits": 4})
        assert costs.of(found.plan)["average_bits"] <= 4
        set_bits(model, found.plan)
        assert torch.isfinite(call(model, batch)).all()


@pytest.mark.slow
def test_onnx(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    for name in ("MultiheadAttention", "LSTM", "GRU"):
        make, batch = NETWORKS[name]
        save(trained(name), tmp_path / "m")
        live = load(tmp_path / "m", make(), kernels="float")
        export_onnx(live, tmp_path / "m.onnx", batch, bits=4)
        session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
        given = batch if isinstance(batch, tuple) else (batch,)
        names = [i.name for i in session.get_inputs()]
        (found,) = session.run(None, {key: value.numpy() for key, value in zip(names, given, strict=True)})
        set_bits(live, 4)
        near = torch.isclose(torch.from_numpy(found), call(live, batch), rtol=1e-3, atol=1e-3).all(dim=1)
        assert near.float().mean() >= 0.5, name


def test_onnx_names_what_it_cannot_have(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    for name, problem in (
        ("LSTM, projected", "'network' is an LSTM with proj_size=5, which ONNX's LSTM does not have"),
        ("LSTM, packed", "in 'network', the path of the forward depends on the values of a tensor"),
    ):
        make, batch = NETWORKS[name]
        save(trained(name), tmp_path / "m")
        with pytest.raises(ExportError, match=problem):
            export_onnx(load(tmp_path / "m", make()), tmp_path / "m.onnx", batch)


def test_a_compiled_model_is_the_same() -> None:
    model, batch = trained("MultiheadAttention", activations="float"), NETWORKS["MultiheadAttention"][1]
    torch.compiler.reset()
    with torch.no_grad():
        assert torch.equal(call(torch.compile(model, backend="eager", fullgraph=True), batch), call(model, batch))


def test_a_file_from_before_keeps_its_modules_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["bitdial.prepare.prepare"], "decompose", lambda model: {})
    for name in ("MultiheadAttention", "LSTM"):
        make, batch = NETWORKS[name]
        model = trained(name, keep_first_last=False)
        save(model, tmp_path / "m")
        assert "decomposed" not in read_artifact(tmp_path / "m").manifest
        live = load(tmp_path / "m", make())
        set_bits(model, 4)
        set_bits(live, 4)
        with torch.no_grad():
            assert torch.equal(call(live, batch), call(model, batch)), name


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    model = trained("MultiheadAttention")
    save(model, tmp_path / "m")
    other = Translator()
    other.encoder.layers[0].self_attn = nn.Identity()
    with pytest.raises(ArtifactError, match=r"'encoder.layers.0.self_attn' is a MultiheadAttention in the file"):
        load(tmp_path / "m", other)
