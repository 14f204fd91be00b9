"""Linear layers on packed words, with float activations: what `load(..., kernels="packed")` runs.

Inputs in bf16 and fp16, on the CPU in float32 too, and others under autocast to these, go to the op
`bitdial::packed_linear`. For an input of another float type the weight is dequantised for that one call, and torch's
product runs in the input's type: the numbers of a model on float kernels, slowly. NaN and infinity pass through, as in
any float layer; nothing looks for them, since that would wait for the device.
"""

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import QuantizationError
from bitdial.kernels.packed_ops import dtypes_on, packed_scales, product
from bitdial.live.engines.packed.joined import Joined
from bitdial.live.engines.packed.words import NestedWords, PooledWords
from bitdial.live.layers import LiveLayer

Words = NestedWords | PooledWords


class PackedEngine(nn.Module):
    """Multiplies with the words that the layer's codes are.

    Holds `scale` (rows,) of one step between stored codes, and `group_scale` where groups of inputs have scales, as
    `packed_scales` lays them out. The layer may be `joined` with others that read the same input, at a `place` there.
    """

    name = "packed kernels"
    scale: Tensor
    group_scale: Tensor | None
    joined: Joined | None = None
    place: int = 0

    def __init__(self, layer: LiveLayer):
        super().__init__()
        scale, group_scale = _scales(layer)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("group_scale", group_scale, persistent=False)

    def select(self, layer: LiveLayer, weight_bits: int, act_bits: int) -> None:
        """Read the words at `weight_bits` from now on."""
        words_of(layer).select(weight_bits)

    def refresh(self, layer: LiveLayer) -> None:
        """Take the scales anew; nothing is made of the words."""
        scale, group_scale = _scales(layer)
        self.scale.copy_(scale)
        if self.group_scale is not None and group_scale is not None:
            self.group_scale.copy_(group_scale)
        if self.joined is not None:
            self.joined.reset()

    def multiply(self, layer: LiveLayer, x: Tensor) -> Tensor:
        """The product at the selected width, in the type of the input or of autocast."""
        device, columns, given = x.device.type, layer.weight_shape[1], x
        x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
        if x.shape[-1:] != (columns,):
            raise QuantizationError(f"layer {layer.name!r}: its input is {tuple(x.shape)}, expected (..., {columns})")
        bits, bias = layer.weight_bits, layer.bias
        if x.dtype not in dtypes_on(x.device):
            weight = layer.codes.weight_values(bits)
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        joined = self.joined
        if joined is not None and (part := joined.part(self.place, bits, given, x)) is not None:
            return part
        codes = layer.codes  # looked up once: attributes of modules take long
        words, stored, offset = cast(Words, codes.source), codes.bit_choices[0], codes.offset(bits)
        flat = x.reshape(-1, columns)
        how = words.fields, bits, stored, offset
        y = product(flat, words.words, self.scale, bias, *how, self.group_scale)
        return y.view(*x.shape[:-1], layer.weight_shape[0])

    def tensors(self) -> dict[str, list[Tensor]]:
        """The scales. What a CPU has made of the words is theirs."""
        scales = [self.scale] if self.group_scale is None else [self.scale, self.group_scale]
        return {"other": scales, "active": [] if self.joined is None else self.joined.tensors()}

    def switched(self) -> list[Tensor]:
        """None: scales are those of the stored codes, and words are the codes'."""
        return []

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = self.scale
        super()._apply(fn, recurse)
        if self.joined is not None and self.scale is not before:
            self.joined.reset()
        return self


def join(layers: Sequence[LiveLayer]) -> None:
    """Let `layers`, whose words lie together, make one product where they can, in place."""
    joined = Joined(layers)
    for place, layer in enumerate(layers):
        vars(layer.engine).update(joined=joined, place=place)


def _scales(layer: LiveLayer) -> tuple[Tensor, Tensor | None]:
    """The scales of `layer` as the op takes them: a scale for each row, and what its groups have beside it."""
    codes, (rows, columns) = layer.codes, layer.weight_shape
    if codes.multipliers is not None:
        return packed_scales(codes.scale[0], codes.multipliers, columns=columns)
    scale = codes.weight_scale()
    one_for_all = len(scale) < rows  # else the op reads the scale where the codes have it
    return packed_scales(scale.expand(rows).clone() if one_for_all else scale, columns=columns)


def words_of(layer: LiveLayer) -> Words:
    """The words that the codes of `layer` lie in."""
    return cast(Words, layer.codes.source)
