import torch

from bitdial import set_bits
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.scales import choose_scales
from bitdial.nn import QuantLayer

from .conftest import images, mobile, prepared


def test_scales_are_those_that_prepare_would_start_from() -> None:
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
