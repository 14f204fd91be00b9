"""The modules of a prepared model."""

from bitdial.nn.batchnorm import TRANSITIONS, SwitchableBatchNorm, TransitionalBatchNorm
from bitdial.nn.layers import UNKNOWN, QuantConv2d, QuantLayer, QuantLinear
from bitdial.nn.quantizers import ActivationQuantizer, WeightQuantizer

__all__ = [
    "TRANSITIONS",
    "UNKNOWN",
    "ActivationQuantizer",
    "QuantConv2d",
    "QuantLayer",
    "QuantLinear",
    "SwitchableBatchNorm",
    "TransitionalBatchNorm",
    "WeightQuantizer",
]
