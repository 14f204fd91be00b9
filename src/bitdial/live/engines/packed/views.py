"""Several widths at once from one set of weights."""

import copy

from torch import nn

from bitdial.dial.dial import dialled_layers, set_bits, unwrap
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError
from bitdial.live.engines.packed.layers import NestedLinear


def view_at_bits(model: nn.Module, bits: LayerBits | BitPlan | str) -> nn.Module:
    """A model that shares every tensor with the live `model` and has a dial of its own, set to `bits`.

    Threads that serve different widths take a view each: `set_bits` on one changes nothing in another, where
    `at_bits` turns the dial that all users of a model share. Each view can be compiled or recorded by itself. It needs
    weights that are read at any width (schemes nested, truncate and adabits on packed kernels), for a switch of others
    rewrites what the views would share.
    """
    model = unwrap(model)
    for name, layer in dialled_layers(model).items():
        if not isinstance(layer, NestedLinear):
            raise ConfigError(
                f"layer {name!r} ({type(layer).__name__}) rewrites its weight to change width, so views of the model "
                "would disturb each other; views need a weight-only model of scheme nested, truncate or adabits, from "
                'load(path, kernels="packed")'
            )
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    set_bits(view, bits)
    return view
