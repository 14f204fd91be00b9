"""Live models on packed words: their codes, their numbers and their switches, against the model on float kernels.

On a GPU the kernels run, elsewhere the reference of the op; `test_on_kernels.py` runs them there by the interpreter.
"""

import copy
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    at_bits,
    code_exact,
    export_onnx,
    get_bits,
    load,
    prepare,
    read_artifact,
    resident_bytes,
    save,
    set_bits,
    view_at_bits,
)  # fmt: skip
from bitdial.dial.dial import dialled_layers
from bitdial.errors import ConfigError, PlanError, QuantizationError
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.live import kernel_choice
from bitdial.live.engines.packed import PackedEngine
from bitdial.live.layers import LiveLayer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (8, 6, 4, 3, 2)
NESTED = ("nested", "nested+2", "centred", "truncate", "adabits")
SCHEMES = ("double_rounding", *NESTED)
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
MIXED = BitPlan({"first": 2, "early": 3, "late": 8, "head": (4, 8)}, default=6)


def layers_of(model: nn.Module) -> dict[str, LiveLayer]:
    layers = dialled_layers(model)
    assert all(isinstance(layer, LiveLayer) and isinstance(layer.engine, PackedEngine) for layer in layers.values())
    return layers  # type: ignore[return-value]


def words_of(model: nn.Module) -> dict[str, Any]:
    """What holds the words of each layer."""
    return {name: layer.codes.source for name, layer in layers_of(model).items()}


def run(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens.to(next(model.parameters()).device)).cpu()


@pytest.fixture
def live(saved: Callable[..., Path], decoder: nn.Module) -> Callable[..., nn.Module]:
    """Loads the decoder on packed kernels."""

    def make(scheme: str, *, config: dict[str, Any] | None = None, **options: Any) -> nn.Module:
        options = {"kernels": "packed", "device": DEVICE, **options}
        return load(saved(scheme, **(config or {})), decoder, **options)

    return make


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("config", [{}, {"per_channel": False, "bit_choices": (7, 5, 2)}])
def test_codes_scales_and_float32_outputs_are_those_of_float_kernels(
    live: Callable[..., nn.Module], saved: Callable[..., Path], decoder: nn.Module, tokens: Tensor, scheme: str,
    config: dict[str, Any],
) -> None:  # fmt: skip
    packed, plain = live(scheme, config=config), load(saved(scheme, **config), decoder)
    widths = config.get("bit_choices", WIDTHS)
    for setting in (*widths, *([] if config else [MIXED]), widths[0]):
        set_bits(packed, setting)
        set_bits(plain, setting)
        assert get_bits(packed) == get_bits(plain)
        for name, layer in layers_of(packed).items():
            bits, twin = layer.weight_bits, dialled_layers(plain)[name]
            assert isinstance(twin, LiveLayer)
            assert torch.equal(layer.codes.weight_codes(bits).cpu(), twin.codes.weight_codes(bits)), (name, setting)
            step = layer.codes.step(bits).cpu()
            assert torch.equal(step, twin.codes.step(bits).expand_as(step)), (name, setting)
        if DEVICE == "cpu":  # by sums in another order
            torch.testing.assert_close(run(packed, tokens), run(plain, tokens))


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("scheme", ["double_rounding", "nested", "nested+2", "centred"])
def test_layers_in_16_bits_keep_the_stated_bound(
    live: Callable[..., nn.Module], dtype: torch.dtype, scheme: str
) -> None:
    packed = live(scheme, dtype=dtype)
    for setting in (*WIDTHS, MIXED):
        set_bits(packed, setting)
        for layer in layers_of(packed).values():
            x = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(2)).to(dtype)
            codes, scale = layer.codes.weight_codes(layer.weight_bits), layer.codes.step(layer.weight_bits)
            shift = 8 - layer.weight_bits
            middle = scheme == "centred" or (scheme.startswith("nested") and shift > 0)
            offset = 0.5 * middle - int(scheme.partition("+")[2] or 0) / 2**shift
            weight = ((codes.double() + offset) * scale.double()[:, None]).cpu()
            bias = torch.zeros(len(weight)).double() if layer.bias is None else layer.bias.double().cpu()
            exact = x.double() @ weight.T + bias
            slack = layer.in_features * 2.0**-23 * (x.double().abs() @ weight.T.abs() + bias.abs())
            y = layer(x.to(DEVICE))
            assert y.dtype == dtype
            assert bool(((y.double().cpu() - exact).abs() <= UNIT[dtype] * exact.abs() + slack).all())


@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_the_model_in_16_bits_is_near_the_one_in_float32(
    live: Callable[..., nn.Module], saved: Callable[..., Path], decoder: nn.Module, tokens: Tensor, scheme: str
) -> None:
    plain, half = load(saved(scheme), decoder), live(scheme, dtype=torch.float16)
    for bits in (8, 2):
        set_bits(plain, bits)
        set_bits(half, bits)
        wanted, found = run(plain, tokens), run(half, tokens)
        assert found.dtype == torch.float16
        assert float((found.float() - wanted).norm() / wanted.norm()) < 2e-3


def test_types_that_kernels_lack_are_multiplied_out_and_autocast_is_heeded(live: Callable[..., nn.Module]) -> None:
    layer = layers_of(live("double_rounding"))["down"]
    x = torch.randn(4, 40, device=DEVICE)
    assert layer(x).dtype == torch.float32
    assert layer(x.double()).dtype == torch.float64
    assert torch.allclose(layer(x).double(), layer(x.double()), atol=1e-5)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(layer(x), layer(x.bfloat16()))
    with pytest.raises(QuantizationError, match=r"layer 'down': its input is \(4, 39\), expected \(..., 40\)"):
        layer(x[:, 1:])


def test_float_kernels_in_16_bits_round_the_weight_and_keep_the_scale(
    saved: Callable[..., Path], decoder: nn.Module, tokens: Tensor
) -> None:
    plain = load(saved("nested"), decoder)
    half = load(saved("nested"), decoder, dtype=torch.float16, kernels="float")
    for bits in (3, 8):
        set_bits(plain, bits)
        set_bits(half, bits)
        for name, layer in dialled_layers(half).items():
            assert isinstance(layer, LiveLayer)
            assert layer.codes.scale.dtype == torch.float32
            assert torch.equal(layer.engine.active, dialled_layers(plain)[name].engine.active.half())
        assert run(half, tokens).dtype == torch.float16
    assert half.table.dtype == torch.float32
    assert half.embed.weight.dtype == torch.float16


# --- switching ------------------------------------------------------------------------------------


def test_a_nested_switch_moves_nothing(live: Callable[..., nn.Module]) -> None:
    for scheme in NESTED:
        packed = live(scheme)
        before = {n: (layer.words, layer.words._version, layer.words.clone()) for n, layer in words_of(packed).items()}
        for setting in (2, MIXED, 8):
            set_bits(packed, setting)
        for name, layer in words_of(packed).items():
            words, version, content = before[name]
            assert layer.words is words
            assert words._version == version
            assert torch.equal(words, content)


@pytest.mark.parametrize("master", ["device", "host"])
def test_one_call_switches_the_pool_and_addresses_stay(
    live: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    packed = live("double_rounding", master=master)
    layers, held = layers_of(packed), words_of(packed)
    pool = held["first"].pool
    addresses = {name: words.words.data_ptr() for name, words in held.items()}
    calls = []
    switch = PackedWeightPool.set_bits
    monkeypatch.setattr(PackedWeightPool, "set_bits", lambda self, plan: (calls.append(plan), switch(self, plan)))
    plans = [4, MIXED, 2]
    for plan in plans:
        set_bits(packed, plan)
    assert len(calls) == len(plans)
    assert {name: words.words.data_ptr() for name, words in held.items()} == addresses
    with pytest.raises(PlanError, match=r"bits=5 is not in bit_choices"):
        set_bits(packed, BitPlan({"first": 5}, default=8))
    assert pool.bits == dict.fromkeys(layers, 2), "a plan that does not fit changes nothing"
    layers["down"].select_bits(8, 8)
    assert pool.bits == {**dict.fromkeys(layers, 2), "down": 8}
    set_bits(packed, 2)
    assert get_bits(packed)["down"] == (2, 2)
    assert held["down"].words.shape[0] == 2
    assert pool.bits == dict.fromkeys(layers, 2)


@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_fewer_choices_take_less_memory_and_give_the_same_numbers(
    live: Callable[..., nn.Module], tokens: Tensor, scheme: str
) -> None:
    whole, part = live(scheme), live(scheme, bit_choices=(4, 2))
    weights = 4 * 128 * sum(-(-m.out_features // 16) * -(-m.in_features // 256) for m in layers_of(whole).values())
    if scheme == "nested":
        weights -= 4 * 128 * 3  # `late` shares the words of `early`
    assert resident_bytes(whole)["active"] == 8 * weights
    assert resident_bytes(part)["active"] == 4 * weights
    assert get_bits(part)["first"] == (4, 4)
    set_bits(whole, 4)
    assert torch.equal(run(whole, tokens), run(part, tokens))
    with pytest.raises(PlanError, match=r"bits=8 is not in bit_choices \(4, 2\)"):
        set_bits(part, 8)


def test_a_master_on_the_host_gives_the_same_words(live: Callable[..., nn.Module]) -> None:
    device, host = live("double_rounding"), live("double_rounding", master="host", bit_choices=(4, 3, 2))
    for setting in (3, BitPlan({"first": 4, "late": 2}, default=3), 2, 4):
        set_bits(device, setting)
        set_bits(host, setting)
        for name, layer in words_of(device).items():
            assert torch.equal(layer.words, words_of(host)[name].words), (name, setting)
    pool = words_of(host)["first"].pool
    pool.active.zero_()
    pool._held.zero_()
    pool.repack()
    assert torch.equal(words_of(host)["late"].words, words_of(device)["late"].words)
    bytes_of = resident_bytes(host)
    assert bytes_of["master"] == 0
    assert bytes_of["host_master"] == 2 * bytes_of["active"] == resident_bytes(device)["master"]
    assert bytes_of["other"] < resident_bytes(device)["other"] + pool._staging.nbytes + 1000


@pytest.mark.skipif(DEVICE != "cpu", reason="layouts are made on CPUs")
@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_layouts_follow_the_dial_and_do_not_pile_up(
    live: Callable[..., nn.Module], tokens: Tensor, scheme: str
) -> None:
    """One layout a layer, of its width, in the model and in each view; numbers are those of a fresh model."""
    packed, fresh = live(scheme, dtype=torch.bfloat16), {}
    for bits in (8, 4, 2):
        other = live(scheme, dtype=torch.bfloat16)
        set_bits(other, bits)
        fresh[bits] = run(other, tokens)
    before, weights = resident_bytes(packed)["active"], sum(m.weight_shape.numel() for m in layers_of(packed).values())
    view = view_at_bits(packed, 2)
    for bits in (8, 2, 4, 8, 4, 2, 8):
        set_bits(packed, bits)
        assert torch.equal(run(packed, tokens), fresh[bits]), bits
        assert torch.equal(run(view, tokens), fresh[2])
        held = resident_bytes(packed)["active"] - before
        assert weights <= held <= 1.5 * weights + 40 * 500, (bits, "bytes, half bytes, and the steps of 500 rows")
    set_bits(packed, MIXED)
    wanted = live(scheme, dtype=torch.bfloat16)
    set_bits(wanted, MIXED)
    assert torch.equal(run(packed, tokens), run(wanted, tokens))


def test_resident_bytes_of_float_kernels(saved: Callable[..., Path], decoder: nn.Module) -> None:
    plain = load(saved("double_rounding"), decoder)
    found = resident_bytes(plain)
    weights = {n: layer.codes.stored for n, layer in dialled_layers(plain).items()}  # type: ignore[attr-defined]
    assert found["active"] == 4 * sum(w.numel() for w in weights.values())
    assert found["master"] == sum(w.numel() for n, w in weights.items() if n != "late")
    assert found["host_master"] == 0
    assert found["other"] >= decoder.embed.weight.nbytes  # type: ignore[union-attr]


@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_copies_and_conversions(live: Callable[..., nn.Module], tokens: Tensor, scheme: str) -> None:
    packed = live(scheme, dtype=torch.float16)
    set_bits(packed, 4)
    before = run(packed, tokens)
    twin = copy.deepcopy(packed)
    assert torch.equal(run(twin, tokens), before)
    set_bits(twin, 2)
    assert torch.equal(run(packed, tokens), before), "a copy has words of its own"
    assert not torch.equal(run(twin, tokens), before)
    set_bits(twin, 4)
    assert torch.equal(run(twin, tokens), before)
    scales = {name: layer.codes.scale.clone() for name, layer in layers_of(twin).items()}
    with pytest.raises(ConfigError, match="cannot be cast"):
        twin.to(torch.bfloat16)
    twin = live(scheme, dtype=torch.bfloat16)
    assert all(torch.equal(layer.codes.scale, scales[name]) for name, layer in layers_of(twin).items())
    assert all(torch.equal(layer.engine.scale, scales[name][0]) for name, layer in layers_of(twin).items())
    assert run(twin, tokens).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_models_follow_the_dial(live: Callable[..., nn.Module], tokens: Tensor, scheme: str) -> None:
    packed = live(scheme, dtype=torch.float16)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    for setting in (8, 2, MIXED, 4):
        set_bits(compiled, setting)
        assert torch.equal(run(compiled, tokens), run(packed, tokens)), setting


# --- what load makes of its arguments -------------------------------------------------------------


def test_what_is_chosen(
    saved: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, choose = torch.device("cuda"), kernel_choice.choose_kernels
    monkeypatch.setattr(kernel_choice, "missing_on", lambda device: None)
    kernel_choice._say_once.cache_clear()
    artifact, learned = read_artifact(saved("double_rounding")), read_artifact(saved("lsq"))
    caplog.clear()  # of what save says
    assert choose(artifact, gpu, torch.bfloat16, None) == "packed"
    assert choose(artifact, torch.device("cpu"), torch.bfloat16, None) == "packed"
    assert choose(artifact, torch.device("cpu"), None, None) == "float"
    with monkeypatch.context() as patched:
        patched.setattr(kernel_choice, "products_are_exact", lambda: False)
        assert choose(artifact, torch.device("cpu"), torch.bfloat16, None) == "float"
    assert choose(artifact, gpu, torch.bfloat16, "float") == "float"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choose(artifact, gpu, None, None) == "float"
            assert choose(learned, gpu, torch.float16, None) == "float"
    assert [r.message for r in caplog.records] == [
        "float kernels run: packed ones need 16 bits, load(..., dtype=torch.bfloat16) or torch.float16"
    ]
    monkeypatch.setattr(kernel_choice, "missing_on", lambda device: "Triton is not installed")
    assert choose(artifact, gpu, torch.bfloat16, None) == "float"
    assert "no packed kernels on cuda: Triton is not installed; float kernels run instead" in caplog.text
    kernel_choice._say_once.cache_clear()


def test_layers_that_kernels_do_not_serve_keep_the_float_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 2)
    )
    x = torch.randn(4, 2, 8, 8)
    save(prepare(net, QuantConfig(activations="float", scheme="nested", start="3std"), x), tmp_path / "m")
    kernel_choice._say_once.cache_clear()
    live = load(tmp_path / "m", net, kernels="packed")
    load(tmp_path / "m", net, kernels="packed")
    said = "packed kernels do not serve 1 of 3 layers (layer '1': it is a Conv2d); float ones do"
    assert caplog.messages.count(said) == 1
    plain = load(tmp_path / "m", net)
    for bits in (8, 4):
        set_bits(live, bits)
        set_bits(plain, bits)
        torch.testing.assert_close(run(live, x), run(plain, x))
    kernel_choice._say_once.cache_clear()


@pytest.mark.parametrize(
    ("scheme", "config", "options", "message"),
    [
        ("nested", {}, {"kernels": "fast"}, "kernels='fast' is not known; choose one of 'float', 'integer', 'packed'"),
        ("nested", {}, {"dtype": torch.float64}, "dtype=torch.float64 is not supported"),
        ("nested", {}, {"kernels": "integer", "dtype": torch.float16}, "integer kernels are asked for"),
        ("nested", {"activations": "auto"}, {"dtype": torch.float16}, "layer '.*' quantises its activations"),
        ("nested", {"activations": "auto"}, {"kernels": "packed"}, "serve no layer of this file"),
        ("lsq", {}, {"kernels": "packed"}, "scheme 'lsq' has no integers to pack"),
        ("nested", {}, {"kernels": "packed", "master": "host"}, "for 'nested', one buffer for all widths"),
        ("double_rounding", {}, {"master": "host"}, "with float kernels, there is no such master"),
        ("nested", {}, {"kernels": "packed", "master": "disk"}, "master='disk' is not known"),
        ("nested", {}, {"bit_choices": (4, 2)}, "this model runs on float kernels"),
        ("nested", {}, {"kernels": "packed", "bit_choices": (5, 2)}, r"the file has \(8, 6, 4, 3, 2\), not 5"),
        ("nested", {}, {"kernels": "packed", "bit_choices": (2, 4)}, "must be descending"),
    ],
)
def test_arguments_that_do_not_fit(
    saved: Callable[..., Path], decoder: nn.Module, scheme: str, config: dict[str, Any], options: dict[str, Any],
    message: str,
) -> None:  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        load(saved(scheme, **config), decoder, **options)


@pytest.mark.parametrize("scheme", ["double_rounding", "centred"])
def test_exact_sums_and_exports_of_words_are_those_of_float_kernels(
    saved: Callable[..., Path], decoder: nn.Module, tokens: Tensor, scheme: str, tmp_path: Path
) -> None:
    plain, packed = (load(saved(scheme), decoder, kernels=kernels) for kernels in ("float", "packed"))
    few = load(saved(scheme), decoder, kernels="packed", bit_choices=(4, 2))
    exact, others = code_exact(plain), [code_exact(packed), code_exact(few)]
    for bits in (4, 2):
        for model in (exact, *others):
            set_bits(model, bits)
        assert all(torch.equal(run(model, tokens), run(exact, tokens)) for model in others), bits
    set_bits(others[0], 8)
    with pytest.raises(PlanError, match=r"bits=8 is not in bit_choices \(4, 2\)"):
        set_bits(others[1], 8)
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    files = [
        export_onnx(model, tmp_path / "m.onnx", tokens, bits=4).path.read_bytes() for model in (plain, packed, few)
    ]
    assert len(set(files)) == 1
    with pytest.raises(PlanError, match=r"bits=8 is not in bit_choices \(4, 2\)"):
        export_onnx(few, tmp_path / "m.onnx", tokens, bits=8)


def test_the_dtype_of_the_given_model_does_not_matter(saved: Callable[..., Path], decoder: nn.Module) -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    for dtype in (None, torch.bfloat16):
        expected = load(saved("nested"), decoder, kernels="packed", dtype=dtype)(tokens)
        found = load(saved("nested"), copy.deepcopy(decoder).bfloat16(), kernels="packed", dtype=dtype)(tokens)
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype == (dtype or torch.float32)


def test_values_beyond_float16_are_refused(saved: Callable[..., Path], decoder: nn.Module, tmp_path: Path) -> None:
    large = copy.deepcopy(decoder)
    nn.init.constant_(large.norm.bias, 1e6)
    config = QuantConfig(activations="float", scheme="nested", start="3std")
    save(prepare(large, config, torch.zeros(1, 1, dtype=torch.int64)), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"the parameter 'norm.bias' has values beyond torch.float16; choose"):
        load(tmp_path / "m", large, dtype=torch.float16)


def test_two_threads_at_two_widths(live: Callable[..., nn.Module], tokens: Tensor) -> None:
    packed = live("nested", dtype=torch.float16)
    wanted = {}
    for bits in (2, 8):
        with at_bits(packed, bits):
            wanted[bits] = run(packed, tokens)
    assert not torch.equal(wanted[2], wanted[8])
    barrier = threading.Barrier(2, timeout=30)

    def wait(*_: object) -> None:
        barrier.wait()

    # Both threads are in the same layer at once, and each waits there for the other before and after.
    packed.down.register_forward_pre_hook(wait)
    packed.down.register_forward_hook(wait)
    found: dict[int, list[Tensor]] = {2: [], 8: []}

    def serve(bits: int) -> None:
        view = view_at_bits(packed, bits)
        for _ in range(3):
            found[bits].append(run(view, tokens))

    threads = [threading.Thread(target=serve, args=(bits,)) for bits in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for bits, outputs in found.items():
        assert len(outputs) == 3
        assert all(torch.equal(y, wanted[bits]) for y in outputs)
    assert set(get_bits(packed).values()) == {(8, 8)}


def test_views_share_every_tensor_and_no_dial(live: Callable[..., nn.Module], tokens: Tensor) -> None:
    packed = live("truncate")
    view = view_at_bits(torch.compile(packed, backend="eager"), MIXED)
    mine, theirs = dict(packed.named_buffers()), dict(view.named_buffers())
    assert mine.keys() == theirs.keys()
    assert all(theirs[name].data_ptr() == tensor.data_ptr() for name, tensor in mine.items())
    pairs = list(zip(packed.parameters(), view.parameters(), strict=True))
    assert all(a.data_ptr() == b.data_ptr() and a is not b for a, b in pairs), "a move of one would move both"
    with at_bits(packed, MIXED):
        assert torch.equal(run(packed, tokens), run(view, tokens))
    set_bits(view, 2)
    assert set(get_bits(packed).values()) == {(8, 8)}
