"""Several widths at once from one set of codes, on every engine, and threads that serve them."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import BitPlan, QuantConfig, at_bits, code_exact, get_bits, load, prepare, save, set_bits, view_at_bits
from bitdial import resident_bytes as resident
from bitdial.dial.dial import SWITCHBOARD, unwrap
from bitdial.errors import ConfigError
from bitdial.nn import SwitchableBatchNorm

WIDTHS = (8, 4, 2)
IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
MIXED = BitPlan({"body.0": 2}, default=(4, 8))


def convolutions() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)]
            self.body, self.head = nn.Sequential(*layers), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.first(self.stem(x)))
            return self.head((self.body(x) + x).mean(dim=(2, 3)))

    return Net()


def linear() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64, bias=False), nn.ReLU())


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Callable[[], nn.Module], Tensor]]:
    """By name: how a live model is loaded, and a batch for it."""
    folder = tmp_path_factory.mktemp("views")

    def written(name: str, model: nn.Module, x: Tensor, **config: Any) -> Path:
        ready = prepare(model, QuantConfig(bit_choices=WIDTHS, start="3std", **config), x)
        generator = torch.Generator().manual_seed(2)
        for module in ready.modules():
            if isinstance(module, SwitchableBatchNorm):  # a set for each width, as training leaves them
                for each in module.sets.values():
                    each.running_mean.copy_(torch.rand(8, generator=generator))
        save(ready, folder / name)
        return folder / name

    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, odd = (written(scheme, convolutions(), IMAGES, scheme=scheme) for scheme in ("double_rounding", "lsq"))
        weights = {"activations": "float", "keep_first_last": False}
        nested = written("nested", linear(), ROWS, scheme="nested", **weights)
        rounded = written("rounded", linear(), ROWS, scheme="double_rounding", **weights)
    packed = {"kernels": "packed", "dtype": torch.float16}
    halves = ROWS.half()
    return {
        "float": (lambda: load(images, convolutions()), IMAGES),
        "exact": (lambda: code_exact(load(images, convolutions())), IMAGES),
        "integer": (lambda: load(images, convolutions(), kernels="integer"), IMAGES),
        "integer, lsq": (lambda: load(odd, convolutions(), kernels="integer"), IMAGES),
        "packed, nested": (lambda: load(nested, linear(), **packed), halves),
        "packed, rounded": (lambda: load(rounded, linear(), **packed), halves),
        "packed, host": (lambda: load(rounded, linear(), master="host", **packed), halves),
    }


def outputs(live: nn.Module, x: Tensor, settings: tuple[Any, ...] = WIDTHS) -> dict[Any, Tensor]:
    found = {}
    for setting in settings:
        with at_bits(live, setting), torch.no_grad():
            found[setting] = live(x)
    assert len({tuple(y.flatten().tolist()) for y in found.values()}) == len(settings), "each width differs"
    return found


@pytest.mark.usefixtures("one_thread")
def test_a_view_has_its_own_dial(engines: dict[str, Any]) -> None:
    for name, (make, x) in engines.items():
        live = make()
        wanted = outputs(live, x)
        set_bits(live, 4)
        views = {bits: view_at_bits(live, bits) for bits in WIDTHS}
        of_view = view_at_bits(views[2], 8)
        for bits, view in views.items():
            assert type(view) is type(live)
            assert torch.equal(view(x), wanted[bits]), (name, bits)
        for bits in WIDTHS:
            set_bits(views[8], bits)
            assert torch.equal(views[8](x), wanted[bits]), (name, bits)
            assert torch.equal(views[2](x), wanted[2]), (name, bits)
            assert torch.equal(live(x), wanted[4]), (name, bits)
            assert torch.equal(of_view(x), wanted[8]), (name, bits)
        set_bits(live, 2)
        assert torch.equal(views[4](x), wanted[4]), name
        assert {bits for bits, _ in get_bits(views[4]).values()} == {4}
    live = engines["integer"][0]()
    wanted = outputs(live, IMAGES, (8, MIXED))
    assert torch.equal(view_at_bits(nn.DataParallel(live).cpu(), MIXED)(IMAGES), wanted[MIXED]), (
        "also of a wrapped model"
    )
    assert torch.equal(live(IMAGES), wanted[8])


def own_operands(view: nn.Module) -> dict[str, list[Tensor]]:
    """What docs/api.md says that a view has for itself, by engine."""
    board: Any = getattr(unwrap(view), SWITCHBOARD, None)
    pool: Any = getattr(board, "pool", None)
    layers: list[Any] = [layer for layer in view.modules() if hasattr(type(layer), "select_bits")]
    return {
        "float": [layer.engine.active for layer in layers if hasattr(layer.engine, "active")],
        "exact": [],
        "integer": [] if board is None or pool is not None else [board.active, board.words, board._wanted],
        "packed, nested": [],
        "packed, rounded": [] if pool is None else [pool.active, pool._bits, pool._held],
        "packed, host": [] if pool is None else [pool.active, pool._bits, pool._held, getattr(pool, "_staging", None)],
    }


def test_what_a_view_costs(engines: dict[str, Any]) -> None:
    for name in ("float", "exact", "integer", "packed, nested", "packed, rounded", "packed, host"):
        live = engines[name][0]()
        view = view_at_bits(live, 2)
        mine, theirs = memory(live), memory(view)
        expected = [tensor.untyped_storage() for tensor in own_operands(view)[name]]
        assert {place: size for place, size in theirs.items() if place not in mine} == {
            storage.data_ptr(): storage.nbytes() for storage in expected
        }, name
        assert bool(expected) == (name not in ("exact", "packed, nested")), name
        assert resident(view) == resident(live), name


def memory(model: nn.Module) -> dict[int, int]:
    """Bytes by where they begin: of all tensors of the model, and of its switchboard."""
    board = getattr(unwrap(model), SWITCHBOARD, None)
    held = [] if board is None else [*vars(board).values(), *vars(getattr(board, "pool", board)).values()]
    tensors = [*model.parameters(), *model.buffers(), *(value for value in held if isinstance(value, Tensor))]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


@pytest.mark.usefixtures("one_thread")
def test_moving_one_leaves_the_others(engines: dict[str, Any]) -> None:
    """PyTorch moves parameters in place, which would take those of the others along.

    To clone every tensor is what a move does, without another device. The moved one shares nothing any more.
    """
    for name, (make, x) in engines.items():
        live = make()
        wanted = outputs(live, x)
        view, other = view_at_bits(live, 4), view_at_bits(live, 8)
        places = {parameter.data_ptr() for parameter in live.parameters()}
        view._apply(lambda t: t.clone())
        assert places == {parameter.data_ptr() for parameter in live.parameters()}, name
        assert not places & {parameter.data_ptr() for parameter in view.parameters()}, name
        for model, bits in ((view, 4), (live, 8), (other, 8), (live, 2), (other, 4), (view, 2)):
            set_bits(model, bits)
            assert torch.equal(model(x), wanted[bits]), name
    live = engines["float"][0]()
    view_at_bits(live, 2).to("meta")
    assert {t.device.type for t in (*live.parameters(), *live.buffers())} == {"cpu"}


def test_a_prepared_model_has_none() -> None:
    ready = prepare(convolutions(), QuantConfig(bit_choices=WIDTHS, start="3std"), IMAGES)
    with pytest.raises(ConfigError, match=r"layer 'body\.0' is a QuantConv2d; views are of live models: load\(path\)"):
        view_at_bits(ready, 4)


def test_made_in_inference_mode(engines: dict[str, Any]) -> None:
    live = engines["float"][0]()
    with torch.inference_mode():
        view = view_at_bits(live, 2)
    set_bits(view, 4)
    assert torch.equal(view(IMAGES), outputs(live, IMAGES)[4])


# --- threads ----------------------------------------------------------------------------------------


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Threads that take turns far more often than they do by themselves."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def serve(live: nn.Module, x: Tensor, widths: tuple[int, ...], wanted: dict[int, Tensor], wrong: list[str]) -> None:
    """Run a view of `live` at `widths` in turn, and note the outputs that are not `wanted`."""
    try:
        view = view_at_bits(live, widths[0])
        for turn in range(12):
            bits = widths[turn % len(widths)]
            if len(widths) > 1:
                set_bits(view, bits)
            with torch.no_grad():
                if not torch.equal(view(x), wanted[bits]):
                    wrong.append(f"an output at {bits} bits")
    except Exception as problem:
        wrong.append(repr(problem))


def together(*tasks: Callable[[], None]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.usefixtures("one_thread", "eager_threads")
def test_threads_at_different_widths(engines: dict[str, Any]) -> None:
    """Each makes a view and runs it; two of them switch theirs all the time."""
    for name in ("float", "integer", "integer, lsq", "packed, nested", "packed, rounded"):
        make, x = engines[name]
        live, wrong = make(), []
        wanted = outputs(live, x)
        tasks = [(8,), (4,), (2,), WIDTHS, (2, 8)]
        together(*(functools.partial(serve, live, x, widths, wanted, wrong) for widths in tasks))
        assert wrong == [], name
        assert torch.equal(live(x), wanted[8]), name


class Meanwhile:
    """In a model that is being copied: what another thread does at that moment."""

    def __init__(self, act: Callable[[], None]):
        self.act = act

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        self.act()


def put_behind(holder: dict[str, Any], key: str, value: object) -> None:
    """Let `value` be copied right after `key` of `holder`."""
    items = list(holder.items())
    at = [name for name, _ in items].index(key) + 1
    holder.clear()
    holder.update([*items[:at], ("meanwhile", value), *items[at:]])


@pytest.mark.usefixtures("one_thread")
def test_a_view_made_while_the_model_is_switched(engines: dict[str, Any]) -> None:
    """It would have the operands of one width, and take them for those of another."""
    for name, key in (("integer", "_buffers"), ("packed, rounded", "_held"), ("packed, host", "_held")):
        make, x = engines[name]
        live = make()
        wanted = outputs(live, x)
        board: Any = getattr(unwrap(live), SWITCHBOARD)
        for before, meanwhile in ((8, 2), (2, 8)):
            set_bits(live, before)
            holder = vars(board.pool) if hasattr(board, "pool") else vars(next(iter(board.layers.values())).engine)
            put_behind(holder, key, Meanwhile(functools.partial(set_bits, live, meanwhile)))
            views = [view_at_bits(live, bits) for bits in (before, meanwhile)]
            assert torch.equal(views[0](x), wanted[before]), (name, before)
            assert torch.equal(views[1](x), wanted[meanwhile]), (name, before)
            del holder["meanwhile"]


@pytest.mark.usefixtures("one_thread", "eager_threads")
def test_loading_does_not_disturb_models_that_run(engines: dict[str, Any]) -> None:
    """Integer models are traced when they are loaded, for which torch.fx changes nn.Module itself."""
    running, x = engines["float"][0](), IMAGES
    wanted, original = running(x), (nn.Module.__call__, nn.Module.__getattr__)
    problems: list[str] = []
    finished: list[None] = []

    def serve_on() -> None:
        while len(finished) < 2:
            try:
                if not torch.equal(running(x), wanted):
                    problems.append("another output")
            except Exception as problem:
                problems.append(repr(problem))

    def loads() -> None:
        try:
            for _ in range(3):
                engines["integer"][0]()
        except Exception as problem:
            problems.append(repr(problem))
        finally:
            finished.append(None)

    together(serve_on, loads, loads)
    assert problems == []
    assert (nn.Module.__call__, nn.Module.__getattr__) == original
