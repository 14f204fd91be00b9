"""Several widths at once from one set of weights."""

import copy

from torch import nn

from bitdial.dial.dial import dialled_layers, set_bits, unwrap
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError
from bitdial.live.engines.packed.words import NestedWords
from bitdial.live.layers import LiveLayer


def view_at_bits(model: nn.Module, bits: LayerBits | BitPlan | str) -> nn.Module:
    """A model that shares every tensor with the live `model` and has a dial of its own, set to `bits`.

    Threads that serve different widths take a view each: `set_bits` on one changes nothing in another, where
    `at_bits` turns the dial that all users of a model share. Each view can be compiled or recorded by itself. It needs
    weights that are read at any width (on packed kernels, of a scheme whose low codes are prefixes: nested, centred,
    truncate, adabits), for a switch of others rewrites what the views would share.
    """
    model = unwrap(model)
    for name, layer in dialled_layers(model).items():
        if not (isinstance(layer, LiveLayer) and isinstance(layer.codes.source, NestedWords)):
            engine = layer.engine.name if isinstance(layer, LiveLayer) else type(layer).__name__
            raise ConfigError(
                f"layer {name!r} ({engine}) rewrites its weight to change width, so views of the model would "
                "disturb each other; views need a weight-only model of scheme nested, centred, truncate or adabits: "
                'load(path, kernels="packed")'
            )
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    set_bits(view, bits)
    return view
