"""Layers and norms whose operands lie ready for the integer kernels, at fixed addresses, and follow the dial.

A width changes the contents of these tensors and nothing else, so a recorded CUDA graph runs at the width that is set
when it is replayed. There is one exception: centred codes (`nested`, `dorefa`) stand for 2 * code + 1, which fits int8
below 8 bits and is stored so; at 8 bits another variant of the kernel runs, so a graph recorded at 8 bits of such a
layer serves only 8 bits, and one recorded below only widths below.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.errors import QuantizationError
from bitdial.exact import ExactBatchNorm, ExactLayer, ExactQuantizedConv2d, ExactQuantizedLinear, norm_lines
from bitdial.kernels.integer import QUANTIZER_NUMBERS, STORED_SHIFT, Outputs, integer_conv2d, integer_finish
from bitdial.nn import SwitchableBatchNorm, TransitionalBatchNorm


class IntegerLayer(ExactLayer):
    """What IntegerConv2d and IntegerLinear share. Abstract.

    Buffers, none of them in the state: `integers` (K, R, S, C / groups), `pad`, `correction`, `factor`, `quantizer`;
    see `bitdial.kernels.integer`.
    """

    integers: Tensor
    pad: Tensor
    correction: Tensor
    factor: Tensor
    quantizer: Tensor
    halves: bool

    def allocate(self) -> None:
        """Make the buffers, and fill them for the selected widths."""
        device, scale = self.stored.device, self.weight_scale
        shape = self.filters(self.stored).shape
        buffers = {
            "integers": torch.empty(shape, dtype=torch.int8, device=device),
            "pad": torch.empty(shape[3], dtype=torch.int8, device=device),
            "correction": torch.empty(shape[0], dtype=torch.int32, device=device),
            "factor": torch.empty(shape[0], dtype=torch.float32, device=device),
            "quantizer": torch.empty(QUANTIZER_NUMBERS, dtype=torch.float32, device=device),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=False)
        self.active = torch.empty(0, dtype=scale.dtype, device=device)  # the float weight is not used
        self.select_bits(self.weight_bits, self.act_bits)

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Narrow the stored codes to `weight_bits` and write the kernels' operands, in place."""
        super().select_bits(weight_bits, act_bits)
        codes, step = self.weight_codes(weight_bits)
        filters = self.filters(codes)
        sums = filters.flatten(1).sum(dim=1, dtype=torch.int32)
        centred = bf.scheme_of(self.scheme).offset != 0
        self.halves = centred and weight_bits == 8
        if centred:
            sums, step = 2 * sums + filters[0].numel(), step / 2
            filters = filters if self.halves else 2 * filters + 1
        self.integers.copy_(filters)
        scale, zero_point = self.act_parameters()
        signed = self.act_kind == "signed"
        zero = torch.zeros_like(scale) if zero_point is None else bf.integer_zero_point(zero_point, act_bits)
        shift = torch.full_like(scale, 0 if signed else STORED_SHIFT)
        self.pad.copy_(zero - shift)
        self.correction.copy_((shift - zero).int() * sums)
        self.factor.copy_(scale * step)
        limits = torch.cat([torch.full_like(scale, bound) for bound in bf.code_range(act_bits, signed=signed)])
        self.quantizer.copy_(torch.cat([scale, zero, limits, shift]))

    def filters(self, codes: Tensor) -> Tensor:
        """`codes` of the weight in the order (K, R, S, C / groups)."""
        raise NotImplementedError

    def output_shape(self, codes: Tensor) -> tuple[int, ...]:
        """The shape of the layer's output for an input like `codes`."""
        raise NotImplementedError

    def is_batch(self, x: Tensor) -> bool:
        """Whether channels are dimension 1 of x and of what the layer gives."""
        raise NotImplementedError

    def run(
        self,
        codes: Tensor,
        *,
        norm: Tensor | None = None,
        other: Tensor | None = None,
        cap: float | None = None,
        first: Tensor | None = None,
        second: Tensor | None = None,
        keep: bool = True,
    ) -> Outputs:
        """Value and codes behind the layer and what follows; see `integer_conv2d`."""
        raise NotImplementedError

    def codes_of(self, x: Tensor) -> Tensor:
        """Stored codes of the float input x at the selected width."""
        return integer_finish(self.as_float32(x), None, None, self.quantizer, None, None, False)[1]

    def as_float32(self, x: Tensor) -> Tensor:
        """x as the quantizer takes it."""
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise QuantizationError(
                f"layer {self.name!r}: its input is {x.dtype}; the integer kernels take float32, or 16-bit floats"
            )
        return x.float()

    def forward(self, input: Tensor) -> Tensor:
        """The layer at the selected widths."""
        return self.run(self.codes_of(input))[0]


class IntegerConv2d(IntegerLayer, ExactQuantizedConv2d):
    """PackedConv2d on integer kernels."""

    exact_type = ExactQuantizedConv2d

    def filters(self, codes: Tensor) -> Tensor:
        return codes.permute(0, 2, 3, 1)

    def output_shape(self, codes: Tensor) -> tuple[int, ...]:
        padding = padding_of(self)
        assert padding is not None
        sizes = (
            (codes.shape[i - 2] + 2 * padding[i] - self.dilation[i] * (self.kernel_size[i] - 1) - 1) // self.stride[i]
            + 1
            for i in range(2)
        )
        return *codes.shape[:-3], self.out_channels, *sizes

    def is_batch(self, x: Tensor) -> bool:
        return x.dim() == 4

    def run(self, codes: Tensor, *, other: Tensor | None = None, **finish: Any) -> Outputs:
        if (codes.dim() not in (3, 4)) or codes.shape[-3] != self.in_channels:
            raise QuantizationError(
                f"layer {self.name!r}: its input is {tuple(codes.shape)}, expected ({self.in_channels}, height, width) "
                "behind a batch or alone"
            )
        single = codes.dim() == 3
        if single:
            codes, other = codes[None], None if other is None else other[None]
        padding = padding_of(self)
        assert padding is not None
        outputs = _convolve(self, codes, other, (self.stride, padding, self.dilation, self.groups), finish)
        return cast(Outputs, tuple(out[0] if out.numel() and single else out for out in outputs))


class IntegerLinear(IntegerLayer, ExactQuantizedLinear):
    """PackedLinear on integer kernels."""

    exact_type = ExactQuantizedLinear

    def filters(self, codes: Tensor) -> Tensor:
        return codes[:, None, None, :]

    def output_shape(self, codes: Tensor) -> tuple[int, ...]:
        return *codes.shape[:-1], self.out_features

    def is_batch(self, x: Tensor) -> bool:
        return x.dim() == 2

    def run(self, codes: Tensor, *, other: Tensor | None = None, **finish: Any) -> Outputs:
        if codes.dim() == 0 or codes.shape[-1] != self.in_features:
            raise QuantizationError(
                f"layer {self.name!r}: its input is {tuple(codes.shape)}, expected (..., {self.in_features})"
            )
        shape = self.output_shape(codes)
        if other is not None:
            other = other.reshape(-1, self.out_features, 1, 1)
        columns = codes.reshape(-1, self.in_features, 1, 1)
        outputs = _convolve(self, columns, other, ((1, 1), (0, 0), (1, 1), 1), finish)
        return cast(Outputs, tuple(out.reshape(shape) if out.dim() == 4 else out for out in outputs))


def _convolve(
    layer: IntegerLayer, codes: Tensor, other: Tensor | None, moves: tuple[Any, ...], finish: dict[str, Any]
) -> Outputs:
    stride, padding, dilation, groups = moves
    return integer_conv2d(
        codes, layer.integers, layer.pad, layer.correction, layer.factor, cast(Tensor | None, layer.bias),
        finish.get("norm"), other, finish.get("first"), finish.get("second"), list(stride), list(padding),
        list(dilation), groups, layer.halves, finish.get("cap"), finish.get("keep", True),
    )  # fmt: skip


def padding_of(conv: nn.Conv2d) -> tuple[int, int] | None:
    """Rows and columns of zeros on either side, None if both sides differ."""
    if conv.padding == "valid":
        return 0, 0
    if conv.padding == "same":
        both = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return None if any(total % 2 for total in both) else (both[0] // 2, both[1] // 2)
    rows, columns = cast(tuple[int, int], conv.padding)
    return rows, columns


class IntegerNorm(nn.Module):
    """A batch norm as `lines` (2, channels): multiplier and offset of the set in use. Abstract."""

    lines: Tensor

    def normalize(self, x: Tensor) -> Tensor:
        """x * multiplier + offset, each rounded once."""
        if x.dim() in (2, 4) and x.dtype == torch.float32:
            return integer_finish(x, self.lines, None, None, None, None, True)[0]
        multiplier, offset = (line.view(1, -1, *(1,) * (x.dim() - 2)) for line in self.lines)
        return x * multiplier + offset


def _refresh(norm: Any, keys: object) -> None:
    """After other statistics were loaded, the lines must follow."""
    norm.refresh()


class IntegerBatchNorm(IntegerNorm, ExactBatchNorm):
    """One batch norm."""

    exact_type = ExactBatchNorm

    def allocate(self) -> None:
        """Make `lines`, and fill them."""
        self.register_buffer("lines", norm_lines(self).to(cast(Tensor, self.running_mean).device), persistent=False)
        self.register_load_state_dict_post_hook(_refresh)

    def refresh(self) -> None:
        """Fill `lines` anew, in place."""
        self.lines.copy_(norm_lines(self))

    def forward(self, input: Tensor) -> Tensor:
        return self.normalize(input)


class IntegerSwitchableNorm(IntegerNorm, SwitchableBatchNorm):
    """One set of lines for each width, in `table`; `lines` are a copy of those in use."""

    exact_type: type[SwitchableBatchNorm] = SwitchableBatchNorm
    table: Tensor

    def allocate(self) -> None:
        """Make the table of all sets, and `lines`."""
        device = next(self.sets[self.key].buffers()).device
        table = torch.stack([norm_lines(cast(ExactBatchNorm, norm)) for norm in self.sets.values()]).to(device)
        self.register_buffer("table", table, persistent=False)
        self.register_buffer("lines", torch.empty_like(table[0]), persistent=False)
        self.places = {name: i for i, name in enumerate(self.sets)}
        self.select_set(self.bits, self.fed_bits)
        self.register_load_state_dict_post_hook(_refresh)

    def refresh(self) -> None:
        """Fill `table` and `lines` anew, in place."""
        for row, norm in zip(self.table, self.sets.values(), strict=True):
            row.copy_(norm_lines(cast(ExactBatchNorm, norm)))
        self.select_set(self.bits, self.fed_bits)

    def select_set(self, bits: int, fed_bits: int | None = None) -> None:
        super().select_set(bits, fed_bits)
        self.lines.copy_(self.table[self.places[self.key]])

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x)


class IntegerTransitionalNorm(IntegerSwitchableNorm, TransitionalBatchNorm):
    """The same for pairs of widths."""

    exact_type = TransitionalBatchNorm


def serves(layer: ExactLayer) -> bool:
    """Whether the integer operators can run `layer`: quantised activations, zeros around the image, float32 scales."""
    if layer.act_scale is None or layer.weight_scale.dtype != torch.float32 or layer.act_scale.dtype != torch.float32:
        return False
    return not isinstance(layer, nn.Conv2d) or (layer.padding_mode == "zeros" and padding_of(layer) is not None)


def to_integer(model: nn.Module) -> None:
    """Change the layers and norms of the code-exact `model` in place to those on integer kernels, where these serve."""
    modules = list(model.modules())
    in_sets = {norm for module in modules if isinstance(module, SwitchableBatchNorm) for norm in module.sets.values()}
    for module in modules:
        kind = None if module in in_sets else _INTEGER.get(type(module))
        if kind is None or (isinstance(module, ExactLayer) and not serves(module)):
            continue
        if not all(_has_statistics(norm) for norm in module.modules() if isinstance(norm, ExactBatchNorm)):
            continue
        module.__class__ = kind  # the same state, another forward
        cast(Any, module).allocate()


def _has_statistics(norm: ExactBatchNorm) -> bool:
    return norm.running_mean is not None and norm.running_var is not None


_INTEGER: dict[type[nn.Module], type[nn.Module]] = {
    ExactQuantizedConv2d: IntegerConv2d,
    ExactQuantizedLinear: IntegerLinear,
    SwitchableBatchNorm: IntegerSwitchableNorm,
    TransitionalBatchNorm: IntegerTransitionalNorm,
    ExactBatchNorm: IntegerBatchNorm,
}
