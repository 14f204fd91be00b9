"""Linear layers that read packed weights: 2 to 8 bits a weight, activations in bf16 or fp16.

    y = x @ ((c + offset) * scale * 2^shift).T + bias          shift = high - bits

with c the `bits`-bit codes, offset and scale as `bitdial.functional` defines them. Numbers c + offset are exact in both
types, so are their products with x in float32; what is rounded are the float32 sums, in an order that is fixed by the
shapes, the product with the scale, and the result. Against float64:

    |y - exact| <= u |exact| + columns * 2^-23 * sum |x * w|        u = 2^-8 for bf16, 2^-11 for fp16

The reference, which serves wherever Triton does not, sums in float64 and rounds once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import ConfigError, QuantizationError
from bitdial.kernels.dispatch import triton_runs
from bitdial.kernels.word_layout import nested_fields, pack_words, read_fields, unpack_words, words_shape

DTYPES = (torch.bfloat16, torch.float16)


@torch.library.custom_op("bitdial::packed_linear", mutates_args=())
def packed_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    fields: Sequence[int],
    bits: int,
    high: int,
    offset: float,
) -> Tensor:
    """x (tokens, columns) times a packed weight (rows, columns) read at `bits` bits: (tokens, rows), in x's type.

    `words` as `layouts` draws them, in `fields`; `scale` (rows,) float32, of one step at `high` bits; `offset` is
    what the scheme adds to a code of that width. `PackedWeight.linear` checks what it is given; this does not.
    """
    if triton_runs(x):
        from bitdial.kernels.triton.packed import linear as triton_linear

        return triton_linear.linear(x, words, scale, bias, fields=tuple(fields), bits=bits, high=high, offset=offset)
    codes = unpack_words(words, fields, bits, scale.numel(), x.shape[1])
    weight = (codes + offset) * (scale.double() * 2.0 ** (high - bits))[:, None]
    y = x.double() @ weight.T
    return (y if bias is None else y + bias.double()).to(x.dtype)


@packed_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    fields: Sequence[int],
    bits: int,
    high: int,
    offset: float,
) -> Tensor:
    return x.new_empty((x.shape[0], scale.shape[0]))


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight (rows, columns) as packed words, its rows' scale at `high` bits, and the layer's name for errors."""

    name: str
    words: Tensor
    scale: Tensor
    columns: int
    fields: tuple[int, ...]
    high: int
    scheme: str

    def __post_init__(self) -> None:
        """Refuse parts that do not fit each other."""
        shape = words_shape(self.fields, self.scale.numel(), self.columns)
        if self.words.shape != shape or self.words.dtype != torch.int32 or not self.words.is_contiguous():
            found = f"{self.words.dtype} {tuple(self.words.shape)}"
            raise QuantizationError(f"layer {self.name!r}: words are {found}, expected contiguous torch.int32 {shape}")
        if self.scale.dtype != torch.float32 or self.scale.dim() != 1 or self.scale.device != self.words.device:
            raise QuantizationError(f"layer {self.name!r}: the scale must be float32 (rows,) on {self.words.device}")

    @classmethod
    def nested(
        cls, codes: Tensor, scale: Tensor, *, bit_choices: Sequence[int], name: str, scheme: str = "nested"
    ) -> "PackedWeight":
        """One buffer that is read at any of `bit_choices`; `codes` (rows, columns) int8 of the highest."""
        if not bf.scheme_of(scheme).nests:
            raise ConfigError(f"layer {name!r}: scheme {scheme!r} does not nest; its lower widths are not bit-planes")
        fields = nested_fields(bit_choices)
        return cls(
            name=name, words=pack_words(codes, fields), scale=scale, columns=codes.shape[1], fields=fields,
            high=max(bit_choices), scheme=scheme,
        )  # fmt: skip

    @property
    def bit_choices(self) -> tuple[int, ...]:
        """The widths at which the words can be read, from the highest: only one where lower ones are rounded anew."""
        if not bf.scheme_of(self.scheme).nests:
            return (sum(self.fields),)
        return tuple(sum(self.fields[: i + 1]) for i in reversed(range(len(self.fields))))

    def linear(self, x: Tensor, bits: int, bias: Tensor | None = None) -> Tensor:
        """The layer's output (..., rows) for x (..., columns) in bf16 or fp16, at `bits` bits."""
        if bits not in self.bit_choices:
            raise ConfigError(
                f"layer {self.name!r}: bits={bits} is not among those it can be read at, {self.bit_choices}"
            )
        if x.dtype not in DTYPES:
            raise QuantizationError(f"layer {self.name!r}: its input is {x.dtype}, expected bfloat16 or float16")
        if x.shape[-1:] != (self.columns,) or x.device != self.words.device:
            found = f"{tuple(x.shape)} on {x.device}"
            wanted = f"(..., {self.columns}) on {self.words.device}"
            raise QuantizationError(f"layer {self.name!r}: its input is {found}, expected {wanted}")
        offset = bf.scheme_of(self.scheme).offset(self.high - bits)
        flat = x.reshape(-1, self.columns)
        y = packed_linear(flat, self.words, self.scale, bias, self.fields, bits, self.high, offset)
        return y.view(*x.shape[:-1], self.scale.numel())

    def codes(self, bits: int) -> Tensor:
        """The codes (rows, columns), int8, at `bits` bits."""
        return unpack_words(self.words, self.fields, bits, self.scale.numel(), self.columns)

    def bytes_read(self, bits: int) -> int:
        """What one call at `bits` reads of the weight: the planes and the scale."""
        planes = sum(read_fields(self.fields, bits))
        return self.words[:planes].numel() * self.words.element_size() + self.scale.numel() * 4
