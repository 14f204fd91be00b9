"""The float engine: weights are dequantised when the dial turns, and torch's kernels run, as in training.

Its outputs are those of the trained model, bit for bit.
"""

import torch
from torch import Tensor, nn

from bitdial.live.layers import LiveLayer
from bitdial.live.plain import take_over
from bitdial.nn.linear import linear
from bitdial.nn.swap import swap_modules


class FloatEngine(nn.Module):
    """Holds `active`: the dequantised weight at the selected width, in the layer's own order."""

    name = "float kernels"
    active: Tensor

    def __init__(self, layer: LiveLayer):
        super().__init__()
        active = torch.empty(layer.weight_shape, dtype=layer.like.dtype, device=layer.codes.scale.device)
        self.register_buffer("active", active, persistent=False)

    def select(self, layer: LiveLayer, weight_bits: int, act_bits: int) -> None:
        """Dequantise the weight at `weight_bits` into `active`, in place."""
        self.active.copy_(layer.kind.from_rows(layer, layer.codes.weight_values(weight_bits)))

    def refresh(self, layer: LiveLayer) -> None:
        """Dequantise the weight anew."""
        self.select(layer, layer.weight_bits, layer.act_bits)

    def multiply(self, layer: LiveLayer, x: Tensor) -> Tensor:
        """The product of the dequantised input with the dequantised weight."""
        return layer.kind.product(layer, layer.quantized_input(x), self.active, layer.bias)

    def tensors(self) -> dict[str, list[Tensor]]:
        """The weight in use."""
        return {"active": [self.active]}

    def switched(self) -> list[Tensor]:
        """The weight in use."""
        return [self.active]


class FloatLinear(nn.Linear):
    """An unquantised Linear whose frozen weight multiplies as the trained one did; it takes the place of `layer`."""

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        take_over(self, layer)

    def forward(self, input: Tensor) -> Tensor:
        """The product, plus the bias."""
        return linear(input, self.weight, self.bias)

    def plain(self) -> nn.Module:
        """The float layer."""
        made = nn.Linear(self.in_features, self.out_features, device="meta")
        take_over(made, self)
        return made


def run_on_float(model: nn.Module) -> None:
    """Give every layer of `model` that has no engine this one, in place; unquantised Linear layers run as in training.

    Subclasses of nn.Linear stay what they are.
    """
    for layer in model.modules():
        if isinstance(layer, LiveLayer) and layer.engine is None:
            layer.run_on(FloatEngine(layer))
    swap_modules(model, {layer: FloatLinear(layer) for layer in model.modules() if type(layer) is nn.Linear})
