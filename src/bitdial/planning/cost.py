"""What a plan costs: bits, bytes, BitOps, activation bytes, and latency from a table of the user's.

Every quantity is a sum over layers, so that a search can bound it. Sums are exact (whole numbers and fractions); a
budget of 2.3 means 23/10, not the float nearest to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, cast

from torch import Tensor, nn

from bitdial.dial.dial import dialled_layers, fixed_widths, leader_of, unwrap
from bitdial.dial.plan import BitPlan, LayerBits, resolve_bits
from bitdial.errors import ConfigError, PlanError
from bitdial.nn import ActivationSite, QuantLayer, SwitchableBatchNorm
from bitdial.prepare.model_call import Batch, call, evaluating
from bitdial.prepare.sizes import SITE_BYTES, float_bytes, packed_bytes, state_bytes

# The keys of `Costs.of`, in the order in which they are shown; `latency` only where a table was given.
QUANTITIES: tuple[str, ...] = (
    "average_bits",
    "layer_average_bits",
    "bytes",
    "bitops",
    "activation_bytes",
    "latency",
)
FLOAT_BITS = 32  # of an activation that is not quantised

LatencyTable = Mapping[str, Mapping[LayerBits, float]]


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """What one layer contributes, whatever its bits.

    weights       weight elements
    out_channels  output channels
    macs          multiply-accumulates on the sample
    inputs        elements of its input on the sample
    scale_bytes   of the weight scales, the bias, one activation scale and zero-point
    norm_bytes    of one set of each switchable norm that follows it
    quantises_input  False for a weight-only layer
    tied_to       the layer that holds its weight, if that is another
    """

    weights: int
    out_channels: int
    macs: int
    inputs: int
    scale_bytes: int
    norm_bytes: int
    quantises_input: bool
    tied_to: str | None = None


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the layers of a model contribute to the cost of any plan; `of(plan)` adds them up.

    `fixed_bits` are the layers with a width of their own, which they have in any plan that does not name them.
    """

    layers: Mapping[str, LayerCosts]
    bit_choices: Mapping[str, tuple[int, ...]]
    float_bytes: int
    latency: LatencyTable | None = None
    fixed_bits: Mapping[str, int] = field(default_factory=dict)

    @property
    def quantities(self) -> tuple[str, ...]:
        """The names of what `of` gives and of what a budget can be set for."""
        return QUANTITIES if self.latency is not None else QUANTITIES[:-1]

    def of(self, plan: LayerBits | BitPlan) -> dict[str, float]:
        """The cost of `plan` by quantity.

        average_bits        mean weight bits over all weights
        layer_average_bits  mean weight bits over the layers, each counted once (the paper's average)
        bytes               of a file's tensors that hold this plan alone: packed codes, scales, biases, one set of each
                            norm, float layers; for a uniform plan what `artifact.sizes` calls `separate`
        bitops              multiply-accumulates x weight bits x activation bits (32 if the input is not quantised),
                            quantised layers only, on the sample
        activation_bytes    the quantised inputs of all layers, added up: what is read, not the peak
        latency             the sum over the table, in its unit
        """
        exact = self.exact(resolve_bits(self.bit_choices, plan, self.fixed_bits))
        exact["bytes"] += self.float_bytes
        return {name: plain_number(value) for name, value in exact.items()}

    def exact(self, chosen: Mapping[str, tuple[int, int]]) -> dict[str, Fraction]:
        """What the layers named in `chosen`, at those (weight bits, activation bits), add to each quantity.

        Layers that share a weight share its codes where their weight bits are the same; name them together.
        """
        weights = sum(layer.weights for layer in self.layers.values())
        totals = dict.fromkeys(self.quantities, Fraction(0))
        stored: set[tuple[str, int]] = set()
        for name, (weight_bits, act_bits) in chosen.items():
            layer = self.layers[name]
            totals["average_bits"] += Fraction(layer.weights * weight_bits, weights)
            totals["layer_average_bits"] += Fraction(weight_bits, len(self.layers))
            totals["bytes"] += layer.scale_bytes + layer.norm_bytes
            codes = layer.tied_to or name, weight_bits
            if codes not in stored:
                totals["bytes"] += packed_bytes(layer.weights, weight_bits)
                stored.add(codes)
            totals["bitops"] += layer.macs * weight_bits * (act_bits if layer.quantises_input else FLOAT_BITS)
            if layer.quantises_input:
                totals["activation_bytes"] += packed_bytes(layer.inputs, act_bits)
            if self.latency is not None:
                totals["latency"] += as_written(self._seconds(name, weight_bits, act_bits))
        return totals

    def _seconds(self, name: str, weight_bits: int, act_bits: int) -> float:
        assert self.latency is not None
        table = self.latency[name]
        for key in [(weight_bits, act_bits), *([weight_bits] if weight_bits == act_bits else [])]:
            if key in table:
                return table[cast(LayerBits, key)]
        raise PlanError(
            f"layer {name!r}: the latency table has no entry for weight bits {weight_bits} and activation bits "
            f"{act_bits}; it has {', '.join(map(repr, table)) or 'none'}"
        )


def measure_costs(model: nn.Module, sample: Batch, *, latency: LatencyTable | None = None) -> Costs:
    """Run the prepared `model` once on `sample` and note what each quantised layer contributes to a plan's cost.

    Operations and activations are counted for `sample` as a whole: pass one image for costs per image. `latency` is
    {layer: {bits, or (weight bits, activation bits): time}}, measured by you, for every quantised layer. The products
    of attention, which multiply no weight, are not counted.
    """
    model = unwrap(model)
    layers = prepared_layers(model)
    norms = {n: m for n, m in model.named_modules() if isinstance(m, SwitchableBatchNorm)}
    norm_bytes = dict.fromkeys(layers, 0)
    for name, norm in norms.items():
        norm_bytes[leader_of(name, norm.follows, layers)] += state_bytes(next(iter(norm.sets.values())))
    sites = {n: m for n, m in model.named_modules() if isinstance(m, ActivationSite)}
    site_bytes = dict.fromkeys(layers, 0)
    for name, site in sites.items():
        site_bytes[leader_of(name, site.follows, layers)] += SITE_BYTES
    owners: dict[Tensor, str] = {}
    table: dict[str, LayerCosts] = {}
    for name, (macs, inputs) in _count_operations(model, layers, sample).items():
        layer = layers[name]
        owner = owners.setdefault(layer.weight, name)
        rows = len(layer.weight_rows())
        scales = layer.weight_quantizer.scale_bytes if owner == name else 0
        bias = 4 * rows if layer.bias is not None else 0
        act = layer.act_quantizer
        act_bytes = 0 if act is None else 5 if act.kind == "asymmetric" else 4
        table[name] = LayerCosts(
            weights=layer.weight.numel(),
            out_channels=rows,
            macs=macs,
            inputs=inputs,
            scale_bytes=scales + bias + act_bytes + site_bytes[name],
            norm_bytes=norm_bytes[name],
            quantises_input=act is not None,
            tied_to=None if owner == name else owner,
        )
    if latency is not None:
        _check_latency(latency, list(layers))
    return Costs(
        layers=table,
        bit_choices={name: layer.bit_choices for name, layer in layers.items()},
        float_bytes=float_bytes(model, [*layers, *norms, *sites]),
        latency=latency,
        fixed_bits=fixed_widths(layers),
    )


def prepared_layers(model: nn.Module) -> dict[str, QuantLayer]:
    """The quantised layers of a prepared model by name; an error for a live model, which has no float weights."""
    layers = dialled_layers(model)
    for name, layer in layers.items():
        if not isinstance(layer, QuantLayer):
            raise ConfigError(
                f"layer {name!r} is a {type(layer).__name__}; costs and search take a prepared model: from prepare(), "
                "or load_trainable(path) for a file"
            )
    return cast(dict[str, QuantLayer], layers)


def as_written(value: float) -> Fraction:
    """The number as it is written: 2.3 is 23/10."""
    return Fraction(repr(float(value))) if not isinstance(value, int | Fraction) else Fraction(value)


def plain_number(value: Fraction) -> float:
    """An int if it is whole, else the nearest float."""
    return value.numerator if value.denominator == 1 else float(value)


def _count_operations(model: nn.Module, layers: Mapping[str, QuantLayer], sample: Batch) -> dict[str, tuple[int, int]]:
    """Multiply-accumulates and input elements of each layer, over all its calls, in the order of `layers`."""
    seen: dict[str, tuple[int, int]] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            x = args[0] if args else kwargs["input"]
            macs, inputs = seen.get(name, (0, 0))
            seen[name] = macs + layers[name].kind.multiply_adds(module, x, out), inputs + x.numel()

        return hook

    handles = [layer.register_forward_hook(hook_for(n), with_kwargs=True) for n, layer in layers.items()]
    try:
        with evaluating(model):
            call(model, sample)
    finally:
        for handle in handles:
            handle.remove()
    for name in layers:
        if name not in seen:
            raise ConfigError(f"layer {name!r} did not run on the sample; pass one that reaches it")
    return {name: seen[name] for name in layers}


def _check_latency(latency: LatencyTable, layers: list[str]) -> None:
    if missing := [name for name in layers if name not in latency]:
        raise ConfigError(f"the latency table lacks layer {missing[0]!r}; it must have every quantised layer")
    if unknown := [name for name in latency if name not in layers]:
        raise ConfigError(f"the latency table names {unknown[0]!r}, which is not a quantised layer of the model")
    for name, times in latency.items():
        for bits, value in times.items():
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ConfigError(f"layer {name!r}: latency {value!r} at {bits!r} bits is not a time")
