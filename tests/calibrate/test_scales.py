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
    """But for what is found around activation scales."""
    monkeypatch.setattr(scales, "FACTORS", (1.0,))
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

    def error(importance: dict[int, float]) -> float:
        model = prepared(net)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLayer)}
        choose_scales(layers, float_copy(model), [x], CalibrateConfig(importance=importance))
        set_bits(model, 3)
        return sum(float((m.quantized_weight() - m.weight).detach().square().sum()) for m in layers.values())

    assert error({3: 20.0}) < error({8: 20.0})


def least_errors(x: torch.Tensor, net: torch.nn.Sequential) -> tuple[float, float]:
    """The error of 4-bit activations behind the layer, on samples of usual size: before scales are chosen, and then."""
    model = prepare(net, QuantConfig(bit_choices=(8, 4), keep_first_last=False), x)
    layer = model.get_submodule("0")

    def error() -> float:
        with torch.no_grad():
            wanted, inputs = net(x), layer.act_quantizer(x, 4)
            apart = (torch.nn.functional.linear(inputs, layer.weight) + layer.bias - wanted).square().mean(dim=1)
            return float(apart[x.abs().amax(dim=1) < 8].mean())

    before = error()
    choose_scales({"0": layer}, float_copy(model), [x], CalibrateConfig())
    return before, error()


def test_activation_scales_have_the_least_error_in_what_reads_them() -> None:
    """The scale of least squared error clips the one channel of large values, which the layer reads most of."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 8)).eval()
    x = torch.rand(512, 64)
    x[:, 0] *= 3
    with torch.no_grad():
        net[0].weight[:, 0] = 2
    before, after = least_errors(x, net)
    assert after < 0.5 * before


def test_samples_with_huge_values_do_not_stretch_the_scale_for_all() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 8)).eval()
    x = torch.randn(512, 64)
    x[::100] *= 12
    before, after = least_errors(x, net)
    assert after < 0.2 * before
