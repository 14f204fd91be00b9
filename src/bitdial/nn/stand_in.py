"""Layers that take the place of a user's layer, which may be of a class derived from PyTorch's.

Models read more of their layers than PyTorch's classes have: what somebody has put on a layer, what its class defines.
"""

from typing import Any, NoReturn

from torch import nn

from bitdial.errors import ConfigError

# Attributes that layers have once they are quantised, in training or live; a user's layer may not have them too.
RESERVED = frozenset(
    (
        "act_bits", "act_quantizer", "active_scales", "bit_choices", "check_input", "codes", "engine", "fed_by",
        "fixed_bits", "from_float", "kind", "like", "name", "quantized_input", "quantized_weight", "quantizes_input",
        "run_on", "select_bits", "unset_passes", "weight_bits", "weight_quantizer", "weight_rows", "weight_shape",
    )
)  # fmt: skip


class LeftBehind:
    """In the place of a method or property `attribute` of the class that `layer` was of: to use it is an error."""

    def __init__(self, layer: str, was: str, attribute: str):
        self.layer, self.was, self.attribute = layer, was, attribute

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AttributeError(
            f"layer {self.layer!r} was a {self.was}, whose {self.attribute!r} a quantised layer does not have, since "
            f"it may read the float weight; call the layer itself, or keep it in float: Rule(pattern={self.layer!r}, "
            "quantize=False)"
        )

    __call__ = __bool__ = __len__ = __iter__ = __getitem__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __lt__ = __gt__ = __le__ = __ge__ = __torch_function__ = _refuse


def stand_in(made: nn.Module, layer: nn.Module, name: str) -> None:
    """Give `made`, which takes the place of `layer`, the attributes that models may read of it, in place.

    Those are what somebody has put on the layer, and the constants of its class. Methods are left behind: using one is
    an error that names the layer. ConfigError if an attribute is one that `made` has for itself.
    """
    theirs = [cls for cls in reversed(type(layer).__mro__) if not cls.__module__.startswith(("torch.nn.", "builtins"))]
    of_class = {key: value for cls in theirs for key, value in vars(cls).items() if not key.startswith("_")}
    if taken := sorted(RESERVED.intersection((*vars(layer), *of_class))):
        raise ConfigError(
            f"layer {name!r}: its attribute {taken[0]!r} is one that quantised layers have themselves; rename it, or "
            f"keep the layer in float: Rule(pattern={name!r}, quantize=False)"
        )
    for key, value in of_class.items():
        if key not in vars(layer) and not hasattr(made, key):
            described = hasattr(type(value), "__get__")  # a method or a property
            vars(made)[key] = LeftBehind(name, type(layer).__name__, key) if described else value
    keep_attributes(made, layer)


def keep_attributes(made: nn.Module, layer: nn.Module) -> None:
    """Give `made` what `layer` has and it has not, in place, less what only quantised layers have."""
    vars(made).update({k: value for k, value in vars(layer).items() if k not in RESERVED and not hasattr(made, k)})
