import torch
from torch import nn

from bitdial import QuantConfig, prepare
from bitdial.calibrate.biases import bare_layers, correct_bias, watch_means
from bitdial.calibrate.walk import Walk

from .conftest import images, mobile, prepared


def test_layers_without_a_norm_behind_them_are_bare() -> None:
    model = prepared(mobile())
    blocks = Walk(model, [images(4)]).blocks
    assert [bare_layers(model, block) for block in blocks] == [[], [], [], ["head"]]


def test_means_are_those_of_each_channel_over_all_calls() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    x = images(6)
    with watch_means(net, ["0", "2"]) as means:
        for batch in x.split(4):
            net(batch)
    torch.testing.assert_close(means["0"].float(), net[0](x).mean(dim=(0, 2, 3)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(means["2"].float(), net(x).mean(dim=0), rtol=1e-4, atol=1e-5)
    net(x)
    torch.testing.assert_close(means["2"].float(), net(x).mean(dim=0), rtol=1e-4, atol=1e-5)


def test_one_bias_goes_by_relative_shifts() -> None:
    model = prepare(nn.Sequential(nn.Linear(2, 2)), QuantConfig(keep_first_last=False), torch.randn(4, 2))
    layer = model.get_submodule("0")
    before = layer.bias.detach().clone()
    reference = torch.zeros(2, dtype=torch.float64)
    correct_bias(layer, reference, {8: reference + torch.tensor([0.01, -0.01])})
    torch.testing.assert_close(layer.bias.detach(), before - torch.tensor([0.01, -0.01]))
    # A hundred times the shift at 2 bits counts for a ten thousandth.
    before = layer.bias.detach().clone()
    shifts = {8: reference + torch.tensor([0.01, 0.0]), 2: reference + torch.tensor([1.0, 0.0])}
    correct_bias(layer, reference, shifts)
    assert abs(float(before[0] - layer.bias.detach()[0]) - 0.0101) < 1e-4
