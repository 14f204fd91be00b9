"""The models: sizes, shapes, names, and agreement with torchvision where it can be imported."""

from __future__ import annotations

import importlib
import inspect
import json
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.models import MODELS, build_model
from bitdial.models.cifar_resnet import cifar_resnet, resnet20
from bitdial.models.mobilenetv2 import mobilenet_v2
from bitdial.models.transformer import tiny_transformer

TORCHVISION_TWINS = ["resnet18", "resnet50", "mobilenet_v2"]


def torchvision_models() -> ModuleType:
    """Return ``torchvision.models``, or skip: beside a CPU build of torch its import fails."""
    try:
        return importlib.import_module("torchvision.models")
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"torchvision cannot be imported: {error}")


def images(*shape: int) -> Tensor:
    """Return reproducible normal noise."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def scramble(model: nn.Module) -> None:
    """Change every tensor of ``model`` in place, so that no parameter sits at a neutral value."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2.0, generator=generator)
        elif tensor.dim() == 1 and tensor.is_floating_point():
            tensor.uniform_(-0.5, 1.0, generator=generator)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("mobilenet_v2", 3_504_872),
        ("efficientnet_lite0", 4_652_008),
        ("resnet20", 272_474),
        ("cifar_resnet", 272_474),
        ("resnet56", 855_770),
        ("tiny_transformer", 120_706),
        ("tiny_detector", 142_776),
    ],
)
def test_parameter_count(name: str, count: int) -> None:
    assert sum(parameter.numel() for parameter in build_model(name).parameters()) == count


def test_every_model_has_its_count_tested() -> None:
    marks = test_parameter_count.pytestmark  # pyright: ignore[reportFunctionMemberAccess]
    assert sorted(MODELS) == sorted(name for name, _ in marks[0].args[1])


@pytest.mark.parametrize("name", TORCHVISION_TWINS)
def test_equals_torchvision(name: str) -> None:
    theirs = getattr(torchvision_models(), name)(weights=None).eval()
    scramble(theirs)
    ours = build_model(name).eval()
    wanted = {key: value.shape for key, value in theirs.state_dict().items()}
    found = {key: value.shape for key, value in ours.state_dict().items()}
    assert list(found) == list(wanted)
    assert found == wanted
    ours.load_state_dict(theirs.state_dict(), strict=True)
    batch = images(2, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(batch), theirs(batch))


@pytest.mark.parametrize("width_mult", [0.35, 0.5, 0.75, 1.4])
def test_mobilenet_widths_equal_torchvision(width_mult: float) -> None:
    theirs = torchvision_models().mobilenet_v2(weights=None, width_mult=width_mult)
    mobilenet_v2(width_mult=width_mult).load_state_dict(theirs.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        (
            "resnet18",
            {
                "conv1.weight": (64, 3, 7, 7),
                "layer1.0.bn2.num_batches_tracked": (),
                "layer2.0.downsample.0.weight": (128, 64, 1, 1),
                "layer2.0.downsample.1.running_var": (128,),
                "layer4.1.conv2.weight": (512, 512, 3, 3),
                "fc.bias": (1000,),
            },
        ),
        (
            "resnet50",
            {
                "conv1.weight": (64, 3, 7, 7),
                "layer1.0.downsample.0.weight": (256, 64, 1, 1),
                "layer1.2.conv1.weight": (64, 256, 1, 1),
                "layer3.5.conv3.weight": (1024, 256, 1, 1),
                "fc.bias": (1000,),
            },
        ),
        (
            "mobilenet_v2",
            {
                "features.0.0.weight": (32, 3, 3, 3),
                "features.1.conv.0.0.weight": (32, 1, 3, 3),
                "features.1.conv.1.weight": (16, 32, 1, 1),
                "features.2.conv.1.0.weight": (96, 1, 3, 3),
                "features.17.conv.3.running_mean": (320,),
                "features.18.0.weight": (1280, 320, 1, 1),
                "classifier.1.bias": (1000,),
            },
        ),
        (
            "resnet20",
            {
                "conv1.weight": (16, 3, 3, 3),
                "layer2.0.downsample.0.weight": (32, 16, 1, 1),
                "layer3.0.downsample.1.weight": (64,),
                "layer3.2.conv2.weight": (64, 64, 3, 3),
                "fc.bias": (10,),
            },
        ),
        (
            "tiny_transformer",
            {
                "tokens.weight": (256, 64),
                "blocks.0.attention.q.weight": (64, 64),
                "blocks.1.mlp.fc1.weight": (256, 64),
                "head.bias": (2,),
            },
        ),
    ],
)
def test_names_and_shapes(name: str, keys: dict[str, tuple[int, ...]]) -> None:
    state = {k: tuple(value.shape) for k, value in build_model(name).state_dict().items()}
    assert {key: state.get(key) for key in keys} == keys
    assert (next(iter(state)), list(state)[-1]) == (next(iter(keys)), list(keys)[-1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet18", {"layer2.0", "layer3.0", "layer4.0"}),
        ("resnet50", {"layer1.0", "layer2.0", "layer3.0", "layer4.0"}),
        ("resnet20", {"layer2.0", "layer3.0"}),
    ],
)
def test_shortcuts_exist_only_where_the_shape_changes(name: str, expected: set[str]) -> None:
    modules = dict(build_model(name).named_modules())
    ends = {key.removesuffix(".downsample") for key in modules if key.endswith(".downsample")}
    assert ends == expected


def test_strides_of_resnet50_may_be_on_the_first_convolution() -> None:
    plain, first = build_model("resnet50"), build_model("resnet50", stride_first=True, norm_eps=1e-3)
    for stage in range(1, 5):
        a, b = plain.get_submodule(f"layer{stage}.0"), first.get_submodule(f"layer{stage}.0")
        stride = 1 if stage == 1 else 2
        assert [conv.stride[0] for conv in (a.conv1, a.conv2, b.conv1, b.conv2)] == [1, stride, stride, 1]
    assert {m.eps for m in first.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-3}
    assert plain.state_dict().keys() == first.state_dict().keys()


def test_strided_convolutions_of_efficientnet_pad_as_tensorflow_does() -> None:
    """Of an even size, with one pixel more behind than before: the first window begins at the first pixel."""
    model = build_model("efficientnet_lite0")
    pads = {m.padding for m in model.modules() if isinstance(m, nn.ZeroPad2d)}
    assert pads == {(0, 1, 0, 1), (1, 2, 1, 2)}
    strided = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.stride != (1, 1)]
    assert len(strided) == 5
    assert all(m.padding == (0, 0) for m in strided)


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("resnet18", {"num_classes": 7}, (3, 64, 64)),
        ("resnet18", {"num_classes": 5, "in_channels": 1}, (1, 33, 47)),
        ("resnet50", {"num_classes": 7}, (3, 64, 64)),
        ("mobilenet_v2", {"num_classes": 7}, (3, 64, 64)),
        ("resnet50", {"num_classes": 7, "stride_first": True}, (3, 64, 64)),
        ("efficientnet_lite0", {"num_classes": 7}, (3, 64, 64)),
        ("mobilenet_v2", {"num_classes": 10, "small_input": True, "width_mult": 0.5}, (3, 32, 32)),
        ("resnet20", {}, (3, 32, 32)),
        ("resnet56", {"num_classes": 100}, (3, 32, 32)),
        ("cifar_resnet", {"blocks": 1, "width": 8, "in_channels": 1}, (1, 8, 8)),
    ],
)
def test_image_models_forward_and_backward(name: str, arguments: dict[str, int], shape: tuple[int, ...]) -> None:
    model = build_model(name, **arguments)
    logits = model(images(2, *shape))
    assert logits.shape == (2, arguments.get("num_classes", 10))
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("small_input", "size"), [(False, 1), (True, 4)])
def test_mobilenet_on_32_pixels(small_input: bool, size: int) -> None:
    model = mobilenet_v2(small_input=small_input, width_mult=0.35).eval()
    features = model.get_submodule("features")
    assert features(images(1, 3, 32, 32)).shape[2:] == (size, size)


def test_small_input_changes_no_parameter() -> None:
    plain, small = mobilenet_v2(), mobilenet_v2(small_input=True)
    small.load_state_dict(plain.state_dict(), strict=True)


def test_cifar_depth_counts_the_layers() -> None:
    for name, layers in (("resnet20", 20), ("resnet56", 56)):
        weighted = [
            n
            for n, m in build_model(name).named_modules()
            if isinstance(m, nn.Conv2d | nn.Linear) and "downsample" not in n
        ]
        assert len(weighted) == layers
    assert cifar_resnet(blocks=1, width=4).get_parameter("fc.weight").shape == (10, 16)


def test_convolutions_start_kaiming_normal_by_fan_out() -> None:
    torch.manual_seed(0)
    weight = resnet20().get_parameter("layer3.0.conv1.weight")
    assert weight.shape == (64, 32, 3, 3)
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "mobilenet_v2"])
def test_activations_work_out_of_place(name: str) -> None:
    relus = [m for m in build_model(name).modules() if isinstance(m, nn.ReLU | nn.ReLU6)]
    assert relus
    assert not any(relu.inplace for relu in relus)


def test_transformer_forward_and_backward() -> None:
    model = tiny_transformer(vocab=11, width=16, depth=3, heads=2, num_classes=5, max_length=9)
    tokens = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    assert logits.shape == (4, 5)
    assert model(tokens[:, :3]).shape == (4, 5)
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_transformer_attention_from_first_principles() -> None:
    """One head at a time, softmax written out, against the fused call."""
    torch.manual_seed(0)
    attention = tiny_transformer(width=12, heads=3).get_submodule("blocks.0.attention")
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = images(2, 5, 12)
    q, k, v = (attention.get_submodule(name)(x) for name in "qkv")
    heads = []
    for part in (slice(0, 4), slice(4, 8), slice(8, 12)):
        scores = (q[..., part] @ k[..., part].mT / 4**0.5).exp()
        heads.append(scores / scores.sum(-1, keepdim=True) @ v[..., part])
    expected = attention.get_submodule("proj")(torch.cat(heads, dim=-1))
    torch.testing.assert_close(attention(x), expected)


def test_transformer_sees_order_and_each_sequence_alone() -> None:
    model = tiny_transformer(max_length=6).eval()
    tokens = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    both = model(tokens)
    assert not torch.allclose(both[0], both[1], atol=1e-6)
    torch.testing.assert_close(model(tokens[:1]), both[:1])


def test_transformer_is_made_of_linears() -> None:
    owners = {type(m) for m in tiny_transformer().modules() if not list(m.children())}
    assert owners == {nn.Linear, nn.Embedding, nn.LayerNorm, nn.GELU}


def test_transformer_errors() -> None:
    with pytest.raises(ConfigError, match="width=10 does not divide into heads=4"):
        tiny_transformer(width=10, heads=4)
    with pytest.raises(ConfigError, match="5 tokens exceeds max_length=4"):
        tiny_transformer(max_length=4)(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize("name", MODELS)
def test_arguments_survive_json(name: str) -> None:
    """Every argument has a default that a JSON manifest can hold, and rebuilding accepts it."""
    defaults = {k: p.default for k, p in inspect.signature(MODELS[name]).parameters.items()}
    restored = json.loads(json.dumps(defaults))
    assert restored == defaults
    ours, again = build_model(name), build_model(name, **restored)
    again.load_state_dict(ours.state_dict(), strict=True)


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"'resnet21' is not known; choose one of: .*resnet20"):
        build_model("resnet21")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 3}, "'resnet20' takes no argument 'depth'; choose among: num_classes"),
        ({"width": 0}, "width=0 is not a size"),
        ({"width": 16.0}, "width=16.0 is not a size"),
        ({"width": True}, "width=True is not a number"),
        ({"width": "16"}, "width='16' is not a number"),
        ({"num_classes": None}, "num_classes=None is not a number"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model("resnet20", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"small_input": 1}, "small_input=1 is not a bool"),
        ({"width_mult": -0.5}, "width_mult=-0.5 is negative"),
        ({"width_mult": float("inf")}, "width_mult=inf is negative or not finite"),
        ({"width_mult": float("nan")}, "width_mult=nan is negative or not finite"),
    ],
)
def test_bad_mobilenet_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_model("mobilenet_v2", **arguments)


def test_integers_pass_for_floats() -> None:
    model = build_model("mobilenet_v2", width_mult=1, dropout=0)
    assert model(images(2, 3, 32, 32)).isfinite().all()
