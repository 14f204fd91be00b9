"""The layers of a prepared model from an artifact, to train on from: master weights whose codes are the stored ones."""

from typing import Any

from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.nn import ActivationQuantizer, QuantConv2d, QuantLinear, WeightQuantizer

TRAINABLE: dict[str, Any] = {"Conv2d": QuantConv2d, "Linear": QuantLinear}


def trainable_layers(artifact: Artifact, layers: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    """For each of the float `layers` its successor with quantizers; layers on one weight share it."""
    widths, ties = artifact.bit_choices, artifact.manifest["ties"]
    masters: dict[str, tuple[nn.Parameter, WeightQuantizer]] = {}
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        owner = artifact.owner(name)
        if owner not in masters:
            scale = artifact.tensors[f"{owner}/weight_scale"]
            scales = dict(zip(widths, scale, strict=False))
            quantizer = WeightQuantizer(
                scales, bit_choices=widths, scheme=artifact.scheme, ties=ties, channels=scale.shape[1]
            )
            masters[owner] = nn.Parameter(_master_weight(artifact, owner)), quantizer
        weight, quantizer = masters[owner]
        layer.weight = weight
        act = _act_quantizer(artifact, name)
        trainable = TRAINABLE[artifact.layers[name]["type"]].from_float(layer, quantizer, act)
        trainable.fed_by = artifact.layers[name]["fed_by"]
        new[layer] = trainable
    return new


def _master_weight(artifact: Artifact, owner: str) -> Tensor:
    """A float weight whose codes are the stored ones."""
    if not bf.scheme_of(artifact.scheme).narrows:
        return artifact.tensors[f"{owner}/weight"].clone()
    scale = artifact.tensors[f"{owner}/weight_scale"][0]
    return bf.weight_of_codes(artifact.codes(owner), scale, bits=artifact.bit_choices[0], scheme=artifact.scheme)


def _act_quantizer(artifact: Artifact, name: str) -> ActivationQuantizer | None:
    scale, zero_point = artifact.part(name, "act_scale"), artifact.part(name, "act_zero_point")
    if scale is None:
        return None
    widths = artifact.bit_choices
    zeros = None if zero_point is None else {b: z.float() for b, z in zip(widths, zero_point.split(1), strict=True)}
    scales = dict(zip(widths, scale.split(1), strict=True))
    return ActivationQuantizer(scales, zeros, kind=artifact.layers[name]["activations"])
