"""prepare(model, config, calibration): a float model in, a model that trains at several widths out."""

import logging
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.dial.dial import set_bits, unwrap
from bitdial.errors import ConfigError
from bitdial.nn import (
    QUANTIZED,
    UNKNOWN,
    LayerKind,
    QuantLayer,
    SwitchableBatchNorm,
    WeightQuantizer,
    kind_of,
)
from bitdial.nn.decompose import decompose
from bitdial.nn.layer_kinds import LINEAR
from bitdial.nn.single_width import watch_width
from bitdial.nn.swap import swap_modules, turn_off_fast_paths
from bitdial.nn.untouched import remember_start
from bitdial.prepare.activation_ranges import LayerInput
from bitdial.prepare.attention_products import quantize_products
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.copies import check_initialised, check_plain, copy_to_prepare
from bitdial.prepare.initial_scales import act_quantizer_of, weight_scales
from bitdial.prepare.model_call import Batch
from bitdial.prepare.report import REPORT, ModelReport
from bitdial.prepare.sizes import expected_bytes, float_bytes
from bitdial.prepare.survey import survey
from bitdial.prepare.treatment import Treatment, check_weight, check_weights

log = logging.getLogger(__name__)


def prepare(model: nn.Module, config: QuantConfig, calibration: Batch | Sequence[Batch]) -> nn.Module:
    """A copy of `model` whose layers quantise; `model` itself is left as it is.

    Of a model in DataParallel, torch.compile or the like it is a copy of the model inside. All that is floating-point
    becomes float32.

    `calibration` is a batch of inputs (a tensor, a tuple of positional or a dict of keyword arguments) or a list of
    batches. It shows which layers are first and last, the kind and starting scales of the activations and which layer
    each batch norm follows. The result is set to the highest width, layers with a width of their own to that.
    `describe(prepared)` reports what was done.
    """
    if not isinstance(config, QuantConfig):
        raise ConfigError(
            f"prepare's second argument must be a QuantConfig, got {type(config).__name__}; QuantConfig() has the "
            "defaults, QuantConfig.from_dict takes a dict"
        )
    batches = list(calibration) if isinstance(calibration, list) else [cast(Batch, calibration)]
    if not batches:
        raise ConfigError("calibration is empty; pass at least one batch of inputs")
    model = unwrap(model)
    check_plain(model)
    if any(hasattr(module, "select_bits") for module in model.modules()):
        raise ConfigError("the model is prepared already; prepare a float model")
    check_initialised(model)
    check_weights(model)
    model, batches, said = copy_to_prepare(model, batches)
    turn_off_fast_paths(model)
    decompose(model)

    found = survey(model, config, batches)
    before, said = float_bytes(model, []), [*said, *found.warnings]
    new: dict[nn.Module, nn.Module] = {}
    layers = _quantized_layers(found.chosen, found.inputs, found.treatments, config)
    for name, layer in layers.items():
        layer.fed_by = found.flow.feeders.get(name, UNKNOWN)
        new[found.chosen[name]] = layer
    for name, norm in found.norms.switch.items():
        follows = found.flow.leaders[name]
        new[norm] = SwitchableBatchNorm(norm, bit_choices=config.bit_choices, follows=follows)
    if config.attention == "quantized":
        said += quantize_products(model, layers, batches, config)
    swap_modules(model, new)
    set_bits(model, config.bit_choices[0])
    watch_width(model)
    remember_start(model)

    report = ModelReport(**found.facts(), float_bytes=before, **expected_bytes(model), warnings=tuple(said))
    setattr(model, REPORT, report)
    for warning in report.warnings:
        log.warning(warning)
    log.info(report.summary())
    return model


def _quantized_layers(
    chosen: dict[str, nn.Module],
    inputs: dict[str, LayerInput],
    treatments: dict[str, Treatment],
    config: QuantConfig,
) -> dict[str, QuantLayer]:
    """The layers that take the place of `chosen`."""
    made: dict[str, QuantLayer] = {}
    first_of: dict[nn.Parameter, str] = {}  # tied weights share their scale, and so their codes
    for name, layer in chosen.items():
        kind, treatment = cast(LayerKind, kind_of(layer)), treatments[name]
        check_weight(name, layer)
        if reason := kind.unsupported_reason(layer):
            raise ConfigError(f"layer {name!r}: {reason}")
        if inputs[name].arguments > 1:
            raise ConfigError(
                f"layer {name!r}: the model calls it with more than its input, which a quantised {kind.name} does not "
                f"take; call it with its input alone, or keep it in float: Rule(pattern={name!r}, quantize=False)"
            )
        rows = kind.to_rows(layer, cast(Tensor, layer.weight).detach())
        scale_shape = treatment.granularity.scale_shape(tuple(rows.shape), name)
        if bf.has_groups(scale_shape) and config.group_scales == "float" and treatment.activations != "float":
            raise ConfigError(
                f"layer {name!r}: its activations are quantised, and sums of codes need whole numbers between the "
                "scales of its groups: use group_scales='integer', or activations='float' for this layer"
            )
        owner = first_of.setdefault(cast(nn.Parameter, layer.weight), name)
        if owner == name:
            quantizer = _weight_quantizer(name, rows, scale_shape, treatment.fixed_bits, config)
        else:
            quantizer = made[owner].weight_quantizer
            _check_tied(name, kind, rows, scale_shape, owner, made[owner])
        activations = treatment.activations
        if activations == bf.DYNAMIC and kind != LINEAR:
            raise ConfigError(
                f"layer {name!r}: it is a {kind.name}, whose input has no tokens, and dynamic activations have a scale "
                f"for each: give it one for all by a rule, such as Rule(type={kind.name!r}, activations='auto')"
            )
        act_quantizer = None if activations == "float" else act_quantizer_of(name, inputs[name], activations, config)
        made[name] = QUANTIZED[kind].from_float(layer, quantizer, act_quantizer, name)
        made[name].fixed_bits = treatment.fixed_bits
    return made


def _check_tied(
    name: str, kind: LayerKind, rows: Tensor, scale_shape: tuple[int, ...], owner: str, other: QuantLayer
) -> None:
    """Refuse a layer whose weight is that of `other`, unless both have the same rows and the same scales."""
    if other.kind.to_rows is not kind.to_rows or other.weight_rows().shape != rows.shape:
        raise ConfigError(
            f"layer {name!r}: it uses the weight of {owner!r}, whose output channels lie along another dimension, so "
            "they cannot share codes; untie them, or keep one in float by a rule"
        )
    if other.weight_quantizer.scale_shape != scale_shape:
        raise ConfigError(
            f"layer {name!r}: it is tied to another layer, {owner!r}, but rules give them different per_channel or "
            "group_size"
        )


def _weight_quantizer(
    name: str, rows: Tensor, scale_shape: tuple[int, ...], fixed_bits: int | None, config: QuantConfig
) -> WeightQuantizer:
    with torch.no_grad():
        scales = weight_scales(rows, scale_shape, name=name, config=config, fixed_bits=fixed_bits)
    return WeightQuantizer(
        scales,
        bit_choices=config.bit_choices,
        scheme=config.scheme,
        ties=config.ties,
        scale_shape=scale_shape,
        group_scales=config.group_scales,
        scale_gradient=config.scale_gradient,
    )
