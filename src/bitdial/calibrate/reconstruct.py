"""Learn the weights of one block so that its output is the float model's, at all widths at once. No labels.

One code serves all widths, so it is not enough to learn whether a weight is rounded up or down: that moves the highest
width by one step and the lowest by none. Instead the float weight itself moves, by up to `reach` steps of the lowest
width, with gradients straight through the rounding. Activation scales and the norms of each width are learned with it.
The loss is

    sum over widths of importance * log(error + tolerance),    error = |out - float out|^2 / |float out|^2

so that each width counts by its relative error, and one that is good already does not hold the others back.

As in QDrop, quantisation is dropped at random: in each iteration a share of what the block reads, and of the
activations inside it, is as in float.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.calibrate.blocks import Block
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.values import Environment, Values, run
from bitdial.dial.dial import resolve_plan, set_bits
from bitdial.dial.plan import BitPlan
from bitdial.errors import QuantizationError
from bitdial.functional.granularity import values_by_scale
from bitdial.nn import QuantLayer

Report = Callable[[int, dict[int, float]], None]  # the iteration, and the error at each width
_LEAST_SCALE = 1 / 8  # of its start, to which a scale may shrink


class Reconstruction:
    """The learning of one block. `settings` is what the dial gets for each width, the highest first."""

    def __init__(
        self,
        model: nn.Module,
        block: Block,
        settings: Mapping[int, BitPlan],
        config: CalibrateConfig,
        generator: torch.Generator,
    ):
        self.model, self.block, self.settings, self.config = model, block, settings, config
        self.generator = generator
        lowest = {name: min(resolve_plan(model, plan)[name][0] for plan in settings.values()) for name in block.layers}
        modules = {model.get_submodule(name): bits for name, bits in lowest.items()}
        self.layers = {layer: bits for layer, bits in modules.items() if isinstance(layer, QuantLayer)}
        self.weights = [
            (layer.weight, layer.weight.detach().clone(), step_of(layer, b)) for layer, b in self.layers.items()
        ]
        self.offsets = [torch.zeros_like(start) for _, start, _ in self.weights]

    def parameters(self) -> list[dict[str, Any]]:
        """What is learned, with a learning rate each."""
        config = self.config
        groups = [{"params": [offset], "lr": config.weight_rate} for offset in self.offsets]
        for scale in self._act_scales():
            groups.append({"params": [scale], "lr": config.scale_rate * float(scale.detach())})
        for layer in self.layers:
            if layer.bias is not None:
                groups.append({"params": [layer.bias], "lr": config.norm_rate * _size(layer.bias)})
        for name in self.block.norms:
            for parameter in self.model.get_submodule(name).parameters():
                groups.append({"params": [parameter], "lr": config.norm_rate * _size(parameter)})
        return groups

    def _act_scales(self) -> list[nn.Parameter]:
        quantizers = [layer.act_quantizer for layer in self.layers if layer.act_quantizer is not None]
        return [scale for quantizer in quantizers for scale in quantizer.scales.values()]

    def learn(self, plain: Values, quantized: Mapping[int, Values], after: Values, report: Report) -> None:
        """Run all iterations. `plain` and `quantized` are what the block reads, `after` what it gives in float."""
        config, block, (node,) = self.config, self.block, self.block.made[-1:]
        optimizer = torch.optim.Adam(self.parameters())
        rates = [group["lr"] for group in optimizer.param_groups]
        floors = [(scale, scale.detach() * _LEAST_SCALE) for scale in self._act_scales()]
        energy = _energy(after, node)
        reads = [n for n in block.reads if n.op != "get_attr"] or [n for n in block.nodes if n.op == "placeholder"]
        mixable = plain.is_mixable(reads) and after.is_mixable([node])
        samples = sum(len(batch[node]) for batch in after.batches) if mixable else len(after.batches)
        with self._dropping():
            for iteration in range(config.iterations):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * iteration / config.iterations))
                chosen: Any = torch.randperm(samples, generator=self.generator, device=self.generator.device)
                chosen = chosen[: config.batch_size] if mixable else int(chosen[0])
                given, wanted = plain.take(reads, chosen), after.take([node], chosen)[node]
                optimizer.zero_grad(set_to_none=True)
                self._move()
                errors = {}
                for bits, plan in self.settings.items():
                    set_bits(self.model, plan)
                    mixed = self._mixed(quantized[bits].take(reads, chosen), given)
                    error = (run(self.model, block.nodes, mixed)[node] - wanted).square().mean() / energy
                    (config.importance_of(bits) * torch.log(error + config.tolerance)).backward()
                    errors[bits] = float(error.detach())
                if not all(map(math.isfinite, errors.values())):
                    raise QuantizationError(f"block {block.name!r}: its error is not finite; check the batches")
                self._take_gradients()
                optimizer.step()
                with torch.no_grad():
                    for offset in self.offsets:
                        offset.clamp_(-config.reach, config.reach)
                    for scale, floor in floors:
                        scale.clamp_(min=floor)
                report(iteration + 1, errors)
        optimizer.zero_grad(set_to_none=True)
        self._move()

    def loss(self, errors: Mapping[int, float]) -> float:
        """The loss of `errors` by width."""
        return sum(self.config.importance_of(b) * math.log(e + self.config.tolerance) for b, e in errors.items())

    @torch.no_grad()
    def _move(self) -> None:
        """Put the weights where the offsets say."""
        for (weight, start, step), offset in zip(self.weights, self.offsets, strict=True):
            weight.copy_(torch.addcmul(start, offset, step))

    def _take_gradients(self) -> None:
        for (weight, _, step), offset in zip(self.weights, self.offsets, strict=True):
            offset.grad = None if weight.grad is None else weight.grad * step
            weight.grad = None

    def _mixed(self, given: Environment, plain: Environment) -> Environment:
        return {node: self._drop(value, plain[node]) for node, value in given.items()}

    def _drop(self, value: Any, plain: Any) -> Any:
        """`value`, with a share of its elements from `plain`."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or not self.config.drop:
            return value
        drawn = torch.rand(value.shape, generator=self.generator, device=value.device)
        return torch.where(drawn < self.config.drop, plain, value)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        """Let the activation quantizers of the block leave a share of the elements as they are."""
        with ExitStack() as stack:
            for layer in self.layers:
                if layer.act_quantizer is not None:
                    hook = layer.act_quantizer.register_forward_hook(lambda m, args, out: self._drop(out, args[0]))
                    stack.callback(hook.remove)
            yield


@torch.no_grad()
def step_of(layer: QuantLayer, bits: int) -> Tensor:
    """The distance between two values of each weight of `layer` at `bits`, in the shape of the weight."""
    quantizer, rows = layer.weight_quantizer, layer.weight_rows()
    scale = quantizer.scale_of(rows, bits) * 2.0 ** (quantizer.stored_bits(bits) - bits)
    return layer.kind.from_rows(layer, values_by_scale(torch.ones_like(rows), scale)).contiguous()


def _size(parameter: Tensor) -> float:
    return max(float(parameter.detach().square().mean().sqrt()), 1e-6)


def _energy(values: Values, node: Any) -> float:
    total = sum(float(batch[node].double().square().sum()) for batch in values.batches)
    return max(total / sum(batch[node].numel() for batch in values.batches), 1e-30)
