"""Linear layers on packed words, with float activations: what `load(..., kernels="packed")` runs.

Inputs in bf16 and fp16, and others under autocast to these, go to the op `bitdial::packed_linear`. For an input of
another float type the weight is dequantised for that one call, and torch's product runs in the input's type: the
numbers of a model on float kernels, slowly. NaN and infinity pass through, as in any float layer; nothing looks for
them, since that would wait for the device.
"""

from collections.abc import Callable
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.errors import QuantizationError
from bitdial.kernels.packed_ops import DTYPES, packed_linear
from bitdial.live.engines.packed.words import NestedWords, PooledWords
from bitdial.live.layers import LiveLayer

Words = NestedWords | PooledWords


class PackedEngine(nn.Module):
    """Multiplies with the words that the layer's codes are.

    Holds `scale`, float32, of one step between stored codes: (rows,) or (rows, groups), as the op takes it.
    """

    name = "packed kernels"
    scale: Tensor

    def __init__(self, layer: LiveLayer):
        super().__init__()
        self.register_buffer("scale", layer.codes.weight_scale(), persistent=False)

    def select(self, layer: LiveLayer, weight_bits: int, act_bits: int) -> None:
        """Read the words at `weight_bits` from now on."""
        words_of(layer).select(weight_bits)

    def refresh(self, layer: LiveLayer) -> None:
        """Take the scale anew; nothing is made of the words."""
        self.scale.copy_(layer.codes.weight_scale())

    def multiply(self, layer: LiveLayer, x: Tensor) -> Tensor:
        """The product at the selected width, in the type of the input or of autocast."""
        device, columns = x.device.type, layer.weight_shape[1]
        x = x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x
        if x.shape[-1:] != (columns,):
            raise QuantizationError(f"layer {layer.name!r}: its input is {tuple(x.shape)}, expected (..., {columns})")
        bits, bias = layer.weight_bits, layer.bias
        if x.dtype not in DTYPES:
            weight = layer.codes.weight_values(bits)
            return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        words, stored, offset = words_of(layer), layer.codes.bit_choices[0], layer.codes.offset(bits)
        flat = x.reshape(-1, columns)
        y = packed_linear(flat, words.words, self.scale, bias, words.fields, bits, stored, offset)
        return y.view(*x.shape[:-1], layer.weight_shape[0])

    def tensors(self) -> dict[str, list[Tensor]]:
        """The scale."""
        return {"other": [self.scale]}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale = self.scale
        super()._apply(fn, recurse)
        if self.scale.dtype != scale.dtype:  # `.to(torch.bfloat16)` of a model must not round it
            self.scale = scale.to(self.scale.device)
        return self


def words_of(layer: LiveLayer) -> Words:
    """The words that the codes of `layer` lie in."""
    return cast(Words, layer.codes.source)
