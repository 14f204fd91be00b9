import pytest
import torch

from bitdial import QuantConfig, prepare, set_bits
from bitdial.calibrate import scales
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.scales import choose_scales
from bitdial.nn import QuantLayer

from .conftest import images, mobile, prepared


def test_scales_are_those_that_prepare_would_start_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what is found around activation scales, and by the inputs of Linear layers."""
    monkeypatch.setattr(scales, "FACTORS", (1.0,))
    monkeypatch.setattr(scales, "input_squares", lambda *arguments: {})
    x, net = images(16), mobile()
    for scheme in ("double_rounding", "nested", "lsq", "adabits"):
        model = prepared(net, scheme=scheme, start="mse", keep_first_last=8)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLayer)}
        choose_scales(layers, float_copy(model), [x], CalibrateConfig())
        wanted = prepared(net, scheme=scheme, start="balanced", keep_first_last=8)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, wanted.state_dict()[name], rtol=0, atol=0, msg=f"{scheme} {name}")


def test_a_width_can_be_made_more_important() -> None:
    x, net = images(16), mobile()

    def error(importance: dict[int, float], bits: int = 3, **more: dict[int, float]) -> float:
        model = prepared(net)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLayer)}
        choose_scales(layers, float_copy(model), [x], CalibrateConfig(importance=importance, **more))
        set_bits(model, bits)
        return sum(float((m.quantized_weight() - m.weight).detach().square().sum()) for m in layers.values())

    assert error({3: 20.0}) < error({8: 20.0})
    assert error({8: 0.1}, 8) == error({}, 8), "codes may give it up, scales do not"
    assert error({}, 8, scale_importance={8: 0.1}) > error({}, 8), "unless they are told to"
    assert error({}, 3, scale_importance={8: 0.1}) < error({}, 3)


def test_activation_scales_have_the_least_error_in_what_reads_them() -> None:
    """Outliers in all channels at once: the scale of least squared error clips them, and the sum of a row suffers."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 8)).eval()
    with torch.no_grad():
        net[0].weight.copy_(torch.rand(8, 64) + 0.1)
    x = torch.rand(512, 64)
    x[::50] *= 6
    model = prepare(net, QuantConfig(bit_choices=(8, 4), keep_first_last=False), x)
    layer = model.get_submodule("0")

    def error() -> float:
        with torch.no_grad():
            inputs = layer.act_quantizer(x, 4)
            return float((torch.nn.functional.linear(inputs, layer.weight) - net(x) + layer.bias).square().mean())

    before = error()
    choose_scales({"0": layer}, float_copy(model), [x], CalibrateConfig())
    assert error() < 0.8 * before


def test_pixels_with_huge_values_do_not_stretch_the_scale_for_all() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(64, 8, 1)).eval()
    x = torch.randn(32, 64, 4, 4)
    x[::6, :, 0, 0] *= 12
    model = prepare(net, QuantConfig(bit_choices=(8, 4), keep_first_last=False), x)
    layer = model.get_submodule("0")

    def error() -> float:
        """Of all pixels but those."""
        with torch.no_grad():
            apart = torch.nn.functional.conv2d(layer.act_quantizer(x, 4), layer.weight, layer.bias) - net(x)
            return float(apart[:, :, 1:].square().mean())

    before = error()
    choose_scales({"0": layer}, float_copy(model), [x], CalibrateConfig())
    assert error() < 0.2 * before


def test_clip_ratios_of_tokens_have_the_least_error_in_what_reads_them() -> None:
    """Tokens with an outlier that the layer hardly reads: clipping it leaves more codes to the others."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 8)).eval()
    x = torch.randn(256, 64)
    x[:, 0] *= 8
    with torch.no_grad():
        net[0].weight[:, 0] *= 0.01
    config = QuantConfig(bit_choices=(8, 4, 3), keep_first_last=False, activations="dynamic", start="max")
    model = prepare(net, config, x)
    layer = model.get_submodule("0")

    def error(bits: int) -> float:
        with torch.no_grad():
            inputs = layer.act_quantizer(x, bits)
            return float((torch.nn.functional.linear(inputs, layer.weight) - net(x) + layer.bias).square().mean())

    before = {bits: error(bits) for bits in (8, 4, 3)}
    choose_scales({"0": layer}, float_copy(model), [x], CalibrateConfig())
    assert error(4) < 0.7 * before[4]
    assert error(3) < 0.7 * before[3]
    assert error(8) < 1.01 * before[8]
    assert all(0 < float(ratio.detach()) <= 1 for ratio in layer.act_quantizer.scales.values())


def test_the_error_of_a_weight_counts_by_its_input() -> None:
    """Some inputs are large: the scale suits their weights, and outputs are nearer at every low width."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False)).eval()
    x = torch.randn(256, 64) * (torch.arange(64) % 4 == 0).float().mul(9).add(0.1)
    squares = scales.input_squares(net, ["0"], [{"input": x[:100]}, x[100:]])["0"]
    plain = x.square().mean(dim=0)
    torch.testing.assert_close(squares, plain + 0.01 * plain.mean())
    config = QuantConfig(
        bit_choices=(8, 4, 3), keep_first_last=False, activations="float", start="balanced", group_size=32
    )
    before, after = prepare(net, config, x), prepare(net, config, x)
    choose_scales({"0": after.get_submodule("0")}, float_copy(after), [x], CalibrateConfig())
    for bits in (4, 3):
        errors = []
        for model in (before, after):
            set_bits(model, bits)
            with torch.no_grad():
                errors.append(float((model(x) - net(x)).square().mean()))
        assert errors[1] < 0.95 * errors[0], (bits, errors)
    assert scales.input_squares(net, ["0"], [torch.zeros(4, 64)]) == {}, "nothing to go by"
