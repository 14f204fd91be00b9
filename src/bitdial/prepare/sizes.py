"""Bytes that a prepared model will take: its file, and each width by itself."""

from typing import Any

from torch import Tensor, nn

from bitdial.nn import ActivationSite, QuantLayer, SwitchableBatchNorm
from bitdial.nn.own_dtypes import shortest, shortest_of

SITE_BYTES = 4  # the scale of one width


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of that many codes."""
    return -(-elements * bits // 8)


def state_bytes(module: nn.Module) -> int:
    """Bytes of a module's state."""
    return sum(value.nbytes for value in module.state_dict().values())


def float_bytes(model: nn.Module, quantised: list[str]) -> int:
    """Bytes of the model's state outside the modules named in `quantised`; tensors with two names count once.

    What was in 16 bits before the model became float32, and has such values still, counts as that.
    """
    swapped = {model.get_submodule(name) for name in quantised}
    prefixes = tuple(f"{n}." for n, m in model.named_modules(remove_duplicate=False) if m in swapped)
    state = {key: v for key, v in model.state_dict(keep_vars=True).items() if isinstance(v, Tensor)}
    outside = {key: v for key, v in state.items() if not key.startswith(prefixes)}
    return sum({id(v): shortest_of(model, key, v).nbytes for key, v in outside.items()}.values())


def expected_bytes(model: nn.Module) -> dict[str, Any]:
    """Bytes of the tensors of the file that `save` writes (`file_bytes`), and of each width alone (`width_bytes`)."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}
    norms = {name: m for name, m in model.named_modules() if isinstance(m, SwitchableBatchNorm)}
    widths = next(iter(layers.values())).bit_choices
    sites = [name for name, m in model.named_modules() if isinstance(m, ActivationSite)]
    rest = float_bytes(model, [*layers, *norms, *sites])
    one_set = sum(state_bytes(norm.active) for norm in norms.values())
    together = rest + sum(_norm_bytes(norm) for norm in norms.values())
    together += SITE_BYTES * len(widths) * len(sites)
    alone = dict.fromkeys(widths, rest + one_set + SITE_BYTES * len(sites))
    stored = set()
    for layer in layers.values():
        quantizer, act, elements = layer.weight_quantizer, layer.act_quantizer, layer.weight.numel()
        bias = 0 if layer.bias is None else shortest(layer, "bias", layer.bias).nbytes
        act_bytes = 0 if act is None else 5 if act.kind == "asymmetric" else 4
        together += bias + len(widths) * act_bytes
        own = layer.weight not in stored
        stored.add(layer.weight)
        if own and quantizer.rule.narrows:
            together += packed_bytes(elements, widths[0]) + quantizer.scale_bytes
        elif own:
            together += 4 * elements + len(widths) * quantizer.scale_bytes
        for bits in widths:
            codes = packed_bytes(elements, layer.fixed_bits or bits)
            alone[bits] += bias + act_bytes + (codes + quantizer.scale_bytes if own else 0)
    return {"file_bytes": together, "width_bytes": alone}


def _norm_bytes(norm: SwitchableBatchNorm) -> int:
    """Of all sets, as a file has them."""
    return sum(len(norm.holders(part)) * value.nbytes for part, value in norm.active.state_dict().items())
