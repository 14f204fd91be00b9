"""Linear layers on packed weights: values exact at every width, sums within the stated bound of float64.

The reference runs here, the kernels on a GPU and under Triton's interpreter (`test_interpreter.py`).
"""

import os
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from bitdial import functional as bf
from bitdial.errors import ConfigError, QuantizationError
from bitdial.kernels import packed_ops
from bitdial.kernels.packed_ops import packed_linear, packed_scales
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import nested_fields, pack_words, packed_fields

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter
CHOICES = (8, 6, 4, 3, 2)
DTYPES = [torch.bfloat16, torch.float16]
# The interpreter cuts float32 to bf16 where everything else rounds.
# On the CPU PyTorch's product of half bytes rounds to bf16 once more: the second term that `packed_ops` states.
UNIT = {torch.bfloat16: 2.0**-7 if INTERPRETED else 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
TWICE = DEVICE == "cpu" and not INTERPRETED
CASES = [("centred", bits) for bits in CHOICES] + [("double_rounding", bits) for bits in range(2, 9)]
PHASED = [("nested", 8), ("nested", 3), *(("nested+8", bits) for bits in CHOICES)]


class Packed(NamedTuple):
    """A weight as `packed_linear` takes it, read at one width, and its values in float64."""

    words: Tensor
    scale: Tensor
    group_scale: Tensor | None
    fields: tuple[int, ...]
    bits: int
    offset: float
    values: Tensor

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        fields, bits, offset = self.fields, self.bits, self.offset
        return packed_linear(x, self.words, self.scale, bias, fields, bits, 8, offset, self.group_scale)


def make(
    scheme: str, bits: int, rows: int, columns: int, scale: Tensor | None = None, multipliers: Tensor | None = None
) -> Packed:
    """A weight with every 8-bit code in it, packed as the runtime packs it; `scale` of any granularity."""
    codes = (torch.arange(rows * columns) * 97 % 256 - 128).char().view(rows, columns)
    rule = bf.scheme_of(scheme)
    if scale is None:
        scale = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) / 50 + 0.01
    if rule.nests:
        fields = nested_fields(CHOICES)
        words = pack_words(codes.to(DEVICE), fields)
    else:
        fields = packed_fields(bits)
        pool = PackedWeightPool({"fc": codes}, high=8, bit_choices=(bits,), scheme=scheme, device=DEVICE)
        words = pool.words("fc")
    low = bf.narrow(codes, high=8, low=bits, scheme=scheme)
    exact = scale.double() if multipliers is None else scale.double()[:, None] * multipliers
    values = bf.dequantize(low, exact, shift=8 - bits, scheme=scheme)
    made = packed_scales(scale.to(DEVICE), None if multipliers is None else multipliers.to(DEVICE), columns=columns)
    return Packed(words, *made, fields, bits, rule.offset(8 - bits), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "bits"), CASES + PHASED)
def test_every_value_is_exact(scheme: str, bits: int, dtype: torch.dtype) -> None:
    """One-hot tokens read the weight out; by the way of many tokens all of it, by the kernel for few some columns."""
    weight = make(scheme, bits, 20, 260, torch.ones(20))
    tokens = torch.eye(260, dtype=dtype, device=DEVICE)
    assert torch.equal(weight.linear(tokens).double().cpu(), weight.values.T)
    picked = torch.tensor([0, 1, 2, 4, 37, 77, 129, 200, 255, 256, 259])
    assert torch.equal(weight.linear(tokens[picked]).double().cpu(), weight.values.T[picked])
    assert torch.equal(weight.linear(tokens[77:78]).double().cpu(), weight.values.T[77:78])


def check_bound(y: Tensor, x: Tensor, values: Tensor, bias: Tensor | None, *, nibbles: bool = False) -> None:
    """The bound that `packed` states, against float64; `nibbles` where PyTorch's product of half bytes may run."""
    exact = x.cpu().double() @ values.T
    size = x.cpu().double().abs() @ values.T.abs()
    if bias is not None:
        exact, size = exact + bias.cpu().double(), size + bias.cpu().double().abs()
    bound = UNIT[y.dtype] * exact.abs() + x.shape[-1] * 2.0**-23 * size
    if nibbles and TWICE and y.dtype == torch.bfloat16 and len(x) <= 16:
        product = exact if bias is None else exact - bias.cpu().double()
        bound = bound + UNIT[y.dtype] * (product.abs() + bound)
    assert bool(((y.cpu().double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 16, 40])
@pytest.mark.parametrize(("scheme", "bits"), [("centred", 3), ("centred", 8), ("double_rounding", 6)])
def test_sums_are_within_the_bound(scheme: str, bits: int, tokens: int, dtype: torch.dtype) -> None:
    weight = make(scheme, bits, 17, 1030)  # a tile of rows and one; 5 tiles of columns, shared by two programs
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 1030, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(17, generator=generator).to(DEVICE, dtype) if tokens % 2 else None
    y = weight.linear(x, bias)
    assert y.dtype == dtype
    check_bound(y, x, weight.values, bias)
    if dtype == torch.float16 or not INTERPRETED:  # which runs programs one after another: it repeats, or reads waste
        assert torch.equal(y, weight.linear(x, bias))


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
    weight = make(scheme, bits, 37, 1100)
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(17, 1100, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(37, generator=generator).to(DEVICE, dtype) if bits % 2 == 0 else None
    y = weight.linear(x, bias)
    assert y.dtype == dtype
    check_bound(y, x, weight.values, bias)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "columns", "chunk"), [(1, 8, 16), (300, 30, 512), (48, 512, 32)])
def test_more_tokens_and_rows_than_a_program_has(
    rows: int, columns: int, chunk: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row the tokens, too, come in parts: 256 and 44."""
    small_chunks(monkeypatch, chunk, columns)
    weight = make("centred", 6, rows, columns)
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(300, columns, generator=generator).to(DEVICE, torch.bfloat16)
    bias = torch.randn(rows, generator=generator).to(DEVICE, torch.bfloat16) if with_bias else None
    check_bound(weight.linear(x, bias), x, weight.values, bias)


def test_many_tokens_that_are_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 16, 260)
    weight = make("double_rounding", 4, 40, 260)
    x = torch.randn(260, 50, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    check_bound(weight.linear(x.T), x.T, weight.values, None)
    wide = torch.randn(40, 270, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    check_bound(weight.linear(wide[::2, 3:263]), wide[::2, 3:263], weight.values, None)


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
    from bitdial.kernels.triton.packed.few_settings import FewSettings

    weight = make("centred", 4, 40, 1100)
    x = torch.randn(tokens, 1100, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
    bias = torch.randn(40, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    reading = triton_linear.Reading(weight.fields, 4, 8, weight.offset)
    chosen = FewSettings(**settings)
    y = triton_linear.linear(x, weight.words, weight.scale, bias, reading, settings=chosen)
    check_bound(y, x, weight.values, bias)


# --- groups of inputs ---------------------------------------------------------------------------


def grouped(scheme: str, bits: int, rows: int, columns: int, group: int, *, bytes_only: bool) -> Packed:
    """A weight with a scale for each group: multipliers of a row's scale, or any float32."""
    generator = torch.Generator().manual_seed(rows + group)
    groups = columns // group
    if bytes_only:
        multipliers = torch.randint(1, 16, (rows, groups), generator=generator, dtype=torch.uint8)
        return make(scheme, bits, rows, columns, None, multipliers)
    return make(scheme, bits, rows, columns, torch.rand(rows, groups, generator=generator) / 50 + 0.01)


def test_every_value_of_every_group_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """One-hot tokens, one, few and many at a time; columns of one tile, of more, and of parts of one.

    An 8-bit value times 15 has 12 bits at most, and the last is rounded off once.
    """
    small_chunks(monkeypatch, 16, 512)
    for scheme, bits, rows, columns, group in (
        ("centred", 8, 20, 256, 32), ("double_rounding", 4, 33, 512, 64), ("nested+8", 3, 5, 192, 96),
        ("nested+8", 2, 16, 384, 128), ("centred", 6, 20, 512, 256), ("nested+8", 8, 3, 1024, 512),
    ):  # fmt: skip
        multipliers = torch.arange(rows * columns // group).reshape(rows, -1).remainder(15).add(1).to(torch.uint8)
        tokens = torch.eye(columns, dtype=torch.float16, device=DEVICE)
        picked = torch.tensor([0, 31, 32, 63, 64, 95, 96, 127, 128, columns - 65, columns - 1])
        for scale, given in ((torch.ones(rows), multipliers), (multipliers.float(), None)):
            weight = make(scheme, bits, rows, columns, scale, given)
            expected = weight.values.T.half().double()
            step = columns // 128 * 2 + 1  # at least 17 tokens, and columns of every group
            assert torch.equal(weight.linear(tokens[::step]).double().cpu(), expected[::step]), group
            assert torch.equal(weight.linear(tokens[picked]).double().cpu(), expected[picked]), group
            for at in (0, 33, columns // 2 + 1, columns - 1):
                assert torch.equal(weight.linear(tokens[at, None]).double().cpu(), expected[at, None]), (group, at)


@pytest.mark.parametrize("bytes_only", [True, False])
def test_sums_of_groups_are_within_the_bound(bytes_only: bool) -> None:
    """All widths in turn; rows of one tile, of one and one row, of almost two; groups that lie across tiles."""
    shapes = ((17, 1024, 32, 8), (17, 1088, 64, 4), (31, 1152, 128, 2), (16, 1056, 96, 3), (20, 1280, 640, 6))
    for i, (rows, columns, group, bits) in enumerate(shapes):
        scheme = "centred" if bits != 6 else "double_rounding"
        weight = grouped(scheme, bits, rows, columns, group, bytes_only=bytes_only)
        for tokens in (1, 2, 9, 17):
            generator = torch.Generator().manual_seed(tokens)
            dtype = DTYPES[(i + tokens) % 2]
            x = torch.randn(tokens, columns, generator=generator).to(DEVICE, dtype)
            bias = torch.randn(rows, generator=generator).to(DEVICE, dtype) if tokens % 2 else None
            y = weight.linear(x, bias)
            check_bound(y, x, weight.values, bias, nibbles=bits <= 4 and rows % 16 == 0 and bytes_only)
            if tokens == 1:
                assert torch.equal(y, weight.linear(x, bias))


def test_many_tokens_of_groups_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """37 rows are chunks of 32 and 5, 150 tokens two programs."""
    small_chunks(monkeypatch, 32, 1024)
    for group, bytes_only in ((64, True), (32, False)):
        weight = grouped("nested+8", 6, 37, 1024, group, bytes_only=bytes_only)
        generator = torch.Generator().manual_seed(group)
        x = torch.randn(150, 1024, generator=generator).to(DEVICE, torch.bfloat16)
        bias = torch.randn(37, generator=generator).to(DEVICE, torch.bfloat16)
        check_bound(weight.linear(x, bias), x, weight.values, bias)


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (1, {"spread": 0}),
        (1, {"row_tiles": 2, "warps": 4, "spread": 2}),
        (1, {"splits": 3, "warps": 2, "ahead": False}),
        (11, {"row_tiles": 2, "splits": 2, "warps": 1}),
        (11, {"warps": 4, "stages": 3}),
    ],
)
def test_settings_change_no_more_than_the_order_of_sums_of_groups(tokens: int, settings: dict[str, Any]) -> None:
    from bitdial.kernels.triton.packed import linear as triton_linear
    from bitdial.kernels.triton.packed.few_settings import FewSettings

    for group, bytes_only in ((32, True), (64, True), (64, False), (128, False)):
        weight = grouped("centred", 4, 40, 1152, group, bytes_only=bytes_only)
        x = torch.randn(tokens, 1152, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
        reading = triton_linear.Reading(weight.fields, 4, 8, weight.offset)
        chosen = FewSettings(**settings)
        y = triton_linear.linear(
            x, weight.words, weight.scale, None, reading, group_scale=weight.group_scale, settings=chosen
        )
        check_bound(y, x, weight.values, None)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NumPy's, under the interpreter
def test_infinite_and_missing_numbers_pass_through_groups() -> None:
    weight = grouped("centred", 4, 16, 512, 64, bytes_only=True)
    for tokens in (1, 3, 20):
        x = torch.ones(tokens, 512, dtype=torch.bfloat16, device=DEVICE)
        x[-1, 100] = torch.inf
        assert bool(torch.isinf(weight.linear(x)[-1]).all())
        assert bool(torch.isfinite(weight.linear(x)[:-1]).all())
        x[-1, 100] = torch.nan
        assert bool(torch.isnan(weight.linear(x)[-1]).all())


# --- the op -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 17])
def test_row_tiles_of_a_larger_weight_are_read_where_they_lie(tokens: int) -> None:
    for scheme, bits in (("nested", 3), ("centred", 8), ("double_rounding", 4)):
        weight = make(scheme, bits, 64, 300)
        x = torch.randn(tokens, 300, generator=torch.Generator().manual_seed(tokens)).half().to(DEVICE)
        part = weight._replace(words=weight.words[:, 1:3], scale=weight.scale[16:48])
        alone = part._replace(words=part.words.contiguous())
        assert not part.words.is_contiguous()
        assert torch.equal(part.linear(x), alone.linear(x)), scheme


def test_no_tokens() -> None:
    for weight in (make("centred", 4, 33, 320), grouped("centred", 4, 33, 320, 64, bytes_only=True)):
        assert weight.linear(torch.zeros(0, 320, dtype=torch.float16, device=DEVICE)).shape == (0, 33)


def test_wrong_inputs_are_refused() -> None:
    weight = grouped("centred", 8, 16, 256, 64, bytes_only=True)
    x = torch.zeros(1, 256, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(ConfigError, match="can be read at 2, 3, 4, 6, 8 bits"):
        weight._replace(bits=5).linear(x)
    with pytest.raises(QuantizationError, match=r"x is torch\.float64 .* expected one of bfloat16, float16"):
        weight.linear(x.double())
    with pytest.raises(QuantizationError, match=r"words are torch\.int32"):
        weight.linear(torch.cat([x, x], dim=1))
    with pytest.raises(QuantizationError, match=r"scale is torch\.float32 \(16, 4\), expected .* see packed_scales"):
        weight._replace(scale=torch.ones(16, 4, device=DEVICE)).linear(x)
    packed = weight.group_scale
    assert packed is not None
    for wrong in (packed.half(), packed[..., :3, :], packed[:, :, :4], packed.flatten(), packed.transpose(2, 4)):
        with pytest.raises(QuantizationError, match="group_scale is"):
            weight._replace(group_scale=wrong).linear(x)
    narrow = make("centred", 8, 16, 96)  # three runs of 32 columns; runs of 64 do not divide it
    with pytest.raises(QuantizationError, match="group_scale is"):
        narrow._replace(group_scale=packed).linear(x[:, :96])


def test_scales_that_cannot_be_packed_are_refused() -> None:
    rows, multipliers = torch.ones(16), torch.ones(16, 4, dtype=torch.uint8)
    with pytest.raises(QuantizationError, match=r"scale is torch\.float64"):
        packed_scales(rows.double(), columns=256)
    with pytest.raises(QuantizationError, match=r"\(rows, groups\) on its own"):
        packed_scales(torch.ones(16, 4), multipliers, columns=256)
    with pytest.raises(QuantizationError, match=r"group_scale is torch\.float32"):
        packed_scales(rows, multipliers.float(), columns=256)
    with pytest.raises(QuantizationError, match=r"group_scale is torch\.uint8 \(15, 4\), expected .* \(16, groups\)"):
        packed_scales(rows, multipliers[:15], columns=256)
    for columns in (4 * 48, 4 * 16, 254):
        with pytest.raises(QuantizationError, match=f"4 groups of {columns} columns: .* a multiple of 32"):
            packed_scales(rows, multipliers, columns=columns)
    scale, none = packed_scales(torch.full((16, 1), 2.0), columns=30)  # one group is a scale per row
    assert none is None
    assert torch.equal(scale, torch.full((16,), 2.0))


@pytest.mark.skipif(INTERPRETED, reason="the op is declared once; opcheck needs its reference only")
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_op_is_declared_well(with_bias: bool) -> None:
    weight = grouped("centred", 4, 20, 320, 64, bytes_only=True)
    x = torch.randn(3, 320).to(DEVICE, torch.float16)
    bias = torch.randn(20).to(DEVICE, torch.float16) if with_bias else None
    group_scale = weight.group_scale if with_bias else None
    arguments = (x, weight.words, weight.scale, bias, list(weight.fields), 4, 8, 0.5, group_scale)
    torch.library.opcheck(packed_linear, arguments)


def test_the_op_has_the_kernels_of_its_backends() -> None:
    for device in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("bitdial::packed_linear", device)


def test_on_a_cpu_an_eager_layer_spares_itself_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, calls = make("nested", 8, 32, 64), []
    kernel = packed_ops.cpu_kernel
    monkeypatch.setattr(packed_ops, "cpu_kernel", lambda *args: (calls.append(1), kernel(*args))[1])
    x = torch.randn(2, 64).to(DEVICE, torch.float16)

    def run(x: Tensor) -> Tensor:
        how = weight.fields, weight.bits, 8, weight.offset, weight.group_scale
        return packed_ops.product(x, weight.words, weight.scale, None, *how)

    assert torch.equal(run(x), weight.linear(x))
    assert len(calls) == (0 if INTERPRETED or DEVICE == "cuda" else 1)
    calls.clear()
    with FlopCounterMode(display=False), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert run(mode.from_tensor(x)).shape == (2, 32)
    with FlopCounterMode(display=False):
        run(x)
    assert run(x.clone().requires_grad_()).requires_grad
    assert not calls


def test_a_gradient_is_refused() -> None:
    """An adapter that is trained in front of the layer would get none."""
    weight = make("centred", 4, 20, 320)
    y = weight.linear(torch.randn(3, 320).to(DEVICE, torch.float16).requires_grad_())
    with pytest.raises(QuantizationError, match="has no gradient, and one is asked for"):
        y.sum().backward()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_a_recorded_call_repeats(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small_chunks(monkeypatch, 16, 1024)
    for weight in (make("centred", 3, 33, 1024), grouped("centred", 3, 33, 1024, 64, bytes_only=True)):
        x = torch.randn(tokens, 1024, device=DEVICE).bfloat16()
        weight.linear(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = weight.linear(x)
        x.copy_(torch.randn(tokens, 1024, device=DEVICE))
        graph.replay()
        assert torch.equal(y, weight.linear(x))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter is not compiled")
def test_the_op_compiles_without_a_break() -> None:
    for weight in (make("centred", 4, 20, 320), grouped("centred", 4, 20, 320, 64, bytes_only=True)):
        x = torch.randn(3, 320).to(DEVICE, torch.float16)
        compiled = torch.compile(lambda x, weight=weight: weight.linear(x) + 1, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), weight.linear(x) + 1)
