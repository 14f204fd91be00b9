import torch
from torch import Tensor, nn

from bitdial import QuantConfig, prepare
from bitdial.calibrate.channels import find_spaces
from bitdial.calibrate.equalize import equalize
from bitdial.calibrate.reference import float_copy
from bitdial.calibrate.walk import Walk

from .conftest import images, mobile, prepared, resnet


def test_the_float_model_stays_what_it_is() -> None:
    x = images(16)
    for model in (prepared(mobile()), prepared(resnet())):
        before = float_copy(model)(x)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        count = equalize(model, Walk(model, [x]).blocks, [x])
        assert count > 0
        torch.testing.assert_close(float_copy(model)(x), before, rtol=1e-4, atol=1e-4)
        assert any(not torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_channels_in_front_of_a_depthwise_layer_get_one_range() -> None:
    x, model = images(16), prepared(mobile())

    def ranges() -> Tensor:
        found: list[Tensor] = []
        plain = float_copy(model)
        plain.get_submodule("first.filter.0").register_forward_pre_hook(lambda m, args: found.append(args[0]))
        plain(x)
        return found[0].amax(dim=(0, 2, 3))

    before = ranges()
    equalize(model, Walk(model, [x]).blocks, [x])
    after = ranges()
    assert float(before.min() / before.max()) < 0.5
    assert float(after.min() / after.max()) > 1 / 1.51  # room is left below the bound of the ReLU6


def test_a_relu6_is_never_exceeded() -> None:
    x = images(16) * 20  # so that some channels reach the bound
    model = prepared(mobile())
    blocks = Walk(model, [x]).blocks
    before = float_copy(model)(x)
    equalize(model, blocks, [x])
    torch.testing.assert_close(float_copy(model)(x), before, rtol=1e-3, atol=1e-3)


def test_spaces_are_chains_and_residual_streams() -> None:
    model = prepared(resnet())
    spaces = find_spaces(model, Walk(model, [images(2)]).blocks)
    ends = {(tuple(space.producers), tuple(space.readers)) for space in spaces}
    for stage in (1, 2, 3):
        assert ((f"layer{stage}.0.bn1",), (f"layer{stage}.0.conv2",)) in ends
    stream = next(space for space in spaces if space.adds)  # to the first stage's, stem and block add
    assert set(stream.producers) == {"bn1", "layer1.0.bn2"}
    assert {"layer1.0.conv1", "layer2.0.conv1"} <= set(stream.readers)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.second(torch.relu(self.first(x)))))


def test_a_layer_that_runs_twice_is_left_alone() -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    model = prepare(Twice(), QuantConfig(keep_first_last=False), x)
    assert find_spaces(model, Walk(model, [x]).blocks) == []


def test_without_a_norm_the_layer_itself_is_scaled() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with torch.no_grad():
        net[0].weight[0] *= 50
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    model = prepare(net, QuantConfig(keep_first_last=False), x)
    assert equalize(model, Walk(model, [x]).blocks, [x]) == 1
    torch.testing.assert_close(float_copy(model)(x), net(x), rtol=1e-4, atol=1e-4)
    assert not torch.equal(model.get_submodule("0").bias, net[0].bias)
