"""Layers that read one tensor: their one product, and every way to call them in which it must not be made."""

import copy
import gc
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    at_bits,
    code_exact,
    load,
    prepare,
    resident_bytes,
    save,
    set_bits,
    view_at_bits,
)
from bitdial.kernels.cpu.digits import products_are_exact
from bitdial.live.engines.packed import engine, joined
from bitdial.live.engines.packed.joined import Joined

LOADING = importlib.import_module("bitdial.live.load")  # by that name the package has the function
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTHS = (8, 4, 3, 2)
SETTINGS: dict[str, Any] = {"activations": "float", "bit_choices": WIDTHS, "keep_first_last": False, "start": "max"}
MIXED = BitPlan({"k": 2, "up": (3, 8)}, default=8)
same_sums = pytest.mark.skipif(
    DEVICE != "cpu" or not products_are_exact(), reason="elsewhere sums are in an order that the shape decides"
)


class Block(nn.Module):
    """Attention without the softmax, and a gated part: (q, k, v) read one tensor, (gate, up) another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 48), nn.Linear(64, 16), nn.Linear(64, 16)
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.odd, self.down = nn.Linear(64, 41), nn.Linear(96, 64, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        x = x + torch.cat([q * k.repeat(1, 1, 3), v], dim=-1)
        y = self.norm(x)
        z = self.gate(y).sigmoid() * self.up(y)
        return self.down(z) + self.odd(y).mean()


GROUPS = [("q", "k", "v"), ("gate", "up")]


@pytest.fixture(scope="module")
def block() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Block().eval()


@pytest.fixture(scope="module")
def file(block: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The block, saved with weights only quantised; keywords go to QuantConfig."""
    made: dict[str, Path] = {}

    def make(scheme: str, **config: Any) -> Path:
        key = f"{scheme} {config}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("joined") / "m.safetensors"
            save(prepare(block, QuantConfig(scheme=scheme, **SETTINGS, **config), tokens(3)), made[key])
        return made[key]

    return make


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(1, count, 64, generator=torch.Generator().manual_seed(seed))


def loaded(path: Path, block: nn.Module, *, apart: bool = False, **options: Any) -> nn.Module:
    """On packed kernels; `apart` without any layers that are joined."""
    with pytest.MonkeyPatch.context() as patched:
        if apart:
            patched.setattr(LOADING, "shared_inputs", lambda model, names: [])
        return load(path, block, kernels="packed", device=DEVICE, **{"dtype": torch.bfloat16, **options})


@contextmanager
def counted() -> Iterator[list[int]]:
    """The rows of each product that is made meanwhile."""
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        for module in (engine, joined):

            def product(x: Tensor, *how: Any, real: Any = module.product) -> Tensor:
                made.append(len(how[1]))
                return real(x, *how)

            patched.setattr(module, "product", product)
        yield made


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x.to(DEVICE, model.norm.weight.dtype)).cpu()  # type: ignore[union-attr]


def words(model: nn.Module, name: str) -> Tensor:
    return model.get_submodule(name).codes.source.words  # type: ignore[union-attr, return-value]


def lie_together(model: nn.Module) -> bool:
    """Whether the words of each group are one piece of memory without a gap, and nothing else is in it."""
    for names in GROUPS:
        parts = [words(model, name) for name in names]
        at = [part.data_ptr() for part in parts]
        ends = [part.data_ptr() + part[0].nbytes for part in parts]
        if at[1:] != ends[:-1] or any(part.stride(0) * 4 != ends[-1] - at[0] for part in parts):
            return False
    return True


# --- numbers --------------------------------------------------------------------------------------


@same_sums
@pytest.mark.parametrize(
    ("scheme", "config"), [("nested", {}), ("double_rounding", {}), ("centred", {"group_size": 32})]
)
def test_outputs_are_those_of_layers_by_themselves(
    file: Callable[..., Path], block: nn.Module, scheme: str, config: dict[str, Any]
) -> None:
    """Bit for bit, by two products in the place of five, at one width and by a plan, for one token and many."""
    path, dtype = file(scheme, **config), torch.float16 if config else torch.bfloat16
    one, several = (loaded(path, block, apart=apart, dtype=dtype) for apart in (False, True))
    assert lie_together(one)
    for setting in (8, 3, MIXED, 3):
        for model in (one, several):
            set_bits(model, setting)
        for count in (1, 20):
            x = tokens(count).to(dtype)
            with counted() as made:
                found = run(one, x)
            wanted = [48, 16, 16, 96, 96] if setting is MIXED else [80, 192]
            assert made == [*wanted, 64, 41], (setting, count)
            assert torch.equal(found, run(several, x)), (setting, count)


@pytest.mark.interpreter(only=True)
def test_outputs_of_kernels_are_those_of_layers_by_themselves(file: Callable[..., Path], block: nn.Module) -> None:
    one, several = (loaded(file("double_rounding"), block, apart=apart) for apart in (False, True))
    for setting in (3, BitPlan({"k": 2}, default=3)):
        for model in (one, several):
            set_bits(model, setting)
        for count in (2, 17):
            x, sizes = tokens(count).bfloat16().to(DEVICE), [48, 16, 16] if setting != 3 else [80]
            with counted() as made, torch.no_grad():
                found = [layer(x) for layer in (one.q, one.k, one.v)]
            assert made == sizes
            with torch.no_grad():
                for y, layer in zip(found, (several.q, several.k, several.v), strict=True):
                    torch.testing.assert_close(y, layer(x), rtol=0 if INTERPRETED else 1e-2, atol=0)


@same_sums
def test_autocast_and_gradients(file: Callable[..., Path], block: nn.Module) -> None:
    one, several = (loaded(file("nested"), block, apart=apart, dtype=None) for apart in (False, True))
    x = tokens(2)
    with torch.autocast(DEVICE, dtype=torch.bfloat16), counted() as made:
        assert torch.equal(run(one, x), run(several, x))
    assert 80 in made
    with counted() as made:
        y = one(x.requires_grad_())
        assert y.requires_grad
        assert torch.equal(y, several(x))
    assert 80 not in made, "where a gradient may be asked for, layers are by themselves"
    with torch.inference_mode(), counted() as made:
        found = one(tokens(2))
    assert 80 not in made, "changes of such tensors are not counted"
    assert torch.equal(found, y.detach())


# --- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["nested", "double_rounding"])
def test_memory_is_that_of_layers_by_themselves(file: Callable[..., Path], block: nn.Module, scheme: str) -> None:
    one, several = (loaded(file(scheme), block, apart=apart) for apart in (False, True))
    before = {part: resident_bytes(one)[part] for part in ("active", "master")}
    assert before == {part: resident_bytes(several)[part] for part in ("active", "master")}
    scales = 4 * (48 + 2 * 16 + 2 * 96)
    assert 0 <= resident_bytes(one)["other"] - resident_bytes(several)["other"] <= scales + 8 * 7
    for setting in (8, MIXED, 4, MIXED, 8):
        for model in (one, several):
            set_bits(model, setting)
            run(model, tokens(1))
        assert resident_bytes(one)["active"] == resident_bytes(several)["active"], "no layouts of both kinds"


@same_sums
@pytest.mark.parametrize("scheme", ["nested", "double_rounding"])
def test_copies_moves_and_states(file: Callable[..., Path], block: nn.Module, scheme: str) -> None:
    x, model = tokens(1), loaded(file(scheme), block)
    wanted = {}
    for bits in (2, 4, 8):
        set_bits(model, bits)
        wanted[bits] = run(model, x)
    twin, view = copy.deepcopy(model), view_at_bits(model, 4)
    assert lie_together(twin)
    assert words(twin, "k").data_ptr() != words(model, "k").data_ptr()
    assert torch.equal(run(view, x), wanted[4])
    if scheme == "nested":
        assert words(view, "k").data_ptr() == words(model, "k").data_ptr()
    set_bits(twin, 2)
    with counted() as made:
        assert torch.equal(run(twin, x), wanted[2])
        assert torch.equal(run(model, x), wanted[8])
    assert made.count(80) == 2
    places = {words(model, name).data_ptr() for names in GROUPS for name in names}
    model._apply(lambda tensor: tensor.clone())  # as a move to another device does
    if scheme == "nested":
        assert not places & {words(model, name).data_ptr() for names in GROUPS for name in names}
    with counted() as made:
        assert torch.equal(run(model, x), wanted[8])
    assert 80 in made
    assert lie_together(model)
    model.to(DEVICE)
    assert torch.equal(run(view, x), wanted[4])


@same_sums
def test_a_state_that_is_loaded_counts(file: Callable[..., Path], block: nn.Module, tmp_path: Path) -> None:
    other = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) / 8)
    save(prepare(other, QuantConfig(scheme="nested", **SETTINGS), tokens(3)), tmp_path / "m")
    source, x = loaded(tmp_path / "m", block), tokens(2)
    for assign in (False, True):
        model = loaded(file("nested"), block)
        before = run(model, x)
        assert model.state_dict().keys() == loaded(file("nested"), block, apart=True).state_dict().keys()
        model.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign)
        assert torch.equal(run(model, x), run(source, x)), assign
        assert not torch.equal(run(model, x), before)
        part = {key: value.clone() for key, value in loaded(file("nested"), block).k.state_dict().items()}
        model.k.load_state_dict(part, assign=assign)
        with at_bits(source, 8):
            mine = copy.deepcopy(source)
            mine.k.load_state_dict(part)
        assert torch.equal(run(model, x), run(mine, x)), "one of them alone"


def test_exact_sums_are_those_of_float_kernels(file: Callable[..., Path], block: nn.Module) -> None:
    plain, packed = load(file("nested"), block, device=DEVICE), loaded(file("nested"), block, dtype=None)
    set_bits(packed, MIXED)
    run(packed, tokens(1))
    exact, other = code_exact(plain), code_exact(packed)
    for setting in (4, MIXED):
        set_bits(exact, setting)
        set_bits(other, setting)
        assert torch.equal(run(exact, tokens(2)), run(other, tokens(2)))


# --- who is called, and with what -----------------------------------------------------------------


@same_sums
def test_layers_that_are_called_otherwise_multiply_by_themselves(file: Callable[..., Path], block: nn.Module) -> None:
    """Alone, in another order, twice, with other tensors, with one that was changed, and hooks that change it."""
    one, several = (loaded(file("nested"), block, apart=apart) for apart in (False, True))
    x, y = tokens(1).bfloat16().to(DEVICE), tokens(1, seed=1).bfloat16().to(DEVICE)

    def same(*calls: tuple[str, Tensor]) -> None:
        with torch.no_grad():
            found = [one.get_submodule(name)(given).clone() for name, given in calls]
            wanted = [several.get_submodule(name)(given) for name, given in calls]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), [name for name, _ in calls]

    same(("k", x))
    same(("v", x), ("k", x), ("q", x))
    same(("q", x), ("k", y), ("v", x), ("k", x))
    same(("q", x), ("q", y), ("k", x), ("v", y), ("v", y))
    same(("q", x), ("k", x.clone()), ("v", x[:]))
    with torch.no_grad():
        for change in (lambda: x.add_(1), lambda: x.copy_(y), lambda: set_bits(one, 4)):
            one.q(x)
            change()
            set_bits(several, 4 if one.k.weight_bits == 4 else 8)
            assert torch.equal(one.k(x), several.k(x))
    set_bits(one, 8)
    set_bits(several, 8)
    for hook in (lambda module, args: (args[0] * 2,), lambda module, args: (args[0].mul_(2),)):
        handles = [model.k.register_forward_pre_hook(hook) for model in (one, several)]
        z = tokens(1, seed=2).bfloat16()
        assert torch.equal(run(one, z.clone()), run(several, z.clone()))
        for handle in handles:
            handle.remove()


class Adapter(nn.Module):
    """A layer with a small other one beside it, in its place, as LoRA has it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.beside = layer, nn.Linear(64, 16, bias=False).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.beside(x)


@same_sums
def test_adapters_and_other_modules_in_the_place_of_a_layer(file: Callable[..., Path], block: nn.Module) -> None:
    one, several = (loaded(file("nested"), block, apart=apart) for apart in (False, True))
    adapter = Adapter(one.k)
    one.k, several.k = adapter, Adapter(several.k)
    several.k.beside = adapter.beside
    x = tokens(2).bfloat16()
    with counted() as made:
        assert torch.equal(run(one, x), run(several, x))
    assert 80 in made
    one.k = several.k = adapter.beside
    assert torch.equal(run(one, x), run(several, x))


def test_nothing_is_held_once_the_input_is_gone(file: Callable[..., Path], block: nn.Module) -> None:
    model = loaded(file("nested"), block)
    group: Joined = model.q.engine.joined
    run(model, tokens(1))
    assert group._held is None, "all have taken their parts"
    with torch.no_grad():
        x = tokens(1).bfloat16().to(DEVICE)
        model.q(x)
        assert group._held is not None
        del x
        gc.collect()
        assert group._held is None
        model.q(tokens(1).bfloat16().to(DEVICE))
        assert group._held is None


@same_sums
def test_threads_on_views_and_on_one_model(file: Callable[..., Path], block: nn.Module) -> None:
    model = loaded(file("nested"), block)
    views = {bits: view_at_bits(model, bits) for bits in (8, 2)}
    inputs = [tokens(1, seed).bfloat16() for seed in range(4)]
    wanted = {bits: [run(view, x) for x in inputs] for bits, view in views.items()}
    wrong: list[tuple[int, int]] = []

    def serve(number: int, bits: int, used: nn.Module) -> None:
        for i in range(60):
            which = (i + number) % 4
            if not torch.equal(run(used, inputs[which]), wanted[bits][which]):
                wrong.append((number, i))

    jobs = [(8, views[8]), (2, views[2]), (8, model), (8, model)]
    threads = [threading.Thread(target=serve, args=(n, *job)) for n, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_as_a_whole_graph(file: Callable[..., Path], block: nn.Module) -> None:
    model = loaded(file("nested"), block)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for setting in (8, MIXED):
        set_bits(compiled, setting)
        assert torch.equal(run(compiled, tokens(2).bfloat16()), run(model, tokens(2).bfloat16())), setting
