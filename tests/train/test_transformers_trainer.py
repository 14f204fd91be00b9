"""transformers' Trainer on all widths: the same model as bitdial's own loop makes, also after a resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitdial import JointStep, QuantConfig, TrainConfig, joint_trainer, prepare
from bitdial.errors import ConfigError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS = 6
INPUTS = torch.randn(24, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(24) % 3


class Net(nn.Module):
    """As transformers' models: keyword arguments in, a loss if there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.three(self.two(self.one(x).relu()).relu())
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def prepared() -> nn.Module:
    torch.manual_seed(0)
    return prepare(Net(), QuantConfig(bit_choices=(8, 4, 2)), {"x": INPUTS})


def trainer(model: nn.Module, folder: Path, *, steps: int = STEPS, **settings: Any) -> Any:
    keys = ("gradient_accumulation_steps", "fp16")
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, save_steps=3, report_to=[],
        disable_tqdm=True, use_cpu=True, logging_steps=1, dataloader_pin_memory=False,
        **{key: settings.pop(key) for key in keys if key in settings},
    )  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in zip(INPUTS, LABELS, strict=True)]
    return joint_trainer(model, TrainConfig(lr=1e-2, distill="in_place") if not settings else TrainConfig(lr=1e-2),
                         args=args, train_dataset=data, **settings)  # fmt: skip


def state(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.filterwarnings("ignore")  # of transformers and accelerate
def test_it_trains_every_width_and_resumes(tmp_path: Path) -> None:
    model, seen = prepared(), []
    one = trainer(model, tmp_path / "a", loss=F.cross_entropy, output="logits")
    real = one.training_step

    def spy(model: nn.Module, inputs: Any, items: Any = None) -> Tensor:
        seen.append((inputs["x"].clone(), inputs["labels"].clone()))
        return real(model, inputs, items)

    one.training_step = spy
    one.train()
    twin = prepared()
    step = JointStep(twin, TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=STEPS, output="logits")
    for x, y in seen:
        report = step({"x": x}, y)
    assert len(seen) == STEPS
    assert torch.equal(state(model), state(twin))
    assert one.state.log_history[-2]["loss"] == pytest.approx(float(sum(report.loss.values())) / 3, rel=1e-3)
    again = prepared()
    resumed = trainer(again, tmp_path / "a", loss=F.cross_entropy, output="logits")
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert resumed.joint.step == STEPS
    assert torch.equal(state(again), state(model))


@pytest.mark.filterwarnings("ignore")
def test_the_loss_of_the_model_itself(tmp_path: Path) -> None:
    model, start = prepared(), prepared()
    trainer(model, tmp_path, loss=None, output=None).train()
    for bits in ("8", "4", "2"):  # each width's own scale has moved
        moved = model.two.act_quantizer.scales[bits], start.two.act_quantizer.scales[bits]  # type: ignore[union-attr, index]
        assert not torch.equal(*moved)
    with pytest.raises(ConfigError, match="does not go with gradient_accumulation_steps"):
        trainer(prepared(), tmp_path, gradient_accumulation_steps=2)
