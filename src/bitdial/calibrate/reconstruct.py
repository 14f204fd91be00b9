"""Learn what one block has, so that its output is the float model's, at all widths at once. No labels.

One code serves all widths, so it is not enough to learn whether a weight is rounded up or down: that moves the highest
width by one step and the lowest by none. Instead the float weight itself moves, by up to `reach` steps of the lowest
width, with gradients straight through the rounding. Activation scales and the norms of each width are learned with it;
with effort 'medium' they alone, and all codes stay as they are. The loss is

    sum over widths of importance * log(error + tolerance),    error = |out - float out|^2 / |float out|^2

so that each width counts by its relative error, and one that is good already does not hold the others back. Pixels
with huge values count as any others in an error (see `positions`).

As in QDrop, quantisation is dropped at random: in each iteration a share of what the block reads, and of the
activations inside it, is as in float.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial.calibrate.blocks import Block
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.quick_nodes import quick_nodes
from bitdial.calibrate.values import Environment, Values, run
from bitdial.dial.dial import resolve_plan, set_bits
from bitdial.dial.plan import BitPlan
from bitdial.errors import QuantizationError, TrainingError
from bitdial.functional.granularity import values_by_scale
from bitdial.kernels.cuda_graph import StepGraphs
from bitdial.kernels.dropping import Draws, can_drop, drop
from bitdial.nn import QuantLayer

log = logging.getLogger(__name__)

Report = Callable[[int, dict[int, float]], None]  # the iteration, and the error at each width
_LEAST_SCALE = 1 / 8  # of its start, to which a scale may shrink
_EVERY = 20  # iterations after which errors are looked at: on a GPU that waits


@dataclass(frozen=True, eq=False)
class Learned:
    """A parameter that moves from its start by `offset` units, which is what is learned; within bounds.

    Units make learning rates mean the same for all: the step of a weight, the size of a scale. They are spread to the
    parameter's shape, so that many parameters move in one launch.
    """

    parameter: Tensor
    unit: Tensor
    least: float = -math.inf
    most: float = math.inf
    start: Tensor = field(init=False)
    offset: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unit", torch.empty_like(self.parameter.detach()).copy_(self.unit))
        object.__setattr__(self, "start", self.parameter.detach().clone())
        object.__setattr__(self, "offset", torch.zeros_like(self.start))


class _Samples:
    """What a block reads and gives for all samples: in float, and at each width what it reads."""

    def __init__(self, block: Block, plain: Values, quantized: Mapping[int, Values], after: Values):
        self._plain, self._quantized, self._after = plain, quantized, after
        self.nodes = after.results(block)
        self._reads = [n for n in block.reads if n.op != "get_attr"] or [
            n for n in block.nodes if n.op == "placeholder"
        ]
        self.mixable = plain.is_mixable(self._reads) and after.is_mixable(self.nodes)
        self.energies = {node: _energy(after, node) for node in self.nodes}
        batches = after.batches
        self._count = sum(len(batch[self.nodes[0]]) for batch in batches) if self.mixable else len(batches)
        self._weights: Any = {n: torch.cat(each) if self.mixable else each for n, each in after.weights.items()}

    def draw(self, batch_size: int, generator: torch.Generator) -> Tensor | int:
        """Some samples: their places, or that of one batch where samples of several cannot be put together."""
        chosen = torch.randperm(self._count, generator=generator, device=generator.device)
        return chosen[:batch_size] if self.mixable else int(chosen[0])

    def plain(self, chosen: Tensor | int) -> Environment:
        """What the block reads in the float model."""
        return self._plain.take(self._reads, chosen)

    def quantized(self, bits: int, chosen: Tensor | int) -> Environment:
        """What the block reads at a width."""
        return self._quantized[bits].take(self._reads, chosen)

    def wanted(self, chosen: Tensor | int) -> Environment:
        """What the block gives in the float model."""
        return self._after.take(self.nodes, chosen)

    def counts(self, chosen: Tensor | int) -> dict[Any, Any]:
        """How much the pixels of that count."""
        return {node: self._weights[node][chosen] if node in self._weights else 1.0 for node in self.nodes}


class Reconstruction:
    """The learning of one block. `settings` is what the dial gets for each width, the highest first.

    `only` are the parameters that may move; None: all that the effort lets move.
    """

    def __init__(
        self,
        model: nn.Module,
        block: Block,
        settings: Mapping[int, BitPlan],
        config: CalibrateConfig,
        generator: torch.Generator,
        *,
        only: Collection[nn.Parameter] | None = None,
    ):
        self.model, self.block, self.settings, self.config = model, block, settings, config
        self.generator = generator
        self.on_gpu = generator.device.type == "cuda"
        lowest = {name: min(resolve_plan(model, plan)[name][0] for plan in settings.values()) for name in block.layers}
        modules = {model.get_submodule(name): bits for name, bits in lowest.items()}
        self.layers = {layer: bits for layer, bits in modules.items() if isinstance(layer, QuantLayer)}
        reach = config.reach
        moving = self.layers.items() if config.effort == "full" else ()
        self.weights = [Learned(layer.weight, step_of(layer, bits), -reach, reach) for layer, bits in moving]
        self.scales = [Learned(scale, scale.detach().clone(), _LEAST_SCALE - 1) for scale in self._act_scales()]
        norms = [p for name in block.norms for p in model.get_submodule(name).parameters()]
        biases = [layer.bias for layer in self.layers if layer.bias is not None]
        self.norms = [Learned(parameter, _size(parameter)) for parameter in dict.fromkeys((*norms, *biases))]
        if only is not None:
            kept = {id(parameter) for parameter in only}
            for some in (self.weights, self.scales, self.norms):
                some[:] = [one for one in some if id(one.parameter) in kept]
        self.learned = [*self.weights, *self.scales, *self.norms]
        self.quick, self.draws = quick_nodes(model, block), Draws(generator)

    def _act_scales(self) -> list[nn.Parameter]:
        quantizers = [layer.act_quantizer for layer in self.layers if layer.act_quantizer is not None]
        return [scale for quantizer in quantizers for scale in quantizer.scales.values()]

    def learn(self, plain: Values, quantized: Mapping[int, Values], after: Values, report: Report) -> None:
        """Run all iterations. `plain` and `quantized` are what the block reads, `after` what it gives in float.

        On a GPU an iteration is recorded as a CUDA graph, where the batches' samples can be mixed.
        """
        samples = _Samples(self.block, plain, quantized, after)
        optimizer = self._optimizer()
        self.graphs = StepGraphs(self.generator) if self.on_gpu and samples.mixable else None

        def step(chosen: Tensor | int) -> dict[int, Tensor]:
            errors = self._gradients(samples, chosen)
            self._take_gradients()
            optimizer.step()
            self._move()
            return errors

        iterations, batch_size = self.config.learning
        with self._dropping(), self._only_learned():
            for iteration in range(iterations):
                self._set_rates(optimizer, 0.5 * (1 + math.cos(math.pi * iteration / iterations)))
                errors = self._run(step, samples.draw(batch_size, self.generator))
                if (iteration + 1) % _EVERY == 0 or iteration + 1 == iterations:
                    self._tell(iteration + 1, errors, report)

    def _optimizer(self) -> torch.optim.Optimizer:
        rates = (self.config.weight_rate, self.config.scale_rate, self.config.norm_rate)
        kinds = zip((self.weights, self.scales, self.norms), rates, strict=True)
        groups = [{"params": [one.offset for one in some], "rate": rate} for some, rate in kinds if some]
        if self.on_gpu:  # a recorded step reads its rates from memory
            groups = [{**group, "lr": torch.zeros((), device=self.generator.device)} for group in groups]
        return torch.optim.Adam(groups, capturable=self.on_gpu)

    def _set_rates(self, optimizer: torch.optim.Optimizer, share: float) -> None:
        for group in optimizer.param_groups:
            rate = group["rate"] * share
            group["lr"] = group["lr"].fill_(rate) if self.on_gpu else rate

    def _run(self, step: Callable[[Tensor | int], dict[int, Tensor]], chosen: Tensor | int) -> dict[int, Tensor]:
        """`step(chosen)`, recorded if that can be done."""
        if self.graphs is not None and isinstance(chosen, Tensor):
            try:
                return cast("dict[int, Tensor]", self.graphs.run(step, chosen))
            except TrainingError as problem:
                log.warning(
                    f"block {self.block.name!r} learns without a CUDA graph, which is slower: {problem.__cause__}"
                )
                self.graphs = None
                for one in self.learned:
                    one.parameter.grad = None
                fresh = torch.Generator(self.generator.device)  # a recording that failed leaves the other unusable
                self.generator = fresh.manual_seed(self.generator.initial_seed() + 1)
        return step(chosen)

    def _gradients(self, samples: "_Samples", chosen: Tensor | int) -> dict[int, Tensor]:
        """The error at each width on some samples; gradients of the loss are added to the parameters'."""
        block, nodes, errors = self.block, samples.nodes, dict[int, Tensor]()
        self.draws.next_iteration()
        given, wanted, counts = samples.plain(chosen), samples.wanted(chosen), samples.counts(chosen)
        for bits, plan in self.settings.items():
            set_bits(self.model, plan)
            found = run(self.model, block.nodes, self._mixed(samples.quantized(bits, chosen), given), self.quick)
            apart = [(found[n] - wanted[n]).square().mul(counts[n]).mean() / samples.energies[n] for n in nodes]
            error = torch.stack(apart).mean()
            (self.config.importance_of(bits) * torch.log(error + self.config.tolerance)).backward()
            errors[bits] = error.detach()
        return errors

    def _tell(self, iteration: int, errors: Mapping[int, Tensor], report: Report) -> None:
        found = {bits: float(error) for bits, error in errors.items()}
        if not all(map(math.isfinite, found.values())):
            raise QuantizationError(f"block {self.block.name!r}: its error is not finite; check the batches")
        report(iteration, found)

    def loss(self, errors: Mapping[int, float]) -> float:
        """The loss of `errors` by width."""
        return sum(self.config.importance_of(b) * math.log(e + self.config.tolerance) for b, e in errors.items())

    @torch.no_grad()
    def take_back(self) -> None:
        """Put all that was learned back to where it began."""
        for one in self.learned:
            one.parameter.copy_(one.start)

    @torch.no_grad()
    def _move(self) -> None:
        """Keep the offsets within their bounds and put the parameters where they say."""
        from_below = [one for one in self.learned if one.least > -math.inf]
        from_above = [one for one in self.learned if one.most < math.inf]
        if from_below:
            torch._foreach_clamp_min_([one.offset for one in from_below], [one.least for one in from_below])
        if from_above:
            torch._foreach_clamp_max_([one.offset for one in from_above], [one.most for one in from_above])
        values = torch._foreach_mul([one.offset for one in self.learned], [one.unit for one in self.learned])
        torch._foreach_add_(values, [one.start for one in self.learned])
        torch._foreach_copy_([one.parameter for one in self.learned], values)

    def _take_gradients(self) -> None:
        """Give the offsets the gradients of their parameters."""
        found = {one: grad for one in self.learned if (grad := one.parameter.grad) is not None}
        made = torch._foreach_mul([*found.values()], [one.unit for one in found]) if found else ()
        offsets = dict(zip(found, made, strict=True))
        for one in self.learned:
            one.offset.grad, one.parameter.grad = offsets.get(one), None

    def _mixed(self, given: Environment, plain: Environment) -> Environment:
        return {node: self._drop(value, plain[node]) for node, value in given.items()}

    def _drop(self, value: Any, plain: Any) -> Any:
        """`value`, with a share of its elements from `plain`, in steps of 1/256."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or not self.config.drop:
            return value
        most = max(round(256 * self.config.drop), 1) - 1
        if can_drop(value, plain):
            return drop(value, plain, self.draws, most)
        return torch.where(self._drawn(value, most), plain, value)

    def _drawn(self, like: Tensor, most: int) -> Tensor:
        """Which elements stay in float: those whose byte is at most `most`, for whole words take long to draw."""
        words = torch.empty(-(-like.numel() // 8), dtype=torch.int64, device=like.device)
        words.random_(-(2**63), None, generator=self.generator)
        return (words.view(torch.uint8)[: like.numel()] <= most).view(like.shape)

    @contextmanager
    def _only_learned(self) -> Iterator[None]:
        """Let no other parameter of the model have a gradient: it would be computed for nothing."""
        learned = {id(one.parameter) for one in self.learned}
        others = [p for p in self.model.parameters() if id(p) not in learned and p.requires_grad]
        try:
            for parameter in others:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

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


def _size(parameter: Tensor) -> Tensor:
    return parameter.detach().square().mean().sqrt().clamp_min(1e-6)


def _energy(values: Values, node: Any) -> float:
    """The mean square of the values of `node`, weighted as its errors are."""
    weights: Any = values.weights.get(node, [1.0] * len(values.batches))
    sums = [(batch[node].double().square() * w).sum() for batch, w in zip(values.batches, weights, strict=True)]
    return max(sum(torch.stack(sums).tolist()) / sum(batch[node].numel() for batch in values.batches), 1e-30)
