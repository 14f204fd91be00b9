"""bitdial in a loop of accelerate: JointStep in place of forward, backward and optimizer.step.

python examples/accelerate_loop.py         (needs: pip install bitdial accelerate)
accelerate launch examples/accelerate_loop.py

accelerate brings the devices and shards the data. JointStep has the optimizers of the weights and of the scales, and
averages norm statistics over the processes, so there is no accelerator.backward and no optimizer to prepare.
"""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bitdial import JointStep, QuantConfig, TrainConfig, evaluate, prepare, save, set_bits


def main(epochs: int = 2, path: str = "accelerate.safetensors") -> dict[int, float]:
    """Train on a small made-up problem, save the file, and return the accuracy of each width."""
    # each pass leaves the scales of the other widths unused
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)])
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x[:, :4].sum(1) > x[:, 4:].sum(1)).long()
    float_model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    bit_choices = (8, 4, 2)
    model = prepare(float_model, QuantConfig(bit_choices=bit_choices), x[:64])
    wrapped, loader = accelerator.prepare(model, DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True))
    step = JointStep(wrapped, TrainConfig(epochs=epochs, lr=1e-2), steps_per_epoch=len(loader))
    for _ in range(epochs):
        for inputs, targets in loader:
            step(inputs, targets)
        step.end_epoch()
    model = accelerator.unwrap_model(wrapped).eval()
    found = evaluate(model, [(x.to(accelerator.device), y.to(accelerator.device))], bit_choices)
    set_bits(model, 8)
    if accelerator.is_main_process:
        save(model.cpu(), path)
    return found


if __name__ == "__main__":
    for bits, accuracy in main(epochs=8).items():
        print(f"{bits} bits: {accuracy:.3f}")
