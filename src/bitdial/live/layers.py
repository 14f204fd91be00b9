"""A layer that runs: it has codes, which say what it is, and an engine, which says how it multiplies.

There is one class for every kind of layer and every engine. `load` puts it where the float layer was.
"""

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from bitdial import functional as bf
from bitdial.errors import HiddenWeightError, QuantizationError
from bitdial.live.codes import Codes
from bitdial.nn.hidden_weight import HiddenWeight
from bitdial.nn.layer_kinds import LayerKind
from bitdial.nn.stand_in import stand_in


class Engine(Protocol):
    """How a layer multiplies. A module, which holds what it makes of the layer's codes."""

    name: str

    def select(self, layer: "LiveLayer", weight_bits: int, act_bits: int) -> None:
        """Get ready to multiply at these widths; the layer keeps their numbers."""
        ...

    def refresh(self, layer: "LiveLayer") -> None:
        """Get ready anew at the selected widths, after the codes have changed."""
        ...

    def multiply(self, layer: "LiveLayer", x: Tensor) -> Tensor:
        """The layer's output for `x` at the selected widths."""
        ...

    def tensors(self) -> dict[str, list[Tensor]]:
        """What it holds, by the names of `bitdial.live.memory`."""
        ...

    def switched(self) -> list[Tensor]:
        """Those of its tensors that `select` rewrites."""
        ...


class LiveLayer(nn.Module):
    """A layer of any kind on integer codes: `codes` (what it is) and `engine` (how it multiplies).

    It has the sizes and settings of the float layer as attributes (`in_features`, `stride`, ...), since models look at
    them, and its `bias`. Its `weight` has a shape, a type and a device, and no values. `bit_choices` are the widths
    that it offers; `name` is its name in the model, for errors. Only `set_bits` changes `weight_bits` and `act_bits`.
    With `fixed_bits` it stays at that width unless a plan names it.
    """

    name: str
    bias: Tensor | None
    like: Tensor
    weight_bits: int
    act_bits: int
    fixed_bits: int | None = None
    weight: Any = property(lambda self: HiddenWeight(self.name, self.weight_shape, self.like))

    def __init__(
        self, kind: LayerKind, layer: nn.Module, codes: Codes, *, name: str, bit_choices: tuple[int, ...] | None = None
    ):
        """`layer` is the float layer, of that `kind`; its bias becomes this one's."""
        super().__init__()
        self.kind, self.name = kind, name
        for key in (*kind.sizes, *kind.settings):
            setattr(self, key, getattr(layer, key))
        self.weight_shape = cast(Tensor, layer.weight).shape
        self.register_parameter("bias", getattr(layer, "bias", None))
        self.register_buffer("like", torch.empty(0), persistent=False)  # of the type that a float weight would have
        self.codes = codes
        self.engine: Any = None
        self.bit_choices = codes.bit_choices if bit_choices is None else bit_choices
        self.weight_bits = self.act_bits = self.bit_choices[0]
        stand_in(self, layer, name)
        self.register_load_state_dict_post_hook(_refresh)

    def run_on(self, engine: nn.Module) -> None:
        """Multiply by `engine` from now on, at the widths that are selected."""
        self.engine = engine.train(self.training)
        cast(Engine, engine).select(self, self.weight_bits, self.act_bits)

    def select_bits(self, weight_bits: int, act_bits: int) -> None:
        """Change the selected widths of this layer."""
        if self.engine is not None:
            self.engine.select(self, weight_bits, act_bits)
        vars(self).update(weight_bits=weight_bits, act_bits=act_bits)  # setting attributes of modules takes far longer

    def forward(self, input: Tensor) -> Tensor:
        """The layer at the selected widths."""
        return cast(Tensor, self.engine.multiply(self, input))

    @property
    def quantizes_input(self) -> bool:
        """Whether its input is quantised."""
        return self.codes.act_scale is not None

    def quantized_input(self, x: Tensor) -> Tensor:
        """Quantise `x` at the selected width, then dequantise it; refuses what is not finite."""
        self.check_input(x)
        if not self.quantizes_input:
            return x
        scale, zero_point = self.codes.act_parameters(self.act_bits)
        with torch.no_grad():
            return bf.fake_quantize_activation(x, scale, zero_point, bits=self.act_bits, kind=self.codes.act_kind)

    def check_input(self, x: Tensor) -> None:
        """Raise QuantizationError naming this layer if `x` holds NaN or infinity.

        torch.export cannot follow a branch on values: there the check becomes an assertion of the program.
        """
        if x.numel() and not self.kind.gathers:
            low, high = x.aminmax()
            finite = (low > -float("inf")) & (high < float("inf"))  # also false for NaN
            problem = f"layer {self.name!r}: its input holds NaN or infinity; check what goes in"
            if torch.compiler.is_exporting():
                torch._assert_async(finite, problem)
            elif not bool(finite):
                raise QuantizationError(problem)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise HiddenWeightError(
                f"layer {self.name!r} of a live model runs on integer codes: a weight put there would not be used. "
                "load_trainable(path) gives a model with float weights; save it and load it again"
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        sizes = ", ".join(f"{key}={getattr(self, key)}" for key in (*self.kind.sizes, *self.kind.settings))
        engine = "no engine" if self.engine is None else self.engine.name
        return f"{self.kind.name}, {sizes}, {self.codes.scheme}, w{self.weight_bits}a{self.act_bits}, {engine}"


def _refresh(layer: LiveLayer, keys: object) -> None:
    """After other codes were loaded into a layer, what its engine has made of them must follow."""
    if layer.engine is not None:
        layer.engine.refresh(layer)
