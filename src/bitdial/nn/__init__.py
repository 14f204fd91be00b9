"""The modules of a prepared model."""

from bitdial.nn.batchnorm import TRANSITIONS, SwitchableBatchNorm, TransitionalBatchNorm
from bitdial.nn.layer_kinds import KIND_OF, KINDS, LayerKind, kind_of, nearest_kind
from bitdial.nn.layers import QUANTIZED, UNKNOWN, QuantConv2d, QuantLayer, QuantLinear
from bitdial.nn.quantizers import ActivationQuantizer, WeightQuantizer

__all__ = [
    "KINDS",
    "KIND_OF",
    "QUANTIZED",
    "TRANSITIONS",
    "UNKNOWN",
    "ActivationQuantizer",
    "LayerKind",
    "QuantConv2d",
    "QuantLayer",
    "QuantLinear",
    "SwitchableBatchNorm",
    "TransitionalBatchNorm",
    "WeightQuantizer",
    "kind_of",
    "nearest_kind",
]
