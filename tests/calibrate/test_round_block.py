import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bitdial import CalibrateConfig, QuantConfig, calibrate, load, prepare, save, set_bits
from bitdial.calibrate import group_scales
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.round_block import BlockRounding, can_round
from bitdial.calibrate.walk import Walk
from bitdial.dial.plan import BitPlan
from bitdial.nn import QuantLayer

BITS = (8, 4, 3)


class Attending(nn.Module):
    """Two layers read one input, one is called twice, and a norm follows none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.again = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.again(self.again(self.query(x) * self.key(x).sigmoid()))))


def inputs(count: int = 64, seed: int = 0) -> Tensor:
    """Correlated, as the inputs of layers are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(16, 16, generator=torch.Generator().manual_seed(7))
    return torch.randn(count, 4, 16, generator=generator) @ (mix + 1.5 * mix[:1])


def prepared(net: nn.Module, **settings: object) -> nn.Module:
    config = QuantConfig(**{"bit_choices": BITS, "keep_first_last": False, "activations": "float", **settings})  # type: ignore[arg-type]
    return prepare(net, config, inputs(8)).eval()


def network() -> nn.Module:
    torch.manual_seed(0)
    return Attending().eval()


def rounding_of(model: nn.Module) -> tuple[BlockRounding, Walk]:
    walk, plans = Walk(model, [inputs(8)]), {b: BitPlan(default=b) for b in BITS}
    return BlockRounding(model, float_copy(model), walk.blocks[0], plans, CalibrateConfig(), seed=0), walk


def test_layers_are_taken_in_order_and_those_of_one_input_together() -> None:
    rounding, walk = rounding_of(prepared(network()))
    assert rounding._by_input(walk.start(), lambda name, x: None) == [["query", "key"], ["out"]]


def test_low_widths_gain_and_the_highest_stays(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, held = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16)).eval(), inputs(64, seed=5)
    found = {}
    for jointly in (False, True):
        model = prepared(net)
        report = calibrate(model, list(inputs(256).split(64)), CalibrateConfig(round_jointly=jointly), progress=False)
        assert ("codes chosen for all widths" in report.steps) == jointly
        for bits in BITS:
            set_bits(model, bits)
            with torch.no_grad():
                found[jointly, bits] = float((model(held) - net(held)).square().sum() / net(held).square().sum())
    print(found)
    assert found[True, 3] < 0.7 * found[False, 3]
    assert found[True, 4] < 0.8 * found[False, 4]
    assert found[True, 8] < 1e-3
    save(model, tmp_path / "m.safetensors")
    live = load(tmp_path / "m.safetensors", net)
    for bits in BITS:
        set_bits(model, bits)
        set_bits(live, bits)
        with torch.no_grad():
            assert torch.equal(model(held), live(held))


def test_weights_are_those_of_their_codes() -> None:
    """So further training, or another save, starts from the codes that were chosen."""
    for scheme in ("double_rounding", "nested", "centred", "truncate"):
        model = prepared(network(), scheme=scheme, group_size=8)
        calibrate(model, inputs(32), progress=False)
        layer = model.get_submodule("query")
        assert isinstance(layer, QuantLayer)
        codes = layer.weight_quantizer.codes(layer.weight, 8)
        again = copy.deepcopy(layer)
        calibrate(model, inputs(32), CalibrateConfig(choose_scales=False, round_jointly=False), progress=False)
        assert torch.equal(codes, again.weight_quantizer.codes(again.weight, 8))


def test_what_cannot_be_rounded_so_is_left() -> None:
    for scheme in ("lsq", "dorefa", "adabits"):
        model = prepared(network(), scheme=scheme)
        layer = model.get_submodule("query")
        assert not can_round(layer)
        before = layer.weight.detach().clone()
        calibrate(model, inputs(32), CalibrateConfig(choose_scales=False, correct_biases=False), progress=False)
        assert torch.equal(before, layer.weight)
    assert can_round(prepared(network()).get_submodule("query"))
    assert not can_round(nn.Linear(4, 4))


def test_layers_without_a_norm_behind_them_aim_at_the_float_outputs() -> None:
    """With enough rows; those of one input share their moments."""
    for count, targeted in ((8, True), (4, False)):
        model = prepared(network())
        walk, plans = Walk(model, [inputs(count)]), {b: BitPlan(default=b) for b in BITS}
        rounding = BlockRounding(model, float_copy(model), walk.blocks[0], plans, CalibrateConfig(), seed=0)
        x = inputs(count)
        known: dict[tuple[bool, int], object] = {}
        given = {0: [x], **{b: [x + 0.1 * (8 - b)] for b in BITS}}
        query, key = (rounding._layer_settings(name, given, known) for name in ("query", "key"))  # type: ignore[arg-type]
        assert [setting.target is not None for setting in query] == [targeted] * 3
        assert all(one.second is two.second and one.target is two.target for one, two in zip(query, key, strict=True))
        rounding.centred = {"out"}
        assert all(each.target is None for each in rounding._layer_settings("out", given, {}))


def test_scales_of_groups_are_chosen_with_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless scales are to stay as they are. What all widths lose by rounding is less than with the scales before."""
    torch.manual_seed(0)
    net, held = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 16)).eval(), inputs(64, seed=5)
    losses = {}
    for tried in (group_scales.TRIED, (), None):
        monkeypatch.setattr(group_scales, "TRIED", tried)
        model = prepared(net, group_size=8, start="balanced")
        layer = model.get_submodule("0")
        assert isinstance(layer, QuantLayer)
        before = layer.weight_quantizer.scale_of(layer.weight_rows(), 8).detach().clone()
        config = CalibrateConfig(choose_scales=tried is not None)
        calibrate(model, list(inputs(256).split(64)), config, progress=False)
        if tried is None:
            assert torch.equal(before, layer.weight_quantizer.scale_of(layer.weight_rows(), 8))
            continue
        for bits in BITS:
            set_bits(model, bits)
            with torch.no_grad():
                losses[tried] = losses.get(tried, 0.0) + float((model(held) - net(held)).square().sum().log())
    first, second = losses.values()
    assert first < second - 0.1
