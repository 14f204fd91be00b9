"""bitdial in Lightning: JointStep inside a module with manual optimisation.

python examples/lightning_module.py        (needs: pip install bitdial lightning)

JointStep has the optimizers of the weights and of the scales, and the schedule. Lightning brings the data, the devices,
the logs and the callbacks; its own optimizers and gradient clipping stay out of it.
"""

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from bitdial import JointStep, QuantConfig, TrainConfig, at_bits, prepare, save, set_bits


class AllWidths(lightning.LightningModule):
    """A prepared model that trains at all of its widths."""

    def __init__(self, model: nn.Module, config: TrainConfig, bit_choices: tuple[int, ...]):
        super().__init__()
        self.automatic_optimization = False
        self.model, self.config, self.bit_choices = model, config, bit_choices
        self.step: JointStep | None = None

    def configure_optimizers(self) -> None:
        """There is nothing for Lightning to step."""

    def on_train_start(self) -> None:
        """The model is on its device now."""
        steps = int(self.trainer.num_training_batches)
        self.step = JointStep(self.model, self.config, steps_per_epoch=steps)

    def training_step(self, batch: list[Tensor], number: int) -> None:
        """One batch at all widths."""
        assert self.step is not None
        report = self.step(*batch)
        self.log_dict({f"loss/{bits} bits": loss for bits, loss in report.loss.items()})

    def on_train_batch_end(self, *_: object) -> None:
        """Lightning counts the steps of its own optimizers; let it count these (max_steps and checkpoints go by it)."""
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_ready()
        self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.increment_completed()

    def on_train_epoch_end(self) -> None:
        """Progressive distillation turns its pages here."""
        assert self.step is not None
        self.step.end_epoch()

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        """The accuracy of each width."""
        inputs, targets = batch
        for bits in self.bit_choices:
            with at_bits(self.model, bits):
                right = (self.model(inputs).argmax(1) == targets).float().mean()
            self.log(f"top1/{bits} bits", right, batch_size=len(inputs))


def main(epochs: int = 2, path: str = "lightning.safetensors") -> lightning.Trainer:
    """Train on a small made-up problem, and save the file."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
    float_model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    bit_choices = (8, 4, 2)
    model = prepare(float_model, QuantConfig(bit_choices=bit_choices), x[:64])
    module = AllWidths(model, TrainConfig(epochs=epochs, lr=1e-2), bit_choices)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(x, y)
    trainer.fit(module, DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=64))
    set_bits(model, 8)
    save(model.eval(), path)
    return trainer


if __name__ == "__main__":
    for name, value in main(epochs=8).callback_metrics.items():
        print(f"{name}: {float(value):.3f}")
