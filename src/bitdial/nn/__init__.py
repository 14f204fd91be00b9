"""The modules of a prepared model."""

from bitdial.nn.activation_site import ActivationSite
from bitdial.nn.batchnorm import TRANSITIONS, SwitchableBatchNorm, TransitionalBatchNorm
from bitdial.nn.layer_kinds import KIND_OF, KINDS, LayerKind, kind_of, nearest_kind
from bitdial.nn.layers import QUANTIZED, UNKNOWN, QuantConv2d, QuantLayer, QuantLinear
from bitdial.nn.norms import (
    BATCH_NORMS,
    NORM_STATE,
    batch_norm_type,
    is_switchable,
    keeps_own_statistics,
    unswitchable_reason,
    usual_state,
)
from bitdial.nn.quantizers import ActivationQuantizer, WeightQuantizer

__all__ = [
    "BATCH_NORMS",
    "KINDS",
    "KIND_OF",
    "NORM_STATE",
    "QUANTIZED",
    "TRANSITIONS",
    "UNKNOWN",
    "ActivationQuantizer",
    "ActivationSite",
    "LayerKind",
    "QuantConv2d",
    "QuantLayer",
    "QuantLinear",
    "SwitchableBatchNorm",
    "TransitionalBatchNorm",
    "WeightQuantizer",
    "batch_norm_type",
    "is_switchable",
    "keeps_own_statistics",
    "kind_of",
    "nearest_kind",
    "unswitchable_reason",
    "usual_state",
]
