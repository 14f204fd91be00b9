"""Scales to calibrate from: weights by the balanced rule, activations by the error of the layer that reads them.

The error of a weight matters by how large its input is. So in Linear layers it counts by the mean square of that.

An activation scale of least squared error clips what is rare. That is not always right: what is clipped in many
channels at once adds up in the sums of a layer, where rounding errors cancel out. So scales around it are tried, and
the one of least error in the layer's output is taken, each output channel measured by its own variance. A pixel of
unusual energy counts as any other (see `positions`): scales need not reach as far as its values. The clip ratios of
dynamic activations are chosen alike.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.input_rows import held_back
from bitdial.calibrate.positions import position_weights
from bitdial.nn import ActivationQuantizer, QuantLayer
from bitdial.nn.layer_kinds import LINEAR
from bitdial.prepare.activation_ranges import observe_inputs
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.initial_scales import act_quantizer_of, weight_scales
from bitdial.prepare.model_call import Batch, call, sample_count

FACTORS = (1.0, 0.25, 0.35, 0.5, 0.7, 0.84, 1.2, 1.45, 1.75, 2.1)
SAMPLES = 64
_DAMPING = 0.01


@torch.no_grad()
def choose_scales(
    layers: Mapping[str, QuantLayer], reference: nn.Module, inputs: list[Batch], config: CalibrateConfig
) -> None:
    """Set the scales of `layers`, in place, by their weights and by what `reference`, the float model, feeds them."""
    squares = input_squares(reference, [n for n, layer in layers.items() if layer.kind is LINEAR], inputs)
    kinds = {name: layer.act_quantizer.kind for name, layer in layers.items() if layer.act_quantizer is not None}
    modules = {name: reference.get_submodule(name) for name in kinds}
    dynamic = {name for name, kind in kinds.items() if kind == bf.DYNAMIC}
    seen = observe_inputs(reference, modules, inputs, tokens=dynamic) if kinds else {}
    for name, layer in layers.items():
        quantizer = layer.weight_quantizer
        settings = QuantConfig(
            bit_choices=layer.bit_choices,
            scheme=quantizer.scheme,
            ties=quantizer.ties,
            group_scales=quantizer.group_scales,
            start="balanced",
            importance=_importance(layer, config),
        )
        rows, shape, fixed = layer.weight_rows(), quantizer.scale_shape, layer.fixed_bits
        counts = squares.get(name)
        scales = weight_scales(rows, shape, name=name, config=settings, fixed_bits=fixed, input_squares=counts)
        for bits, scale in scales.items():
            learned = quantizer.learned_scale(bits)
            assert learned is not None
            learned.copy_(scale)
        if layer.act_quantizer is not None and name in seen:
            made = act_quantizer_of(name, seen[name], layer.act_quantizer.kind, settings)
            layer.act_quantizer.load_state_dict(made.state_dict())
    _refine(layers, reference, inputs)


def _importance(layer: QuantLayer, config: CalibrateConfig) -> dict[int, float]:
    """That of `config`, but the highest width has at least 1, unless `scale_importance` says otherwise."""
    found = {bits: config.importance_of(bits) for bits in layer.bit_choices if bits in config.importance}
    found = {bits: max(value, float(bits == layer.bit_choices[0])) for bits, value in found.items()}
    found |= {bits: config.scale_importance[bits] for bits in layer.bit_choices if bits in config.scale_importance}
    return {bits: value for bits, value in found.items() if value > 0}


def input_squares(reference: nn.Module, names: list[str], inputs: list[Batch]) -> dict[str, Tensor]:
    """The mean square of each input (inputs,) of the Linear layers `names` of the float model, where they ran.

    An input that is nearly always 0 has a share of the mean over all: there may be other samples.
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def hook(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rows = (args[0] if args else kwargs["input"]).flatten(0, -2)
            if not len(rows):
                return
            rows = held_back(rows[None], rows[None], images=False)[0]
            sums[name] = sums.get(name, 0) + rows.square().sum(dim=0, dtype=torch.float64)
            counts[name] = counts.get(name, 0) + len(rows)

        return record

    modules = {name: reference.get_submodule(name) for name in names}
    handles = [m.register_forward_pre_hook(hook(name), with_kwargs=True) for name, m in modules.items()]
    try:
        for batch in inputs if names else []:
            call(reference, batch)
    finally:
        for handle in handles:
            handle.remove()
    means = {name: total / counts[name] for name, total in sums.items()}
    return {name: (mean + _DAMPING * mean.mean()).float() for name, mean in means.items() if bool(mean.any())}


def _refine(layers: Mapping[str, QuantLayer], reference: nn.Module, inputs: list[Batch]) -> None:
    """Try activation scales around the present ones on some of `inputs`, and take the best, in place."""
    errors: dict[tuple[str, int], Tensor] = {}

    def hook(name: str, layer: QuantLayer, quantizer: ActivationQuantizer) -> Any:
        widths = layer.bit_choices if layer.fixed_bits is None else (layer.fixed_bits,)

        def record(module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
            if not out.numel():  # of a detector that found nothing
                return
            channels = out.dim() - 1 - layer.kind.image_dims
            rest = [dim for dim in range(out.dim()) if dim != channels]
            spread = out.var(dim=rest, keepdim=True, correction=0)
            spread = torch.where(spread > 0, spread, out.square().mean() + 1e-30)
            weights = (position_weights([out], channels)[0] if layer.kind.image_dims > 1 else 1.0) / spread
            for bits in widths:
                tried = []
                for factor in FACTORS:
                    scale, zero_point = quantizer.scales[str(bits)] * factor, quantizer.zero_point_of(bits)
                    x = bf.fake_quantize_activation(args[0], scale, zero_point, bits=bits, kind=quantizer.kind)
                    found = layer.kind.product(module, x, module.weight, module.bias)
                    tried.append((found.sub_(out).square_().mul_(weights)).mean())
                errors[name, bits] = errors.get((name, bits), 0) + torch.stack(tried)

        return record

    handles = [
        reference.get_submodule(name).register_forward_hook(hook(name, layer, layer.act_quantizer))
        for name, layer in layers.items()
        if layer.act_quantizer is not None and layer.act_quantizer.kind != "asymmetric"
    ]
    try:
        for batch in _some(inputs) if handles else ():
            call(reference, batch)
    finally:
        for handle in handles:
            handle.remove()
    best = torch.stack([found.argmin() for found in errors.values()]).tolist() if errors else []
    for (name, bits), place in zip(errors, best, strict=True):
        quantizer = layers[name].act_quantizer
        assert quantizer is not None
        scale = quantizer.scales[str(bits)].mul_(FACTORS[place])
        if quantizer.kind == bf.DYNAMIC:
            scale.copy_(bf.usable_clip_ratio(scale))


def _some(inputs: list[Batch]) -> Iterator[Batch]:
    """The first batches, of SAMPLES samples in all."""
    seen = 0
    for batch in inputs:
        if seen >= SAMPLES:
            return
        yield batch
        seen += sample_count(batch) or 1
