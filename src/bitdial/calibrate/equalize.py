"""Cross-layer equalisation: channels are scaled so that one activation scale suits them all.

If the channels of an activation have very different ranges, a scale that fits the largest leaves the small ones few
codes. So each channel gets a factor, which the weights that read it take back (see `channels`). A depthwise layer has a
weight scale for each channel and takes any factor: all channels get the same range. In other layers a channel that
grows leaves smaller weights beside larger ones in a row, so half of the way is gone, on a logarithmic scale.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.calibrate.blocks import Block
from bitdial.calibrate.channels import Space, find_spaces
from bitdial.calibrate.reference import float_copy
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.prepare.model_call import Batch, call

MOST_FACTOR = 64.0
_ROOM = 1.5  # below the bound of a ReLU6, for values larger than the inputs show
_LEAST_SHARE = 1e-4


@torch.no_grad()
def equalize(model: nn.Module, blocks: list[Block], inputs: list[Batch]) -> int:
    """Equalise the channels of `model`, in place, by the ranges that `inputs` give; how many activations it was.

    The model computes the same in float, but for values behind a ReLU6 beyond what `inputs` show.
    """
    spaces = find_spaces(model, blocks)
    ranges = _ranges(float_copy(model), {name for space in spaces for name in space.readers}, inputs)
    for space in spaces:
        readers = [_layer(model, name) for name in space.readers]
        largest = torch.stack([ranges[name] for name in space.readers]).amax(dim=0)
        factors = _factors(readers, largest, space)
        for name in space.producers:
            _multiply(model.get_submodule(name), factors)
        for reader in readers:
            rows = reader.weight_rows()
            divided = rows / _by_input(reader, factors).view(*rows.shape[:2], *(1,) * (rows.dim() - 2))
            reader.weight.copy_(reader.kind.from_rows(reader, divided))
    return len(spaces)


def _layer(model: nn.Module, name: str) -> QuantLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, QuantLayer)
    return layer


def _multiply(producer: nn.Module, factors: Tensor) -> None:
    """Make each channel of what `producer` gives as many times as large."""
    if isinstance(producer, SwitchableBatchNorm):
        for parameter in set(producer.parameters()):  # sets may share some
            parameter.mul_(factors)
        return
    assert isinstance(producer, QuantLayer)
    rows = producer.weight_rows()
    scaled = rows * factors.view(-1, *(1,) * (rows.dim() - 1))
    producer.weight.copy_(producer.kind.from_rows(producer, scaled))
    if producer.bias is not None:
        producer.bias.mul_(factors)


def _by_input(layer: QuantLayer, factors: Tensor) -> Tensor:
    """`factors` (in channels,) for each row and input of `layer`: (rows, inputs of a row)."""
    rows, groups = layer.weight_rows().shape[0], int(getattr(layer, "groups", 1))
    return factors.view(groups, -1).repeat_interleave(rows // groups, dim=0)


def _factors(readers: list[QuantLayer], ranges: Tensor, space: Space) -> Tensor:
    """What each channel, whose largest magnitudes are `ranges`, is multiplied with."""
    most = ranges.max()
    if not bool(most > 0):
        return torch.ones_like(ranges)
    dead = ranges < most / MOST_FACTOR**2
    safe = torch.where(dead, most, ranges)
    wanted = most / safe
    if shares := [_shares(reader) for reader in readers if reader.weight_rows().shape[1] > 1]:
        wanted = (wanted * torch.stack(shares).amax(dim=0)).sqrt()
        wanted = wanted * (most / (wanted * safe).max())
    wanted = torch.where(dead, 1.0, wanted).clamp(1 / MOST_FACTOR, MOST_FACTOR)
    if math.isinf(space.bound):
        return wanted
    most_growth = (space.bound / (_ROOM * safe)).clamp_min(1.0)
    return torch.where(ranges >= space.bound, 1.0, torch.minimum(wanted, most_growth))


def _shares(reader: QuantLayer) -> Tensor:
    """The largest weight of `reader` for each input channel, as a share of the largest in its row."""
    sizes = reader.weight_rows().abs().flatten(2).amax(dim=2) if reader.weight.dim() > 2 else reader.weight_rows().abs()
    shares = sizes / sizes.amax(dim=1, keepdim=True).clamp_min(1e-30)
    by_group = shares.view(int(getattr(reader, "groups", 1)), -1, shares.shape[1])
    return by_group.amax(dim=1).flatten().clamp_min(_LEAST_SHARE)


def _ranges(plain: nn.Module, names: set[str], inputs: list[Batch]) -> Mapping[str, Tensor]:
    """The largest magnitude of each channel of what the layers `names` of the float model read."""
    found: dict[str, Tensor] = {}

    def hook(name: str, image_dims: int) -> Any:
        def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            largest = args[0].movedim(-1 - image_dims, 0).flatten(1).abs().amax(dim=1)
            found[name] = torch.maximum(found[name], largest) if name in found else largest

        return record

    modules: dict[str, Any] = {name: plain.get_submodule(name) for name in names}
    handles = [m.register_forward_pre_hook(hook(name, m.weight.dim() - 2)) for name, m in modules.items()]
    try:
        for batch in inputs:
            call(plain, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found
