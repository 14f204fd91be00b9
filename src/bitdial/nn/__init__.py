"""The modules of a prepared model."""

from bitdial.nn.batchnorm import SwitchableBatchNorm
from bitdial.nn.layers import QuantConv2d, QuantLayer, QuantLinear
from bitdial.nn.packed import PackedConv2d, PackedLayer, PackedLinear
from bitdial.nn.quantizers import ActivationQuantizer, WeightQuantizer

__all__ = [
    "ActivationQuantizer",
    "PackedConv2d",
    "PackedLayer",
    "PackedLinear",
    "QuantConv2d",
    "QuantLayer",
    "QuantLinear",
    "SwitchableBatchNorm",
    "WeightQuantizer",
]
