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

from bitdial.nn.linear import linear
from bitdial.nn.recurrent import RecurrentWeight

Product = Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
CONVOLUTIONS: dict[int, Any] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}  # by the dimensions of the weight
CONV_SETTINGS = ("stride", "padding", "dilation", "groups", "padding_mode")


def _same(layer: Any, weight: Tensor) -> Tensor:
    return weight


def _row_by_output(layer: Any, x: Tensor, out: Tensor) -> int:
    """Each element of the output is the product of one row with as many inputs."""
    return out.numel() * layer.weight[0].numel()


def _nothing(layer: Any) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What bitdial knows of a kind of layer.

    name                the class's name: in manifests, rules and messages
    module              the class of the float layer
    sizes               the constructor's sizes, by argument and attribute
    settings            further arguments of the constructor; the manifest keeps them, and loading compares them
    training_settings   arguments that matter in training only; the manifest does not keep them
    has_bias            whether the constructor takes `bias`
    multiplies          whether its output is a product of its input. If not, its input is never quantised
    gathers             whether its input is indices, by which it picks rows. It multiplies nothing, and is quantised
                        only where a rule asks for it
    product             (layer, input, weight, bias) to output, with a weight in the layer's own order. It asks the
                        layer for its sizes and settings only, so anything that has these can be multiplied
    image_dims          dimensions behind the channels of its output: 0 for a linear layer, 2 for an image
    to_rows             (layer, weight) to the weight in rows (output channels, inputs, ...)
    from_rows           the way back
    multiply_adds       (layer, input, output) to the number of multiply-adds between them
    unsupported_reason  (layer) to why bitdial cannot quantise it right, or None
    """

    name: str
    module: type[nn.Module]
    sizes: tuple[str, ...]
    settings: tuple[str, ...] = ()
    training_settings: tuple[str, ...] = ()
    has_bias: bool = True
    multiplies: bool = True
    gathers: bool = False
    product: Product
    image_dims: int
    to_rows: Callable[[Any, Tensor], Tensor] = _same
    from_rows: Callable[[Any, Tensor], Tensor] = _same
    multiply_adds: Callable[[Any, Tensor, Tensor], int] = _row_by_output
    unsupported_reason: Callable[[Any], str | None] = _nothing

    @property
    def weight_dims(self) -> int:
        """How many dimensions the weight has, in rows and in the layer's own order."""
        return self.image_dims + 2

    def arguments(self, layer: nn.Module) -> dict[str, Any]:
        """The constructor arguments that give another layer of the same shape."""
        given = {name: getattr(layer, name) for name in (*self.sizes, *self.settings, *self.training_settings)}
        return {**given, "bias": layer.bias is not None} if self.has_bias else given

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
    return CONVOLUTIONS[weight.dim()](x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def padding_around(layer: Any) -> list[int]:
    """What a convolution pads on either side, as F.pad takes it: the last dimension first."""
    if layer.padding == "valid":
        return [0] * (2 * len(layer.kernel_size))
    if layer.padding != "same":
        return [size for size in reversed(layer.padding) for _ in range(2)]
    totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return [size for total in reversed(totals) for size in (total // 2, total - total // 2)]


def _convolve_transposed(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    shape = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
    return F.conv_transpose2d(x, weight, bias, *shape)


def _swap_channels(layer: Any, weight: Tensor) -> Tensor:
    """(in, out / groups, ...) to (out, in / groups, ...), group by group; and back, which is the same."""
    return weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)


def _row_by_input(layer: Any, x: Tensor, out: Tensor) -> int:
    """Each element of the input is multiplied with all weights of its channel."""
    return x.numel() * layer.weight[0].numel()


def _multiply(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear(x, weight, bias)


def _look_up(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    by_frequency = getattr(layer, "scale_grad_by_freq", False)  # what only runs does not have it
    return F.embedding(x, weight, layer.padding_idx, scale_grad_by_freq=by_frequency)


def _give_weight(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return weight


def _every_step(layer: Any, x: Tensor, out: Tensor) -> int:
    """The weight is multiplied with one vector for each step of each sequence in (..., features)."""
    return x.numel() // x.shape[-1] * out.numel()


def _none_at_all(layer: Any, x: Tensor, out: Tensor) -> int:
    return 0


def _odd_embedding(layer: Any) -> str | None:
    if layer.max_norm is not None:
        return (
            f"an Embedding with max_norm={layer.max_norm} changes its weight when it is called, so its codes would not "
            "hold; set max_norm=None, or keep it in float by a rule"
        )
    if layer.sparse:
        return (
            "an Embedding with sparse=True has sparse gradients, which quantizers do not take; set sparse=False, or "
            "keep it in float by a rule"
        )
    return None


def _convolution(module: type[nn.Module], image_dims: int) -> LayerKind:
    return LayerKind(
        name=module.__name__,
        module=module,
        sizes=("in_channels", "out_channels", "kernel_size"),
        settings=CONV_SETTINGS,
        product=_convolve,
        image_dims=image_dims,
    )


CONV1D, CONV2D, CONV3D = _convolution(nn.Conv1d, 1), _convolution(nn.Conv2d, 2), _convolution(nn.Conv3d, 3)
CONV_TRANSPOSE2D = LayerKind(
    name="ConvTranspose2d",
    module=nn.ConvTranspose2d,
    sizes=("in_channels", "out_channels", "kernel_size"),
    settings=(*CONV_SETTINGS, "output_padding"),
    product=_convolve_transposed,
    image_dims=2,
    to_rows=_swap_channels,
    from_rows=_swap_channels,
    multiply_adds=_row_by_input,
)
LINEAR = LayerKind(
    name="Linear", module=nn.Linear, sizes=("in_features", "out_features"), product=_multiply, image_dims=0
)
EMBEDDING = LayerKind(
    name="Embedding",
    module=nn.Embedding,
    sizes=("num_embeddings", "embedding_dim"),
    settings=("padding_idx",),
    training_settings=("scale_grad_by_freq",),
    has_bias=False,
    multiplies=False,
    gathers=True,
    product=_look_up,
    image_dims=0,
    multiply_adds=_none_at_all,
    unsupported_reason=_odd_embedding,
)
RECURRENT_WEIGHT = LayerKind(
    name="RecurrentWeight",
    module=RecurrentWeight,
    sizes=("rows", "columns"),
    has_bias=False,
    multiplies=False,
    product=_give_weight,
    image_dims=0,
    multiply_adds=_every_step,
)

KINDS: dict[str, LayerKind] = {
    kind.name: kind for kind in (CONV1D, CONV2D, CONV3D, CONV_TRANSPOSE2D, LINEAR, EMBEDDING, RECURRENT_WEIGHT)
}
KIND_OF: dict[type[nn.Module], LayerKind] = {kind.module: kind for kind in KINDS.values()}


FORWARD = ("forward", "_conv_forward", "__call__", "_call_impl")  # what says how a layer computes


def kind_of(layer: nn.Module) -> LayerKind | None:
    """The kind of `layer`: its class is in the table, or derived from one there without changing how it computes.

    A layer with tensors or modules beside its weight and bias has none: nobody would keep them.
    """
    if "forward" in vars(layer):  # patched by somebody
        return None
    if {*layer._parameters, *layer._buffers, *layer._modules} - {"weight", "bias"}:
        return None
    for each in type(layer).__mro__:
        if each in KIND_OF:
            return KIND_OF[each]
        if any(name in vars(each) for name in FORWARD):
            return None
    return None


def nearest_kind(layer: nn.Module) -> LayerKind | None:
    """The kind that the class of `layer` is in some way derived from; it may compute something else."""
    return next((KIND_OF[each] for each in type(layer).__mro__ if each in KIND_OF), None)
