"""Rotations that run with a model: modules of their own beside a layer, and how a model with them is built again.

`bitdial.rotate` puts them in. The file keeps their names and sizes, and loading calls `rotate_again`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.functional.rotation import across, half_power, turn, turn_back, walsh_hadamard
from bitdial.nn.layer_kinds import EMBEDDING, LINEAR, LayerKind, nearest_kind
from bitdial.nn.swap import swap_modules

ROTATION = "_bitdial_rotation"  # the attribute by which a rotated model knows what was done to it
SEEN = ("weight", "bias", "in_features", "out_features", "num_embeddings", "embedding_dim", "padding_idx")


@dataclass(frozen=True)
class RotationRecord:
    """What `rotate` did to a model beside the modules it put in.

    seed      of the random signs
    residual  how the inputs of the blocks' layers are rotated: "merged", "online", or None
    values    whether the values of the attentions are
    untied    layers that had a weight in common with another module before, and have their own now
    """

    seed: int
    residual: str | None
    values: bool
    untied: tuple[str, ...] = ()


class BlockHadamard(nn.Module):
    """Rotates blocks of `size` neighbouring values, a power of two, by a Hadamard matrix.

    Sums of values and negated values in float32, in a fixed order, then one exact product with a power of two. The
    output has the type of the input. For sizes that are no power of four the result is longer by sqrt(2).
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., width) rotated; `size` divides the width."""
        return (walsh_hadamard(_wide(x), self.size) * half_power(self.size)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"size={self.size}"


class Turn(nn.Module):
    """Rotates vectors of any width by random signs and two matrices (`bitdial.functional.rotation`); `back`: undoes it.

    Signs and matrix are stored with the model. It computes in float32; the output has the type of the input.
    """

    signs: Tensor
    matrix: Tensor

    def __init__(self, signs: Tensor, matrix: Tensor, *, back: bool):
        super().__init__()
        self.size, self.back = len(signs), back
        self.register_buffer("signs", signs)
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., width) rotated."""
        rotated = (turn_back if self.back else turn)(_wide(x), self.signs, self.matrix)
        return rotated.to(x.dtype)

    def extra_repr(self) -> str:
        return f"size={self.size}, back={self.back}"


class _Rotated(nn.Module):
    """`layer` with a rotation beside it. It has the layer's weight and sizes too, since models look at them."""

    def __init__(self, layer: nn.Module, rotation: nn.Module):
        super().__init__()
        self.layer, self.rotation = layer, rotation
        self.training = layer.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in SEEN:
                raise
            return getattr(super().__getattr__("layer"), name)


class RotatedInput(_Rotated):
    """A layer whose input is rotated: `layer(rotation(x))`."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for the rotated `x`."""
        return cast(Tensor, self.layer(self.rotation(x)))


class RotatedOutput(_Rotated):
    """A layer whose output is rotated: `rotation(layer(x))`."""

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output for `x`, rotated."""
        return cast(Tensor, self.rotation(self.layer(x)))


RESIDUAL = ("merged", "online", None)  # how the inputs of the blocks' layers are rotated
HADAMARD, TURN, TURN_BACK = "hadamard", "turn", "turn_back"  # what the file calls them
# The kinds of layer that each may stand beside; norms have none.
BESIDE: dict[str, tuple[LayerKind | None, ...]] = {HADAMARD: (LINEAR,), TURN: (EMBEDDING, None), TURN_BACK: (None,)}


def with_rotation(layer: nn.Module, form: str, size: int, signs: Tensor | None = None) -> nn.Module:
    """`layer` with a rotation of that `form` and `size`: after it for a "turn", else before it.

    `signs` are those of a turn; without them its tensors are allocated and not written.
    """
    if form == HADAMARD:
        return RotatedInput(layer, BlockHadamard(size))
    weight = next(layer.parameters())
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    matrix = across(size).to(weight.device, dtype)
    signs = torch.empty(size, device=weight.device, dtype=dtype) if signs is None else signs.to(weight.device, dtype)
    rotation = Turn(signs, matrix, back=form == TURN_BACK)
    return RotatedInput(layer, rotation) if rotation.back else RotatedOutput(layer, rotation)


def online_rotations(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The modules of `model` with a rotation beside them: {name: {"form": ..., "size": ...}}."""
    return {name: _described(m) for name, m in model.named_modules() if isinstance(m, _Rotated)}


def is_rotated(model: nn.Module) -> bool:
    """Whether `rotate` made `model`, or a part of it."""
    return any(ROTATION in vars(module) for module in model.modules())


def rotation_entry(model: nn.Module) -> dict[str, Any] | None:
    """What the manifest says of the rotations of `model`; None if it is not rotated."""
    found = [(n, vars(m)[ROTATION]) for n, m in model.named_modules() if ROTATION in vars(m)]
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(f"the model has two rotated models in it, {found[0][0]!r} and {found[1][0]!r}; save each")
    name, record = found[0]
    inside = f"{name}." if name else ""
    return {
        "seed": record.seed,
        "residual": record.residual,
        "values": record.values,
        "untied": [f"{inside}{layer}" for layer in record.untied],
        "online": online_rotations(model),
    }


def rotate_again(model: nn.Module, entry: Mapping[str, Any] | None) -> None:
    """Give the plain `model` the structure of the rotated one that `entry` describes, in place, without its values.

    A model that has it already stays as it is; ConfigError if it has another.
    """
    online: Mapping[str, Any] = {} if entry is None else entry["online"]
    there = online_rotations(model)
    if there and there != online:
        raise ConfigError(
            f"{next(iter(there))!r} of the model is rotated otherwise than in the file; pass the plain float model, as "
            "it was before rotate()"
        )
    if entry is None or is_rotated(model):
        return
    new = {}
    for name, each in online.items():
        layer = _module(model, name)
        _check_size(name, layer, each["form"], each["size"])
        new[layer] = with_rotation(layer, each["form"], each["size"])
    swap_modules(model, new)
    for name in entry["untied"]:
        untie_weight(model, name)
    record = RotationRecord(entry["seed"], entry["residual"], entry["values"], tuple(entry["untied"]))
    setattr(model, ROTATION, record)


def untie_weight(model: nn.Module, name: str) -> None:
    """Give the layer called `name` a weight of its own, a copy, in place; a config of the model is told."""
    layer = _module(model, name)
    weight = layer._parameters.get("weight")
    if weight is None:
        raise ConfigError(f"{name!r} has a weight in the file, and none in the model")
    layer.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "tie_word_embeddings"):
        config.tie_word_embeddings = False


def _described(module: _Rotated) -> dict[str, Any]:
    rotation = cast(BlockHadamard | Turn, module.rotation)
    form = HADAMARD if isinstance(rotation, BlockHadamard) else TURN_BACK if rotation.back else TURN
    return {"form": form, "size": rotation.size}


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as problem:
        raise ConfigError(f"{name!r} is rotated in the file, and the model does not have it") from problem


def _check_size(name: str, layer: nn.Module, form: str, size: int) -> None:
    """Refuse a rotation whose size is not that of the `layer`: before anything of that size is made."""
    weight, kind = layer._parameters.get("weight"), nearest_kind(layer)
    width = None if weight is None else weight.shape[-1]
    if width is None or kind not in BESIDE[form] or (width % size if form == HADAMARD else width != size):
        called = type(layer).__name__
        raise ConfigError(f"{name!r}: a {form} of size {size} in the file does not fit the {called} of width {width}")


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
