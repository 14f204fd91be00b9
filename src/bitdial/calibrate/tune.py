"""The last step: what each width alone has learns from the output of the whole model. No labels.

A block is calibrated to give what the float model's block gives. But it does not know what later blocks make of an
error, and what it cannot make up for adds up from block to block. So at the end the norms and activation scales of a
width learn together, by the relative error of the model's outputs (see `reconstruct`). No other width has any of
them: what one gains costs the others nothing, and a width that gains nothing stays as it was.

With effort 'full' weights learn so first, together with all else, at all widths at once: codes are of all widths.

A model that cannot be traced is left as it is.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from bitdial.calibrate.blocks import Block
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.reconstruct import Reconstruction
from bitdial.calibrate.report import BlockReport
from bitdial.calibrate.values import Values
from bitdial.calibrate.walk import Walk
from bitdial.dial.dial import resolve_plan, set_bits
from bitdial.dial.plan import BitPlan
from bitdial.nn import QuantLayer, SwitchableBatchNorm

NAME = "the whole model"
Tell = Callable[[float, dict[int, float]], None]  # the share that is done, and errors by width


def own_parameters(model: nn.Module, settings: Mapping[int, BitPlan]) -> dict[int, list[nn.Parameter]]:
    """The parameters of norms and activation scales that one of `settings` uses and no other, by its width."""
    used: dict[int, dict[nn.Parameter, None]] = {}
    norms = [module for module in model.modules() if isinstance(module, SwitchableBatchNorm)]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLayer)}
    for bits, plan in settings.items():
        set_bits(model, plan)
        pairs = resolve_plan(model, plan)
        used[bits] = dict.fromkeys(parameter for norm in norms for parameter in norm.active.parameters())
        for name, layer in layers.items():
            if layer.act_quantizer is not None:
                used[bits][layer.act_quantizer.scales[str(pairs[name][1])]] = None
    return {
        bits: [p for p in own if not any(p in others for other, others in used.items() if other != bits)]
        for bits, own in used.items()
    }


class Tuning:
    """The last step for the `model` of a traced `walk`, on the samples of `start`; `plain` is the float model."""

    def __init__(
        self,
        model: nn.Module,
        walk: Walk,
        settings: Mapping[int, BitPlan],
        config: CalibrateConfig,
        start: Values,
        plain: nn.Module,
    ):
        self.model, self.settings, self.start = model, settings, start
        iterations, batch_size = config.tuning
        self.joint = replace(
            config,
            iterations=iterations,
            batch_size=batch_size,
            drop=0.0,
            scale_rate=config.tune_rate,
            norm_rate=config.tune_rate,
            weight_rate=config.tune_weight_rate,
        )
        self.config = replace(self.joint, effort="medium")
        nodes = tuple(node for block in walk.blocks for node in block.nodes)
        reads = tuple(node for node in nodes if node.op == "placeholder")
        layers = tuple(name for block in walk.blocks for name in block.layers)
        norms = tuple(name for block in walk.blocks for name in block.norms)
        self.block = Block(NAME, nodes, reads, walk.blocks[-1].gives, layers, norms)
        self.after = self._through(plain)

    def run(self, report: Tell) -> BlockReport:
        """Learn at each width that has something of its own and is not good yet."""
        started, before = time.monotonic(), self._errors(self.settings)
        own, joint = own_parameters(self.model, self.settings), self.joint.effort == "full"
        error, parts = dict(before), len(self.settings) + joint
        if joint:
            error = self._learn(self.settings, self.joint, None, before, _part(report, 0, parts))
        for number, (bits, plan) in enumerate(self.settings.items(), start=joint):
            if own[bits] and error[bits] > self.config.tolerance:
                tell = _part(report, number, parts)
                error |= self._learn({bits: plan}, self.config, own[bits], {bits: error[bits]}, tell)
        seconds = time.monotonic() - started
        return BlockReport(name=NAME, layers=(), error=error, error_before=before, seconds=seconds)

    def _learn(
        self,
        settings: Mapping[int, BitPlan],
        config: CalibrateConfig,
        only: list[nn.Parameter] | None,
        before: dict[int, float],
        report: Tell,
    ) -> dict[int, float]:
        """Learn at `settings`; the errors then. Without a gain over `before` everything is put back."""
        device = next(self.model.parameters()).device
        generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 - sum(settings))
        learning = Reconstruction(self.model, self.block, settings, config, generator, only=only)
        start, iterations = self.start.copy(), config.learning[0]
        with torch.enable_grad():
            learning.learn(
                start, dict.fromkeys(settings, start), self.after, lambda i, errors: report(i / iterations, errors)
            )
        error = self._errors(settings)
        if learning.loss(error) < learning.loss(before):
            return error
        learning.take_back()
        return before

    def _errors(self, settings: Mapping[int, BitPlan]) -> dict[int, float]:
        """The relative error of the model's outputs over all samples, by width."""
        return {bits: self._error(plan) for bits, plan in settings.items()}

    def _error(self, plan: BitPlan) -> float:
        set_bits(self.model, plan)
        return self._through(self.model).distance(self.after, self.block)

    def _through(self, root: nn.Module) -> Values:
        """What `root` gives for the samples."""
        values, whole = self.start.copy(), replace(self.block, norms=())  # with norms, all batches would stop at each
        values.advance(root, whole, lambda name, inputs: None)
        return values


def _part(report: Tell, number: int, count: int) -> Tell:
    """What reports the share that is done of one of `count` parts."""
    return lambda share, errors: report((number + share) / count, errors)
