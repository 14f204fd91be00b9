"""From an artifact back to layers that train: master weights whose codes are the stored ones, and learned scales."""

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.errors import ArtifactError
from bitdial.nn import KINDS, QUANTIZED, ActivationQuantizer, ActivationSite, WeightQuantizer


def trainable_layers(artifact: Artifact, layers: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    """The trainable layer for each of the float `layers` of the file, whose parameters are replaced."""
    masters: dict[str, tuple[nn.Parameter, WeightQuantizer]] = {}
    new: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        entry, owner = artifact.layers[name], artifact.owner(name)
        kind = KINDS[entry["type"]]
        if owner not in masters:
            weight = kind.from_rows(layer, _master_rows(artifact, owner)).contiguous()
            masters[owner] = nn.Parameter(weight), _weight_quantizer(artifact, owner)
        layer.weight, quantizer = masters[owner]
        act_quantizer = act_quantizer_in(artifact, name, entry["activations"])
        trainable = QUANTIZED[kind].from_float(layer, quantizer, act_quantizer, name)
        trainable.fed_by, trainable.fixed_bits = entry["fed_by"], entry.get("fixed_bits")
        new[layer] = trainable
    return new


def _weight_quantizer(artifact: Artifact, owner: str) -> WeightQuantizer:
    scales = {bits: artifact.weight_scale(owner, bits) for bits in artifact.bit_choices}
    scale, two_levels = scales[artifact.bit_choices[0]], artifact.group_scale(owner) is not None
    if two_levels and bf.scheme_of(artifact.scheme).derives_scale:
        raise ArtifactError(
            f"layer {owner!r}: {artifact.scheme} takes its scales from the weights, and scales of two levels do not "
            "come out as they were; train on from a checkpoint, or from a file with group_scales='float'"
        )
    half = two_levels and bf.has_half_rows(artifact.row_scale(owner))
    if two_levels and not torch.equal(bf.two_level(scale, half=half), scale):
        raise ArtifactError(
            f"layer {owner!r}: no multiplier of a row in 'group_scale' is {bf.MOST_MULTIPLIER}, as it is in files of "
            "bitdial; the file runs, but training would not go on from its codes"
        )
    return WeightQuantizer(
        scales,
        bit_choices=artifact.bit_choices,
        scheme=artifact.scheme,
        ties=artifact.manifest["ties"],
        scale_shape=tuple(scale.shape),
        group_scales="half" if half else "integer" if two_levels else "float",
    )


def _master_rows(artifact: Artifact, owner: str) -> Tensor:
    """A float weight in rows whose codes are the stored ones."""
    if not bf.scheme_of(artifact.scheme).narrows:
        return artifact.tensors[f"{owner}/weight"].clone()
    return bf.weight_of_codes(
        artifact.codes(owner), artifact.weight_scale(owner), bits=artifact.bit_choices[0], scheme=artifact.scheme
    )


def put_sites(artifact: Artifact, model: nn.Module) -> None:
    """Put the quantizers of the file that belong to no layer into their places in `model`.

    A live model has the same ones as a model that trains: they quantise and dequantise in float32, on every engine.
    """
    for name, entry in artifact.sites.items():
        holder, _, part = name.rpartition(".")
        quantizer, attention = act_quantizer_in(artifact, name, entry["kind"]), model.get_submodule(holder)
        assert quantizer is not None
        site = ActivationSite(quantizer, bit_choices=artifact.bit_choices, follows=entry["follows"])
        setattr(attention, part, site.train(attention.training))


def act_quantizer_in(artifact: Artifact, name: str, kind: str) -> ActivationQuantizer | None:
    """The quantizer of the layer or site called `name`, of that `kind`; None if it has none."""
    scale, zero_point = artifact.act_scale(name), artifact.part(name, "act_zero_point")
    if scale is None:
        return None
    widths = artifact.bit_choices
    zeros = None if zero_point is None else {b: z.float() for b, z in zip(widths, zero_point.split(1), strict=True)}
    scales = dict(zip(widths, scale.split(1), strict=True))
    return ActivationQuantizer(scales, zeros, kind=kind)
