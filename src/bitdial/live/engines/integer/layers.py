"""Layers and norms whose operands lie ready for the integer kernels, at fixed addresses, and follow the dial.

A width changes the contents of these tensors and nothing else, so a recorded CUDA graph runs at the width that is set
when it is replayed. The operands of norms, and of layers whose codes can be narrowed, are on the model's switchboard,
which changes all of them at once. Layers that round a float weight at each width write theirs one by one.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.dial.dial import SWITCHBOARD
from bitdial.errors import QuantizationError
from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.kernels.integer import run_conv2d, run_epilogue
from bitdial.kernels.operands import IntegerOperands
from bitdial.kernels.switch import grid_of
from bitdial.kernels.width_table import SECOND
from bitdial.live.engines.exact import (
    ExactAdaptiveAvgPool2d,
    ExactBatchNorm,
    ExactConv2d,
    ExactLayer,
    ExactLinear,
    ExactQuantizedConv2d,
    ExactQuantizedLinear,
    norm_lines,
)
from bitdial.live.engines.integer.float_layers import (
    FixedPointConv2d,
    FixedPointLayer,
    FixedPointLinear,
    FixedPointPool,
    serves_float,
)
from bitdial.live.engines.integer.operands import (
    Tables,
    act_tables,
    needs_halves,
    pair_tables,
    quantizer,
    weight_operand,
)
from bitdial.live.engines.integer.shapes import ConvShapes, KernelLayer, LinearShapes, padding_of
from bitdial.live.engines.integer.switchboard import BoardPart, Codes, Switchboard
from bitdial.nn import SwitchableBatchNorm, TransitionalBatchNorm


class IntegerLayer(BoardPart, KernelLayer, ExactLayer):
    """What IntegerConv2d and IntegerLinear share. Abstract.

    Buffers, none of them in the state: `integers` (K, R, S, C / groups), `pad`, `correction`, `factor`, `quantizer`,
    `halves` (None for codes that are never centred at 8 bits); see `bitdial.kernels.operands`.
    """

    integers: Tensor
    pad: Tensor
    correction: Tensor
    factor: Tensor
    quantizer: Tensor
    halves: Tensor | None
    selects = ("weight_bits", "act_bits")

    def allocate(self) -> None:
        """Give up the float weight; make the buffers, unless a switchboard has them, and fill them."""
        self.active = torch.empty(0, dtype=self.weight_scale.dtype, device=self.stored.device)
        self.register_buffer("halves", None, persistent=False)
        if self.board is None:
            integers, tables = self._operands()
            for name, operand in {"integers": integers.contiguous(), **tables}.items():
                self.register_buffer(name, operand, persistent=False)

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Bring the kernels' operands to these widths, in place."""
        if self.board is not None:
            self.board.select_alone(self, weight_bits, act_bits)
        else:
            self.weight_bits, self.act_bits = weight_bits, act_bits
            integers, tables = self._operands()
            for name, operand in {"integers": integers, **tables}.items():
                getattr(self, name).copy_(operand)

    def refresh(self) -> None:
        if self.board is not None:
            self.board.reload(self)
        else:
            super().refresh()

    def _operands(self) -> tuple[Tensor, Tables]:
        """The integers, and the other operands, at the selected widths."""
        integers, sums, step = weight_operand(self, self.weight_bits)
        acts = quantizer(self, self.act_bits)[None]
        halves = [self.weight_bits == 8] if needs_halves(self) else None
        tables = {**pair_tables(sums[None], step[None], acts, halves), **act_tables(acts)}
        return integers, {name: table[0].clone() for name, table in tables.items()}

    def tables(self) -> list[Tables]:
        sums, steps = zip(*(weight_operand(self, bits)[1:] for bits in self.bit_choices), strict=True)
        acts = torch.stack([quantizer(self, bits) for bits in self.bit_choices])
        halves = [bits == 8 for bits in self.bit_choices] if needs_halves(self) else None
        return [pair_tables(torch.stack(sums), torch.stack(steps), acts, halves), act_tables(acts)]

    @staticmethod
    def wanted(bit_choices: tuple[int, ...], first: int, second: int) -> list[int]:
        act = bit_choices.index(second)
        return [first, bit_choices.index(first) * len(bit_choices) + act, act]

    def codes(self) -> Codes:
        kind = SECOND[bf.scheme_of(self.scheme).second_rounding(self.ties)]
        return Codes(self.filters(self.stored), self.bit_choices[0], kind, grid_of(self.scheme))

    def take_codes(self, stored: Tensor, integers: Tensor) -> None:
        self.stored = stored
        self.register_buffer("integers", integers, persistent=False)

    def filters(self, codes: Tensor) -> Tensor:
        """`codes` of the weight in the order (K, R, S, C / groups)."""
        raise NotImplementedError

    def codes_of(self, x: Tensor) -> Tensor:
        """Stored codes of the float input x at the selected width."""
        if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise QuantizationError(
                f"layer {self.called!r}: its input is {x.dtype}; the integer kernels take float32, or 16-bit floats"
            )
        return run_epilogue(x.float(), Epilogue(quantizer_a=self.quantizer, keep_value=False))[1]

    def forward(self, input: Tensor) -> Tensor:
        """The layer at the selected widths."""
        return self.run(self.codes_of(input))[0]

    def run_images(self, x: Tensor, residual: Tensor | None, **epilogue: Any) -> Outputs:
        bias = cast(Tensor | None, self.bias)
        operands = IntegerOperands(self.integers, self.pad, self.correction, self.factor, self.halves, bias)
        return run_conv2d(x, operands, self.conv_shape(x), Epilogue(residual=residual, **epilogue))


class IntegerConv2d(IntegerLayer, ConvShapes, ExactQuantizedConv2d):
    """PackedConv2d on integer kernels."""

    exact_type = ExactQuantizedConv2d

    def filters(self, codes: Tensor) -> Tensor:
        return codes.permute(0, 2, 3, 1)

    def weight_of(self, filters: Tensor) -> Tensor:
        return filters.permute(0, 3, 1, 2)


class IntegerLinear(IntegerLayer, LinearShapes, ExactQuantizedLinear):
    """PackedLinear on integer kernels."""

    exact_type = ExactQuantizedLinear

    def filters(self, codes: Tensor) -> Tensor:
        return codes[:, None, None, :]

    def weight_of(self, filters: Tensor) -> Tensor:
        return filters[:, 0, 0]


class IntegerNorm(nn.Module):
    """A batch norm as `lines` (2, channels): multiplier and offset of the set in use. Abstract."""

    lines: Tensor

    def refresh(self) -> None:
        """Make the lines anew, in place."""
        raise NotImplementedError

    def normalize(self, x: Tensor) -> Tensor:
        """x * multiplier + offset, each rounded once."""
        if x.dim() in (2, 4) and x.dtype == torch.float32:
            return run_epilogue(x, Epilogue(norm_affine=self.lines))[0]
        multiplier, offset = (line.view(1, -1, *(1,) * (x.dim() - 2)) for line in self.lines)
        return x * multiplier + offset


def _refresh(norm: Any, keys: object) -> None:
    """After other statistics were loaded, the lines must follow; a code-exact copy has none."""
    if isinstance(norm, IntegerNorm):
        norm.refresh()


class IntegerBatchNorm(IntegerNorm, ExactBatchNorm):
    """One batch norm."""

    exact_type = ExactBatchNorm

    def allocate(self) -> None:
        """Make `lines`, and fill them."""
        self.register_buffer("lines", norm_lines(self).to(cast(Tensor, self.running_mean).device), persistent=False)
        self.register_load_state_dict_post_hook(_refresh)

    def refresh(self) -> None:
        self.lines.copy_(norm_lines(self))

    def forward(self, input: Tensor) -> Tensor:
        return self.normalize(input)


class IntegerSwitchableNorm(BoardPart, IntegerNorm, SwitchableBatchNorm):
    """One set of lines for each width; `lines` are those in use."""

    exact_type: type[SwitchableBatchNorm] = SwitchableBatchNorm
    selects = ("bits", "fed_bits")

    def allocate(self) -> None:
        """Follow what is loaded; the lines are on the switchboard."""
        self.register_load_state_dict_post_hook(_refresh)

    def refresh(self) -> None:
        assert self.board is not None
        self.board.reload(self)

    def select_set(self, bits: int, fed_bits: int | None = None) -> None:
        assert self.board is not None
        self.board.select_alone(self, bits, bits if fed_bits is None else fed_bits)

    def tables(self) -> list[Tables]:
        norms = [cast(ExactBatchNorm, self.sets[name]) for name in self.set_names()]
        device = cast(Tensor, norms[0].running_mean).device
        return [{"lines": torch.stack([norm_lines(norm) for norm in norms]).to(device)}]

    @staticmethod
    def wanted(bit_choices: tuple[int, ...], first: int, second: int) -> list[int]:
        return [bit_choices.index(first)]

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x)


class IntegerTransitionalNorm(IntegerSwitchableNorm, TransitionalBatchNorm):
    """The same for pairs of widths."""

    exact_type = TransitionalBatchNorm

    @staticmethod
    def wanted(bit_choices: tuple[int, ...], first: int, second: int) -> list[int]:
        return [bit_choices.index(second) * len(bit_choices) + bit_choices.index(first)]


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
    board = Switchboard(model)
    for name, module in modules.items():
        kind = None if module in in_sets else _INTEGER.get(type(module))
        if kind is None or not _can_be(module, kind):
            continue
        module.__class__ = kind  # the same state, another forward
        made = cast(Any, module)
        made.called = name
        if isinstance(made, BoardPart):
            made.board = None
            if not isinstance(made, IntegerLayer) or bf.scheme_of(made.scheme).narrows:
                board.add(name, made)
        made.allocate()
    board.bind()
    setattr(model, SWITCHBOARD, board)


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
    ExactAdaptiveAvgPool2d: FixedPointPool,
    SwitchableBatchNorm: IntegerSwitchableNorm,
    TransitionalBatchNorm: IntegerTransitionalNorm,
    ExactBatchNorm: IntegerBatchNorm,
}
