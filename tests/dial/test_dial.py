"""Bit plans as values, and the dial: checks before it moves, and moves everything."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial.dial.dial import at_bits, dialled_layers, get_bits, resolve_plan, set_bits, unwrap
from bitdial.dial.plan import BitPlan
from bitdial.errors import PlanError
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare

# --- the plan as a value ------------------------------------------------------------------------


def test_a_width_stands_for_weights_and_activations() -> None:
    plan = BitPlan({"a": 4, "b": (4, 8)}, default=2)
    assert plan["a"] == (4, 4)
    assert plan["b"] == (4, 8)
    assert plan["anything else"] == (2, 2)
    assert plan.default == (2, 2)


def test_without_a_default_a_plan_knows_its_layers_only() -> None:
    plan = BitPlan({"a": 4})
    assert plan.default is None
    with pytest.raises(KeyError, match="'b'"):
        plan["b"]


def test_a_plan_iterates_over_the_layers_it_names() -> None:
    plan = BitPlan({"b": 4, "a": (2, 8)}, default=8)
    assert list(plan) == ["b", "a"]
    assert len(plan) == 2
    assert dict(plan) == {"b": (4, 4), "a": (2, 8)}
    assert len(BitPlan(default=8)) == 0


SAME = [
    (BitPlan({"a": 4}), BitPlan({"a": (4, 4)})),
    (BitPlan({"a": 4, "b": 2}), BitPlan({"b": 2, "a": 4})),
    (BitPlan(default=8), BitPlan({}, default=(8, 8))),
]
DIFFERENT: list[tuple[Any, Any]] = [
    (BitPlan({"a": 4}), BitPlan({"a": (4, 8)})),
    (BitPlan({"a": 4}), BitPlan({"a": 4}, default=4)),
    (BitPlan({"a": 4}), BitPlan({"b": 4})),
    (BitPlan(default=4), BitPlan(default=8)),
    (BitPlan({"a": 4}), {"a": (4, 4)}),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_plans(one: BitPlan, other: BitPlan) -> None:
    assert one == other
    assert hash(one) == hash(other)
    assert {one: 1}[other] == 1


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_plans(one: object, other: object) -> None:
    assert one != other


def test_a_plan_does_not_follow_the_dict_it_was_made_from() -> None:
    layers: dict[str, int | tuple[int, int]] = {"a": 4}
    plan = BitPlan(layers)
    layers["a"] = 2
    assert plan["a"] == (4, 4)


def test_a_plan_is_immutable() -> None:
    """It is hashable, so it must not change after it has been put into a set."""
    plan = BitPlan({"a": 4}, default=8)
    with pytest.raises(AttributeError):
        plan.default = (2, 2)
    with pytest.raises(TypeError):
        plan["a"] = (2, 2)  # type: ignore[index]


PLANS = [
    BitPlan({"a": 4, "b.0": (4, 8)}, default=2),
    BitPlan({"a": 4}),
    BitPlan(default=(3, 8)),
    BitPlan(default=6),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_repr_builds_the_same_plan(plan: BitPlan) -> None:
    assert eval(repr(plan), {"BitPlan": BitPlan}) == plan


def test_repr_is_short() -> None:
    assert repr(PLANS[0]) == "BitPlan({'a': 4, 'b.0': (4, 8)}, default=2)"
    assert repr(PLANS[3]) == "BitPlan(default=6)"


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_plan_round_trips_through_json(plan: BitPlan) -> None:
    text = json.dumps(plan.to_dict())
    assert BitPlan.from_dict(json.loads(text)) == plan
    assert BitPlan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("bits", [1, 9, 0, -4, 4.0, True, "4", None, (4,), (4, 4, 4), (4, 9), [4, 8]])
def test_bits_that_are_no_width_are_named(bits: Any) -> None:
    with pytest.raises(PlanError, match=f"layer 'conv1': {re.escape(repr(bits))}"):
        BitPlan({"conv1": bits})
    if bits is not None:
        with pytest.raises(PlanError, match=f"default: {re.escape(repr(bits))}"):
            BitPlan(default=bits)


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="empty"):
        BitPlan()
    with pytest.raises(PlanError, match="empty"):
        BitPlan({})


@pytest.mark.parametrize("layers", [["a"], "a", {3: 4}, {None: 4}], ids=repr)
def test_layers_must_map_names(layers: Any) -> None:
    with pytest.raises(PlanError):
        BitPlan(layers)


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {},
        {"layers": {}},
        {"layers": {}, "default": None},
        {"layers": {"a": 4}, "default": None, "extra": 1},
        {"layers": ["a"], "default": 8},
        {"layers": {"a": "4"}, "default": None},
        {"layers": {"a": [4, 4, 4]}, "default": None},
        {"layers": {"a": [4.0, 4.0]}, "default": None},
        {"layers": {}, "default": [8]},
        {"layers": {}, "default": []},
        {"layers": {}, "default": {"a": 1}},
    ],
    ids=repr,
)
def test_damaged_stored_plans_are_refused(stored: object) -> None:
    with pytest.raises(PlanError):
        BitPlan.from_dict(stored)


# --- the dial -----------------------------------------------------------------------------------


class Net(nn.Module):
    """stem (float), norm0, a, norm_a, b, norm_b, head (float)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.norm0 = nn.BatchNorm2d(4)
        self.a = nn.Conv2d(4, 4, 3)
        self.norm_a = nn.BatchNorm2d(4)
        self.b = nn.Conv2d(4, 4, 3)
        self.norm_b = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm0(self.stem(x)))
        x = torch.relu(self.norm_a(self.a(x)))
        return self.head(torch.relu(self.norm_b(self.b(x))))


BATCH = torch.randn(2, 2, 9, 9, generator=torch.Generator().manual_seed(0))
CONFIG = QuantConfig(bit_choices=(8, 4, 2), start="3std")


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(1)
    return prepare(Net(), CONFIG, BATCH).eval()


def norm_bits(model: nn.Module) -> tuple[int, int, int]:
    return tuple(getattr(model, n).bits for n in ("norm0", "norm_a", "norm_b"))  # type: ignore[return-value]


def test_a_prepared_model_is_at_its_highest_width(net: nn.Module) -> None:
    assert get_bits(net) == BitPlan({"a": 8, "b": 8})
    assert norm_bits(net) == (8, 8, 8)


def test_a_width_a_pair_and_a_plan(net: nn.Module) -> None:
    set_bits(net, 4)
    assert get_bits(net) == BitPlan({"a": 4, "b": 4})
    set_bits(net, (2, 8))
    assert get_bits(net) == BitPlan({"a": (2, 8), "b": (2, 8)})
    set_bits(net, BitPlan({"b": 2}, default=(4, 8)))
    assert get_bits(net) == BitPlan({"a": (4, 8), "b": 2})


def test_the_dial_changes_the_output_and_comes_back(net: nn.Module) -> None:
    outputs = {}
    for bits in (8, 4, 2):
        set_bits(net, bits)
        outputs[bits] = net(BATCH)
    assert not torch.equal(outputs[8], outputs[4])
    assert not torch.equal(outputs[4], outputs[2])
    set_bits(net, 8)
    assert torch.equal(net(BATCH), outputs[8])


def test_norms_follow_the_weight_bits(net: nn.Module) -> None:
    set_bits(net, BitPlan({"a": (2, 8), "b": (4, 2)}))
    assert norm_bits(net) == (2, 2, 4)  # norm0 comes before any layer: it follows the one it feeds


def test_get_bits_is_taken_back(net: nn.Module) -> None:
    plan = BitPlan({"a": (2, 4), "b": (8, 2)})
    set_bits(net, plan)
    found = get_bits(net)
    set_bits(net, 8)
    set_bits(net, found)
    assert get_bits(net) == plan


WRONG: list[tuple[Any, str]] = [
    (6, r"layer 'a': bits=6 is not in bit_choices \(8, 4, 2\)"),
    ((8, 3), r"layer 'a': bits=3 is not in bit_choices"),
    (BitPlan({"a": 4, "b": 6}), "layer 'b': bits=6"),
    (BitPlan({"a": 4, "b": (4, 3)}), "layer 'b': bits=3"),
    (BitPlan({"a": 4}), "nothing about 'b'"),
    (BitPlan({"a": 4, "b": 4, "c": 4}), "names 'c'"),
    (BitPlan({"stem": 4}, default=4), "names 'stem'.*'a', 'b'"),
    (1, "bits: 1 is not a bit-width"),
    (True, "bits: True is not a bit-width"),
    ([4, 8], r"bits: \[4, 8\] is not a bit-width; .* or a tuple"),
    ("4", "'4' is not a bit-width and not the name of a stored plan; this model has no stored plans"),
    (None, "bits: None is not a bit-width"),
    ({"a": 4, "b": 4}, "not a bit-width"),
]


@pytest.mark.parametrize(("bits", "message"), WRONG, ids=lambda v: str(v)[:40])
def test_a_wrong_plan_changes_nothing(net: nn.Module, bits: Any, message: str) -> None:
    before = BitPlan({"a": 8, "b": (4, 2)})
    set_bits(net, before)
    with pytest.raises(PlanError, match=message):
        set_bits(net, bits)
    assert get_bits(net) == before
    assert norm_bits(net) == (8, 8, 4)
    with pytest.raises(PlanError, match=message), at_bits(net, bits):
        pytest.fail("the block must not run")
    assert get_bits(net) == before
    assert norm_bits(net) == (8, 8, 4)


@pytest.mark.parametrize("bits", [np.int64(4), np.uint8(4), (np.int32(4), 4)])
def test_whole_numbers_of_other_kinds_are_widths(net: nn.Module, bits: Any) -> None:
    set_bits(net, bits)
    assert get_bits(net) == BitPlan({"a": 4, "b": 4})
    assert all(type(b) is int for pair in get_bits(net).values() for b in pair)


def test_resolve_plan_gives_every_layer_its_bits(net: nn.Module) -> None:
    assert resolve_plan(net, BitPlan({"b": 2}, default=(4, 8))) == {"a": (4, 8), "b": (2, 2)}
    assert get_bits(net) == BitPlan({"a": 8, "b": 8})


def test_at_bits_restores_the_former_plan(net: nn.Module) -> None:
    before = BitPlan({"a": (4, 8), "b": 2})
    set_bits(net, before)
    with at_bits(net, 8) as inside:
        assert inside is net
        assert get_bits(net) == BitPlan({"a": 8, "b": 8})
        with at_bits(net, 2):
            assert norm_bits(net) == (2, 2, 2)
        assert norm_bits(net) == (8, 8, 8)
    assert get_bits(net) == before
    assert norm_bits(net) == (4, 4, 2)


def test_at_bits_restores_after_an_error(net: nn.Module) -> None:
    set_bits(net, 4)
    with pytest.raises(ZeroDivisionError), at_bits(net, 2):
        1 / 0  # noqa: B018
    assert get_bits(net) == BitPlan({"a": 4, "b": 4})
    assert norm_bits(net) == (4, 4, 4)


def test_the_dial_moves_no_tensor(net: nn.Module) -> None:
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with at_bits(net, 2):
        pass
    set_bits(net, BitPlan({"a": (2, 8), "b": (4, 2)}))
    assert list(net.state_dict()) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_modes_and_casts_leave_the_bits_alone(net: nn.Module) -> None:
    plan = BitPlan({"a": (2, 4), "b": 4})
    set_bits(net, plan)
    net.train().eval().double().float().load_state_dict(net.state_dict())
    assert get_bits(net) == plan
    assert norm_bits(net) == (2, 2, 4)


def test_a_float_model_has_no_dial() -> None:
    for function in (get_bits, dialled_layers, lambda model: set_bits(model, 8)):
        with pytest.raises(PlanError, match="no quantised layer; call prepare"):
            function(Net())


# --- wrappers -----------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def check_through(wrapper: Any, net: nn.Module) -> None:
    assert unwrap(wrapper) is net
    set_bits(wrapper, BitPlan({"a": (2, 8), "b": 4}))
    assert get_bits(net) == get_bits(wrapper) == BitPlan({"a": (2, 8), "b": 4})
    assert norm_bits(net) == (2, 2, 4)
    with at_bits(wrapper, 4):
        assert get_bits(net) == BitPlan({"a": 4, "b": 4})
    assert norm_bits(net) == (2, 2, 4)


def test_through_data_parallel(net: nn.Module) -> None:
    check_through(nn.DataParallel(net), net)


def test_through_compile(net: nn.Module) -> None:
    check_through(torch.compile(net, backend="eager"), net)


def test_through_distributed_data_parallel(net: nn.Module, process_group: None) -> None:
    parallel = nn.parallel.DistributedDataParallel(net)
    check_through(parallel, net)
    check_through(torch.compile(parallel, backend="eager"), net)


class Holder(nn.Module):
    """A model inside another, as training frameworks and detectors do it."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone


def test_a_model_inside_another_is_switched_with_its_norms_or_not_at_all(net: nn.Module) -> None:
    """The layers' names have a prefix there: nothing may be left half switched."""
    try:
        set_bits(Holder(net), 4)
    except PlanError:
        assert get_bits(net) == BitPlan({"a": 8, "b": 8})
        assert norm_bits(net) == (8, 8, 8)
    else:
        assert get_bits(net) == BitPlan({"a": 4, "b": 4})
        assert norm_bits(net) == (4, 4, 4)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x)))


def test_a_part_of_a_model_is_switched_with_its_norms_or_not_at_all() -> None:
    net: Any = prepare(Nested(), CONFIG, BATCH)
    try:
        set_bits(net.block, 4)
    except PlanError:
        assert get_bits(net) == BitPlan({"block.0": 8})
        assert net.block[1].bits == 8
    else:
        assert get_bits(net) == BitPlan({"block.0": 4})
        assert net.block[1].bits == 4
