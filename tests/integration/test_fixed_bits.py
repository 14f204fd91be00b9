"""Layers with a width of their own, all the way: the dial, training, the file, every engine, costs, ONNX."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    Rule,
    TrainConfig,
    add_transitions,
    at_bits,
    code_exact,
    describe,
    evaluate,
    export_onnx,
    get_bits,
    load,
    load_trainable,
    measure_costs,
    onnx_session_options,
    prepare,
    read_artifact,
    save,
    set_bits,
    view_at_bits,
)
from bitdial.artifact.sizes import sizes
from bitdial.dial.dial import SWITCHBOARD, dialled_layers, unwrap
from bitdial.errors import CheckpointError, ConfigError, PlanError
from bitdial.nn import SwitchableBatchNorm
from bitdial.train import JointStep, load_checkpoint, save_checkpoint

WIDTHS = (8, 6, 4, 2)
FIXED = {"stem": 8, "mid": 4, "head": 8}
CONFIG: dict[str, Any] = {
    "bit_choices": WIDTHS,
    "start": "3std",
    "keep_first_last": 8,
    "rules": (Rule(pattern="mid", bits=4),),
}
PLANS: list[Any] = [
    *WIDTHS,
    (4, 8),
    BitPlan(default=2),
    BitPlan({"conv": 6}, default=4),
    BitPlan({"head": 2, "mid": (2, 8)}, default=6),
]


class Net(nn.Module):
    """Two ends, two convolutions between them, norms behind three of the four."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv, self.norm1 = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.mid, self.norm2 = nn.Conv2d(6, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm0(self.stem(x)))
        x = torch.relu(self.norm1(self.conv(x)))
        x = torch.relu(self.norm2(self.mid(x)))
        return self.head(x.mean(dim=(2, 3)))


GENERATOR = torch.Generator().manual_seed(0)
INPUTS = torch.randn(8, 2, 6, 6, generator=GENERATOR)
TARGETS = torch.randint(0, 3, (8,), generator=GENERATOR)


def prepared(**settings: Any) -> Any:
    torch.manual_seed(0)
    return prepare(Net(), QuantConfig(**CONFIG | settings), INPUTS)


def trained(model: nn.Module, **settings: Any) -> Any:
    config = TrainConfig(epochs=1, lr=1e-2, **settings)
    step = JointStep(model, config, steps_per_epoch=2, sensitivity=dict.fromkeys(dialled_layers(model), 1.0))
    for _ in range(2):
        step(INPUTS, TARGETS)
    return model.eval()


def outputs(model: nn.Module, plan: Any) -> Tensor:
    set_bits(model, plan)
    with torch.no_grad():
        return model(INPUTS)


def selected(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (layer.weight_bits, layer.act_bits) for name, layer in dialled_layers(model).items()}


@pytest.fixture(autouse=True)
def in_one_thread(one_thread: None) -> None:
    """Bit for bit."""


# --- the dial -------------------------------------------------------------------------------------


def test_a_uniform_setting_leaves_them_and_a_plan_that_names_one_wins(tmp_path: Path) -> None:
    model = prepared()
    own = {name: (bits, bits) for name, bits in FIXED.items()}
    assert selected(model) == own | {"conv": (8, 8)}  # as prepare gives it
    assert [norm.bits for norm in (model.norm0, model.norm1, model.norm2)] == [8, 8, 4]
    save(model, tmp_path / "m")
    models = [model, load(tmp_path / "m", Net()), load_trainable(tmp_path / "m", Net())]
    models += [load(tmp_path / "m", Net(), kernels="integer"), code_exact(models[1])]
    for one in models:
        for setting, conv in ((2, (2, 2)), ((4, 8), (4, 8)), (BitPlan(default=6), (6, 6))):
            set_bits(one, setting)
            assert selected(one) == own | {"conv": conv}
            assert [unwrap(one).get_submodule(f"norm{i}").bits for i in range(3)] == [8, conv[0], 4]
        set_bits(one, BitPlan({"stem": 2, "conv": (4, 2)}, default=6))
        assert selected(one) == own | {"stem": (2, 2), "conv": (4, 2)}
        before = get_bits(one)
        with at_bits(one, 8):
            assert selected(one) == own | {"conv": (8, 8)}
        assert get_bits(one) == before  # also of the layer that the plan has moved
        set_bits(one, 4)
        assert get_bits(one) == BitPlan(own | {"conv": 4})
        for wrong in (5, (4, 3), BitPlan({"conv": 2}, default=7)):  # widths of nobody are refused as ever
            with pytest.raises(PlanError, match="not in bit_choices"):
                set_bits(one, wrong)
        with pytest.raises(PlanError, match="says nothing about 'stem'"):
            set_bits(one, BitPlan({"conv": 2}))
        assert get_bits(one) == BitPlan(own | {"conv": 4})


def test_transitional_norms_go_by_the_own_widths() -> None:
    model = prepared()
    set_bits(model, 2)
    for kind in ("full", "statistics"):
        paired: Any = add_transitions(model, kind)
        norms = [m for m in paired.modules() if isinstance(m, SwitchableBatchNorm)]
        assert [norm.key for norm in norms] == ["8", "8-2", "2-4"]
        assert torch.equal(paired.eval()(INPUTS), model.eval()(INPUTS))  # at 2 bits, where the model is
        set_bits(paired, 6)
        assert [norm.key for norm in norms] == ["8", "8-6", "6-4"]


# --- training and the file ------------------------------------------------------------------------


def test_trained_live_exact_and_integer_models_agree_at_every_setting(tmp_path: Path) -> None:
    for config, how in (
        ({}, {}),
        ({"scheme": "nested"}, {"sampling": "random"}),
        ({"scheme": "lsq", "activations": "asymmetric"}, {"sampling": "hasb", "sigma_warmup": 0}),
        ({"bit_choices": (6, 4, 2), "keep_first_last": 6}, {"transitions": True}),
    ):
        widths = config.get("bit_choices", WIDTHS)
        model = prepared(**config)
        if how.pop("transitions", False):
            model = add_transitions(model, "statistics")
        trained(model, **how)
        plans = [plan for plan in PLANS if 8 in widths or plan in (*widths, BitPlan(default=2))]
        save(model, tmp_path / "m", plans={"low": BitPlan(default=2), "own": BitPlan({"head": 2}, default=4)})
        live, again = load(tmp_path / "m", Net(), kernels="float"), load_trainable(tmp_path / "m", Net()).eval()
        integer, exact = load(tmp_path / "m", Net(), kernels="integer"), code_exact(live)
        assert hasattr(unwrap(integer), SWITCHBOARD)
        for plan in plans:
            expected = outputs(model, plan)
            assert torch.equal(outputs(live, plan), expected), (config, plan)
            assert torch.equal(outputs(again, plan), expected), (config, plan)
            assert torch.equal(outputs(integer, plan), outputs(exact, plan)), (config, plan)
            near = torch.isclose(outputs(exact, plan), expected, rtol=1e-3, atol=1e-3).all(dim=1)
            assert near.float().mean() >= 0.5, (config, plan)  # a code near its border may go either way
            for name, layer in dialled_layers(model).items():
                codes = layer.weight_quantizer.codes(layer.weight_rows(), layer.weight_bits)  # type: ignore[attr-defined]
                for each in (live, exact, integer):
                    there: Any = dialled_layers(each)[name]
                    assert (there.weight_bits, there.act_bits) == (layer.weight_bits, layer.act_bits)
                    assert torch.equal(there.codes.weight_codes(there.weight_bits), codes), (config, plan, name)
            assert torch.equal(outputs(view_at_bits(live, widths[0]), plan), expected)
        for name, plan in (("low", 2), ("own", BitPlan({"head": 2}, default=4))):
            assert torch.equal(outputs(live, name), outputs(model, plan))
            assert torch.equal(outputs(integer, name), outputs(exact, plan))
        found = evaluate(live, [(INPUTS, TARGETS)], [2, "low"], measure=lambda model, _: float(model(INPUTS).sum()))
        assert found[2] == found["low"]


def test_every_pass_of_training_runs_them_at_their_width() -> None:
    for sampling in ("none", "random", "hasb"):
        model = prepared()
        seen: dict[str, set[tuple[int, int]]] = {name: set() for name in dialled_layers(model)}
        for name, layer in dialled_layers(model).items():
            layer.register_forward_hook(  # type: ignore[attr-defined]
                lambda m, *_, name=name, seen=seen: seen[name].add((m.weight_bits, m.act_bits))
            )
        before = {name: layer.act_quantizer.scales["2"].clone() for name, layer in dialled_layers(model).items()}  # type: ignore[attr-defined]
        trained(model, sampling=sampling, sigma_warmup=0, sigma=1.0)
        assert seen.pop("conv") == {(bits, bits) for bits in WIDTHS}, sampling
        assert seen == {name: {(bits, bits)} for name, bits in FIXED.items()}, sampling
        moved = {n for n, layer in dialled_layers(model).items() if layer.act_quantizer.scales["2"] != before[n]}  # type: ignore[attr-defined]
        assert moved == {"conv"}  # no other layer was ever at 2 bits


def test_all_layers_at_their_own_widths(caplog: pytest.LogCaptureFixture) -> None:
    model = prepared(rules=(Rule(pattern="*", bits=4),))
    assert "all 4 quantised layers have a width of their own" in caplog.text
    trained(model, sampling="hasb", sigma_warmup=0)
    assert torch.equal(outputs(model, 8), outputs(model, 2))
    assert not torch.equal(outputs(model, 8), outputs(model, BitPlan({"conv": 2}, default=8)))


def test_a_checkpoint_of_other_widths_is_refused(tmp_path: Path) -> None:
    config = TrainConfig(epochs=1)
    step = JointStep(prepared(), config, steps_per_epoch=1)
    save_checkpoint(tmp_path / "c", step)
    load_checkpoint(tmp_path / "c", JointStep(prepared(), config, steps_per_epoch=1))
    for rules in ((), (Rule(pattern="mid", bits=2),)):
        with pytest.raises(CheckpointError, match="mid"):
            load_checkpoint(tmp_path / "c", JointStep(prepared(rules=rules), config, steps_per_epoch=1))


def test_weights_that_are_tied_stay_at_one_width(tmp_path: Path) -> None:
    """The embedding of a language model takes the width of its head, on packed words too: the same codes and scales.

    Packed kernels add up in another order, so outputs are as near as float32 is.
    """

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mid, self.head = nn.Embedding(20, 32), nn.Linear(32, 32), nn.Linear(32, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.relu(self.mid(self.embed(tokens))))

    tokens = torch.randint(0, 20, (3, 5), generator=torch.Generator().manual_seed(0))
    base: dict[str, Any] = {"bit_choices": WIDTHS, "activations": "float", "keep_first_last": 8}
    quantised = Rule(type="Embedding", quantize=True)
    for scheme in ("double_rounding", "nested"):
        torch.manual_seed(0)
        model = prepare(Language(), QuantConfig(scheme=scheme, rules=(quantised,), **base), tokens).eval()
        assert describe(model).fixed_bits == {"embed": 8, "head": 8}
        save(model, tmp_path / "m")
        packed, live = (load(tmp_path / "m", Language(), kernels=kernels) for kernels in ("packed", "float"))
        assert type(dialled_layers(packed)["head"].engine).__name__ == "PackedEngine"  # type: ignore[attr-defined]
        for plan in (*WIDTHS, BitPlan({"head": 2}, default=4)):
            for each in (model, packed, live):
                set_bits(each, plan)
            own, ours = (dialled_layers(each) for each in (packed, live))
            for name, layer in own.items():
                bits = layer.weight_bits
                assert torch.equal(layer.codes.weight_codes(bits), ours[name].codes.weight_codes(bits)), (name, plan)
                rows = len(layer.codes.weight_codes(bits))
                steps = [each.codes.step(bits).expand(rows) for each in (layer, ours[name])]
                assert torch.equal(*steps), (name, plan)
            assert torch.equal(live(tokens), model(tokens)), (scheme, plan)
            torch.testing.assert_close(packed(tokens), model(tokens))
        assert selected(packed) == {"embed": (8, 8), "mid": (4, 4), "head": (2, 2)}
        fewer = load(tmp_path / "m", Language(), kernels="packed", bit_choices=(8, 2))
        set_bits(fewer, 2)
        set_bits(model, 2)
        torch.testing.assert_close(fewer(tokens), model(tokens))
        with pytest.raises(ConfigError, match="layer 'head' stays at 8 bits; offer 8 too"):
            load(tmp_path / "m", Language(), kernels="packed", bit_choices=(4, 2))
    with pytest.raises(ConfigError, match=r"one width, but 'embed' at 4 bits, 'head' at 8 bits"):
        prepare(Language(), QuantConfig(rules=(Rule(pattern="embed", bits=4),), **base), tokens)


# --- sizes, costs, exports ------------------------------------------------------------------------


def test_sizes_by_width_count_them_at_theirs(tmp_path: Path) -> None:
    model, plain = prepared(), prepared(keep_first_last=False, rules=())
    save(model, tmp_path / "m")
    artifact = read_artifact(tmp_path / "m")
    report, costs = describe(model), measure_costs(model, INPUTS[:1])
    assert costs.fixed_bits == artifact.fixed_bits == report.fixed_bits == FIXED
    weights = {name: layer.weight.numel() for name, layer in dialled_layers(model).items()}  # type: ignore[attr-defined]
    total = sum(weights.values())
    for bits in WIDTHS:
        at = {name: FIXED.get(name, bits) for name in weights}
        assert costs.of(bits)["average_bits"] == pytest.approx(sum(weights[n] * at[n] for n in weights) / total)
        assert costs.of(bits) == costs.of(BitPlan(at))
        more = sum(-(-weights[n] * at[n] // 8) - -(-weights[n] * bits // 8) for n in weights)
        expected = describe(plain).width_bytes[bits] + more
        assert report.width_bytes[bits] == sizes(artifact)["separate"][bits] == costs.of(bits)["bytes"] == expected
    assert costs.of(BitPlan({"head": 2}, default=2))["average_bits"] < costs.of(2)["average_bits"]
    assert report.file_bytes == describe(plain).file_bytes == sizes(artifact)["tensors"]


def test_onnx_has_their_integers(tmp_path: Path) -> None:
    save(trained(prepared()), tmp_path / "m")
    live = load(tmp_path / "m", Net(), kernels="float")
    for setting, conv in ((2, (2, 2)), (BitPlan({"head": 4}, default=4), (4, 4))):
        made = export_onnx(live, tmp_path / "m.onnx", INPUTS, bits=setting)
        head = (4, 4) if conv == (4, 4) else (8, 8)
        assert made.weights == {"stem": (8, 8), "conv": conv, "mid": (4, 4), "head": head}
        session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), onnx_session_options())
        (found,) = session.run(None, {session.get_inputs()[0].name: INPUTS.numpy()})
        assert np.abs(found - outputs(live, setting).numpy()).max() < 1e-4
