"""Settings of joint training."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from bitdial.config import Config, check_choice
from bitdial.errors import ConfigError
from bitdial.train.alrs import READINGS as ALRS_READINGS

OPTIMIZERS = ("adam", "adamw", "sgd")
UPDATES = ("separate", "accumulated")
SCALE_STATES = ("shared", "per_bits")
SCALE_STEPS = ("relative", "absolute")
SCHEDULES = ("cosine", "constant")
SAMPLINGS = ("none", "hasb", "random")
DISTILLATIONS = ("none", "progressive", "teacher", "in_place", "cascade")
TAUGHT = ("teacher", "cascade")  # those that need a teacher model


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Config):
    """How to train; the defaults are the paper's (Adam 5e-4, weight decay 5e-5, 90 epochs, cosine, no warm-up).

    optimizer       of the weights: 'adam', 'adamw' or 'sgd' (momentum 0.9); scales always have Adam, because their
                    gradients span orders of magnitude
    update          'separate': each bit-width updates at once (Algorithm A.2); 'accumulated': one step for the sum of
                    all losses (Algorithm A.1)
    alrs            Adaptive Learning Rate Scaling of the scales: 'relative', 'literal' (floored at 0), 'layer' (a rate
                    for each layer), 'channel' (for each scale) or 'off'; see `bitdial.train.alrs`
    learn_scales    False keeps the scales at their start
    scale_lr        rate of the scales before ALRS; None: the same as `lr`
    scale_state     the shared weight scale's optimizer state: one, or one 'per_bits'
    scale_step      how a scale moves: 'relative' to its size, or 'absolute' as the paper has it; see
                    `bitdial.train.guard`
    lower_weight    what the loss of a width counts, in units of the next higher one's: 2.0 weighs the widths 8, 4, 2 by
                    1, 2 and 4
    clip_norm       largest norm of the weights' gradient
    accumulate      parts in which a batch goes through the model; the gradients add up before an update, as with the
                    whole batch at once, except that batch norms see the parts
    steps_per_epoch batches that make an epoch, for data without a length; each epoch goes on where the last one ended
    autocast        'auto' (bfloat16 on a GPU that has it, for a float32 model), 'bfloat16', or None (float32); the
                    quantizers compute their codes in float32
    distill         'none', 'progressive' (the highest width's prediction for the sample in the epoch before), 'teacher'
                    (a frozen float model), 'in_place' (the highest width teaches the others within the step) or
                    'cascade' (the same, and a frozen float model teaches the highest width)
    distill_weight  share of the soft loss; 'progressive' grows it linearly up to this
    sampling        mixed precision: 'none' (each pass at one width), 'hasb' (layers are drawn anew by sensitivity) or
                    'random' (alike); see `bitdial.train.hasb`
    sigma           with `sampling`, the probability that a layer is drawn anew: grows linearly to this
    sigma_warmup    epochs at the start in which none is
    seed            of the sampled plans
    cuda_graph      on a GPU, replay the whole step as one CUDA graph; without it a loss that is not finite is noticed
                    in its own step, not up to 50 later
    fused           on a GPU, call the model through fused kernels; its Python runs once, when it is traced; see
                    `bitdial.train.gpu.fuse`
    checkpoint_every  steps between checkpoints, besides one after each epoch
    """

    epochs: int = 90
    lr: float = 5e-4
    weight_decay: float = 5e-5
    optimizer: str = "adam"
    update: str = "separate"
    alrs: str = "relative"
    learn_scales: bool = True
    scale_lr: float | None = None
    scale_state: str = "shared"
    scale_step: str = "relative"
    schedule: str = "cosine"
    warmup_steps: int = 0
    lower_weight: float = 1.0
    clip_norm: float | None = None
    accumulate: int = 1
    steps_per_epoch: int | None = None
    autocast: str | None = "auto"
    distill: str = "none"
    distill_weight: float = 0.7
    temperature: float = 1.0
    sampling: str = "none"
    sigma: float = 0.5
    sigma_warmup: int = 10
    seed: int = 0
    checkpoint_every: int | None = None
    cuda_graph: bool = True
    fused: bool = True

    def __post_init__(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("update", self.update, UPDATES)
        check_choice("alrs", self.alrs, ALRS_READINGS)
        check_choice("scale_state", self.scale_state, SCALE_STATES)
        check_choice("scale_step", self.scale_step, SCALE_STEPS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("distill", self.distill, DISTILLATIONS)
        check_choice("sampling", self.sampling, SAMPLINGS)
        for name in ("learn_scales", "cuda_graph", "fused"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        check_choice("autocast", self.autocast, ("auto", "bfloat16", None))
        for name, least in (
            ("epochs", 1),
            ("warmup_steps", 0),
            ("sigma_warmup", 0),
            ("seed", 0),
            ("accumulate", 1),
            ("steps_per_epoch", 1),
            ("checkpoint_every", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("checkpoint_every", "steps_per_epoch"):
                continue
            if not (type(value) is int and value >= least):
                raise ConfigError(f"{name}={value!r} must be a whole number, at least {least}")
        for name in ("lr", "temperature", "clip_norm", "scale_lr", "lower_weight"):
            value = getattr(self, name)
            if not (_is_number(value) and value > 0) and not (value is None and name in ("clip_norm", "scale_lr")):
                raise ConfigError(f"{name}={value!r} must be a positive number")
        if not (_is_number(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"weight_decay={self.weight_decay!r} must not be negative")
        for name in ("distill_weight", "sigma"):
            if not (_is_number(getattr(self, name)) and 0 <= getattr(self, name) <= 1):
                raise ConfigError(f"{name}={getattr(self, name)!r} must lie between 0 and 1")
        if self.update == "accumulated" and (self.alrs != "off" or self.scale_state != "shared"):
            raise ConfigError(
                "update='accumulated' takes one step for all widths, so there is no rate or state per "
                "width: set alrs='off' and scale_state='shared'"
            )


def choose_autocast(setting: str | None, model: nn.Module) -> str | None:
    """What `autocast='auto'` means for `model`: bfloat16 if it is of float32 on a GPU that has it, else None."""
    if setting != "auto":
        return setting
    device = next(model.parameters()).device
    if device.type != "cuda" or any(p.dtype != torch.float32 for p in model.parameters()):
        return None
    return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
