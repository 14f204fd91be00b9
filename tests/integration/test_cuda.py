"""The GPU gives the codes that the CPU gives; runs where there is one."""

import copy
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import bitdial
from bitdial import functional as bf
from bitdial.cli import main
from bitdial.dial.dial import dialled_layers
from bitdial.errors import ConfigError, TrainingError
from bitdial.train.float_loop import train_float

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def awkward_values(count: int, scale: float, seed: int) -> torch.Tensor:
    """Random values, exact ties between codes, and their neighbours one ulp to either side."""
    generator = torch.Generator().manual_seed(seed)
    ties = (torch.randint(-300, 300, (count,), generator=generator) + 0.5) * scale
    spread = torch.randn(count, generator=generator) * 60 * scale
    up = torch.nextafter(ties, torch.full_like(ties, torch.inf))
    down = torch.nextafter(ties, torch.full_like(ties, -torch.inf))
    return torch.cat([ties, up, down, spread])


@pytest.mark.parametrize("scheme", list(bf.SCHEMES))
@pytest.mark.parametrize("bits", [8, 6, 4, 3, 2])
def test_weight_codes_equal_the_cpus(scheme: str, bits: int) -> None:
    weight = awkward_values(20_000, 0.0173, seed=bits).reshape(8, -1)
    scales = torch.linspace(0.005, 0.05, 8)
    rule = bf.scheme_of(scheme)
    high = 8 if rule.narrows else bits
    if rule.scale == "derived":
        weight = weight / weight.abs().max() * 2
        scales = bf.derived_scale(weight, bits=high, scheme=scheme, shape=(8,))
        there = bf.derived_scale(weight.cuda(), bits=high, scheme=scheme, shape=(8,))
        assert torch.equal(scales, there.cpu())
    here = bf.quantize(weight, scales, bits=high, scheme=scheme)
    there = bf.quantize(weight.cuda(), scales.cuda(), bits=high, scheme=scheme)
    assert torch.equal(here, there.cpu())
    if rule.narrows:
        for ties in bf.TIE_RULES:
            low = bf.narrow(here, high=8, low=bits, scheme=scheme, ties=ties)
            assert torch.equal(low, bf.narrow(there, high=8, low=bits, scheme=scheme, ties=ties).cpu())
    fake = bf.fake_quantize(weight, scales, high=high, low=bits, scheme=scheme)
    assert torch.equal(fake, bf.fake_quantize(weight.cuda(), scales.cuda(), high=high, low=bits, scheme=scheme).cpu())


@pytest.mark.parametrize("kind", bf.ACTIVATION_KINDS)
@pytest.mark.parametrize("bits", [8, 6, 4, 3, 2])
def test_activation_codes_equal_the_cpus(kind: str, bits: int) -> None:
    scale = torch.tensor([0.0371])
    zero_point = torch.tensor([float(2 ** (bits - 1)) - 0.4]) if kind == "asymmetric" else None
    x = awkward_values(50_000, float(scale), seed=bits)
    here = bf.quantize_activation(x, scale, zero_point, bits=bits, kind=kind)
    there_zero = None if zero_point is None else zero_point.cuda()
    there = bf.quantize_activation(x.cuda(), scale.cuda(), there_zero, bits=bits, kind=kind)
    assert torch.equal(here, there.cpu())


@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_training_on_the_gpu_then_the_same_file_on_both(scheme: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = bitdial.build_model("cifar_resnet", blocks=1, width=8).cuda()
    x, y = torch.randn(64, 3, 16, 16, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    prepared = bitdial.prepare(model, bitdial.QuantConfig(scheme=scheme), x)
    data = bitdial.ArrayData(x, y, batch_size=16)
    config = bitdial.TrainConfig(epochs=2, lr=1e-3, autocast="bfloat16")
    history = bitdial.train(prepared, data, config, progress=False, checkpoint=tmp_path / "run.ckpt")
    assert history.rows[-1]["loss"]["2"] > 0
    path = tmp_path / "model.safetensors"
    bitdial.save(prepared, path)

    live = bitdial.load(path, device="cuda")
    for bits in (8, 6, 4, 2):
        bitdial.set_bits(live, bits)
        for name, layer in dialled_layers(live).items():
            trained = dict(prepared.named_modules())[name]
            codes = trained.weight_quantizer.codes(trained.weight, bits)
            assert torch.equal(layer.codes.weight_codes(bits), codes), name

    exact_here, exact_there = bitdial.code_exact(bitdial.load(path)), bitdial.code_exact(live)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(32, 3, 16, 16, generator=generator)
    for bits in (8, 6, 4, 2, (4, 8)):
        bitdial.set_bits(exact_here, bits)
        bitdial.set_bits(exact_there, bits)
        assert torch.equal(exact_here(images), exact_there(images.cuda()).cpu()), bits


def test_the_command_line_evaluates_and_switches_there(tmp_path, capsys) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 16, 16), torch.randint(0, 10, (64,))
    prepared = bitdial.prepare(bitdial.build_model("cifar_resnet", blocks=1, width=8), bitdial.QuantConfig(), x)
    path, data = tmp_path / "model.safetensors", tmp_path / "data.npz"
    bitdial.save(prepared, path)
    np.savez(data, x=x.numpy(), y=y.numpy())
    command = ["eval", str(path), "--data", str(data), "--kernels", "integer"]
    assert main([*command, "--device", "cpu"]) == 0
    here = capsys.readouterr().out
    assert main([*command, "--device", "cuda"]) == 0
    assert capsys.readouterr().out == here
    assert main(["switch", str(path), "--bits", "4", "--device", "cuda", "--data", str(data)]) == 0
    assert "Accuracy there" in capsys.readouterr().out


def test_resume_on_the_gpu_goes_on_where_it_stopped(tmp_path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 16, 16, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    model = bitdial.build_model("cifar_resnet", blocks=1, width=8).cuda()
    data = bitdial.ArrayData(x, y, batch_size=16)
    config = bitdial.TrainConfig(epochs=2, lr=1e-3, autocast=None)
    first = bitdial.JointStep(bitdial.prepare(model, bitdial.QuantConfig(), x), config, steps_per_epoch=4)
    for batch in list(data.batches(0))[:3]:
        first(batch.inputs, batch.targets)
    bitdial.save_checkpoint(tmp_path / "run.ckpt", first, {"note": 1})
    second = bitdial.JointStep(bitdial.prepare(model, bitdial.QuantConfig(), x), config, steps_per_epoch=4)
    assert bitdial.load_checkpoint(tmp_path / "run.ckpt", second) == {"note": 1}
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name
    moments = [step.scale_optimizers[8].state for step in (first, second)]
    assert len(moments[0]) == len(moments[1]) > 0
    for mine, yours in zip(first.scales, second.scales, strict=True):
        assert torch.equal(moments[0][mine]["exp_avg"], moments[1][yours]["exp_avg"])
    for batch in data.batches(1):
        losses = [step(batch.inputs, batch.targets).loss[8] for step in (first, second)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_float_stage_goes_on_where_it_stopped(tmp_path: Path, optimizer: str) -> None:
    """Fused optimizers take the moments that were saved. Kernels add up in any order: the ends are close, not equal.

    Close is a tenth of the way that training went; with the moments lost it would be a third (counted on the CPU).
    """
    torch.manual_seed(0)
    x, y = torch.randn(72, 3, 16, 16, device="cuda"), torch.randint(0, 10, (72,), device="cuda")
    first = bitdial.build_model("cifar_resnet", blocks=1, width=8).to("cuda", memory_format=torch.channels_last)

    class Terminating(bitdial.ArrayData):
        def batches(self, epoch, **share):
            for batch in super().batches(epoch, **share):
                if epoch == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

    def run(data: bitdial.ArrayData, checkpoint: Path | None) -> torch.nn.Module:
        model = copy.deepcopy(first)
        settings = {"epochs": 4, "lr": 1e-3, "weight_decay": 5e-4, "optimizer": optimizer, "autocast": "bfloat16"}
        train_float(model, data, checkpoint=checkpoint, progress=False, **settings)
        return model

    with pytest.raises(TrainingError, match="after step 6; run again"):
        run(Terminating(x, y, batch_size=16), tmp_path / "float.ckpt")
    data = bitdial.ArrayData(x, y, batch_size=16)
    resumed, whole = run(data, tmp_path / "float.ckpt"), run(data, None)
    assert [path.name for path in tmp_path.iterdir()] == ["float.ckpt"]
    begun, ended, resumed_end = (
        torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        for model in (first, whole, resumed)
    )
    assert (resumed_end - ended).norm() < 0.1 * (ended - begun).norm()


def test_progressive_distillation_in_a_graph_is_that_of_eager_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    x, y = torch.randn(24, 3, 16, 16, device="cuda"), torch.randint(0, 10, (24,), device="cuda")
    start = bitdial.prepare(bitdial.build_model("cifar_resnet", blocks=1, width=8).cuda(), bitdial.QuantConfig(), x)
    losses: list[list[float]] = []
    for graph in (False, True):
        config = bitdial.TrainConfig(epochs=4, lr=1e-4, distill="progressive", cuda_graph=graph, autocast=None)
        step = bitdial.JointStep(copy.deepcopy(start), config, steps_per_epoch=4, samples=24)
        losses.append([])
        for epoch in range(4):
            for batch in bitdial.ArrayData(x, y, batch_size=6).batches(epoch):
                losses[-1].append(float(step(batch.inputs, batch.targets, batch.index).loss[2]))
            step.end_epoch()
        assert bool(step.graphs._recorded) == graph
        assert not bool(step.distiller.previous.isnan().any()), "each sample's prediction was kept"
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_labels_of_no_class_do_not_end_the_process() -> None:
    """cross_entropy would fail by an assertion on the device, after which nothing runs there."""
    x, y = torch.randn(32, 16, device="cuda"), torch.randint(0, 16, (32,), device="cuda")
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).cuda()
    prepared, config = (
        bitdial.prepare(model, bitdial.QuantConfig(), x),
        bitdial.TrainConfig(epochs=3, lr=1e-3, autocast=None),
    )
    bitdial.train(copy.deepcopy(prepared), bitdial.ArrayData(x, y, batch_size=8), config, progress=False)
    y[5] = 16
    for data in (bitdial.ArrayData(x, y, batch_size=8), [(x, y)]):
        with pytest.raises(TrainingError, match="the label 16 is none of the model's 16 classes"):
            bitdial.train(copy.deepcopy(prepared), data, config, progress=False)
    with pytest.raises(ConfigError, match="batch 0: the label 16 "):
        bitdial.hessian_trace(prepared, [(x, y)], progress=False)
    torch.cuda.synchronize()


def test_a_model_without_a_convolution_is_recorded() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4))).cuda()
    x, y = torch.randn(32, 16, device="cuda"), torch.randint(0, 16, (32,), device="cuda")
    step = bitdial.JointStep(
        bitdial.prepare(model, bitdial.QuantConfig(), x), bitdial.TrainConfig(lr=1e-3, autocast=None), steps_per_epoch=9
    )
    losses = [float(step(x, y).loss[2]) for _ in range(9)]
    assert step.graphs._recorded
    assert losses[-1] < losses[0]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch without NCCL")
@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2}, {"sampling": "random", "sigma_warmup": 0}, {"update": "accumulated", "alrs": "off"}],
    ids=str,
)
def test_a_process_of_a_group_keeps_fused_kernels_and_graphs(
    settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collectives of one process change nothing. Kernels may add up in any order: the ends are close, not equal."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    x, y = torch.randn(64, 3, 16, 16, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    start = bitdial.prepare(bitdial.build_model("cifar_resnet", blocks=1, width=8).cuda(), bitdial.QuantConfig(), x)
    ends, losses = [], []
    for grouped in (False, True):
        if grouped:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            model = copy.deepcopy(start)
            config = bitdial.TrainConfig(epochs=3, lr=1e-3, autocast=None, **settings)
            step = bitdial.JointStep(model, config, steps_per_epoch=4)
            assert (step.reducer is not None) == grouped
            assert step.fast.convolutions, "it is fused"
            for epoch in range(3):
                for batch in bitdial.ArrayData(x, y, batch_size=16).batches(epoch):
                    report = step(batch.inputs, batch.targets)
            step.check()
            assert step.graphs._recorded, "it is recorded"
            assert (step.slots is not None) == ("sampling" in settings)
            losses.append([float(report.loss[bits]) for bits in (8, 6, 4, 2)])
            ends.append(torch.cat([value.detach().flatten() for value in model.parameters()]))
            step.graphs.clear()
        finally:
            if grouped:
                dist.destroy_process_group()
    begun = torch.cat([value.detach().flatten() for value in start.parameters()])
    assert (ends[1] - ends[0]).norm() < 0.01 * (ends[0] - begun).norm()
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
