"""The joint step on a decoder of transformers: in bfloat16 with float32 masters, and with the logits in chunks."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.dial.dial import set_bits
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.train import JointStep, TrainConfig, soft_loss
from bitdial.train.optimizers import split_parameters

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = (8, 4, 2)
TOKENS = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models(tiny_language: Any) -> tuple[nn.Module, nn.Module]:
    """The float model and the prepared one."""
    transformers = pytest.importorskip("transformers")
    teacher = transformers.AutoModelForCausalLM.from_pretrained(tiny_language.model, dtype=torch.float32)
    teacher.config.use_cache = False
    config = QuantConfig(bit_choices=WIDTHS, group_size=16, activations="float", start="balanced")
    return teacher, prepare(teacher, config, TOKENS)


def logits_of(returned: Any) -> Tensor:
    return returned.logits.flatten(0, 1)


def step_on(models: tuple[nn.Module, nn.Module], **settings: Any) -> tuple[nn.Module, dict[int, float]]:
    """The model after one plain step for all widths, and the losses."""
    teacher, model = models[0], copy.deepcopy(models[1])
    config = TrainConfig(
        epochs=1,
        update="accumulated",
        alrs="off",
        distill="teacher",
        distill_weight=1.0,
        learn_scales=False,
        **settings,
    )
    step = JointStep(
        model, config, steps_per_epoch=1, teacher=teacher, output=logits_of,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1.0),
    )  # fmt: skip
    report = step(TOKENS, None)
    return model, {bits: float(loss) for bits, loss in report.loss.items()}


def moves(models: tuple[nn.Module, nn.Module], model: nn.Module) -> dict[str, Tensor]:
    before = models[1].state_dict()
    weights = {id(parameter) for parameter in split_parameters(model)[1]}
    return {n: p.detach() - before[n] for n, p in model.named_parameters() if id(p) in weights}


def test_bfloat16_has_float32_masters_and_the_same_direction(models: tuple[nn.Module, nn.Module]) -> None:
    plain, losses = step_on(models, autocast=None)
    half, rounded = step_on(models, autocast="bfloat16")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.float32}
    for bits in WIDTHS:
        assert rounded[bits] == pytest.approx(losses[bits], rel=0.05, abs=2e-3)
    expected, found = moves(models, plain), moves(models, half)
    for name, value in expected.items():
        assert float(torch.cosine_similarity(value.flatten(), found[name].flatten(), dim=0)) > 0.99, name
    assert any(not torch.equal(value, found[name]) for name, value in expected.items()), "16 bits were used"


def test_codes_under_autocast_are_those_in_float32(models: tuple[nn.Module, nn.Module]) -> None:
    layer: Any = models[1].get_submodule("model.layers.1.mlp.down_proj")
    for bits in WIDTHS:
        set_bits(models[1], bits)
        outside = layer.quantized_weight()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer.quantized_weight(), outside)
            assert layer(torch.ones(1, 64)).dtype == torch.bfloat16


@pytest.mark.parametrize(("autocast", "share"), [(None, 1e-4), ("bfloat16", 2**-7)])
def test_in_chunks_the_step_is_the_same(
    autocast: str | None, share: float, models: tuple[nn.Module, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bits, two steps of the last bit: gradients of logits round to them from sums in another order."""
    whole, losses = step_on(models, autocast=autocast)
    monkeypatch.setattr(soft_loss, "LARGEST", 5 * 64)
    parts, found = step_on(models, autocast=autocast)
    assert found == pytest.approx(losses, rel=1e-5)
    expected, moved = moves(models, whole), moves(models, parts)
    for name, value in expected.items():
        torch.testing.assert_close(moved[name], value, rtol=share, atol=share * float(value.abs().max()), msg=name)
