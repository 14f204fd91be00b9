"""A Linear network with groups of 32 inputs through the whole path, and what its groups are good for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    JointStep,
    QuantConfig,
    TrainConfig,
    code_exact,
    load,
    load_trainable,
    prepare,
    read_artifact,
    save,
    search,
    set_bits,
)
from bitdial import functional as bf
from bitdial.artifact import sizes
from bitdial.nn import QuantLayer
from bitdial.planning.cost import measure_costs

WIDTHS = (8, 6, 4, 3, 2)
CONFIGS: list[dict[str, Any]] = [
    {"scheme": scheme, "group_scales": kind, "activations": activations}
    for scheme in ("double_rounding", "nested", "nested+8", "centred", "truncate", "adabits")
    for kind, activations in (("integer", "auto"), ("integer", "float"), ("float", "float"))
] + [{"scheme": "nested", "group_scales": "half", "activations": "auto"}]


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    hidden = [(64, 96), (96, 128), (128, 64)]
    layers: list[nn.Module] = [nn.Linear(32, 64), nn.ReLU()]
    for inputs, outputs in hidden:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(64, 32, generator=GENERATOR)
TARGETS = torch.randint(0, 10, (64,), generator=GENERATOR)


def trained(**settings: Any) -> nn.Module:
    """Prepared with groups of 32 and trained for three steps."""
    config = QuantConfig(**{"group_size": 32, "bit_choices": WIDTHS, "start": "3std", **settings})
    model = prepare(network(), config, INPUTS)
    step = JointStep(model, TrainConfig(epochs=1, lr=1e-2, alrs="channel"), steps_per_epoch=3)
    for _ in range(3):
        step(INPUTS, TARGETS)
    return model.eval()


def layers_of(model: nn.Module) -> dict[str, QuantLayer]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantLayer)}


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """Bit for bit."""


def test_trained_file_and_live_model_agree_on_every_code_and_output(tmp_path: Path) -> None:
    for config in CONFIGS:
        model = trained(**config)
        save(model, tmp_path / "m")
        artifact = read_artifact(tmp_path / "m")
        live = load(artifact, network(1), kernels="float")
        for plan in (*WIDTHS, BitPlan({"2": (2, 8), "4": (6, 4)}, default=3)):
            set_bits(model, plan)
            set_bits(live, plan)
            assert torch.equal(live(INPUTS), model(INPUTS)), (config, plan)
        for name, layer in layers_of(model).items():
            shape = (layer.out_features, layer.in_features // 32)  # type: ignore[operator]
            assert artifact.weight_scale(name).shape == shape
            for bits in WIDTHS:
                codes = bf.narrow(artifact.codes(name), high=8, low=bits, scheme=artifact.scheme)
                assert torch.equal(codes, layer.weight_quantizer.codes(layer.weight_rows(), bits))
        if artifact.scheme != "adabits":
            again = load_trainable(artifact, network(1)).eval()
            for layer in layers_of(again).values():
                assert layer.weight_quantizer.group_scales == config["group_scales"]
            for bits in WIDTHS:
                set_bits(again, bits)
                set_bits(model, bits)
                assert torch.equal(again(INPUTS), model(INPUTS)), (config, bits)


def exact_by_hand(artifact: Any, name: str, x: Tensor, bits: int) -> Tensor:
    """A layer by whole numbers in Python's own integers: multiplier * weight integer * activation code."""
    rule, shift = bf.scheme_of(artifact.scheme), 8 - bits
    factor, addend = rule.integers(shift)
    codes = bf.narrow(artifact.codes(name), high=8, low=bits, scheme=artifact.scheme)
    integers = (codes.long() * factor + addend).numpy().astype(object)
    integers *= artifact.group_scale(name).repeat_interleave(32, dim=1).long().numpy().astype(object)
    i = artifact.bit_choices.index(bits)
    scale = artifact.part(name, "act_scale")[i]
    a = bf.quantize_activation(x, scale.reshape(1), None, bits=bits, kind=artifact.layers[name]["activations"])
    sums = torch.tensor((a.long().numpy().astype(object) @ integers.T).astype(float)).float()
    step = artifact.row_scale(name) * 2.0**shift / factor
    return sums * (scale * step) + artifact.part(name, "bias")


def test_exact_sums_are_integer_sums_of_multiplied_codes(tmp_path: Path) -> None:
    for scheme in ("double_rounding", "nested", "nested+8", "centred", "truncate"):
        save(trained(scheme=scheme), tmp_path / "m")
        artifact = read_artifact(tmp_path / "m")
        live = load(artifact, network(1), kernels="float")
        exact: Any = code_exact(live)
        seen: dict[str, tuple[Tensor, Tensor]] = {}
        for name in artifact.layers:
            exact.get_submodule(name).register_forward_hook(
                lambda m, args, out, name=name, seen=seen: seen.update({name: (args[0], out)})
            )
        for bits in WIDTHS:
            set_bits(exact, bits)
            set_bits(live, bits)
            out = exact(INPUTS)
            for name, (x, y) in seen.items():
                assert torch.equal(y, exact_by_hand(artifact, name, x, bits)), (scheme, name, bits)
            near = torch.isclose(out, live(INPUTS), rtol=1e-3, atol=1e-3).all(dim=1)
            assert near.float().mean() > 0.5  # a code near its border may go the other way
            assert torch.equal(torch.cat([exact(x[None]) for x in INPUTS]), out)


def test_a_weight_only_model_by_exact_sums(tmp_path: Path) -> None:
    for kind in bf.GROUP_SCALES:
        save(trained(activations="float", group_scales=kind), tmp_path / "m")
        live = load(tmp_path / "m", network(1), kernels="float")
        exact = code_exact(live)
        for bits in WIDTHS:
            set_bits(exact, bits)
            set_bits(live, bits)
            torch.testing.assert_close(exact(INPUTS), live(INPUTS), rtol=1e-3, atol=1e-3)


def test_bytes_and_a_search(tmp_path: Path) -> None:
    model = trained()
    save(model, tmp_path / "m")
    costs, found = measure_costs(model, INPUTS[:1]), sizes(read_artifact(tmp_path / "m"))
    assert {bits: costs.of(bits)["bytes"] for bits in WIDTHS} == found["separate"]
    plan = search(model, dict.fromkeys(layers_of(model), 1.0), costs, {"bytes": costs.of(4)["bytes"]}).plan
    assert costs.of(plan)["bytes"] <= costs.of(4)["bytes"]


def test_groups_keep_a_few_large_weights_from_coarsening_the_others() -> None:
    """Full-range scales, nothing trained: outliers in one group of a row cost the other groups nothing."""
    model = network()
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight[:, 3] *= 20
    errors = {}
    for name, settings in {
        "channel": {},
        "integer": {"group_size": 32},
        "float": {"group_size": 32, "group_scales": "float"},
    }.items():
        config = QuantConfig(start="max", activations="float", bit_choices=(8, 4), **settings)
        prepared = prepare(model, config, INPUTS).eval()
        set_bits(prepared, 4)
        errors[name] = sum(
            float((layer.quantized_weight() - layer.weight).detach().square().sum())
            for layer in layers_of(prepared).values()
        )
    assert errors["float"] <= errors["integer"] < 0.8 * errors["channel"]
