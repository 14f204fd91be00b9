"""One batch through all widths: Algorithm A.2 (each width updates at once) or A.1 (one step for the sum).

step = JointStep(model, TrainConfig(epochs=90), steps_per_epoch=len(loader))
for epoch in range(90):
    for inputs, targets in loader:
        report = step(inputs, targets)
    step.end_epoch()
"""

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.dial.dial import dialled_layers, set_bits, unwrap
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError, TrainingError
from bitdial.kernels.cuda_graph import StepGraphs
from bitdial.nn import ActivationSite, QuantLayer
from bitdial.prepare.model_call import Batch, call
from bitdial.prepare.model_output import Output, selected
from bitdial.prepare.own_losses import OwnLosses, with_targets
from bitdial.sensitivity.result import Sensitivity, sensitivity_of
from bitdial.train import distributed
from bitdial.train.accumulate import Part, split_batch
from bitdial.train.alrs import moving_scales, rate_of_scales
from bitdial.train.config import TrainConfig, choose_autocast
from bitdial.train.distill import Distiller, class_axis_to_distill
from bitdial.train.gpu.fuse import FastModel
from bitdial.train.gpu.plan_slots import PlanSlots, unsupported_reason
from bitdial.train.guard import LabelGuard, ScaleGuard, check_loss, find_culprit
from bitdial.train.hasb import make_sampler, sigma_at
from bitdial.train.optimizers import make_optimizer, make_scale_optimizers, split_parameters, step_at
from bitdial.train.own_optimizer import OptimizerFactory, OwnOptimizer
from bitdial.train.reduction import GradientReducer
from bitdial.train.refusals import check_own_losses, check_sharded
from bitdial.train.sharding import is_sharded
from bitdial.train.step_report import StepReport, gradient_peaks

log = logging.getLogger(__name__)

CHECK_EVERY = 50

LossFunction = Callable[[Any, Any], Tensor]


class JointStep:
    """Trains a prepared model one batch at a time, at all of its widths.

    `loss` takes (output, targets): what the model returns, or the part of it that `output` selects, by name, by place
    in a tuple or by a function; the same part is distilled and compared with class labels. A model that returns its
    own losses, as detectors do, is called with the targets too, and has `loss=OwnLosses()`. `optimizer`
    makes one of your own for the weights, see `bitdial.train.own_optimizer`. `teacher` goes with
    distill='teacher' or 'cascade', `samples` (the size of the training set) with distill='progressive', `sensitivity`
    (what `hessian_trace` returns, or a number per quantised layer) with sampling='hasb'.

    In a process group every process makes one and calls it at the same time: all get the model of rank 0, and gradients
    and norm statistics are averaged. A model in DistributedDataParallel(find_unused_parameters=True), or one that
    fully_shard (FSDP2) has spread over the processes, has its gradients averaged by that, without fused kernels and
    CUDA graphs; the latter has no optimizer of your own and no sampled plans. Where steps are recorded, let go of the
    JointStep before the process group is destroyed: its graphs hold the group's collectives.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        *,
        steps_per_epoch: int,
        loss: LossFunction = F.cross_entropy,
        output: Output = None,
        optimizer: OptimizerFactory | None = None,
        teacher: nn.Module | None = None,
        samples: int | None = None,
        sensitivity: Sensitivity | Mapping[str, float] | None = None,
    ):
        if steps_per_epoch < 1:
            raise ConfigError(f"steps_per_epoch={steps_per_epoch} must be at least 1; is the data empty?")
        if teacher is not None and unwrap(teacher) is unwrap(model):
            raise ConfigError(
                "the teacher is the model itself; pass another, such as the float model that was given to prepare. "
                "distill='in_place' lets the highest width teach the others"
            )
        check_own_losses(loss, config, output)
        config = dataclasses.replace(config, autocast=choose_autocast(config.autocast, model))
        self.model, self.config, self.loss_function, self.output = model, config, loss, output
        self.total_steps, self.step = steps_per_epoch * config.epochs, 0
        self.layers = {n: m for n, m in dialled_layers(model).items() if isinstance(m, QuantLayer)}
        self.sites = [m for m in unwrap(model).modules() if isinstance(m, ActivationSite)]
        if not self.layers:
            raise ConfigError("the model holds integers only (it was loaded to run); load_trainable(path) trains on")
        self.bit_choices = next(iter(self.layers.values())).bit_choices
        self.samples, self.steps_per_epoch = samples, steps_per_epoch
        self.sensitivity = None if sensitivity is None else sensitivity_of(sensitivity, list(self.layers))
        self.sampler = make_sampler(config, self.layers, self.bit_choices, self.sensitivity)
        self.distiller = Distiller(config, teacher=teacher, samples=samples, output=output)
        device = next(model.parameters()).device
        self.on_gpu = device.type == "cuda"
        self.sharded = is_sharded(model)
        if self.sharded:
            check_sharded(config, optimizer)
        self.wrapped = self.sharded or distributed.reduced_by_ddp(model)  # and what is around it averages gradients
        if not self.wrapped:
            distributed.share_state(model)
        fused = self.on_gpu and config.fused and not (self.wrapped and distributed.world_size() > 1)
        self.fast = FastModel(model, fused=fused)
        self.scales, self.weights = split_parameters(unwrap(model))
        if not self.weights:
            raise ConfigError("the model has no weight that requires a gradient; there is nothing to train")
        self.guard = ScaleGuard(unwrap(model), relative=config.scale_step == "relative")
        self.own = None if optimizer is None else OwnOptimizer(optimizer, self._named_weights())
        self.weight_optimizer = (
            make_optimizer(config.optimizer, self.weights, lr=config.lr, weight_decay=config.weight_decay)
            if self.own is None
            else self.own.optimizer
        )
        self.scale_optimizers = make_scale_optimizers(config, self.scales, self.bit_choices)
        # The step of an own optimizer may not be fit for a CUDA graph, and parts of a model come and go.
        self.records = config.cuda_graph and self.own is None and not self.sharded
        self.slots = self._make_slots() if self.sampler is not None and fused and self.records else None
        self.reducer = GradientReducer(self._learned()) if distributed.active() and not self.wrapped else None
        self.labels = LabelGuard(loss)
        self.graphs = StepGraphs()
        self.rate: float | Tensor = 0.0
        self.device_rate = torch.zeros((), device=device)
        self.loss_sum = torch.zeros((), device=device)  # since the last check: not finite if one loss was not
        self.last_inputs: Batch | None = None

    def _named_weights(self) -> list[tuple[str, nn.Parameter]]:
        mine = set(self.weights)
        return [(name, parameter) for name, parameter in unwrap(self.model).named_parameters() if parameter in mine]

    def _make_slots(self) -> PlanSlots | None:
        """Let sampled plans run on the fast path at fixed addresses, if all of the model is on it."""
        model, shared = unwrap(self.model), self.scale_optimizers.get(self.bit_choices[0])
        if reason := unsupported_reason(model, self.fast, self.config):
            log.info("steps with sampled plans are not recorded as CUDA graphs: %s", reason)
            return None
        return PlanSlots(model, self.fast, self.config, weight_optimizer=self.weight_optimizer, scale_optimizer=shared)

    def plans(self) -> Mapping[int, LayerBits | BitPlan]:
        """What each pass of the current step is set to, by the width of the pass."""
        if self.sampler is None:
            return {bits: bits for bits in self.bit_choices}
        config, epoch = self.config, self.step // self.steps_per_epoch
        sigma = sigma_at(epoch, sigma=config.sigma, epochs=config.epochs, warmup=config.sigma_warmup)
        return self.sampler.plans(self.step, sigma)

    def learning_rate(self) -> float:
        """The learning rate of the current step: warm-up, then cosine to 0 (or constant), or by your own schedule."""
        config, step = self.config, self.step
        if self.own is not None and (factor := self.own.factor(step)) is not None:
            return config.lr * factor
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        if config.schedule == "constant":
            return config.lr
        span = max(self.total_steps - config.warmup_steps, 1)
        return config.lr * 0.5 * (1 + math.cos(math.pi * min((step - config.warmup_steps) / span, 1.0)))

    def __call__(self, inputs: Batch, targets: Any, index: Tensor | None = None) -> StepReport:
        """Train on one batch, in place; the model is left at its lowest width.

        On a GPU the step becomes a CUDA graph, the report's tensors stay there and hold until the next step, and what
        went wrong is noticed at `check`, which runs every 50 steps.
        """
        if self.reducer is None and not self.wrapped and distributed.world_size() > 1:
            raise TrainingError("the process group is younger than this step; join it first, then make the JointStep")
        self.labels.check(targets, epoch_begins=self.step % self.steps_per_epoch == 0)
        lr = self.learning_rate()
        self.rate = lr
        if self.on_gpu and not self.sharded:
            self.rate = self.device_rate.fill_(lr)
        if self.slots is not None:
            self.slots.choose(self.plans().values())
        index = self.distiller.placed(index, self.device_rate.device)
        if self._can_record(inputs, targets):
            tensors = (cast(Tensor, inputs), targets, *(() if index is None else (index,)))
            report = cast(StepReport, self.graphs.run(self._all_widths, *tensors))
        else:
            report = self._all_widths(inputs, targets, index)
        report.lr = lr
        self.step += 1
        self.last_inputs = with_targets(inputs, targets, self.loss_function)
        if self.step % CHECK_EVERY == 0:
            self.check()
        return report

    def _can_record(self, inputs: Batch, targets: Any) -> bool:
        reducer, processes = self.reducer, distributed.world_size()
        reduces = processes == 1 if reducer is None else reducer.uniform and distributed.backend("cuda") == "nccl"
        fixed = (self.sampler is None or self.slots is not None) and self.distiller.recordable
        tensors = all(isinstance(t, Tensor) and t.is_cuda for t in (inputs, targets))
        return self.on_gpu and self.records and reduces and fixed and tensors

    def _all_widths(self, inputs: Batch, targets: Any, index: Tensor | None = None) -> StepReport:
        report = StepReport()
        parts = split_batch(self.fast.arranged(inputs), targets, index, self.config.accumulate)
        parts = [dataclasses.replace(p, inputs=with_targets(p.inputs, p.targets, self.loss_function)) for p in parts]
        self.model.train()
        with self._autocast():
            self.distiller.begin(*(part.inputs for part in parts))
        self._clear_gradients()
        for number, (bits, plan) in enumerate(self.plans().items()):
            if self.slots is None:
                set_bits(self.model, plan)
            else:
                self.slots.gather(number)
            for place, part in enumerate(parts):
                self._pass(report, bits, place, part)
            if self.reducer is not None:
                self.reducer.reduce()
            self._record_peaks(report, bits)
            if self.config.update == "separate":
                self._update(report, bits)
                self._clear_gradients()
            if self.slots is not None:
                self.slots.scatter()
        if self.config.update == "accumulated":
            self._update(report, self.bit_choices[0])
            report.scale_rate = {bits: rate for rate in report.scale_rate.values() for bits in self.bit_choices}
        return report

    def _pass(self, report: StepReport, bits: int, place: int, part: Part) -> None:
        """Add the gradients of one part of the batch at `bits`."""
        loss, output = self._forward(place, part, highest=bits == self.bit_choices[0])
        mean_loss = distributed.mean(loss.detach())
        if self.on_gpu and self.records:
            self.loss_sum.add_(mean_loss)
        else:
            check_loss(mean_loss, unwrap(self.model), part.inputs, step=self.step, bits=bits)
        share = part.share * self.config.lower_weight ** self.bit_choices.index(bits)
        self.fast.backward(loss if share == 1.0 else loss * share)
        distributed.average_norms(self.model, None if self.slots is None else self.slots.stand_ins)
        report.add(bits, mean_loss, output, part)
        if isinstance(self.loss_function, OwnLosses):
            report.add_parts(bits, self.loss_function.parts(output), part.share)

    def check(self) -> None:
        """Raise TrainingError if a loss was not finite or a scale collapsed since the last check.

        On a GPU; on the CPU, and with cuda_graph=False, every loss is looked at once.
        """
        if not self.on_gpu:
            return
        if not bool(torch.isfinite(self.loss_sum)) and self.last_inputs is not None:
            raise TrainingError(
                f"step {self.step}: the loss was not finite within the last {CHECK_EVERY} steps; "
                f"{find_culprit(unwrap(self.model), self.last_inputs)}. The last checkpoint is intact"
            )
        self.loss_sum.zero_()
        if self.reducer is not None:
            self.reducer.check()
        self.guard.check(step=self.step, bits=self.bit_choices[-1])

    def _forward(self, place: int, part: Part, *, highest: bool) -> tuple[Tensor, Any]:
        with self._autocast():
            output = selected(call(self.fast, part.inputs), self.output)
            self.labels.learn(output, part.targets)
            hard = self._hard_loss(output, part.targets) if self.distiller.needs_hard(highest=highest) else None
            axis = class_axis_to_distill(output, part.targets) if self.config.distill != "none" else -1
            loss = self.distiller.loss(hard, output, highest=highest, index=part.index, axis=axis, part=place)
            return loss, output

    def _hard_loss(self, output: Any, targets: Any) -> Tensor:
        hard = self.loss_function(output, targets)
        if not isinstance(hard, Tensor) or hard.numel() != 1:
            what = f"a tensor of shape {tuple(hard.shape)}" if isinstance(hard, Tensor) else type(hard).__name__
            raise TrainingError(f"the loss must be one number, the mean over the batch; got {what}")
        return hard

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device_rate.device.type, torch.bfloat16, enabled=self.config.autocast is not None)

    def _update(self, report: StepReport, bits: int) -> None:
        """Step both optimizers on the gradients of the pass at `bits`, the scales at their ALRS rate."""
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_([*self.weights, *self._in_slots()[0]], self.config.clip_norm)
        if self.own is not None:
            self.own.step(self.learning_rate() / self.config.lr)
        else:
            step_at(self.weight_optimizer, self.rate)
        if self.slots is not None and self.slots.weight_optimizer is not None:
            step_at(self.slots.weight_optimizer, self.rate)
        if not self.config.learn_scales:
            report.scale_rate[bits] = 0.0
            return
        rate, shares = self._scale_rate(bits)
        report.scale_rate[bits] = rate
        if shares is not None:
            report.scale_rate[bits] = rate * torch.stack([share.mean() for share in shares.values()]).mean()
        moving = [scale for scale in (*self.guard.scales, *self._in_slots()[1]) if scale.grad is not None]
        if self.scales:
            with self.guard.watch(moving, step=self.step, bits=bits, shares=shares):
                step_at(self.scale_optimizers[bits], rate)
                if self.slots is not None and self.slots.scale_optimizer is not None:
                    step_at(self.slots.scale_optimizer, rate)

    def _in_slots(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The norms' parameters and the scales that have slots."""
        return ([], []) if self.slots is None else self.slots.parameters()

    def _active_scales(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """The weight scale and the activation scale of the current pass, by layer."""
        if self.slots is not None:
            return [(slot.weight_scale, slot.act_scale) for slot in self.slots.layers.values()]
        return [layer.active_scales() for layer in self.layers.values()]

    def _scale_rate(self, bits: int) -> tuple[float | Tensor, dict[Tensor, Tensor] | None]:
        """The ALRS rate of the scales at `bits` and, where they have rates of their own, each one's share of it."""
        rate, config = self.rate, self.config
        if config.scale_lr is not None:
            rate = rate * (config.scale_lr / config.lr)
        sites = ((None, site.active_scale()) for site in self.sites)  # a site of its own counts as a layer
        moving = moving_scales((*self._active_scales(), *sites))
        return rate_of_scales(rate, moving, shift=self.bit_choices[0] - bits, reading=config.alrs)

    def _learned(self) -> list[nn.Parameter]:
        """All parameters that can have a gradient."""
        norms, scales = self._in_slots()
        return [*self.weights, *self.scales, *norms, *scales]

    def _clear_gradients(self) -> None:
        for parameter in self._learned():
            parameter.grad = None

    def _record_peaks(self, report: StepReport, bits: int) -> None:
        scales = self._active_scales()
        peaks = gradient_peaks([weight for weight, _ in scales] + [act for _, act in scales], report.loss[bits])
        report.weight_scale_peaks[bits], report.act_scale_peaks[bits] = peaks.chunk(2)

    def end_epoch(self) -> None:
        """Call after each epoch; progressive distillation turns its pages here."""
        self.distiller.end_epoch()
