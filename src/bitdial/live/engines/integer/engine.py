"""The integer engine of a layer: its operands lie ready for the kernels, at fixed addresses, and follow the dial.

A width changes the contents of these tensors and nothing else, so a recorded CUDA graph runs at the width that is set
when it is replayed. The operands of layers whose codes can be narrowed are on the model's switchboard, which changes
all of them at once. Layers that round a float weight at each width write theirs one by one.
"""

from typing import cast

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import QuantizationError
from bitdial.kernels.epilogue import Epilogue, Outputs
from bitdial.kernels.integer import run_conv2d, run_epilogue
from bitdial.kernels.operands import IntegerOperands
from bitdial.kernels.switch import grid_of
from bitdial.kernels.width_table import SECOND
from bitdial.live.codes import StoredCodes
from bitdial.live.engines.integer.operands import (
    Tables,
    act_tables,
    needs_doubling,
    pair_tables,
    quantizer,
    row_sums,
    weight_operand,
)
from bitdial.live.engines.integer.shapes import SHAPES, padding_of, run_as_images
from bitdial.live.engines.integer.switchboard import BoardPart, CodeOperand
from bitdial.live.layers import LiveLayer
from bitdial.nn.layer_kinds import CONV2D

INPUT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class IntegerEngine(BoardPart):
    """The operands of one layer, and the products with them.

    Where each token of the input has a scale, `factor` is the weight's step alone, and `quantizer` begins with what a
    token's largest magnitude is multiplied with. Scales and bias are then applied behind the kernel, and the layer is
    no part of fused calls: codes can only be made of whole tokens.

    Buffers, none of them in the state: `integers` (K, R, S, C / groups), `pad`, `correction`, `factor`, `quantizer`,
    `doubled` (None for codes that are never centred at 8 bits); see `bitdial.kernels.operands`.
    """

    name = "integer kernels"
    integers: Tensor
    pad: Tensor
    correction: Tensor
    factor: Tensor
    quantizer: Tensor
    doubled: Tensor | None

    def __init__(self, layer: LiveLayer):
        """An engine without operands: `allocate` makes them, or a switchboard on which it is put."""
        # Those that the layer does not offer yet, in a model that may grow, have their places too.
        super().__init__(layer, ("weight_bits", "act_bits"), layer.codes.bit_choices)
        self.shapes = SHAPES[layer.kind.name](layer, layer.name)
        self.register_buffer("doubled", None, persistent=False)

    @property
    def layer(self) -> LiveLayer:
        """The layer that it is the engine of."""
        return cast(LiveLayer, self.owner)

    def allocate(self) -> None:
        """Make the operands, off the switchboard, at the selected widths."""
        layer = self.layer
        for name, operand in self._operands(layer, layer.weight_bits, layer.act_bits).items():
            self.register_buffer(name, operand.contiguous(), persistent=False)

    # --- an engine of a layer -----------------------------------------------------------------------

    def select(self, layer: LiveLayer, weight_bits: int, act_bits: int) -> None:
        """Bring the operands to these widths, in place."""
        if self.board is not None:
            self.board.select_alone(self, weight_bits, act_bits)
        else:
            for name, operand in self._operands(layer, weight_bits, act_bits).items():
                getattr(self, name).copy_(operand)

    def refresh(self, layer: LiveLayer) -> None:
        """Make the operands anew, in place."""
        if self.board is not None:
            self.board.reload(self)
        else:
            self.select(layer, layer.weight_bits, layer.act_bits)

    def multiply(self, layer: LiveLayer, x: Tensor) -> Tensor:
        """The layer at the selected widths."""
        return self._multiply_tokens(x) if self.is_dynamic else self.run(self.codes_of(x), Epilogue())[0]

    def tensors(self) -> dict[str, list[Tensor]]:
        """The integers in use."""
        return {"active": [self.integers]}

    @property
    def is_dynamic(self) -> bool:
        """Whether each token of the input has a scale of its own."""
        return self.layer.codes.is_dynamic

    def _multiply_tokens(self, x: Tensor) -> Tensor:
        """The layer where each token of x has a scale: sum * weight step * scale + bias."""
        self._check_type(x)
        x, bias = x.float(), self.layer.bias
        factor, _, least, most, _ = self.quantizer
        scale = bf.token_scale(x, factor)
        codes = bf.activation_codes(x, scale, None, (least, most)).to(torch.int8)
        y = self.run(codes, Epilogue())[0] * scale
        return y if bias is None else y + bias

    def _check_type(self, x: Tensor) -> None:
        if x.dtype not in INPUT_TYPES:
            name = self.shapes.name
            raise QuantizationError(
                f"layer {name!r}: its input is {x.dtype}; the integer kernels take float32, or 16-bit floats"
            )

    # --- for fused calls ----------------------------------------------------------------------------

    def codes_of(self, x: Tensor) -> Tensor:
        """Stored codes of the float input x at the selected width."""
        self._check_type(x)
        return run_epilogue(x.float(), Epilogue(quantizer_a=self.quantizer, keep_value=False))[1]

    def run(self, x: Tensor, end: Epilogue) -> Outputs:
        """Value and codes behind the layer and `end`, for the codes x of its input."""
        bias = None if self.is_dynamic else self.layer.bias
        operands = IntegerOperands(self.integers, self.pad, self.correction, self.factor, self.doubled, bias)
        shape = self.shapes.conv_shape(x)
        return run_as_images(self.shapes, x, end, lambda images, last: run_conv2d(images, operands, shape, last))

    # --- on the switchboard ---------------------------------------------------------------------------

    def tables(self) -> list[Tables]:
        codes = self.layer.codes
        rows = self.layer.weight_shape[0]
        sums, steps = zip(*(row_sums(codes, bits, rows) for bits in self.bit_choices), strict=True)
        acts = torch.stack([quantizer(codes, bits) for bits in self.bit_choices])
        doubled = [bits == 8 for bits in self.bit_choices] if needs_doubling(codes) else None
        pairs = pair_tables(torch.stack(sums), torch.stack(steps), acts, doubled, dynamic=self.is_dynamic)
        return [pairs, act_tables(acts)]

    def wanted(self, first: int, second: int) -> list[int]:
        act = self.bit_choices.index(second)
        return [first, self.bit_choices.index(first) * len(self.bit_choices) + act, act]

    def code_operand(self) -> CodeOperand:
        codes = self.layer.codes
        kind = SECOND[codes.rule.second_rounding(codes.ties)]
        return CodeOperand(self.shapes.filters(codes.stored), codes.bit_choices[0], kind, grid_of(codes.scheme))

    @property
    def code_source(self) -> StoredCodes:
        return cast(StoredCodes, self.layer.codes.source)

    def rows(self, filters: Tensor) -> Tensor:
        return self.shapes.rows(filters)

    def _operands(self, layer: LiveLayer, weight_bits: int, act_bits: int) -> Tables:
        """The operands at these widths."""
        codes = layer.codes
        integers = weight_operand(codes, weight_bits)
        sums, step = row_sums(codes, weight_bits, len(integers))
        acts = quantizer(codes, act_bits)[None]
        doubled = [weight_bits == 8] if needs_doubling(codes) else None
        pairs = pair_tables(sums[None], step[None], acts, doubled, dynamic=self.is_dynamic)
        tables = {**pairs, **act_tables(acts)}
        return {"integers": self.shapes.filters(integers), **{name: table[0].clone() for name, table in tables.items()}}


def unsupported_reason(layer: LiveLayer) -> str | None:
    """Why the integer kernels cannot run `layer`; None if they can."""
    codes = layer.codes
    if layer.kind.name not in SHAPES:
        return f"it is a {layer.kind.name}"
    if codes.act_scale is None:
        return "its input is not quantised"
    if codes.act_scale.dtype != torch.float32:
        return f"its scales are {codes.act_scale.dtype}"
    if codes.groups > 1:
        return "it has scales for groups of inputs"
    if layer.kind == CONV2D and padding_of(layer) is None:
        return f"its padding is {layer.padding!r}, {layer.padding_mode!r}"
    return None
