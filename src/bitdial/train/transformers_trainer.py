"""transformers' Trainer for all widths: its data, logs, evaluation and callbacks around bitdial's joint step.

trainer = joint_trainer(model, TrainConfig(lr=1e-3), args=TrainingArguments(...), train_dataset=data)
trainer.train()
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import CheckpointError, ConfigError, MissingDependencyError
from bitdial.prepare.model_output import Output, selected
from bitdial.train.checkpoint import load_checkpoint, save_checkpoint
from bitdial.train.config import TrainConfig
from bitdial.train.own_optimizer import OptimizerFactory
from bitdial.train.steps import JointStep, LossFunction

STATE = "joint.safetensors"  # in the folder of a checkpoint, beside what the Trainer writes


def joint_trainer(
    model: nn.Module,
    config: TrainConfig,
    *,
    loss: LossFunction | None = None,
    output: Output = None,
    optimizer: OptimizerFactory | None = None,
    teacher: nn.Module | None = None,
    **arguments: Any,
) -> Any:
    """A transformers.Trainer whose every step trains the prepared `model` at all of its widths.

    `arguments` are those of the Trainer. `loss`, `output`, `optimizer` and `teacher` are as for `train`; without `loss`
    it is the model's own, of inputs with labels. `config` says how to train: epochs and steps are the Trainer's, but of
    TrainingArguments the optimizer, learning rate, weight decay and clipping have no say. The state of the widths is
    saved in the Trainer's checkpoints, and comes back with resume_from_checkpoint.
    """
    try:
        from transformers import Trainer, TrainerCallback
    except ImportError as problem:
        raise MissingDependencyError.missing("hf", "transformers") from problem

    class Keeper(TrainerCallback):  # type: ignore[misc]  # it has no types
        """Ends epochs, and saves the state of the widths beside the Trainer's."""

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if trainer.joint is not None:
                trainer.joint.end_epoch()

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if trainer.joint is not None:
                save_checkpoint(_folder(args, state) / STATE, trainer.joint)

    class JointTrainer(Trainer):  # type: ignore[misc]  # it has no types
        """Leaves nothing to do for the Trainer's own optimizer: the gradients are gone when it steps."""

        joint: JointStep | None = None

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            inputs = dict(self._prepare_inputs(inputs))
            targets = inputs.get("labels") if loss is None else inputs.pop("labels", None)
            if self.joint is None:
                self.joint = make_step(model, self.args, self.state)
            report = self.joint(inputs, targets)
            model.zero_grad(set_to_none=True)
            return torch.stack([one.detach().float() for one in report.loss.values()]).mean()

        def _get_learning_rate(self) -> float:
            return config.lr if self.joint is None else self.joint.learning_rate()

    def make_step(model: nn.Module, args: Any, state: Any) -> JointStep:
        epochs = max(int(state.num_train_epochs), 1)
        step = JointStep(
            model,
            dataclasses.replace(config, epochs=epochs),
            steps_per_epoch=math.ceil(state.max_steps / epochs),
            loss=_own_loss if loss is None else loss,
            output=output,
            optimizer=optimizer,
            teacher=teacher,
        )
        if state.global_step:
            path = _folder(args, state) / STATE
            if not path.exists():
                raise CheckpointError(f"the Trainer goes on from step {state.global_step}, but {path} is not there")
            load_checkpoint(path, step)
        return step

    trainer: Any = JointTrainer(model=model, **arguments)
    _check_arguments(trainer.args)
    trainer.add_callback(Keeper())
    trainer.args.ddp_find_unused_parameters = True  # each pass leaves the scales of other widths unused
    return trainer


def _own_loss(returned: Any, _: Any) -> Tensor:
    loss: Tensor = selected(returned, "loss")
    return loss


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _check_arguments(args: Any) -> None:
    for wrong, way_out in (
        (args.gradient_accumulation_steps > 1 and "gradient_accumulation_steps", "TrainConfig(accumulate=...)"),
        (args.fp16 and "fp16", "TrainConfig(autocast='bfloat16')"),
        (args.n_gpu > 1 and "several GPUs in one process", "torchrun, with a process for each"),
    ):
        if wrong:
            raise ConfigError(f"joint training does not go with {wrong} of the Trainer; use {way_out}")
