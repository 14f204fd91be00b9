"""Switchable batch norm: plain batch norms that do not touch one another."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.nn import SwitchableBatchNorm, TransitionalBatchNorm

BITS = (8, 4, 2)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained_norm() -> nn.BatchNorm2d:
    """A norm whose parameters and statistics are not the initial ones."""
    norm = nn.BatchNorm2d(3, eps=1e-3, momentum=0.2)
    norm(randn(8, 3, 4, 4, seed=0) * 2 + 1)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, -1, 1)
    return norm


def switchable(norm: nn.Module) -> SwitchableBatchNorm:
    return SwitchableBatchNorm(norm, bit_choices=BITS, follows="conv1")


def test_every_set_starts_as_the_float_norm() -> None:
    norm = trained_norm().eval()
    switch = switchable(norm)
    x = randn(2, 3, 5, 5, seed=1)
    assert switch.follows == "conv1"
    assert switch.bits == 8
    for bits in BITS:
        switch.select_set(bits)
        assert torch.equal(switch(x), norm(x))


def test_what_models_read_of_a_norm_is_that_of_the_set_in_use() -> None:
    norm: Any = SwitchableBatchNorm(nn.BatchNorm2d(3, eps=0.5), bit_choices=(8, 4), follows="conv")
    norm.sets["4"].running_mean.fill_(2.0)
    assert (norm.num_features, norm.eps, norm.running_mean.tolist()) == (3, 0.5, [0.0] * 3)
    norm.select_set(4)
    assert copy.deepcopy(norm).running_mean.tolist() == norm.running_mean.tolist() == [2.0] * 3
    with pytest.raises(AttributeError, match="nothing"):
        _ = norm.nothing
    assert set(norm.state_dict()) == {f"sets.{b}.{key}" for b in (8, 4) for key in nn.BatchNorm2d(3).state_dict()}


def test_only_the_selected_set_learns_statistics() -> None:
    norm = trained_norm()
    switch = switchable(norm)
    before = copy.deepcopy(switch.state_dict())
    x = randn(8, 3, 4, 4, seed=2) * 5 - 3
    switch.select_set(4)
    out = switch(x)
    expected = copy.deepcopy(norm)
    assert torch.equal(out, expected(x))
    for name, value in switch.state_dict().items():
        if ".4." in name or name.startswith("sets.4."):
            assert torch.equal(value, expected.state_dict()[name.removeprefix("sets.4.")])
        else:
            assert torch.equal(value, before[name]), name
    assert not torch.equal(switch.sets["4"].running_mean, switch.sets["8"].running_mean)
    assert torch.equal(norm.running_mean, switch.sets["8"].running_mean)  # nor does the float norm


def test_only_the_selected_set_gets_gradients() -> None:
    switch = switchable(trained_norm())
    switch.select_set(2)
    switch(randn(4, 3, 4, 4, seed=3)).square().sum().backward()
    received = {name for name, p in switch.named_parameters() if p.grad is not None}
    assert received == {"sets.2.weight", "sets.2.bias"}


def test_sets_share_nothing() -> None:
    norm = trained_norm()
    switch = switchable(norm)
    tensors = [*norm.state_dict().values(), *switch.state_dict().values()]
    assert len({t.data_ptr() for t in tensors}) == 4 * len(norm.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_norm_is_kept(training: bool) -> None:
    """Also in the wrapper: a norm that was frozen must not read as training."""
    switch = switchable(trained_norm().train(training))
    assert {module.training for module in switch.modules()} == {training}


@pytest.mark.parametrize(
    "arguments",
    [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
    ],
    ids=str,
)
def test_unusual_norms(arguments: dict[str, Any]) -> None:
    norm = nn.BatchNorm2d(3, **arguments)
    switch = switchable(norm)
    x = randn(4, 3, 2, 2, seed=4) + 1
    for bits in BITS:
        switch.select_set(bits)
        assert torch.equal(switch(x), copy.deepcopy(norm)(x))


def test_state_dict_round_trip() -> None:
    switch = switchable(trained_norm())
    for bits in BITS:
        switch.select_set(bits)
        switch(randn(4, 3, 2, 2, seed=bits) * bits)
    other = switchable(nn.BatchNorm2d(3, eps=1e-3))
    other.load_state_dict(switch.state_dict(), strict=True)
    x = randn(2, 3, 2, 2, seed=5)
    for bits in BITS:
        switch.select_set(bits)
        other.select_set(bits)
        assert torch.equal(other.eval()(x), switch.eval()(x))


def test_repr_says_what_it_follows() -> None:
    assert "follows='conv1'" in repr(switchable(nn.BatchNorm2d(3)))


# --- transitions --------------------------------------------------------------------------------


def transitional(transitions: str = "full") -> tuple[SwitchableBatchNorm, TransitionalBatchNorm]:
    """A switchable norm whose sets differ, and the transitional one made from it."""
    switch = switchable(trained_norm())
    for number, norm in enumerate(switch.sets.values()):
        nn.init.constant_(norm.bias, float(number))
    return switch, TransitionalBatchNorm(switch, fed_by="conv0", transitions=transitions)


@pytest.mark.parametrize("transitions", ["full", "statistics"])
def test_every_pair_starts_as_the_set_of_the_own_width(transitions: str) -> None:
    switch, pairs = transitional(transitions)
    x = randn(2, 3, 5, 5, seed=1)
    assert list(pairs.sets) == ["8-8", "8-4", "8-2", "4-8", "4-4", "4-2", "2-8", "2-4", "2-2"]
    switch.eval(), pairs.eval()
    for fed in BITS:
        for own in BITS:
            switch.select_set(own)
            pairs.select_set(own, fed)
            assert torch.equal(switch(x), pairs(x))
    with torch.no_grad():
        pairs.sets["4-2"].bias.add_(1.0)
    pairs.select_set(2, 4)
    switch.select_set(2)
    assert not torch.equal(switch(x), pairs(x)), "sets are copies"
    assert (pairs.follows, pairs.fed_by, pairs.bit_choices) == ("conv1", "conv0", BITS)


def test_only_the_pair_in_use_learns() -> None:
    _, pairs = transitional()
    pairs.select_set(2, 8)
    before = {key: copy.deepcopy(norm.state_dict()) for key, norm in pairs.sets.items()}
    pairs(randn(4, 3, 5, 5, seed=2)).sum().backward()
    for key, norm in pairs.sets.items():
        moved = not torch.equal(before[key]["running_mean"], norm.running_mean)
        assert moved == (key == "8-2")
        assert (norm.weight.grad is not None) == (key == "8-2")
    assert pairs.active is pairs.sets["8-2"]


def test_pairs_of_statistics_share_what_learns_by_their_own_width() -> None:
    _, pairs = transitional("statistics")
    assert len(list(pairs.parameters())) == 2 * len(BITS)
    pairs.select_set(2, 4)
    assert pairs.holders("bias") == ["8-8", "8-4", "8-2"]
    assert pairs.holders("running_mean") == pairs.set_names()
    before = {key: copy.deepcopy(norm.state_dict()) for key, norm in pairs.sets.items()}
    pairs(randn(4, 3, 5, 5, seed=2)).sum().backward()
    for key, norm in pairs.sets.items():
        assert (not torch.equal(before[key]["running_mean"], norm.running_mean)) == (key == "4-2")
        assert (norm.weight.grad is not None) == (key in ("8-2", "4-2", "2-2"))
    twin = copy.deepcopy(pairs)
    assert twin.sets["4-2"].weight is twin.sets["8-2"].weight is not pairs.sets["8-2"].weight


def test_rows_are_those_of_what_is_in_use() -> None:
    for norm in (transitional("statistics")[1], *transitional()):
        for fed, own in ((8, 8), (4, 2), (2, 4)):
            norm.select_set(own, fed)
            for part, value in norm.active.state_dict().items():
                holder = norm.sets[norm.holders(part)[norm.row(part)]]
                assert holder.state_dict()[part].data_ptr() == value.data_ptr()


def test_transitions_that_are_not_known() -> None:
    with pytest.raises(ConfigError, match=r"transitions='none' is not known; choose one of 'full', 'statistics'"):
        transitional("none")


def test_without_a_feeding_width_the_pair_is_the_own_one_twice() -> None:
    _, pairs = transitional()
    pairs.select_set(4)
    assert pairs.key == "4-4"
