"""A switchboard changes a whole model at once, in place, and leaves it as if it had been loaded so.

On a GPU, and in `test_interpreter.py` under Triton's interpreter, the kernel runs; elsewhere,
the same tests see the operator's reference.
"""

import copy
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    add_transitions,
    at_bits,
    code_exact,
    get_bits,
    load,
    prepare,
    save,
    set_bits,
)
from bitdial.dial import dial
from bitdial.dial.dial import SWITCHBOARD, dialled_layers
from bitdial.errors import ConfigError, PlanError
from bitdial.live.engines.integer import switchboard
from bitdial.live.engines.integer.switchboard import Switchboard

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter
BITS = (8, 6, 4, 3, 2)
OPERANDS = ("stored", "integers", "pad", "correction", "factor", "quantizer", "doubled", "affine_now")
IMAGES = torch.randn(2, 3, 4, 3, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    """Layers of every kind with norms, one of several blocks, two on one weight, and one that no kernel serves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 20, 3, padding=1), nn.BatchNorm2d(20)
        self.grouped, self.grouped_norm = nn.Conv2d(20, 20, 3, padding=1, groups=20), nn.BatchNorm2d(20)
        self.wide, self.wide_norm = nn.Conv2d(20, 60, 3, padding=1), nn.BatchNorm2d(60)
        self.odd = nn.Conv2d(60, 7, 3, padding=1, padding_mode="reflect")
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.left, self.right = nn.Linear(7, 7), nn.Linear(7, 7)
        self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.wide_norm(self.wide(torch.relu(self.grouped_norm(self.grouped(x))))))
        x = self.pool(torch.relu(self.odd(x))).flatten(1)
        return self.right(torch.relu(self.left(x)))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Callable[[], nn.Module]]:
    """Writes a file and returns what loads it."""

    def write(*, transitions: bool = False, bit_choices: tuple[int, ...] = BITS, **settings: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            config = QuantConfig(bit_choices=bit_choices, keep_first_last=False, **settings)
            prepared = prepare(Net(), config, IMAGES)
            prepared = add_transitions(prepared) if transitions else prepared
            for name, buffer in prepared.named_buffers():
                if name.endswith("running_mean"):
                    buffer.normal_(0, 0.2)
        save(prepared, tmp_path / "m", plans={"mixed": BitPlan({"wide": 2}, default=bit_choices[0])})
        return lambda: load(tmp_path / "m", Net(), device=DEVICE, kernels="integer")

    return write


def board_of(live: nn.Module) -> Switchboard:
    return getattr(live._orig_mod, SWITCHBOARD)


def operands(live: nn.Module) -> dict[str, Tensor]:
    found = live.named_buffers(remove_duplicate=False)
    return {name: t for name, t in found if name.rpartition(".")[2] in OPERANDS}


def equal(one: nn.Module, other: nn.Module) -> bool:
    mine, yours = operands(one), operands(other)
    assert len(mine) == len(yours) > 20
    return mine.keys() == yours.keys() and all(torch.equal(mine[name], yours[name]) for name in mine)


def in_place(live: nn.Module) -> bool:
    """Whether all operands lie in the board's buffers."""
    board = board_of(live)
    homes = {t.untyped_storage().data_ptr() for t in (board.master, board.active, board.words)}
    served = {n: t for n, t in operands(live).items() if not n.endswith("odd.codes.source.stored")}
    return {t.untyped_storage().data_ptr() for t in served.values()} == homes


def right(live: nn.Module, setting: Any) -> bool:
    """Whether the outputs are those of the definition."""
    set_bits(live, setting)
    x = IMAGES.to(DEVICE)
    return torch.equal(live(x), code_exact(live)(x))


def random_plan(live: nn.Module, rng: random.Random) -> BitPlan:
    return BitPlan({n: (rng.choice(m.bit_choices), rng.choice(m.bit_choices)) for n, m in dialled_layers(live).items()})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What was wanted by each call of the operator."""
    found: list[Tensor] = []
    real = switchboard.switch_

    def counting(*arguments: Tensor) -> None:
        found.append(arguments[-1].cpu().clone())
        real(*arguments)

    monkeypatch.setattr(switchboard, "switch_", counting)
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "double rounding": {},
    "ties up": {"ties": "up", "activations": "asymmetric"},
    "nested": {"scheme": "nested", "activations": "signed"},
    "nested, 6 bits, phase": {"scheme": "nested+8", "bit_choices": (6, 5, 2)},
    "centred": {"scheme": "centred", "activations": "signed"},
    "centred, 6 bits": {"scheme": "centred", "bit_choices": (6, 5, 2)},
    "adabits, one scale": {"scheme": "adabits", "per_channel": False},
    "transitions": {"transitions": True},
}


@pytest.mark.parametrize("name", ["ties up", "nested, 6 bits, phase", "centred"] if INTERPRETED else SETTINGS)
def test_after_any_switches_as_freshly_loaded(name: str, make: Callable[..., Any]) -> None:
    fresh = make(**SETTINGS[name])
    live, rng = fresh(), random.Random(1)
    addresses = {name: t.data_ptr() for name, t in operands(live).items()}
    top = max(live.stem.bit_choices)
    for setting in (2, top, random_plan(live, rng), (2, top), random_plan(live, rng)):
        set_bits(live, setting)
    for setting in ("mixed", random_plan(live, rng), top):
        assert INTERPRETED or right(live, setting), setting  # slow there, and seen in test_model.py
        set_bits(live, setting)
        other = fresh()
        set_bits(other, setting)
        assert equal(live, other), setting
    assert in_place(live)
    assert {name: t.data_ptr() for name, t in operands(live).items()} == addresses


@pytest.mark.skipif(INTERPRETED, reason="these are not on the board")
@pytest.mark.parametrize("scheme", ["lsq", "dorefa"])
def test_layers_that_round_a_float_weight_keep_their_addresses_too(scheme: str, make: Callable[..., Any]) -> None:
    live = make(scheme=scheme)()
    addresses = {name: t.data_ptr() for name, t in operands(live).items()}
    for setting in (2, 8, (3, 6), random_plan(live, random.Random(0))):
        assert right(live, setting), setting
    assert {name: t.data_ptr() for name, t in operands(live).items()} == addresses
    doubled = dialled_layers(live)["wide"].engine.doubled
    assert (doubled is not None) == (scheme == "dorefa")


def test_one_launch_for_what_changes(make: Callable[..., Any], launches: list[Tensor]) -> None:
    live = make()()
    launches.clear()
    set_bits(live, 4)
    assert len(launches) == 1
    assert launches[0][1].all()
    set_bits(live, 4)
    assert len(launches) == 1
    set_bits(live, BitPlan({"wide": (2, 4)}, default=4))
    assert len(launches) == 2
    # The width and the pair of `wide`, and the set of its norm; not its activations.
    assert launches[1][1].sum() == 3
    with at_bits(live, (4, 3)):
        assert len(launches) == 3
    assert len(launches) == 4
    assert get_bits(live)["wide"] == (2, 4)


@pytest.mark.skipif(INTERPRETED, reason="slow there, and seen above")
def test_codes_are_centred_by_a_number_in_memory(make: Callable[..., Any]) -> None:
    settings = ({"scheme": "centred"}, SETTINGS["centred, 6 bits"], {}, {"scheme": "nested"})
    centred, low, plain, nested = (make(**one)() for one in settings)
    for bits, flag in ((8, 1), (6, 0), (2, 0), (8, 1)):
        set_bits(centred, bits)
        assert centred.wide.engine.doubled.tolist() == [flag]
    assert all(m.wide.engine.doubled is None for m in (plain, low, nested))  # they never pay for it


def test_bad_plans_change_nothing(make: Callable[..., Any], launches: list[Tensor]) -> None:
    live = make()()
    launches.clear()
    with pytest.raises(PlanError, match="layer 'wide': bits=5 is not in bit_choices"):
        set_bits(live, BitPlan({"wide": 5}, default=2))
    with pytest.raises(PlanError, match="not the name of a stored plan; the stored plans are 'mixed'"):
        set_bits(live, "other")
    foreign = BitPlan({"stem": 4, "elsewhere": 4}, default=2)
    for setting, problem in ((foreign, "'elsewhere', which the model does not"), (8.0, r"8\.0 is not a bit-width")):
        for _ in range(2):  # also when it is not new
            with pytest.raises(PlanError, match=problem):
                set_bits(live, setting)
    with pytest.raises(PlanError, match="the plan says nothing about 'grouped', 'wide', 'odd'"):
        set_bits(live, BitPlan({"stem": 4}))
    assert not launches
    assert set(get_bits(live).values()) == {(8, 8)}
    set_bits(live, 2)  # a good one still works, and bad ones are still refused
    with pytest.raises(PlanError, match=r"2\.0 is not a bit-width"):
        set_bits(live, 2.0)
    assert len(launches) == 1


# --- like any other module; nothing here is about how the operator computes -------------------------

here = pytest.mark.skipif(INTERPRETED, reason="the operator's reference will do")


@here
def test_moved_operands_are_laid_out_anew(make: Callable[..., Any]) -> None:
    fresh = make(scheme="nested")
    live = fresh()
    set_bits(live, 3)
    addresses = {name: t.data_ptr() for name, t in operands(live).items()}
    assert live.to(DEVICE) is live
    assert {name: t.data_ptr() for name, t in operands(live).items()} == addresses  # nothing had to move
    for moved in (live, live._orig_mod, live.wide):
        moved._apply(lambda t: t.clone())
        assert in_place(live) == (moved is live)
        assert torch.equal(live(IMAGES.to(DEVICE)), code_exact(live)(IMAGES.to(DEVICE)))
        assert right(live, 8)
        assert right(live, 3)
        assert in_place(live)
    other = fresh()
    set_bits(other, 3)
    assert equal(live, other)


@here
def test_layers_on_several_devices_are_refused(make: Callable[..., Any]) -> None:
    live = make()()
    live.wide.to("meta")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"lie on (cpu|cuda:0), meta; move the whole model"):
            set_bits(live, 4)
    assert set(get_bits(live).values()) == {(8, 8)}


@here
def test_remembered_plans_hold_nothing_of_the_past(make: Callable[..., Any]) -> None:
    fresh = make(transitions=True)
    live, other = fresh(), fresh()
    rng = random.Random(2)
    settings = [3, (8, 2), "mixed", random_plan(live, rng), random_plan(live, rng)]
    for setting in settings:
        set_bits(live, setting)
    twin = copy.deepcopy(live)
    state = {name: (t.flip(0) if t.dim() else t).clone() for name, t in live.state_dict().items()}
    before = {name: t.clone() for name, t in operands(live).items()}
    for setting in settings:
        set_bits(other, setting)
        set_bits(twin, setting)
        assert equal(twin, other), setting
    assert all(torch.equal(t, before[name]) for name, t in operands(live).items())
    live._apply(lambda t: t.clone())
    for setting in settings:
        set_bits(other, setting)
        set_bits(live, setting)
        assert equal(live, other), setting
    live.load_state_dict(state)
    for setting in settings:
        assert right(live, setting), setting
    live.wide.select_bits(2, 2)
    set_bits(live, 3)
    assert get_bits(live)["wide"] == (3, 3)
    assert right(live, 3)


@here
def test_no_more_plans_are_remembered_than_said(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "MOST_REMEMBERED", 3)
    live, rng = make()(), random.Random(4)
    plans = [random_plan(live, rng) for _ in range(5)]
    for setting in (*plans, *plans, plans[0]):
        set_bits(live, setting)
        assert get_bits(live) == setting
        assert len(board_of(live)._remembered) <= 3
    assert right(live, plans[0])


@here
def test_a_plan_is_taken_as_it_was_when_made(make: Callable[..., Any]) -> None:
    live = make()()
    widths: dict[str, Any] = dict.fromkeys(get_bits(live), 4)
    set_bits(live, BitPlan(widths))
    widths["wide"] = 2
    assert get_bits(live)["wide"] == (4, 4)
    set_bits(live, BitPlan(widths))
    assert get_bits(live)["wide"] == (2, 2)
    set_bits(live, BitPlan(dict.fromkeys(widths, 4)))
    assert get_bits(live)["wide"] == (4, 4)


@here
def test_copies_have_boards_of_their_own(make: Callable[..., Any]) -> None:
    live = make(scheme="nested")()
    set_bits(live, 4)
    twin, exact = copy.deepcopy(live), code_exact(live)
    assert in_place(twin)
    assert board_of(twin) is not board_of(live)
    assert board_of(twin).master.data_ptr() != board_of(live).master.data_ptr()
    set_bits(live, 2)
    assert equal(twin, copy.deepcopy(twin))
    assert not equal(twin, live)
    assert right(twin, 4)
    assert not hasattr(exact, SWITCHBOARD)
    assert get_bits(exact) == get_bits(twin)
    exact.load_state_dict({name: torch.zeros_like(t) for name, t in exact.state_dict().items()})
    set_bits(exact, 6)
    assert right(twin, 8)


@here
@pytest.mark.parametrize("scheme", ["double_rounding", "nested"])
def test_copies_run_at_the_widths_that_they_are_switched_to(scheme: str, make: Callable[..., Any]) -> None:
    """Also where something is kept that was made from a weight: the copy has run before each switch."""
    live = make(scheme=scheme)()
    assert right(live, 4)
    twin = copy.deepcopy(live)
    for bits in (4, 2, 8, 6, 4):
        assert right(twin, bits)
        assert right(live, 3 if bits == 2 else 2)


@here
@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_takes_effect(assign: bool, make: Callable[..., Any]) -> None:
    live = make()()
    set_bits(live, 3)
    before = {name: t.clone() for name, t in operands(live).items()}
    state = {name: (t.flip(0) if t.dim() else t).clone() for name, t in live.state_dict().items()}
    live.load_state_dict(state, assign=assign)
    assert not torch.equal(live.wide.engine.integers, before["_orig_mod.wide.engine.integers"])
    for setting in (3, 8, (2, 4)):
        assert right(live, setting)
    assert in_place(live)


@here
def test_layers_on_one_weight_share_what_is_stored(make: Callable[..., Any]) -> None:
    live = make()()
    assert (live.left.codes.stored.data_ptr() == live.right.codes.stored.data_ptr()) == (DEVICE == "cpu")
    assert right(live, BitPlan({"left": 2, "right": 8}, default=4))
    assert not torch.equal(live.left.engine.integers, live.right.engine.integers)


@here
def test_a_part_or_a_model_around_it_can_be_switched(make: Callable[..., Any]) -> None:
    live = make()()
    around = nn.Sequential(nn.Identity(), live)
    set_bits(around, 3)
    assert set(get_bits(live).values()) == {(3, 3)}
    set_bits(live.left, 8)
    assert get_bits(live)["left"] == (8, 8)
    plan = get_bits(live)
    other = make()()
    set_bits(other, plan)
    assert equal(live, other)


@here
def test_memory_is_counted(make: Callable[..., Any]) -> None:
    held = board_of(make()()).bytes_held()
    assert held["master"] == (5 if DEVICE == "cuda" else 4) * 8192 + 8192  # a block for each layer, two for `wide`
    assert held["active"] == 6 * 8192
    assert held["table"] > 5 * held["words"] > 0


@pytest.mark.cuda
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_switching_allocates_nothing_and_is_not_recorded(make: Callable[..., Any]) -> None:
    live, rng = make(scheme="nested")(), random.Random(0)
    set_bits(live, 2)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(100):
        set_bits(live, random_plan(live, rng))
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == before
    set_bits(live, 2)
    images = IMAGES.to(DEVICE)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        images.add_(1)  # PyTorch warns of graphs without anything
        with pytest.raises(PlanError, match="a switch cannot be recorded"):
            set_bits(live, 4)
    assert set(get_bits(live).values()) == {(2, 2)}
    assert right(live, 4)
