"""The kinds of layer that bitdial quantises: one record each, and the table of them.

A package that must know a kind keeps one table keyed by it, or asks the record. A new kind is a record here, a class in
`nn/layers.py`, and an entry wherever a table has something to say of it.

Weights are quantised **in rows**: dimension 0 counts output channels, dimension 1 the inputs of a channel. For most
kinds that is how PyTorch keeps them; a kind that does not says how to turn its weight into rows and back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

Product = Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
CONV_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")


def _same(layer: Any, weight: Tensor) -> Tensor:
    return weight


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What bitdial knows of a kind of layer.

    name        the class's name: in manifests, rules and messages
    module      the class of the float layer
    sizes       the constructor's sizes, by argument and attribute
    settings    further arguments of the constructor; the manifest keeps them, and loading compares them
    product     (layer, input, weight, bias) to output, with a weight in the layer's own order. It asks the layer for
                its sizes and settings only, so anything that has these can be multiplied
    image_dims  dimensions behind the channels of its output: 0 for a linear layer, 2 for an image
    gathers     whether its input is indices: it picks rows and multiplies nothing
    to_rows     (layer, weight) to the weight in rows (output channels, inputs, ...)
    from_rows   the way back
    """

    name: str
    module: type[nn.Module]
    sizes: tuple[str, ...]
    settings: tuple[str, ...] = ()
    product: Product
    image_dims: int
    gathers: bool = False
    to_rows: Callable[[Any, Tensor], Tensor] = _same
    from_rows: Callable[[Any, Tensor], Tensor] = _same

    def arguments(self, layer: nn.Module) -> dict[str, Any]:
        """The constructor arguments that give another layer of the same shape."""
        given = {name: getattr(layer, name) for name in (*self.sizes, *self.settings)}
        return {**given, "bias": layer.bias is not None}

    def over_channels(self, values: Tensor) -> Tensor:
        """View `values` (output channels,) so that it broadcasts over the layer's output."""
        return values.view(-1, *(1,) * self.image_dims)

    def is_batch(self, x: Tensor) -> bool:
        """Whether dimension 0 of the input `x` counts samples."""
        return x.dim() == self.image_dims + 2 if self.image_dims else x.dim() > 1


def _convolve(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = F.pad(x, padding_around(layer), mode=layer.padding_mode), 0
    return F.conv2d(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def padding_around(layer: Any) -> list[int]:
    """What a convolution pads on either side, as F.pad takes it: the last dimension first."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    if layer.padding != "same":
        return [size for size in reversed(layer.padding) for _ in range(2)]
    totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return [size for total in reversed(totals) for size in (total // 2, total - total // 2)]


def _multiply(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


CONV2D = LayerKind(
    name="Conv2d",
    module=nn.Conv2d,
    sizes=("in_channels", "out_channels", "kernel_size"),
    settings=CONV_SETTINGS,
    product=_convolve,
    image_dims=2,
)
LINEAR = LayerKind(
    name="Linear", module=nn.Linear, sizes=("in_features", "out_features"), product=_multiply, image_dims=0
)

KINDS: dict[str, LayerKind] = {kind.name: kind for kind in (CONV2D, LINEAR)}
KIND_OF: dict[type[nn.Module], LayerKind] = {kind.module: kind for kind in KINDS.values()}
