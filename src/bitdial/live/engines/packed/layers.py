"""Linear layers on packed words, with float activations: what `load(..., kernels="packed")` puts into a model.

Inputs in bf16 and fp16, and others under autocast to these, go to the op `bitdial::packed_linear`. For an input of
another float type the weight is multiplied out for that one call, and torch's product runs in the input's type: the
numbers of a model on float kernels, slowly. NaN and infinity pass through, as in any float layer; nothing looks for
them, since that would wait for the device.
"""

import copy
from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.dial.dial import SWITCHBOARD, Board, Selection
from bitdial.errors import QuantizationError
from bitdial.kernels.packed_ops import DTYPES, packed_linear
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import packed_fields, unpack_words
from bitdial.live.hidden_weight import HiddenWeight, HidesWeight


class WordsLinear(HidesWeight, nn.Linear):
    """What NestedLinear and ArenaLinear share: a scale for each row, of one step at `high` bits. Abstract.

    `stored` is the width of the file's codes; `high` that of the widest words.

    `words` in `fields` hold the weight at `weight_bits`. `act_bits` is kept for `get_bits`; activations are float.
    `active` is empty: it has the type that a float weight would have.
    """

    active: Tensor
    scale: Tensor
    words: Tensor
    fields: tuple[int, ...]
    weight: Any = property(lambda self: HiddenWeight(self.name, (self.out_features, self.in_features), self.active))

    def __init__(
        self,
        linear: nn.Linear,
        *,
        name: str,
        scale: Tensor,
        high: int,
        stored: int,
        bit_choices: tuple[int, ...],
        scheme: str,
    ):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        del self.weight
        self.bias = linear.bias
        self.name, self.high, self.stored, self.bit_choices, self.scheme = name, high, stored, bit_choices, scheme
        self.weight_bits = self.act_bits = bit_choices[0]
        self.register_buffer("scale", scale)
        self.register_buffer("active", scale.new_empty(0), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        """The product at the selected width, in the type of the input or of autocast."""
        kind = input.device.type
        x = input.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else input
        if x.shape[-1:] != (self.in_features,):
            raise QuantizationError(
                f"layer {self.name!r}: its input is {tuple(x.shape)}, expected (..., {self.in_features})"
            )
        if x.dtype not in DTYPES:
            return F.linear(x, self.values().to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        flat = x.reshape(-1, self.in_features)
        fields, bits = self.fields, self.weight_bits
        y = packed_linear(flat, self.words, self.scale, self.bias, fields, bits, self.high, self.offset)
        return y.view(*x.shape[:-1], self.out_features)

    def weight_codes(self) -> tuple[Tensor, Tensor]:
        """Integer codes (int8) at the selected width, and the scale (rows,) of one step between them."""
        bits = self.weight_bits
        codes = unpack_words(self.words, self.fields, bits, self.out_features, self.in_features)
        return codes, self.scale * 2.0 ** (self.high - bits)

    @property
    def offset(self) -> float:
        """What is added to a code at the selected width."""
        return bf.scheme_of(self.scheme).offset(self.stored - self.weight_bits)

    def values(self) -> Tensor:
        """The weight at the selected width, multiplied out in float32."""
        codes, step = self.weight_codes()
        return (codes + self.offset) * step[:, None]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        scale = self.scale
        super()._apply(fn, recurse)
        self.scale = scale.to(self.scale.device)  # `.to(torch.bfloat16)` of a model must not round it
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.scheme}, w{self.weight_bits}"


class NestedLinear(WordsLinear):
    """A layer of a scheme whose low codes are prefixes: one buffer for every width, a switch changes a number."""

    def __init__(self, linear: nn.Linear, words: Tensor, fields: tuple[int, ...], **parts: Any):
        super().__init__(linear, **parts)
        self.register_buffer("words", words)
        self.fields = fields

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Read the words at `weight_bits` from now on."""
        vars(self).update(weight_bits=weight_bits, act_bits=act_bits)  # setting attributes of modules takes far longer


class ArenaBoard(Board[Selection]):
    """The switchboard of a model whose layers lie in a pool: all change by one call of `PackedWeightPool.set_bits`."""

    def __init__(self, arena: PackedWeightPool):
        super().__init__()
        self.arena = arena

    def __deepcopy__(self, memo: dict[int, Any]) -> "ArenaBoard":
        """A board with an arena of its own, which is there before the layers that take their words from it."""
        new = memo[id(self)] = ArenaBoard(copy.deepcopy(self.arena, memo))
        new.layers, new.norms = copy.deepcopy((self.layers, self.norms), memo)
        return new

    def attach(self, model: nn.Module) -> None:
        """Be what `set_bits` switches `model` by."""
        self.register(model)
        setattr(model, SWITCHBOARD, self)

    def _steps(self, chosen: Selection) -> Selection:
        return chosen

    def _apply(self, steps: Selection) -> None:
        self.arena.set_bits({name: bits for name, (bits, _) in steps.items() if name in self.arena.names})
        for name, pair in steps.items():
            if name in self.arena.names:
                cast(ArenaLinear, self.layers[name]).take_words(*pair)
            else:
                self.select(name, *pair)


class ArenaLinear(WordsLinear):
    """A layer of a scheme that rounds anew at each width: its words lie in the arena of the whole model.

    The words are part of no state_dict: the artifact is the form in which a model is kept.
    """

    def __init__(self, linear: nn.Linear, board: ArenaBoard, **parts: Any):
        super().__init__(linear, **parts)
        self.board = board
        self.take_words(self.weight_bits, self.act_bits)

    def take_words(self, weight_bits: int, act_bits: int) -> None:
        """Use the words that the arena has for this layer now, at `weight_bits`."""
        state = vars(self)  # setting attributes of modules takes far longer
        state["weight_bits"], state["act_bits"] = weight_bits, act_bits
        state["words"], state["fields"] = self.board.arena.words(self.name), packed_fields(weight_bits)

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Switch this layer alone."""
        self.board.arena.set_bits({self.name: weight_bits})
        self.take_words(weight_bits, act_bits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.board.arena.move(self.scale.device)
        self.take_words(self.weight_bits, self.act_bits)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "words"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.take_words(self.weight_bits, self.act_bits)  # of its own arena: a copy of the model has one too
