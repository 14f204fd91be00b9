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
from bitdial.exact import (
    ExactBatchNorm,
    ExactConv2d,
    ExactLayer,
    ExactLinear,
    ExactQuantizedConv2d,
    ExactQuantizedLinear,
    norm_lines,
)
from bitdial.integer.float_layers import FixedPointConv2d, FixedPointLayer, FixedPointLinear, serves_float
from bitdial.integer.shapes import ConvShapes, KernelLayer, LinearShapes, padding_of
from bitdial.kernels.integer import QUANTIZER_NUMBERS, STORED_SHIFT, Outputs, integer_conv2d, integer_finish
from bitdial.nn import SwitchableBatchNorm, TransitionalBatchNorm


class IntegerLayer(KernelLayer, ExactLayer):
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

    def codes_of(self, x: Tensor) -> Tensor:
        """Stored codes of the float input x at the selected width."""
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise QuantizationError(
                f"layer {self.called!r}: its input is {x.dtype}; the integer kernels take float32, or 16-bit floats"
            )
        return integer_finish(x.float(), None, None, self.quantizer, None, None, False)[1]

    def forward(self, input: Tensor) -> Tensor:
        """The layer at the selected widths."""
        return self.run(self.codes_of(input))[0]

    def _run(self, x: Tensor, other: Tensor | None, moves: tuple[Any, ...], finish: dict[str, Any]) -> Outputs:
        stride, padding, dilation, groups = moves
        return integer_conv2d(
            x, self.integers, self.pad, self.correction, self.factor, self.halves, cast(Tensor | None, self.bias),
            finish.get("norm"), other, finish.get("first"), finish.get("second"), list(stride), list(padding),
            list(dilation), groups, finish.get("cap"), finish.get("keep", True),
        )  # fmt: skip


class IntegerConv2d(IntegerLayer, ConvShapes, ExactQuantizedConv2d):
    """PackedConv2d on integer kernels."""

    exact_type = ExactQuantizedConv2d

    def filters(self, codes: Tensor) -> Tensor:
        return codes.permute(0, 2, 3, 1)

    def run_images(self, x: Tensor, other: Tensor | None, **finish: Any) -> Outputs:
        return self._run(x, other, (self.stride, padding_of(self), self.dilation, self.groups), finish)


class IntegerLinear(IntegerLayer, LinearShapes, ExactQuantizedLinear):
    """PackedLinear on integer kernels."""

    exact_type = ExactQuantizedLinear

    def filters(self, codes: Tensor) -> Tensor:
        return codes[:, None, None, :]

    def run_images(self, x: Tensor, other: Tensor | None, **finish: Any) -> Outputs:
        return self._run(x, other, ((1, 1), (0, 0), (1, 1), 1), finish)


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
    return not isinstance(layer, nn.Conv2d) or padding_of(layer) is not None


def to_integer(model: nn.Module) -> None:
    """Change the layers and norms of the code-exact `model` in place to those on integer kernels, where these serve."""
    modules = dict(model.named_modules())
    in_sets = {
        n for module in modules.values() if isinstance(module, SwitchableBatchNorm) for n in module.sets.values()
    }
    for name, module in modules.items():
        kind = None if module in in_sets else _INTEGER.get(type(module))
        if kind is None or not _can_be(module, kind):
            continue
        module.__class__ = kind  # the same state, another forward
        made = cast(Any, module)
        made.called = name
        made.allocate()


def _can_be(module: nn.Module, kind: type[nn.Module]) -> bool:
    if isinstance(module, ExactLayer):
        return serves(module)
    if issubclass(kind, FixedPointLayer):
        return serves_float(module)
    return all(_has_statistics(norm) for norm in module.modules() if isinstance(norm, ExactBatchNorm))


def _has_statistics(norm: ExactBatchNorm) -> bool:
    return norm.running_mean is not None and norm.running_var is not None


_INTEGER: dict[type[nn.Module], type[nn.Module]] = {
    ExactQuantizedConv2d: IntegerConv2d,
    ExactQuantizedLinear: IntegerLinear,
    ExactConv2d: FixedPointConv2d,
    ExactLinear: FixedPointLinear,
    SwitchableBatchNorm: IntegerSwitchableNorm,
    TransitionalBatchNorm: IntegerTransitionalNorm,
    ExactBatchNorm: IntegerBatchNorm,
}
