"""What a user would take instead of bitdial: networks of other libraries, for the benchmarks to train.

brevitas is pure Python; it runs from a folder that nothing else sees:

    pip install --no-deps --target runs/peer brevitas==0.13.4 dependencies==2.0.1 unfoldNd==0.2.3
    PYTHONPATH=runs/peer python benchmarks/train_step.py
"""

import copy
import importlib.util

import torch
from torch import Tensor, nn

from bitdial.nn.swap import swap_modules

GET_BREVITAS = "brevitas is not installed; benchmarks/peers.py says how to get it"


def has_brevitas() -> bool:
    """Whether brevitas can be imported."""
    return importlib.util.find_spec("brevitas") is not None


def brevitas_model(model: nn.Module, bits: int, inputs: Tensor) -> nn.Module:
    """A copy of a ResNet on the device of `inputs`, in brevitas' layers; the first and the last layer stay in float.

    All scales are learned, as in LSQ: one per channel for weights, one per tensor for the activations, quantised at the
    ReLUs. They start from statistics of the first pass, which is done here (brevitas' default is 300 passes, each
    sorting the activations), so that the next one is an ordinary step.
    """
    import brevitas.nn as qnn
    from brevitas.quant import Int8WeightPerChannelFloat, Uint8ActPerTensorFloat

    model = copy.deepcopy(model)
    new: dict[nn.Module, nn.Module] = {}
    for layer in [module for module in model.modules() if isinstance(module, nn.Conv2d)][1:]:
        assert layer.bias is None, "the convolutions of the ResNets have no bias"
        new[layer] = quantized = qnn.QuantConv2d(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,
            stride=layer.stride,
            padding=layer.padding,
            bias=False,
            weight_quant=Int8WeightPerChannelFloat,
            weight_bit_width=bits,
            weight_scaling_impl_type="parameter_from_stats",
        )
        quantized.weight.data.copy_(layer.weight.data)
    for relu in [module for module in model.modules() if isinstance(module, nn.ReLU)]:
        new[relu] = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=bits, collect_stats_steps=1)
    swap_modules(model, new)
    model.to(inputs.device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    with torch.no_grad():
        for _ in range(2):  # one pass to look, one that sets the scales
            model(inputs)
    return model
