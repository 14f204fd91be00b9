"""What a model computes, as text: the same for models that compute the same, and nothing is left behind."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import QuantConfig, prepare
from bitdial.graph import operations as module
from bitdial.graph.operations import operations


class Net(nn.Module):
    """A residual network whose forward is `run`."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.stem, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 4)
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.act, self.drop, self.pool = nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.AvgPool2d(2)
        self.gain = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    y = m.act(m.norm(m.a(x)))
    y = F.dropout(m.b(y) * m.gain, 0.1, training=m.training)
    return m.head(m.pool(m.drop(y + x)).mean(dim=(2, 3), keepdim=False))


def written_otherwise(m: Any, x: Tensor) -> Tensor:
    """The same by other means: in place, other keywords, without dropout."""
    x = m.stem(x)
    y = m.b(F.relu(m.norm(m.a(x)), inplace=True)) if m.act is None else m.b(m.act(m.norm(m.a(x))))
    y = y.mul_(m.gain)
    y += x
    return m.head(m.pool(y).mean(keepdim=False, dim=(2, 3)))


def swapped(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    y = m.act(m.norm(m.b(x)))
    return m.head(m.pool(m.a(y) * m.gain + x).mean(dim=(2, 3), keepdim=False))


def other_residual(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    y = z = m.act(m.norm(m.a(x)))
    return m.head(m.pool(m.b(y) * m.gain + z).mean(dim=(2, 3), keepdim=False))


def without_relu(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    return m.head(m.pool(m.b(m.norm(m.a(x))) * m.gain + x).mean(dim=(2, 3), keepdim=False))


def other_number(m: Any, x: Tensor) -> Tensor:
    x = m.stem(x)
    y = m.act(m.norm(m.a(x)))
    return m.head(m.pool(m.b(y) * m.gain + x).mean(dim=(1, 2), keepdim=False))


PLAIN = [
    "'stem'(in0; kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), output_padding=(0, 0), dilation=(1, 1), groups=1, "
    "padding_mode='zeros')",
    "'a'(%0)",
    "'norm'(%1)",
    "ReLU(%2)",
    "'b'(%3)",
    "mul(%4, 'gain')",
    "add(%5, %0)",
    "AvgPool2d(%6; kernel_size=2, stride=2, padding=0, ceil_mode=False, count_include_pad=True)",
    "mean(%7, dim=(2, 3), keepdim=False)",
    "'head'(%8)",
    "output(%9)",
]
LEAVES = ("a", "b", "norm")


def test_what_is_written() -> None:
    assert operations(Net(plain), LEAVES) == PLAIN
    assert operations(Net(written_otherwise), LEAVES) == PLAIN
    for other in (swapped, other_residual, without_relu, other_number):
        found = operations(Net(other), LEAVES)
        assert found is not None, other
        assert found != PLAIN, other
    strided = Net(plain)
    strided.pool = nn.AvgPool2d(2, stride=1)
    assert operations(strided, LEAVES) != PLAIN


def test_a_prepared_model_is_its_float_one() -> None:
    model = Net(plain)
    ready = prepare(model, QuantConfig(start="3std"), torch.rand(2, 2, 6, 6))
    assert type(ready.a) is not type(model.a)
    assert operations(ready, LEAVES) == operations(ready.train(), LEAVES) == operations(model.eval(), LEAVES) == PLAIN


def test_subclasses_are_not_looked_into() -> None:
    """What prepare replaces may be of any class that is derived from PyTorch's, or of one that a table names."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = nn.Sequential(Scaled(3, 3), nn.Sequential(Foreign()))
    assert operations(model, ("1.0",)) == ["'0'(in0)", "'1.0'(%0)", "output(%1)"]
    assert operations(model) == ["'0'(in0)", "matmul(%0, '1.0.weight')", "output(%1)"]


def test_arguments_that_need_not_be_given() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None, *more: Tensor, scale: float = 2.0) -> Any:
            x = x * scale
            return {"y": x if mask is None else x * mask, "none": None, "parts": [x[:, 1:, ...].shape[0], more]}

    assert operations(Masked()) == [
        "mul(in0, 2.0)",
        "getitem(%0, (None:None:None, 1:None:None, Ellipsis))",
        "getattr(%1, 'shape')",
        "getitem(%2, 0)",
        "output((none=None, parts=(%3, ()), y=%0))",
    ]


def branches(m: Any, x: Tensor) -> Tensor:
    return m.stem(x) if x.sum() > 0 else x


def loops(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.stem(image) for image in x])


def fails(m: Any, x: Tensor) -> Tensor:
    raise RecursionError


def goes_on(m: Any, x: Tensor) -> Tensor:
    for _ in range(10**9):
        x = x + 1
    return x


@pytest.mark.parametrize("run", [branches, loops, fails, goes_on])
def test_what_cannot_be_followed(run: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OPERATIONS", 500)
    assert operations(Net(run)) is None


def test_what_cannot_be_copied_is_not_followed() -> None:
    model = Net(plain)
    model.lock = threading.Lock()
    assert operations(model) is None


def test_nothing_is_left_behind() -> None:
    """No mode, attribute, hook call or random number changes, also if it fails in between."""

    def careless(m: Any, x: Tensor) -> Tensor:
        m.calls.append(x)
        m.last = x
        m.seen.add_(1)
        m.training = False
        torch.rand(3)
        return plain(m, x)

    def called(*_: Any) -> None:
        raise AssertionError

    for fail in (False, True):
        model = Net(lambda m, x, fail=fail: fails(m, careless(m, x)) if fail else careless(m, x)).train()
        model.calls = []
        model.register_forward_hook(called)
        model.a.register_forward_pre_hook(called)
        before = {name: (vars(m).copy(), copy.copy(m._parameters)) for name, m in model.named_modules()}
        values = {name: t.clone() for name, t in model.state_dict().items()}
        torch.manual_seed(1)
        random_state = torch.get_rng_state()
        original = nn.Module.__call__, nn.Module.__getattr__
        assert (operations(model) is None) == fail
        assert (nn.Module.__call__, nn.Module.__getattr__) == original
        assert torch.equal(torch.get_rng_state(), random_state)
        assert model.calls == []
        assert {name: (vars(m), m._parameters) for name, m in model.named_modules()} == before
        assert all(torch.equal(t, values[name]) for name, t in model.state_dict().items())


def test_other_threads_are_not_disturbed() -> None:
    """torch.fx would change nn.Module itself meanwhile."""
    model, x, problems = Net(plain).eval(), torch.rand(2, 2, 6, 6), []
    wanted, running = model(x), threading.Event()

    def serve() -> None:
        while not running.is_set():
            try:
                if not torch.equal(model(x), wanted):
                    problems.append("another output")
            except Exception as problem:
                problems.append(repr(problem))

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(100):
        assert operations(model, LEAVES) == PLAIN
    running.set()
    thread.join(30)
    assert problems == []
