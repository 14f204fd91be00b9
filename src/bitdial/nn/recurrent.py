"""nn.LSTM, nn.GRU and nn.RNN taken apart: their matrices become layers, which can be quantised; weights only.

A layer here is called once for each call of the network, and its output is its matrix: dequantised where it is
quantised. The network then runs by PyTorch's own function over all steps.

On a GPU, cuDNN wants all weights of a network in one piece of memory, which dequantised ones are not. It copies them at
each call, and PyTorch warns of it; the numbers are the same.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bitdial.nn.parts import Parts

# What models read of PyTorch's networks beside their weights.
SETTINGS = (
    "mode",
    "input_size",
    "hidden_size",
    "num_layers",
    "bias",
    "batch_first",
    "dropout",
    "bidirectional",
    "proj_size",
)
STATE = r"(weight|bias)_(ih|hh|hr)_l\d+(_reverse)?"
# What says how they compute, beside `forward`.
METHODS = ("check_forward_args", "check_input", "check_hidden_size", "permute_hidden")
FUNCTIONS: dict[str, Any] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}

Hidden = Tensor | tuple[Tensor, ...]


class RecurrentWeight(nn.Module):
    """A matrix (rows, columns) of a recurrent network. It is called with the network's input, and gives the matrix.

    The input is for those who watch layers run: it says how many steps there are.
    """

    weight: Tensor

    def __init__(self, rows: int, columns: int, device: torch.device | str | None = None):
        super().__init__()
        self.rows, self.columns = rows, columns
        self.weight = nn.Parameter(torch.empty(rows, columns, device=device))

    def forward(self, input: Tensor) -> Tensor:
        """The matrix."""
        return self.weight

    def extra_repr(self) -> str:
        return f"{self.rows}, {self.columns}"


class Recurrent(nn.Module):
    """What nn.LSTM, nn.GRU or nn.RNN computes, with its matrices as layers, under the names that PyTorch gives them.

    Biases stay parameters. Inputs, states and results are those of PyTorch's module.
    """

    mode: str
    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool
    proj_size: int

    def __init__(self, network: nn.RNNBase, parts: Parts):
        super().__init__()
        for key in SETTINGS:
            setattr(self, key, getattr(network, key))
        for name, parameter in network.named_parameters():
            if name.startswith("weight"):
                rows, columns = parameter.shape
                made = RecurrentWeight(rows, columns, device="meta")
                made.weight = parameter
                self.add_module(name, made)
            else:
                self.register_parameter(name, parameter)

    def forward(self, input: Tensor | PackedSequence, hx: Hidden | None = None) -> tuple[Any, Any]:
        """As PyTorch's: (output, final state); the state of an LSTM is a pair."""
        y, after = self._packed(input, hx) if isinstance(input, PackedSequence) else self._padded(input, hx)
        return y, tuple(after) if self.mode == "LSTM" else after[0]

    def _packed(self, input: PackedSequence, hx: Hidden | None) -> tuple[PackedSequence, list[Tensor]]:
        x, sizes, order, back = input
        state = self._state(hx, x, int(sizes[0]))
        y, *after = FUNCTIONS[self.mode](x, sizes, self._of_mode([_reordered(s, order) for s in state]), *self._how(x))
        return PackedSequence(y, sizes, order, back), [_reordered(each, back) for each in after]

    def _padded(self, x: Tensor, hx: Hidden | None) -> tuple[Tensor, list[Tensor]]:
        samples = 0 if self.batch_first else 1  # the dimension that counts them
        if x.dim() not in (2, 3):
            raise ValueError(f"the input of a {self.mode} is {tuple(x.shape)}; expected 2 or 3 dimensions")
        if x.dim() == 2:
            given = None if hx is None else [each.unsqueeze(1) for each in _each(hx)]
            y, after = self._padded(x.unsqueeze(samples), None if given is None else self._of_mode(given))
            return y.squeeze(samples), [each.squeeze(1) for each in after]
        state = self._of_mode(self._state(hx, x, x.shape[samples]))
        y, *after = FUNCTIONS[self.mode](x, state, *self._how(x), self.batch_first)
        return y, after

    def _how(self, x: Tensor) -> tuple[Any, ...]:
        """The weights, and what else PyTorch's functions are told."""
        if x.shape[-1] != self.input_size:
            raise RuntimeError(f"the input of a {self.mode} is {tuple(x.shape)}; expected (..., {self.input_size})")
        weights: list[Tensor] = []
        for layer in range(self.num_layers):
            for end in (f"l{layer}", f"l{layer}_reverse") if self.bidirectional else (f"l{layer}",):
                weights += [getattr(self, f"weight_{part}_{end}")(x) for part in ("ih", "hh")]
                weights += [getattr(self, f"bias_{part}_{end}") for part in ("ih", "hh") if self.bias]
                weights += [getattr(self, f"weight_hr_{end}")(x)] if self.proj_size else []
        return weights, self.bias, self.num_layers, float(self.dropout), self.training, self.bidirectional

    def _of_mode(self, state: list[Tensor]) -> Any:
        return tuple(state) if self.mode == "LSTM" else state[0]

    def _state(self, hx: Hidden | None, x: Tensor, batch: int) -> list[Tensor]:
        """The state to start from, zeros if none is given: of the output, and for an LSTM of the cells."""
        layers = self.num_layers * (2 if self.bidirectional else 1)
        widths = [self.proj_size or self.hidden_size, *([self.hidden_size] if self.mode == "LSTM" else [])]
        sizes = [(layers, batch, width) for width in widths]
        if hx is None:
            return [x.new_zeros(size) for size in sizes]
        if (given := [tuple(each.shape) for each in _each(hx)]) != sizes:
            raise RuntimeError(f"the state of a {self.mode} is {given}; expected {sizes}")
        return list(_each(hx))

    def flatten_parameters(self) -> None:
        """Do nothing: there is no one piece of memory for cuDNN."""

    def extra_repr(self) -> str:
        return ", ".join(f"{key}={getattr(self, key)}" for key in SETTINGS)


def _each(state: Hidden) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else tuple(state)


def _reordered(state: Tensor, order: Tensor | None) -> Tensor:
    """`state` (layers, batch, width) with its samples in another `order`."""
    return state if order is None else state.index_select(1, order)
