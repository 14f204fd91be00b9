"""Quantizers in front of the products of attention, q k^T and p v, in attentions that were taken apart."""

from collections.abc import Mapping

from torch import nn

from bitdial.errors import ConfigError
from bitdial.nn import ActivationSite, QuantLayer
from bitdial.nn.attention import SITES, Attention
from bitdial.prepare.activation_ranges import LayerInput, observe_inputs
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.initial_scales import act_quantizer_of
from bitdial.prepare.model_call import Batch

LEADERS = ("out_proj", "v_proj", "k_proj", "q_proj")  # whose activation bits the products have: the first that has some


def quantize_products(
    model: nn.Module, layers: Mapping[str, QuantLayer], batches: list[Batch], config: QuantConfig
) -> list[str]:
    """Quantise the products of every attention of the float `model`, in place, of which `layers` are to be quantised.

    Returns warnings of those that stay in float; ConfigError if all do.
    """
    attentions = {name: m for name, m in model.named_modules() if isinstance(m, Attention)}
    if not attentions:
        raise ConfigError(
            "attention='quantized', but the model has no nn.MultiheadAttention that was taken apart; products in code "
            "of a model's own cannot be seen. Leave attention out, or use nn.MultiheadAttention"
        )
    leaders = {name: leader for name in attentions if (leader := _leader(name, layers)) is not None}
    seen = _observe(model, {name: attentions[name] for name in leaders}, batches)
    for name, leader in leaders.items():
        attentions[name].quantize_products(
            {part: _site(f"{name}.{part}", kind, seen, leader, config) for part, kind in SITES.items()}
        )
    floats = [name for name in attentions if name not in leaders]
    reason = (
        "attention='quantized', but the products of {} stay in float: none of its layers is quantised with its input; "
        "rules can do that, or leave attention out"
    )
    if not leaders:
        raise ConfigError(reason.format(repr(floats[0])))
    return [reason.format(repr(name)) for name in floats]


def _leader(attention: str, layers: Mapping[str, QuantLayer]) -> str | None:
    """The layer whose activation bits the products of `attention` have."""
    for name in (f"{attention}.{part}" for part in LEADERS):
        if name in layers and layers[name].act_quantizer is not None:
            return name
    return None


def _observe(model: nn.Module, attentions: Mapping[str, Attention], batches: list[Batch]) -> dict[str, LayerInput]:
    """What stands in front of the products on `batches`, by the names of the sites."""
    places: dict[str, nn.Module] = {}
    for name, attention in attentions.items():
        empty = {part: nn.Identity() for part in SITES}
        attention.quantize_products(empty)
        places |= {f"{name}.{part}": place for part, place in empty.items()}
    return observe_inputs(model, places, batches)


def _site(name: str, kind: str, seen: Mapping[str, LayerInput], leader: str, config: QuantConfig) -> ActivationSite:
    if name not in seen:
        raise ConfigError(
            f"attention='quantized': the calibration batch runs {leader!r}, but not the attention around it; call the "
            "attention itself, or leave attention out"
        )
    if kind == "unsigned":  # probabilities, whatever calibration has seen of them
        seen[name].minimum, seen[name].maximum = 0.0, 1.0
    return ActivationSite(
        act_quantizer_of(name, seen[name], kind, config), bit_choices=config.bit_choices, follows=leader
    )
