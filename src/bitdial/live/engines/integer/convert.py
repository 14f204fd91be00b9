"""From a live model by exact sums to one on integer kernels, wherever these serve."""

import functools
import logging
from typing import cast

from torch import nn

from bitdial.dial.dial import SWITCHBOARD
from bitdial.dial.plan import shortened
from bitdial.live.codes import StoredCodes
from bitdial.live.engines.exact import ExactLayer, ExactNorm, ExactPool
from bitdial.live.engines.integer.engine import IntegerEngine, unsupported_reason
from bitdial.live.engines.integer.float_layers import FixedPointLayer, FixedPointPool, serves_float
from bitdial.live.engines.integer.norms import IntegerNorm, IntegerSwitchableNorm, is_affine
from bitdial.live.engines.integer.switchboard import Switchboard
from bitdial.live.layers import LiveLayer
from bitdial.nn import SwitchableBatchNorm
from bitdial.nn.swap import swap_modules

log = logging.getLogger(__name__)


def to_integer(model: nn.Module) -> None:
    """Change the live `model`, which runs by exact sums, in place to integer kernels, where these serve."""
    modules = dict(model.named_modules())
    new = _successors(modules)
    swap_modules(model, new)
    engines = _engines(modules)
    board = Switchboard(model)
    for name, module in model.named_modules():
        if isinstance(module, IntegerSwitchableNorm):
            board.add(name, module.operands)
        elif name in engines and cast(LiveLayer, module).codes.rule.narrows:
            board.add(name, engines[name])
    board.bind()
    for name, engine in engines.items():
        if engine.board is None:
            engine.allocate()
        cast(LiveLayer, modules[name]).engine = engine
    setattr(model, SWITCHBOARD, board)
    model.eval()


def _successors(modules: dict[str, nn.Module]) -> dict[nn.Module, nn.Module]:
    """What takes the place of unquantised layers, norms and pools."""
    switchable = [m for m in modules.values() if isinstance(m, SwitchableBatchNorm)]
    in_sets = {each for norm in switchable for each in norm.sets.values()}
    new: dict[nn.Module, nn.Module] = {}
    for name, module in modules.items():
        if isinstance(module, ExactLayer) and serves_float(module):
            new[module] = FixedPointLayer(module, name)
        elif isinstance(module, ExactPool) and module.is_global:
            new[module] = FixedPointPool(module)
        elif isinstance(module, SwitchableBatchNorm) and is_affine(module):
            new[module] = IntegerSwitchableNorm(module)
        elif isinstance(module, ExactNorm) and module not in in_sets and is_affine(module):
            new[module] = IntegerNorm(module)
    return new


def _engines(modules: dict[str, nn.Module]) -> dict[str, IntegerEngine]:
    """The engines of the layers that the kernels serve, by name; says once which they do not."""
    layers = {name: module for name, module in modules.items() if isinstance(module, LiveLayer)}
    reasons = {name: reason for name, layer in layers.items() if (reason := unsupported_reason(layer)) is not None}
    for name in reasons:
        layer = layers[name]
        if isinstance(source := layer.codes.source, StoredCodes):
            source.stored = source.stored.clone()  # it may be a part of a whole file's memory
    if reasons:
        first, names = next(iter(reasons)), shortened(list(reasons), most=20)
        _say_once(
            f"integer kernels do not serve {len(reasons)} of {len(layers)} layers ({names}; layer {first!r}: "
            f"{reasons[first]}); exact sums do, slowly"
        )
    return {name: IntegerEngine(layer) for name, layer in layers.items() if name not in reasons}


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)
