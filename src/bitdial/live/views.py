"""Several widths at once from one set of codes.

A view is a copy of the modules of a live model on the same tensors. What a switch rewrites is its own:

    engine     shared                                        own
    float      codes, scales, biases, norms, float layers    the dequantised weights in use
    exact      everything                                    nothing: it makes nothing beforehand
    integer    the same, and the tables of operands          the integers and the rows of the tables in use
    packed     everything, if codes are prefixes; else       the words in use (double_rounding)
               the words of the highest width, and the rest

A module says by `switched` which of its tensors a switch rewrites, a switchboard by `fixed` which of those that no
module has it does not.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.dial.dial import SWITCHBOARD, dialled_layers, set_bits, unwrap, wrapped
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError
from bitdial.live.engines.integer import IntegerModel
from bitdial.live.layers import LiveLayer


@torch.inference_mode(False)  # what is made within inference mode could not be switched outside
def view_at_bits(model: nn.Module, bits: LayerBits | BitPlan | str) -> nn.Module:
    """A model on what the live `model` has that does not depend on the width, with a dial of its own, set to `bits`.

    Threads that serve different widths take a view each: `set_bits` on one changes nothing in another, where `at_bits`
    turns the dial that all users of a model share. Each view can be compiled or recorded by itself. A view that is
    moved to another device has tensors of its own from then on; those of the model and of other views stay.
    """
    while not isinstance(model, IntegerModel) and (inner := wrapped(model)) is not None:
        model = inner
    for name, layer in dialled_layers(model).items():
        if not isinstance(layer, LiveLayer):
            raise ConfigError(f"layer {name!r} is a {type(layer).__name__}; views are of live models: load(path)")
    view: nn.Module = copy.deepcopy(model, _shared(model))
    board = getattr(unwrap(view), SWITCHBOARD, None)
    if board is not None:
        board.forget()  # the model may have been switched while it was copied
    set_bits(view, bits)
    return view


def _shared(model: nn.Module) -> dict[int, Any]:
    """What a view of `model` has, by id, instead of copies: buffers themselves, parameters on the same memory.

    Moving a model changes the parameters that it has, in place, so a view needs some of its own.
    """
    switched = {id(t) for m in model.modules() if hasattr(type(m), "switched") for t in m.switched()}  # type: ignore[operator]
    board = getattr(unwrap(model), SWITCHBOARD, None)
    fixed: list[Tensor] = [] if board is None else board.fixed()
    found: dict[int, Any] = {id(t): t for t in (*model.buffers(), *fixed) if id(t) not in switched}
    return found | {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
