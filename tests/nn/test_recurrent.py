"""Recurrent networks taken apart are PyTorch's: outputs, states and gradients, whatever they are asked."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils._pytree import tree_leaves

from bitdial.nn.parts import Parts
from bitdial.nn.recurrent import Recurrent

NETWORKS: list[tuple[type[nn.RNNBase], dict[str, Any]]] = [
    (nn.LSTM, {}),
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "proj_size": 3, "batch_first": True}),
    (nn.LSTM, {"bias": False, "num_layers": 2}),
    (nn.GRU, {"num_layers": 2, "batch_first": True}),
    (nn.GRU, {"bidirectional": True, "bias": False}),
    (nn.RNN, {"num_layers": 2, "bidirectional": True}),
    (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
]
STEPS, BATCH, INPUTS, HIDDEN = 6, 4, 5, 7
LENGTHS = torch.tensor([2, 6, 1, 4])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def state_of(network: nn.RNNBase, *batch: int) -> Any:
    layers = network.num_layers * (2 if network.bidirectional else 1)
    h = randn(layers, *batch, network.proj_size or HIDDEN)
    return (h, randn(layers, *batch, HIDDEN)) if isinstance(network, nn.LSTM) else h


def calls(network: nn.RNNBase) -> list[tuple[Any, ...]]:
    """Padded, unbatched and packed inputs, the last in two orders, with and without a state."""
    x = randn(BATCH, STEPS, INPUTS) if network.batch_first else randn(STEPS, BATCH, INPUTS)
    packed = pack_padded_sequence(x, LENGTHS, network.batch_first, enforce_sorted=False)
    ordered = pack_padded_sequence(x, LENGTHS.sort(descending=True).values, network.batch_first)
    some: list[tuple[Any, ...]] = [(x,), (packed,), (ordered,), (x[0],)]
    some += [(given, state_of(network, BATCH)) for given in (x, packed, ordered)]
    return [*some, (randn(STEPS, INPUTS), state_of(network))]


def leaves(value: Any) -> list[Tensor]:
    flat = [x.data if isinstance(x, PackedSequence) else x for x in (value[0], *tree_leaves(value[1]))]
    return [x for x in flat if isinstance(x, Tensor)]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_outputs_states_and_gradients_are_those_of_pytorch() -> None:
    for kind, arguments in NETWORKS:
        torch.manual_seed(0)
        network = kind(INPUTS, HIDDEN, **arguments)
        apart = Recurrent(copy.deepcopy(network), Parts())
        for given in calls(network):
            expected, found = network(*given), apart(*given)
            assert type(found[0]) is type(expected[0])
            assert type(found[1]) is type(expected[1])
            for mine, theirs in zip(leaves(found), leaves(expected), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
            network.zero_grad()
            apart.zero_grad()
            sum(x.square().sum() for x in leaves(expected)).backward()  # type: ignore[union-attr]
            sum(x.square().sum() for x in leaves(found)).backward()  # type: ignore[union-attr]
            mine_by_name = {key.removesuffix(".weight"): p for key, p in apart.named_parameters()}
            assert mine_by_name.keys() == dict(network.named_parameters()).keys()
            for key, theirs in network.named_parameters():
                torch.testing.assert_close(mine_by_name[key].grad, theirs.grad, rtol=1e-5, atol=1e-5, msg=key)


def test_dropout_is_between_the_layers() -> None:
    network = nn.LSTM(INPUTS, HIDDEN, num_layers=2, dropout=0.5)
    apart, x = Recurrent(copy.deepcopy(network), Parts()), randn(STEPS, BATCH, INPUTS)
    for training in (True, False):
        network.train(training)
        apart.train(training)
        results = []
        for each in (network, apart):
            torch.manual_seed(1)
            results.append(each(x)[0])
        torch.testing.assert_close(*results)
        assert torch.equal(apart(x)[0], apart(x)[0]) != training


def test_a_matrix_is_asked_for_once_a_call() -> None:
    apart, asked = Recurrent(nn.GRU(INPUTS, HIDDEN, bidirectional=True), Parts()), []
    for name, layer in apart.named_children():
        layer.register_forward_hook(lambda *_, name=name: asked.append(name))
    apart(randn(STEPS, BATCH, INPUTS))
    assert sorted(asked) == sorted(
        f"weight_{p}_l0{end}" for p, end in itertools.product(("ih", "hh"), ("", "_reverse"))
    )


def test_wrong_inputs_are_refused() -> None:
    apart = Recurrent(nn.LSTM(INPUTS, HIDDEN), Parts())
    apart.flatten_parameters()  # models call it
    x = randn(STEPS, BATCH, INPUTS)
    with pytest.raises(ValueError, match="expected 2 or 3 dimensions"):
        apart(x[None])
    with pytest.raises(RuntimeError, match=r"expected \(\.\.\., 5\)"):
        apart(x[..., 1:])
    with pytest.raises(RuntimeError, match=r"the state of a LSTM is .* expected \[\(1, 4, 7\), \(1, 4, 7\)\]"):
        apart(x, (randn(1, 3, 7), randn(1, 3, 7)))
