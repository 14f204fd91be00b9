"""Max pools of codes in live models: where they stand in the graph, and that outputs stay those of `code_exact`.

Without kernels a graph has no such pools. Here it is made as if they were there, and the operator's reference runs. On
a GPU, and under Triton's interpreter (`test_interpreter.py`), the kernels do.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bitdial import BitPlan, QuantConfig, code_exact, load, prepare, save, set_bits
from bitdial.dial.dial import dialled_layers
from bitdial.graph.patterns import MAX_POOLS, max_pool
from bitdial.kernels.max_pool import run_max_pool
from bitdial.live.engines.integer import IntegerModel, graph
from bitdial.live.engines.integer.graph import Call
from bitdial.models.resnet import BasicBlock, Bottleneck, make_stage

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter
BITS = (8, 6, 4, 3, 2)
IMAGES = torch.randn(2, 3, 14, 13, generator=torch.Generator().manual_seed(3))

Pool = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def as_with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "missing_on", lambda device: None)


class Net(nn.Module):
    """A layer with norm and ReLU, a pool, what reads it, and a last layer."""

    def __init__(self, pool: Pool, rest: nn.Module | None = None) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        self.pool = pool
        self.rest = make_stage(Bottleneck, 16, 4, 1, stride=2) if rest is None else rest
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.rest(self.pool(self.relu(self.norm(self.conv(x)))))
        return self.head(x.amax(dim=(2, 3)))


class Readers(nn.Module):
    """Layers that read the same, and their sum."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(dim=0)


class Beside(nn.Module):
    """The value before the pool is read too: by layers, or as it is."""

    def __init__(self, direct: int, *, shared: bool = False, value: bool = False) -> None:
        super().__init__()
        self.conv, self.behind = nn.Conv2d(3, 16, 3, bias=False), nn.Conv2d(16, 5, 1)
        self.direct = nn.ModuleList([self.behind] if shared else (nn.Conv2d(16, 5, 1) for _ in range(direct)))
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv(x))
        y = self.behind(F.max_pool2d(x, 2))
        y = y.amax(dim=(2, 3)) + sum(layer(x).amax(dim=(2, 3)) for layer in self.direct)
        return torch.cat([y, x.amax(dim=(2, 3))], dim=1) if self.value else y


class ChangedInPlace(nn.Module):
    """The value changes after the pool has read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(F.max_pool2d(x, 3, 2, 1))
        x.mul_(-0.5)
        return y.amax(dim=(2, 3)) + x[:, :4].amax(dim=(2, 3))


WAYS: dict[str, Pool] = {
    "module": nn.MaxPool2d(3, 2, 1),
    "function": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "of torch": lambda x: torch.max_pool2d(x, (3, 2), (1, 2), (1, 0)),
    "by its kernel": lambda x: F.max_pool2d(x, [2]),
    "dilated": nn.MaxPool2d(2, 1, dilation=(2, 1)),
}


def make(build: Callable[[], nn.Module], path: Path, **settings: Any) -> tuple[IntegerModel, nn.Module]:
    """The live model on integer kernels and its exact evaluation, from a file at `path`; norms have seen something."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = build()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.2, 2)  # type: ignore[union-attr]
        save(prepare(model, QuantConfig(bit_choices=BITS, **{"keep_first_last": False} | settings), IMAGES), path)
    live, exact = (load(path, model, device=DEVICE, kernels=kind) for kind in ("integer", "float"))
    assert isinstance(live, IntegerModel)
    return live, code_exact(exact)


def pools(live: nn.Module) -> tuple[int, int]:
    """How many pools of codes, and of values, the graph has."""
    model = live._fused[0]
    kinds = [model.get_submodule(n.target) if n.op == "call_module" else n.target for n in model.graph.nodes]
    return kinds.count(run_max_pool), sum(isinstance(k, nn.MaxPool2d) or k in MAX_POOLS for k in kinds)


def calls(live: nn.Module) -> list[tuple[str, int, bool]]:
    model = live._fused[0]
    used = [model.get_submodule(node.target) for node in model.graph.nodes if node.op == "call_module"]
    return [(type(call).__name__, len(call.readers), call.keep_value) for call in used if isinstance(call, Call)]


def equal(live: nn.Module, exact: nn.Module, *settings: Any, x: Tensor = IMAGES) -> None:
    for setting in settings:
        for model in (live, exact):
            set_bits(model, setting)
        with torch.no_grad():
            assert torch.equal(live(x.to(DEVICE)), exact(x.to(DEVICE))), setting


# --- where they stand -----------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_the_call_before_the_pool_quantises_for_its_readers(way: str, tmp_path: Path) -> None:
    live, exact = make(lambda: Net(WAYS[way]), tmp_path / "m")
    assert pools(live) == (2, 0)  # for the first layer of the block and for its shortcut
    assert calls(live)[:2] == [("ValueCall", 1, False), ("LayerCall", 2, False)]
    equal(live, exact, 8, 3)


def test_a_pool_whose_result_is_also_added_stays(tmp_path: Path) -> None:
    live, exact = make(lambda: Net(WAYS["module"], make_stage(BasicBlock, 16, 16, 1, stride=1)), tmp_path / "m")
    assert pools(live) == (0, 1)
    assert calls(live)[:3] == [("ValueCall", 1, False), ("LayerCall", 0, True), ("ValueCall", 1, False)]
    equal(live, exact, 8, 3)


@pytest.mark.parametrize(("readers", "expected"), [(1, (1, 0)), (2, (2, 0)), (3, (0, 1))])
def test_up_to_two_readers(readers: int, expected: tuple[int, int], tmp_path: Path) -> None:
    live, exact = make(lambda: Net(WAYS["module"], Readers(readers)), tmp_path / "m")
    assert pools(live) == expected
    equal(live, exact, 8, 3)


@pytest.mark.parametrize(
    ("build", "expected", "call"),
    [
        (lambda: Beside(1), (1, 0), ("LayerCall", 2, False)),
        (lambda: Beside(2), (0, 1), ("LayerCall", 2, True)),
        (lambda: Beside(1, shared=True), (1, 0), ("LayerCall", 1, False)),  # one layer reads both
        (lambda: Beside(0, value=True), (1, 0), ("LayerCall", 1, True)),
    ],
)
def test_values_that_others_read_too(
    build: Callable[[], nn.Module], expected: tuple[int, int], call: tuple[str, int, bool], tmp_path: Path
) -> None:
    live, exact = make(build, tmp_path / "m")
    assert pools(live) == expected
    assert calls(live)[1] == call
    equal(live, exact, 8, 3)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.MaxPool2d(2, 1, padding=1, dilation=2),  # a window over the edge of a small image may hold no pixel
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: F.max_pool2d(x, x.shape[-1] // 2),
        lambda x: torch.max_pool2d(input=x, kernel_size=2),
        nn.AvgPool2d(2),
        nn.Sequential(nn.MaxPool2d(2), nn.BatchNorm2d(16)),
    ],
)
def test_other_pools_and_other_readers_stay(pool: Pool, tmp_path: Path) -> None:
    live, exact = make(lambda: Net(pool), tmp_path / "m")
    assert pools(live)[0] == 0
    equal(live, exact, 8, 3)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2, return_indices=True),
        nn.MaxPool2d(2, padding=2),  # PyTorch refuses it when it runs
        nn.MaxPool2d(0),
        nn.MaxPool2d((2, 2, 2)),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_plain_max_pool(pool: nn.MaxPool2d) -> None:
    traced = fx.symbolic_trace(nn.Sequential(nn.MaxPool2d((2, 3), padding=(1, 0)), pool))
    plain, other = (node for node in traced.graph.nodes if node.op == "call_module")
    assert max_pool(traced, plain) == ([2, 3], [2, 3], [1, 0], [1, 1])
    assert max_pool(traced, other) is None


def test_a_pool_behind_something_else_stays(tmp_path: Path) -> None:
    live, exact = make(lambda: Net(lambda x: F.max_pool2d(torch.tanh(x), 2)), tmp_path / "m")
    assert pools(live) == (0, 1)
    equal(live, exact, 8, 3)


def test_codes_are_taken_where_they_are_used_if_values_change_in_place(tmp_path: Path) -> None:
    live, exact = make(ChangedInPlace, tmp_path / "m")
    assert pools(live) == (0, 1)
    equal(live, exact, 8, 3)


def test_without_kernels_values_are_pooled_and_a_move_looks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, exact = make(lambda: Net(WAYS["module"]), tmp_path / "m")
    for missing, expected in (("it is no GPU", (0, 1)), (None, (2, 0))):
        monkeypatch.setattr(graph, "missing_on", lambda device, missing=missing: {DEVICE: missing}[device.type])
        live.to(DEVICE)
        assert pools(live) == expected
        equal(live, exact, 8, 3)


# --- what they give -------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_first_last", [False, True])
@pytest.mark.parametrize("activations", ["unsigned", "signed", "asymmetric"])
@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_outputs_are_exact_at_every_width(scheme: str, activations: str, keep_first_last: bool, tmp_path: Path) -> None:
    settings = {"scheme": scheme, "activations": activations, "keep_first_last": keep_first_last}
    live, exact = make(lambda: Net(WAYS["module"]), tmp_path / "m", **settings)
    assert pools(live) == (2, 0)
    rng = random.Random(0)
    plans = [BitPlan({name: (rng.choice(BITS), rng.choice(BITS)) for name in dialled_layers(exact)}) for _ in range(2)]
    equal(live, exact, *BITS, (2, 8), *plans, 8)


def test_one_image_without_a_batch(tmp_path: Path) -> None:
    live, exact = make(
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 4, 1)), tmp_path / "m"
    )
    assert pools(live) == (1, 0)
    equal(live, exact, 4, x=IMAGES[0])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter does not know fake tensors")
@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_torch_compile(scheme: str, tmp_path: Path, fresh_compiler: None) -> None:
    live, exact = make(lambda: Net(WAYS["function"]), tmp_path / "m", scheme=scheme)
    assert pools(live) == (2, 0)
    equal(torch.compile(live, backend="aot_eager", fullgraph=True), exact, 4, 8, 4)
