"""The fast path of training: whole networks through fused nodes, and models that it leaves as they are.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import QuantConfig, build_model, prepare, set_bits
from bitdial.kernels import dispatch
from bitdial.kernels import training as fused
from bitdial.models.resnet import Bottleneck
from bitdial.train.gpu.fuse import FastModel, FusedConv, FusedNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def float32_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 makes differences visible that 16 bits would hide; TF32 would bring some in."""
    monkeypatch.setattr(fused, "CONVOLUTION_TYPES", (torch.float32,))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE).to(memory_format=LAST)


def close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    size = float(expected.detach().abs().max()) + 1e-12
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * size)


class Awkward(nn.Module):
    """Branches that only some fusions fit: shared norms' outputs, additions of numbers, a ReLU in between, no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.one, self.one_norm = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.two = nn.Conv2d(16, 16, 3, padding=1)  # a bias, and no norm behind it
        self.depthwise, self.depthwise_norm = nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.stem_norm(self.stem(x)))
        a = self.one_norm(self.one(x))
        b = self.two(F.relu6(a) + 1.0)
        c = self.depthwise_norm(self.depthwise(F.relu(a + b)))
        c += x
        d = c + c.relu()
        return self.head((d + x).mean(dim=(2, 3)))


NETWORKS = {
    "resnet": lambda: build_model("cifar_resnet", blocks=1, width=4),
    "bottlenecks": lambda: nn.Sequential(Bottleneck(16, 8), Bottleneck(32, 8), Bottleneck(32, 8)),
    "mobilenet": lambda: build_model("mobilenet_v2", num_classes=5, width_mult=0.25, dropout=0.0).features[:4],
    "awkward": Awkward,
}


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    "name, scheme, activations",
    [
        *((name, "nested", "float") for name in NETWORKS),
        ("resnet", "double_rounding", "auto"),
        ("resnet", "adabits", "auto"),
        ("awkward", "lsq", "auto"),
    ],
)
def test_a_network_trains_the_same(name: str, scheme: str, activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    network = NETWORKS[name]().to(DEVICE, memory_format=LAST)
    x = normal(2, 16, 5, 5, seed=13) if name == "bottlenecks" else normal(2, 3, 8, 8, seed=13)
    config = QuantConfig(scheme=scheme, bit_choices=(8, 4), activations=activations)
    model = prepare(network, config, x).train()
    twin = copy.deepcopy(model)
    fast = FastModel(model, fused=True)
    kinds = [type(module) for module in fast.model.modules()]
    assert FusedConv in kinds
    assert FusedNorm in kinds
    for bits in (8, 4):
        set_bits(model, bits)
        set_bits(twin, bits)
        mine = fast(x)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "triton_installed", lambda: False)
            theirs = twin(x)
            grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(14)).to(DEVICE)
            (theirs * grad).sum().backward()
        fast.backward((mine * grad).sum())
        pairs = list(zip(model.named_parameters(), twin.parameters(), strict=True))
        for (key, parameter), other in pairs:
            assert (parameter.grad is None) == (other.grad is None), key
        got, wanted = (
            torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (model, twin)
        )
        if activations == "float":
            close(mine, theirs, tolerance=1e-4)
            assert float(F.cosine_similarity(got, wanted, dim=0)) > 0.999  # a ReLU at 0 may fall to either side too
        else:  # an activation at the edge of a code may fall to the other side, and what is behind it then differs
            assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < 0.01
            assert float(F.cosine_similarity(got, wanted, dim=0)) > 0.99
        for key, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, twin.get_buffer(key), rtol=1e-3, atol=1e-5)
        model.zero_grad()
        twin.zero_grad()


def test_a_model_that_cannot_be_traced_is_called_as_it_is() -> None:
    class Dynamic(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if bool(x.sum() > 0) else -super().forward(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Dynamic(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) if x.sum() > 0 else x

    model = Outer()
    assert FastModel(model, fused=True).model is model


def test_a_model_in_eval_mode_is_traced_as_it_trains() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.dropout(x, 0.5, training=self.training))

    model = Dropping().eval()
    model.head.train()
    fast = FastModel(model, fused=True)
    assert (model.training, model.head.training) == (False, True), "modes stay what they were"
    model.train()
    x = torch.ones(1, 64)
    assert not torch.equal(fast(x), fast(x))


def test_a_model_with_hooks_is_called_as_it_is() -> None:
    model = build_model("cifar_resnet", blocks=1, width=4)
    model.layer1.register_forward_hook(lambda *_: None)  # type: ignore[union-attr, operator]
    assert FastModel(model, fused=True).model is model


def test_a_hook_on_a_gradient_counts_too() -> None:
    model = build_model("cifar_resnet", blocks=1, width=4)
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    assert FastModel(model, fused=True).model is model


def test_layers_called_by_keyword_and_filters_of_other_ranks_stay() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
            self.deep = nn.Conv3d(1, 2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(input=self.conv(input=x)).mean() + self.deep(torch.ones(1, 1, 3, 3, 3)).mean()

    model = Keywords()
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(15))
    expected = copy.deepcopy(model)(x)
    fast = FastModel(model, fused=True)
    assert fast.model is not model
    close(fast(x), expected, tolerance=1e-5)
    assert model.conv.weight.is_contiguous(memory_format=LAST)
