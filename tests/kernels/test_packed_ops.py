"""Linear layers on packed weights: values exact at every width, sums within the stated bound of float64.

The reference runs here, the kernels on a GPU and under Triton's interpreter (`test_interpreter.py`).
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import ConfigError, QuantizationError
from bitdial.kernels.packed_ops import PackedWeight, packed_linear
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import packed_fields

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter
CHOICES = (8, 6, 4, 3, 2)
DTYPES = [torch.bfloat16, torch.float16]
# The interpreter cuts float32 to bf16 where everything else rounds.
UNIT = {torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8, torch.float16: 2.0**-11}
CASES = [("nested", bits) for bits in CHOICES] + [("double_rounding", bits) for bits in range(2, 9)]


def make(scheme: str, bits: int, rows: int, columns: int, scale: Tensor | None = None) -> tuple[PackedWeight, Tensor]:
    """A packed weight with every 8-bit code in it, as the runtime makes them, and its `bits`-bit values in float64."""
    codes = (torch.arange(rows * columns) * 97 % 256 - 128).char().view(rows, columns)
    if scale is None:
        scale = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) / 50 + 0.01
    scale = scale.to(DEVICE)
    if scheme == "nested":
        weight = PackedWeight.nested(codes.to(DEVICE), scale, bit_choices=CHOICES, name="fc")
    else:
        arena = PackedWeightPool({"fc": codes}, high=8, bit_choices=(bits,), scheme=scheme, device=DEVICE)
        weight = PackedWeight(
            name="fc", words=arena.words("fc"), scale=scale, columns=columns, fields=packed_fields(bits), high=8,
            scheme=scheme,
        )  # fmt: skip
    low = bf.narrow(codes, high=8, low=bits, scheme=scheme)
    return weight, bf.dequantize(low, scale.cpu().double(), shift=8 - bits, scheme=scheme)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "bits"), CASES)
def test_every_value_is_exact(scheme: str, bits: int, dtype: torch.dtype) -> None:
    """One-hot tokens read the weight out; by the way of many tokens all of it, by the kernel for few some columns."""
    weight, values = make(scheme, bits, 20, 260, torch.ones(20))
    tokens = torch.eye(260, dtype=dtype, device=DEVICE)
    assert torch.equal(weight.linear(tokens, bits).double().cpu(), values.T)
    picked = torch.tensor([0, 1, 2, 4, 37, 77, 129, 200, 255, 256, 259])
    assert torch.equal(weight.linear(tokens[picked], bits).double().cpu(), values.T[picked])
    assert torch.equal(weight.linear(tokens[77], bits).double().cpu(), values.T[77])


def check_bound(y: Tensor, x: Tensor, values: Tensor, bias: Tensor | None) -> None:
    """The bound that `packed` states, against float64."""
    exact = x.cpu().double() @ values.T
    size = x.cpu().double().abs() @ values.T.abs()
    if bias is not None:
        exact, size = exact + bias.cpu().double(), size + bias.cpu().double().abs()
    bound = UNIT[y.dtype] * exact.abs() + x.shape[-1] * 2.0**-23 * size
    assert bool(((y.cpu().double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 16, 40])
@pytest.mark.parametrize(("scheme", "bits"), [("nested", 3), ("nested", 8), ("double_rounding", 6)])
def test_sums_are_within_the_bound(scheme: str, bits: int, tokens: int, dtype: torch.dtype) -> None:
    weight, values = make(scheme, bits, 33, 1030)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 1030, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(33, generator=generator).to(DEVICE, dtype) if tokens % 2 else None
    y = weight.linear(x, bits, bias)
    assert y.dtype == dtype
    check_bound(y, x, values, bias)
    assert torch.equal(y, weight.linear(x, bits, bias))


def small_chunks(monkeypatch: pytest.MonkeyPatch, rows: int, columns: int) -> None:
    """Let many tokens be served `rows` rows of a weight at a time."""
    if INTERPRETED or DEVICE == "cuda":
        from bitdial.kernels.triton.packed import unpack as triton_unpack

        whole = -(-columns // 256) * 256
        monkeypatch.setattr(triton_unpack, "CHUNK_WEIGHTS", rows * whole)
        assert triton_unpack.chunk_rows(1 << 20, whole) == rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "bits"), CASES)
def test_many_tokens_take_the_rows_in_chunks(
    scheme: str, bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """37 rows are chunks of 32 and 5; 1,100 columns are tiles for two programs, the last one cut."""
    small_chunks(monkeypatch, 32, 1100)
    weight, values = make(scheme, bits, 37, 1100)
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(17, 1100, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(37, generator=generator).to(DEVICE, dtype) if bits % 2 == 0 else None
    y = weight.linear(x, bits, bias)
    assert y.dtype == dtype
    check_bound(y, x, values, bias)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "chunk"), [(1, 8, 16), (300, 30, 512), (48, 512, 32)])
def test_more_tokens_and_rows_than_a_program_has(
    rows: int, columns: int, chunk: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row the tokens, too, come in parts: 256 and 44."""
    small_chunks(monkeypatch, chunk, columns)
    weight, values = make("nested", 6, rows, columns)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(300, columns, generator=generator).to(DEVICE, torch.bfloat16)
    bias = torch.randn(rows, generator=generator).to(DEVICE, torch.bfloat16) if with_bias else None
    check_bound(weight.linear(x, 6, bias), x, values, bias)


def test_many_tokens_that_are_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 16, 260)
    weight, values = make("double_rounding", 4, 40, 260)
    x = torch.randn(260, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    check_bound(weight.linear(x.T, 4), x.T, values, None)
    wide = torch.randn(40, 270, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    check_bound(weight.linear(wide[::2, 3:263], 4), wide[::2, 3:263], values, None)


@pytest.mark.interpreter(only=True)
def test_chunks_hold_a_bounded_number_of_weights_in_whole_tiles() -> None:
    from bitdial.kernels.triton.packed.unpack import CHUNK_WEIGHTS, chunk_rows

    assert [chunk_rows(1 << 20, columns) for columns in (256, 4096, 14336, 28672)] == [65536, 4096, 1024, 512]
    assert chunk_rows(20, 4096) == 32
    assert chunk_rows(1 << 20, 2 * CHUNK_WEIGHTS) == 16  # a row of tiles is the least


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (3, {"row_tiles": 2, "warps": 4}),
        (3, {"splits": 2, "warps": 2, "ahead": False}),
        (11, {"row_tiles": 2, "splits": 3, "warps": 1}),
        (11, {"warps": 4, "stages": 3}),
    ],
)
def test_settings_change_no_more_than_the_order_of_sums(tokens: int, settings: dict[str, Any]) -> None:
    from bitdial.kernels.triton.packed import linear as triton_linear

    weight, values = make("nested", 4, 40, 1100)
    x = torch.randn(tokens, 1100, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    y = triton_linear.linear(
        x, weight.words, weight.scale, bias, fields=weight.fields, bits=4, high=8, centred=True,
        settings=triton_linear.FewSettings(**settings),
    )  # fmt: skip
    check_bound(y, x, values, bias)


def test_leading_dimensions_and_no_tokens() -> None:
    weight, values = make("nested", 4, 33, 300)
    x = torch.randn(2, 3, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    y = weight.linear(x, 4)
    assert y.shape == (2, 3, 33)
    check_bound(y.view(6, 33), x.view(6, 300), values, None)
    assert torch.equal(weight.linear(x.transpose(0, 1), 4), y.transpose(0, 1))
    assert weight.linear(x[:0], 4).shape == (0, 3, 33)


def test_bytes_read_are_the_first_planes_and_the_scale() -> None:
    weight, _ = make("nested", 8, 32, 512)
    assert [weight.bytes_read(bits) for bits in CHOICES] == [32 * 512 * bits // 8 + 32 * 4 for bits in CHOICES]
    assert weight.bit_choices == CHOICES
    assert torch.equal(weight.codes(3), weight.codes(8) >> 5)


def test_wrong_inputs_are_refused_by_name() -> None:
    weight, _ = make("nested", 8, 16, 256)
    x = torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(
        ConfigError, match=r"layer 'fc': bits=5 is not among those it can be read at, \(8, 6, 4, 3, 2\)"
    ):
        weight.linear(x, 5)
    with pytest.raises(QuantizationError, match=r"layer 'fc': its input is torch\.float32"):
        weight.linear(x.float(), 8)
    with pytest.raises(QuantizationError, match=r"layer 'fc': its input is \(1, 255\)"):
        weight.linear(x[:, 1:], 8)
    rounded, _ = make("double_rounding", 6, 16, 256)
    with pytest.raises(ConfigError, match="layer 'fc': bits=4 is not"):  # its first 4 planes are not the 4-bit codes
        rounded.linear(x, 4)
    with pytest.raises(ConfigError, match="'double_rounding' does not nest"):
        PackedWeight.nested(weight.codes(8), weight.scale, bit_choices=(8, 4), name="fc", scheme="double_rounding")
    with pytest.raises(QuantizationError, match=r"layer 'fc': words are torch\.int32"):
        PackedWeight(name="fc", words=weight.words, scale=weight.scale, columns=300, fields=weight.fields, high=8,
                     scheme="nested")  # fmt: skip
    with pytest.raises(QuantizationError, match="layer 'fc': the scale must be float32"):
        PackedWeight(name="fc", words=weight.words, scale=weight.scale.half(), columns=256, fields=weight.fields,
                     high=8, scheme="nested")  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="the op is declared once; opcheck needs its reference only")
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_op_is_declared_well(with_bias: bool) -> None:
    weight, _ = make("nested", 8, 20, 300)
    x = torch.randn(3, 300).to(DEVICE, torch.float16)
    bias = torch.randn(20).to(DEVICE, torch.float16) if with_bias else None
    torch.library.opcheck(packed_linear, (x, weight.words, weight.scale, bias, list(weight.fields), 4, 8, True))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_recorded_call_repeats(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 16, 1024)
    weight, _ = make("nested", 8, 33, 1024)
    x = torch.randn(tokens, 1024, device=DEVICE).bfloat16()
    weight.linear(x, 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = weight.linear(x, 3)
    x.copy_(torch.randn(tokens, 1024, device=DEVICE))
    graph.replay()
    assert torch.equal(y, weight.linear(x, 3))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is not compiled")
def test_the_op_compiles_without_a_break() -> None:
    weight, _ = make("nested", 8, 20, 300)
    x = torch.randn(3, 300).to(DEVICE, torch.float16)
    compiled = torch.compile(lambda x: weight.linear(x, 4) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), weight.linear(x, 4) + 1)
