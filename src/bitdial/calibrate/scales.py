"""Scales to calibrate from: weights by the balanced rule, activations by least squared error at each width."""

from collections.abc import Mapping

import torch
from torch import nn

from bitdial.calibrate.config import CalibrateConfig
from bitdial.nn import QuantLayer
from bitdial.prepare.activation_ranges import observe_inputs
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.initial_scales import act_quantizer_of, weight_scales
from bitdial.prepare.model_call import Batch


@torch.no_grad()
def choose_scales(
    layers: Mapping[str, QuantLayer], reference: nn.Module, inputs: list[Batch], config: CalibrateConfig
) -> None:
    """Set the scales of `layers`, in place, by their weights and by what `reference`, the float model, feeds them."""
    seen = observe_inputs(reference, {name: reference.get_submodule(name) for name in layers}, inputs)
    for name, layer in layers.items():
        quantizer = layer.weight_quantizer
        settings = QuantConfig(
            bit_choices=layer.bit_choices,
            scheme=quantizer.scheme,
            ties=quantizer.ties,
            group_scales=quantizer.group_scales,
            start="balanced",
            importance={b: v for b, v in config.importance.items() if b in layer.bit_choices and v > 0},
        )
        rows, shape, fixed = layer.weight_rows(), quantizer.scale_shape, layer.fixed_bits
        scales = weight_scales(rows, shape, name=name, config=settings, fixed_bits=fixed)
        for bits, scale in scales.items():
            learned = quantizer.learned_scale(bits)
            assert learned is not None
            learned.copy_(scale)
        if layer.act_quantizer is not None and name in seen:
            made = act_quantizer_of(name, seen[name], layer.act_quantizer.kind, settings)
            layer.act_quantizer.load_state_dict(made.state_dict())
