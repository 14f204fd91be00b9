"""Round the layers of a block for all widths at once, one after the other, on what the rounded ones before give."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.calibrate.biases import followed_by_norm
from bitdial.calibrate.blocks import Block, run_side_by_side
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.group_scales import choose_multiples
from bitdial.calibrate.input_rows import ROWS, held_back, input_rows
from bitdial.calibrate.rounding import Setting, Target, round_jointly
from bitdial.calibrate.values import AtNorm, ReachedError, Values
from bitdial.dial.dial import resolve_plan, set_bits
from bitdial.dial.plan import BitPlan
from bitdial.nn import QuantLayer

Moments = tuple[Tensor, Target | None]  # second moments of inputs, and what the layer should make of them
SHARE = 0.1  # of the tolerance for a block: a layer is one of several in it
PLAIN = 0  # the "width" of the float model
ROWS_FOR_TARGET = 2  # for each input of a layer: with fewer, what was seen would be learned by heart


def can_round(layer: nn.Module) -> bool:
    """Whether the codes of `layer` can be chosen: one code for all widths, and inputs that are known as rows."""
    if not isinstance(layer, QuantLayer) or layer.kind not in ROWS:
        return False
    rule = layer.weight_quantizer.rule
    return rule.narrows and not rule.derives_scale


class BlockRounding:
    """The rounding of one block. `settings` is what the dial gets for each width."""

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module,
        block: Block,
        settings: Mapping[int, BitPlan],
        config: CalibrateConfig,
        seed: int,
    ):
        self.model, self.reference, self.block, self.settings = model, reference, block, settings
        self.config, self.seed = config, seed
        self.bits = {width: resolve_plan(model, plan) for width, plan in settings.items()}
        self.centred = set(followed_by_norm(model, block))
        self.shared = set[str]()  # layers that are called several times

    def run(
        self, plain: Values, quantized: Mapping[int, Values], leave: AtNorm, corrector: Callable[[], AtNorm]
    ) -> None:
        """Round all layers, in place.

        `plain` and `quantized` are what the block reads in float and at each width. On the way, `leave` is called at
        the norms of the float model, and what `corrector` makes at those of the quantised one.
        """
        for names in self._by_input(plain, leave):
            first = names[0]
            inputs, correct = {PLAIN: self._inputs(self.reference, first, plain, leave)}, corrector()
            for width, plan in self.settings.items():
                set_bits(self.model, plan)
                inputs[width] = self._inputs(self.model, first, quantized[width], correct)
            known = dict[tuple[bool, int], Moments]()
            for name in names:
                self._round(name, self._layer_settings(name, inputs, known))

    def _by_input(self, plain: Values, leave: AtNorm) -> list[list[str]]:
        """The layers to round, in the order in which they first run; neighbours that read the same tensor together."""
        seen: list[tuple[str, Tensor]] = []

        def hook(name: str) -> Any:
            return lambda module, args, kwargs: seen.append((name, args[0] if args else kwargs["input"]))

        modules = {name: self.reference.get_submodule(name) for name in self.block.layers}
        handles = [m.register_forward_pre_hook(hook(name), with_kwargs=True) for name, m in modules.items()]
        try:
            Values(plain.batches[:1]).advance(self.reference, self.block, leave)
        finally:
            for handle in handles:
                handle.remove()
        names = [name for name, _ in seen]
        found: list[list[str]] = []
        before: Tensor | None = None
        for name, x in seen:
            if not can_round(self.model.get_submodule(name)):
                continue
            if names.count(name) > 1:
                if name not in self.shared and _levels(self.block, name):
                    self.shared.add(name)
                    found.append([name])
                before = None
                continue
            if x is before:
                found[-1].append(name)
            else:
                found.append([name])
            before = x
        return found

    def _inputs(self, root: nn.Module, name: str, values: Values, at_norm: AtNorm) -> list[Tensor]:
        """The inputs of the layer `name` of `root`, batch by batch; those of all its calls, such as levels."""
        with _stop_at(root.get_submodule(name), at_once=name not in self.shared) as found:
            values.copy().advance(root, self.block, at_norm)
        return found

    @torch.no_grad()
    def _layer_settings(
        self, name: str, inputs: Mapping[int, Sequence[Tensor]], known: dict[tuple[bool, int], Moments]
    ) -> list[Setting]:
        """What each width asks of the layer `name`. `known` has the moments of layers before it with the same inputs.

        A norm behind the layer makes up for a shift of the mean and for what is too large or small. Without one the
        layer itself makes up for what its inputs have lost: its target is what the float model gives.
        """
        layer, centred = self.model.get_submodule(name), name in self.centred
        assert isinstance(layer, QuantLayer)
        images = layer.kind.image_dims > 0

        def rows(given: Sequence[Tensor]) -> Tensor:
            found = input_rows(layer.kind, layer, given, seed=self.seed)
            return found - found.mean(dim=1, keepdim=True) if centred else found

        made = list[Setting]()
        for width in self.settings:
            if (centred, width) not in known or layer.act_quantizer is not None:
                quantizer, act_bits = layer.act_quantizer, self.bits[width][name][1]
                given = [x if quantizer is None else quantizer(x, act_bits) for x in inputs[width]]
                own, target = rows(given), None
                plain = own if centred else rows(inputs[PLAIN])
                moved, own = (held_back(x, plain, images=images) for x in (plain - own, own))
                second = product_of(own, own)
                if not centred and own.shape[1] >= ROWS_FOR_TARGET * own.shape[2]:
                    target = Target(second, product_of(moved, own), product_of(moved, moved))
                known[centred, width] = second, target
            second, target = known[centred, width]
            table = _values(layer, self.bits[width][name][0])
            made.append(Setting(table, second, self.config.importance_of(width), target))
        return made

    @torch.no_grad()
    def _round(self, name: str, settings: list[Setting]) -> None:
        layer, plain = self.model.get_submodule(name), self.reference.get_submodule(name)
        assert isinstance(layer, QuantLayer)
        kind, quantizer, high = layer.kind, layer.weight_quantizer, layer.bit_choices[0]
        weight = kind.to_rows(plain, plain.weight)  # type: ignore[arg-type]
        shape, groups = weight.shape, len(settings[0].second)
        scale = quantizer.scale_of(weight, high)
        least = quantizer.rule.stored_range(high)[0]
        tolerance = SHARE * self.config.tolerance

        def by_group(values: Tensor) -> Tensor:
            return values.reshape(groups, shape[0] // groups, -1)

        codes = by_group(bf.quantize(weight, scale, bits=high, scheme=quantizer.scheme).long() - least)
        if self.config.choose_scales and quantizer.two_levels:
            rows, multiples = bf.split_scale(scale, half=quantizer.group_scales == "half")
            found, codes = choose_multiples(
                by_group(weight),
                rows.reshape(groups, -1),
                by_group(multiples.to(rows.dtype)),
                codes,
                settings,
                tolerance=tolerance,
            )
            learned = quantizer.learned_scale(high)
            assert learned is not None
            learned.copy_(bf.join_scale(rows, found.reshape(multiples.shape)))
            scale = quantizer.scale_of(weight, high)  # a row's largest multiple may be smaller now
        spread = bf.values_by_scale(torch.ones_like(weight), scale)
        best = round_jointly(by_group(weight), by_group(spread), codes, settings, tolerance=tolerance)
        stored = (best.reshape(shape) + least).to(torch.int8)
        made = bf.weight_of_codes(stored, scale, bits=high, scheme=quantizer.scheme)
        layer.weight.copy_(kind.from_rows(layer, made))


def _levels(block: Block, name: str) -> bool:
    """Whether the layer `name` is called several times in `block`, side by side."""
    calls = [node for node in block.nodes if node.op == "call_module" and node.target == name]
    return len(calls) > 1 and run_side_by_side(calls, block.nodes)


def product_of(first: Tensor, second: Tensor) -> Tensor:
    """The mean of x' y over the rows x and y (groups, samples, inputs) of both."""
    return first.transpose(1, 2) @ second / first.shape[1]


def _values(layer: QuantLayer, bits: int) -> Tensor:
    """What each code that `layer` can store is worth at `bits`, in steps of the stored codes: (codes,)."""
    quantizer, high = layer.weight_quantizer, layer.bit_choices[0]
    least, most = quantizer.rule.stored_range(high)
    codes = torch.arange(least, most + 1, dtype=torch.int8)  # on the CPU, where checking them waits for nothing
    low = bf.narrow(codes, high=high, low=bits, scheme=quantizer.scheme, ties=quantizer.ties)
    values = bf.dequantize(low, torch.ones(1), shift=high - bits, scheme=quantizer.scheme)
    return values.to(layer.weight.device)


@contextmanager
def _stop_at(module: nn.Module, *, at_once: bool) -> Iterator[list[Tensor]]:
    """The inputs that `module` is called with, each of which ends the pass of its batch if that is to be `at_once`."""
    found: list[Tensor] = []

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["input"])
        if at_once:
            raise ReachedError

    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()
