"""calibrate(model, batches): a prepared model in, the same model out, good at every width. No labels."""

import logging
import math
import os
import time
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bitdial.calibrate.biases import bare_layers, correct_bias, watch_means
from bitdial.calibrate.blocks import Block
from bitdial.calibrate.checkpoint import Checkpoint
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.equalize import equalize
from bitdial.calibrate.inputs import checked, moved
from bitdial.calibrate.norms import Reference, correct_norm, moments, reference_of
from bitdial.calibrate.progress import Progress, show_progress
from bitdial.calibrate.reconstruct import Reconstruction
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.report import BlockReport, CalibrationReport
from bitdial.calibrate.round_block import BlockRounding
from bitdial.calibrate.scales import choose_scales
from bitdial.calibrate.steps import caches_off
from bitdial.calibrate.tune import NAME as WHOLE
from bitdial.calibrate.tune import Tuning
from bitdial.calibrate.values import AtNorm, Values
from bitdial.calibrate.walk import Walk
from bitdial.dial.dial import get_bits, set_bits, unwrap
from bitdial.dial.plan import BitPlan
from bitdial.errors import ConfigError, QuantizationError
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.prepare.model_call import Batch, call, evaluating

log = logging.getLogger(__name__)
ROUNDING_SAMPLES = 128


def calibrate(
    model: nn.Module,
    batches: Tensor | dict[str, object] | Iterable[Batch],
    config: CalibrateConfig | None = None,
    *,
    tune_on: Iterable[Batch] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> CalibrationReport:
    """Make the prepared `model` good at every width, in place, by some hundred inputs without labels.

    A batch is inputs only: a tensor, a tuple of positional or a dict of keyword arguments. Scales are chosen anew.
    Then, block by block in the order in which the model runs, norms and weights are set so that its output is that of
    the float model at each width. CalibrateConfig has the steps. `tune_on` are other inputs for the last of them, such
    as `ImageViews(images, 4)`: the more there are, the less is learned by heart; None takes `batches`.

    After an error the model is half changed: prepare it anew. With a `checkpoint` file a run that was stopped goes on
    after its last whole block, from the same prepared model; remove the file once the model is saved.
    """
    config = CalibrateConfig() if config is None else config
    if not isinstance(config, CalibrateConfig):
        raise ConfigError(f"calibrate's third argument must be a CalibrateConfig, got {type(config).__name__}")
    model = unwrap(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLayer)}
    if not layers:
        raise ConfigError("the model has no quantised layer to calibrate; call prepare(model, config, batch) first")
    inputs, warnings = checked(batches)
    device = next(model.parameters()).device
    inputs = moved(inputs, device)
    more = None if tune_on is None else moved(checked(tune_on)[0], device)
    before = get_bits(model)
    try:
        with evaluating(model), caches_off(model):
            return _Calibration(model, layers, inputs, config, warnings, more).run(checkpoint, show=progress)
    finally:
        set_bits(model, before)


def correct_norms(model: nn.Module, inputs: list[Batch], settings: list[BitPlan]) -> None:
    """Correct the norms of the prepared `model` that `settings` use, in place, against the float model inside it.

    One pass for each setting; a set of statistics that several of them use goes by the first.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLayer)}
    if not layers:
        raise ConfigError("norms are corrected against float weights, and the model has none: give a prepared model")
    inputs, _ = checked(inputs)
    config = CalibrateConfig(equalize=False, choose_scales=False, correct_biases=False, round_jointly=False)
    before = get_bits(model)
    try:
        with evaluating(model), caches_off(model):
            run = _Calibration(model, layers, moved(inputs, next(model.parameters()).device), config, [])
            run.settings = dict(enumerate(settings))
            run.run(None, show=False)
    finally:
        set_bits(model, before)


class _Calibration:
    """One run: the model, the float model inside it, and the values that go from block to block."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, QuantLayer],
        inputs: list[Batch],
        config: CalibrateConfig,
        warnings: list[str],
        tune_on: list[Batch] | None = None,
    ):
        self.model, self.layers, self.inputs, self.config, self.warnings = model, layers, inputs, config, warnings
        self.tune_on = tune_on
        widths = next(iter(layers.values())).bit_choices
        if (act_bits := config.activation_bits) is not None and act_bits not in widths:
            raise ConfigError(f"activation_bits={act_bits} is none of the model's widths {widths}")
        self.settings = {bits: BitPlan(default=(bits, act_bits or bits)) for bits in widths}

    def run(self, path: str | os.PathLike[str] | None, *, show: bool) -> CalibrationReport:
        """All steps, all blocks."""
        started, config = time.monotonic(), self.config
        everything = self.inputs if self.tune_on is None else [*self.inputs, "tune_on", *self.tune_on]
        file = Checkpoint(path, self.model, config, everything)
        self.walk = Walk(self.model, self.inputs)
        self.warnings += self.walk.warnings
        tunes = self.walk.traced and config.tuning[0] > 0
        self._check_tune_on(tunes=tunes)
        steps = []
        if config.equalize and self.walk.has_graphs and (count := equalize(self.model, self.walk.blocks, self.inputs)):
            steps.append(f"channels of {count} activations equalised")
        self.reference = float_copy(self.model)
        if config.choose_scales:
            choose_scales(self.layers, self.reference, self.inputs, config)
            steps.append("scales chosen")
        names = {
            "round_jointly": "codes chosen for all widths",
            "correct_norms": "norms corrected",
            "correct_biases": "biases corrected",
        }
        steps += [text for name, text in names.items() if getattr(config, name)]
        learned = "weights, norms and activation scales" if config.effort == "full" else "norms and activation scales"
        iterations, _ = config.learning
        steps += [f"{learned} learned, {iterations} iterations a block"] if iterations else []
        if tunes and config.effort == "full":
            steps.append(f"weights learned through {WHOLE}, at all widths together")
        steps += [f"norms and activation scales of each width learned through {WHOLE}"] if tunes else []
        for warning in self.warnings:
            log.warning(warning)
        reports = file.read()
        resumed = len(reports)
        if resumed < len(self.walk.blocks) + tunes:
            self._all_blocks(reports, file, tunes=tunes, show=show)
        return CalibrationReport(
            effort=config.effort,
            samples=self.walk.samples,
            steps=tuple(steps),
            blocks=tuple(reports),
            seconds=time.monotonic() - started,
            warnings=tuple(self.warnings),
            resumed=resumed,
        )

    def _check_tune_on(self, *, tunes: bool) -> None:
        """Try the inputs of the last step before any work; a word if there is no such step."""
        if self.tune_on is None:
            return
        if not tunes:
            why = "the last step is left out" if self.walk.traced else "the model cannot be traced as a whole"
            self.warnings.append(f"tune_on is not used: {why}")
            return
        self.walk.start_with(self.tune_on)
        try:
            with torch.no_grad():
                call(self.model, self.tune_on[0])
        except (RuntimeError, TypeError, ValueError, IndexError) as problem:
            raise ConfigError(f"the model does not take the inputs of tune_on: {problem}") from problem

    def _all_blocks(self, reports: list[BlockReport], file: Checkpoint, *, tunes: bool, show: bool) -> None:
        """Calibrate the blocks that `reports`, to which they are added, does not have yet; last, tune the model."""
        resumed = len(reports)
        self.float_values = self.walk.start()
        self.values = {bits: self.walk.start() for bits in self.settings}
        count = len(self.walk.blocks)
        with show_progress(count + tunes, show=show) as progress:
            for number, block in enumerate(self.walk.blocks):
                if number < resumed:
                    self._pass(block)
                    continue
                reports.append(self._calibrate_block(number, block, progress))
                file.write([each.to_dict() for each in reports])
                progress.update(number + 1, block.name, reports[-1].error)
            if tunes:
                start = self.walk.start() if self.tune_on is None else self.walk.start_with(self.tune_on)
                tuning = Tuning(self.model, self.walk, self.settings, self.config, start, self.reference)
                progress.update(count, WHOLE, {})
                reports.append(tuning.run(lambda share, errors: progress.update(count + 0.999 * share, WHOLE, errors)))
                file.write([each.to_dict() for each in reports])
                progress.update(count + 1, WHOLE, reports[-1].error)

    def _calibrate_block(self, number: int, block: Block, progress: Progress) -> BlockReport:
        started, before = time.monotonic(), dict[int, float]()
        progress.update(number, block.name, {})
        self.float_values.enter(self.reference, block)
        for bits, plan in self.settings.items():
            set_bits(self.model, plan)
            self.values[bits].enter(self.model, block, self.float_values)
        if self.config.round_jointly:
            self._round(number, block)
        plain: dict[str, Reference] = {}
        after = self.float_values.copy()
        bare = bare_layers(self.model, block) if self.config.correct_biases else []
        with watch_means(self.reference, bare) as means:
            after.advance(self.reference, block, _noting(plain))
        if block.layers:
            after.weigh(block, self.layers[block.layers[-1]].kind.image_dims)
        if bare:
            self._correct_biases(block, means)
        if self.config.effort != "quick" and block.layers:
            before = self._go_on(block, self._copies(), after, plain)
            self._learn(number, block, after, before, progress)
            plain = {}  # norms have been learned, too
        error = self._go_on(block, self.values, after, plain)
        self.float_values = after
        seconds = time.monotonic() - started
        return BlockReport(name=block.name, layers=block.layers, error=error, error_before=before, seconds=seconds)

    def _go_on(
        self, block: Block, values: dict[int, Values], after: Values, plain: dict[str, Reference]
    ) -> dict[int, float]:
        """Let `values` go on over `block`; errors by width. Norms are corrected to the moments that `plain` has."""
        at_norm, errors = self._corrector(plain), {}
        for bits, plan in self.settings.items():
            set_bits(self.model, plan)
            values[bits].advance(self.model, block, at_norm)
            errors[bits] = values[bits].distance(after, block)
            if not math.isfinite(errors[bits]):
                raise QuantizationError(
                    f"block {block.name!r}: its output at {bits} bits holds NaN or infinity; check the batches and the "
                    "weights of its layers"
                )
        return errors

    def _corrector(self, plain: dict[str, Reference]) -> AtNorm:
        """What corrects the norms that a pass comes to, by the moments that `plain` has of them in float."""
        corrected: set[nn.Module] = set()  # one set may serve several widths: the highest decides

        def at_norm(name: str, inputs: list[Tensor]) -> None:
            norm = self.model.get_submodule(name)
            assert isinstance(norm, SwitchableBatchNorm)
            if self.config.correct_norms and name in plain and norm.active not in corrected:
                corrected.add(norm.active)
                wanted, weights = plain[name]
                found = moments(inputs, name, weights)
                correct_norm(norm.active, self.reference.get_submodule(name), found, wanted)

        return at_norm

    def _round(self, number: int, block: Block) -> None:
        """Choose the codes of the layers of `block`, on some of the samples."""
        count = self.walk.batches_of(ROUNDING_SAMPLES)
        plain = self.float_values.first(count)
        quantized = {bits: values.first(count) for bits, values in self.values.items()}
        found: dict[str, Reference] = {}
        plain.copy().advance(self.reference, block, _noting(found))
        rounding = BlockRounding(self.model, self.reference, block, self.settings, self.config, seed=number)
        rounding.run(plain, quantized, _leave, lambda: self._corrector(found))

    def _correct_biases(self, block: Block, plain: dict[str, Tensor]) -> None:
        means: dict[int, dict[str, Tensor]] = {}
        for bits, plan in self.settings.items():
            set_bits(self.model, plan)
            with watch_means(self.model, list(plain)) as means[bits]:
                self.values[bits].copy().advance(self.model, block, _leave)
        for name, reference in plain.items():
            correct_bias(self.layers[name], reference, {bits: each[name] for bits, each in means.items()})

    def _copies(self) -> dict[int, Values]:
        return {bits: values.copy() for bits, values in self.values.items()}

    def _learn(self, number: int, block: Block, after: Values, before: dict[int, float], progress: Progress) -> None:
        """Learn `block`; if errors are not smaller than `before` on all samples, it stays as it was."""
        generator = torch.Generator(next(self.model.parameters()).device)
        generator.manual_seed(self.config.seed * 1_000_003 + number)

        def report(iteration: int, errors: dict[int, float]) -> None:
            progress.update(number + 0.999 * iteration / self.config.learning[0], block.name, errors)

        learning = Reconstruction(self.model, block, self.settings, self.config, generator)
        with torch.enable_grad():
            learning.learn(self.float_values, self.values, after, report)
        if learning.loss(self._go_on(block, self._copies(), after, {})) >= learning.loss(before):
            learning.take_back()

    def _pass(self, block: Block) -> None:
        """Go on over a block that is done."""
        self.float_values.enter(self.reference, block)
        for bits, plan in self.settings.items():
            set_bits(self.model, plan)
            self.values[bits].enter(self.model, block, self.float_values)
            self.values[bits].advance(self.model, block, _leave)
        self.float_values.advance(self.reference, block, _leave)


def _noting(references: dict[str, Reference]) -> AtNorm:
    """What fills `references` with those of the norms that a pass comes to; that of a norm's first calls."""

    def at_norm(name: str, inputs: list[Tensor]) -> None:
        if name not in references:
            references[name] = reference_of(inputs, name)

    return at_norm


def _leave(name: str, inputs: list[Tensor]) -> None:
    """Leave a norm as it is."""
