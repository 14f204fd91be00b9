"""Cross-layer equalisation: channels are scaled so that one activation scale suits them all.

If the channels of an activation have very different ranges, a scale that fits the largest leaves the small ones few
codes. So each channel gets a factor, which the weights that read it take back (see `channels`). A depthwise layer has a
weight scale for each channel and takes any factor. In other layers a channel that grows leaves smaller weights beside
larger ones in a row, so what activations gain, weights lose.

How far to go is decided for each activation by what is expected to come of it. Rounding with a step d adds noise of
variance d^2 / 12. In a row of weights w_c over inputs with mean squares m_c, the noise of activations is d^2 / 12 * sum
(w_c / k_c)^2, that of weights d_w^2 / 12 * sum k_c^2 m_c, and the signal sum w_c^2 m_c, whatever the factors k_c. Those
factors are taken that have the least product over the widths of (noise / signal), the mean over rows; none, if the gain
is small.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitdial.calibrate.blocks import Block
from bitdial.calibrate.channels import Space, find_spaces
from bitdial.calibrate.reference import float_copy
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.prepare.model_call import Batch, call

MOST_FACTOR = 64.0
EXPONENTS = (0.25, 0.5, 0.75, 1.0)  # how far to go, on a logarithmic scale
LEAST_GAIN = 1.25  # of noise / signal, at each width
_ROOM = 1.5  # below the bound of a ReLU6, for values larger than the inputs show
_LEAST_SHARE = 1e-4
_CLIP = 10.0  # roots of the mean square, beyond which activations are clipped anyway


class Channels(NamedTuple):
    """The largest magnitude and the mean square of each channel (C,) of an activation."""

    largest: Tensor
    squares: Tensor


@torch.no_grad()
def equalize(model: nn.Module, blocks: list[Block], inputs: list[Batch]) -> int:
    """Equalise the channels of `model`, in place, by the ranges that `inputs` give; how many activations it was.

    The model computes the same in float, but for values behind a ReLU6 beyond what `inputs` show.
    """
    spaces = find_spaces(model, blocks)
    seen = _observe(float_copy(model), {name for space in spaces for name in space.readers}, inputs)
    changed = 0
    for space in spaces:
        readers = [_layer(model, name) for name in space.readers]
        found = [seen[name] for name in space.readers]
        channels = Channels(*(torch.stack(parts).amax(dim=0) for parts in zip(*found, strict=True)))
        factors = _factors(readers, channels, space)
        if factors is None:
            continue
        changed += 1
        for name in space.producers:
            _multiply(model.get_submodule(name), factors)
        for reader in readers:
            rows = reader.weight_rows()
            divided = rows / _by_input(reader, factors).view(*rows.shape[:2], *(1,) * (rows.dim() - 2))
            reader.weight.copy_(reader.kind.from_rows(reader, divided))
    return changed


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


def _factors(readers: list[QuantLayer], channels: Channels, space: Space) -> Tensor | None:
    """What each channel is multiplied with; None if nothing is worth it."""
    ranges, most = channels.largest, channels.largest.max()
    if not bool(most > 0):
        return None
    dead = ranges < most / MOST_FACTOR**2
    safe = torch.where(dead, most, ranges)
    direction = most / safe
    if shares := [_shares(reader) for reader in readers if reader.weight_rows().shape[1] > 1]:
        direction = direction * torch.stack(shares).amax(dim=0)
    tried = [torch.ones_like(ranges)]
    for exponent in EXPONENTS:
        wanted = direction**exponent
        wanted = wanted * (most / (wanted * safe).max())
        factors = torch.where(dead, 1.0, wanted).clamp(1 / MOST_FACTOR, MOST_FACTOR)
        if not math.isinf(space.bound):
            most_growth = (space.bound / (_ROOM * safe)).clamp_min(1.0)
            factors = torch.where(ranges >= space.bound, 1.0, torch.minimum(factors, most_growth))
        tried.append(factors)
    losses = torch.stack([_expected_losses(readers, channels, factors) for factors in tried]).tolist()
    usual, *others = (sum(each) for each in losses)
    best = min(range(len(others)), key=others.__getitem__)
    enough = usual - math.log(LEAST_GAIN) * sum(len(reader.bit_choices) for reader in readers)
    return tried[1 + best] if others[best] < enough else None


def _expected_losses(readers: list[QuantLayer], channels: Channels, factors: Tensor) -> Tensor:
    """log(noise / signal) of each reader at each width if channels are multiplied with `factors`."""
    largest, squares = channels.largest * factors, channels.squares * factors.square()
    reach = torch.minimum(largest.max(), _CLIP * squares.mean().sqrt())
    losses = []
    for reader in readers:
        rows = reader.weight_rows().flatten(2) if reader.weight.dim() > 2 else reader.weight_rows()[:, :, None]
        weights = rows / _by_input(reader, factors)[:, :, None]
        inputs = _by_input(reader, squares)
        squared = weights.square()
        signal = (squared.sum(dim=2) * inputs).sum(dim=1).clamp_min(1e-30)
        size, most = squared.sum(dim=(1, 2)), weights.abs().amax(dim=(1, 2))
        total = inputs.sum(dim=1) * weights.shape[2]
        for bits in reader.bit_choices if reader.fixed_bits is None else (reader.fixed_bits,):
            step = reach / (2.0**bits - 1)
            noise = (step.square() * size + (most / 2.0 ** (bits - 1)).square() * total) / 12
            losses.append((noise / signal).clamp_max(1.0).mean().log())
    return torch.stack(losses)


def _shares(reader: QuantLayer) -> Tensor:
    """The largest weight of `reader` for each input channel, as a share of the largest in its row."""
    sizes = reader.weight_rows().abs().flatten(2).amax(dim=2) if reader.weight.dim() > 2 else reader.weight_rows().abs()
    shares = sizes / sizes.amax(dim=1, keepdim=True).clamp_min(1e-30)
    by_group = shares.view(int(getattr(reader, "groups", 1)), -1, shares.shape[1])
    return by_group.amax(dim=1).flatten().clamp_min(_LEAST_SHARE)


def _observe(plain: nn.Module, names: set[str], inputs: list[Batch]) -> Mapping[str, Channels]:
    """What the layers `names` of the float model read."""
    found: dict[str, list[Channels]] = {name: [] for name in names}

    def hook(name: str, image_dims: int) -> Any:
        def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            rows = args[0].movedim(-1 - image_dims, 0).flatten(1)
            if rows.shape[1]:
                found[name].append(Channels(rows.abs().amax(dim=1), rows.square().mean(dim=1)))

        return record

    modules: dict[str, Any] = {name: plain.get_submodule(name) for name in names}
    handles = [m.register_forward_pre_hook(hook(name, m.weight.dim() - 2)) for name, m in modules.items()]
    try:
        for batch in inputs:
            call(plain, batch)
    finally:
        for handle in handles:
            handle.remove()
    largest = {name: torch.stack([each.largest for each in seen]).amax(dim=0) for name, seen in found.items()}
    squares = {name: torch.stack([each.squares for each in seen]).mean(dim=0) for name, seen in found.items()}
    return {name: Channels(largest[name], squares[name]) for name in names}
