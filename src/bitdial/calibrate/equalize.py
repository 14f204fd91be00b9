"""Cross-layer equalisation: channels between two layers are scaled so that one activation scale suits them all.

If the channels of an activation have very different ranges, a scale that fits the largest leaves the small ones few
codes. Between a layer and the one that reads it, channel c can be multiplied by a factor k_c > 0: the norm (or the
layer) in front makes it k_c times as large, and the weights behind are divided by k_c. ReLUs, pools and padding in
between do not mind. A ReLU6 does if a channel reaches its bound, so there a channel may grow up to the bound at most.

A depthwise layer has a weight scale for each channel, so it takes any factor: all channels get the same range. In other
layers a channel that grows leaves smaller weights to a row of larger ones, so half of the way is gone, on a logarithmic
scale.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bitdial.calibrate.blocks import Block
from bitdial.calibrate.reference import float_copy
from bitdial.graph.patterns import RELU_BOUNDS, only_user
from bitdial.nn import QuantLayer, SwitchableBatchNorm
from bitdial.nn.norms import batch_norm_type
from bitdial.prepare.model_call import Batch, call

MOST_FACTOR = 64.0
_SCALE_FREE: tuple[type[nn.Module], ...] = (
    nn.Identity, nn.Dropout, nn.Dropout2d, nn.ZeroPad2d, nn.MaxPool2d, nn.AvgPool2d, nn.LeakyReLU,
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Two layers with nothing between them that a factor for each channel would disturb, up to a bound."""

    front: str
    norm: str | None
    back: str
    bound: float


def find_pairs(model: nn.Module, blocks: list[Block]) -> list[Pair]:
    """The pairs of layers of `model` to equalise. A layer that runs twice is in none."""
    nodes = [node for block in blocks for node in block.nodes if node.op == "call_module"]
    targets = [str(node.target) for node in nodes]
    found = []
    for node in nodes:
        front = model.get_submodule(str(node.target))
        if not isinstance(front, QuantLayer) or not front.kind.multiplies:
            continue
        pair = _pair(model, node)
        if pair is None:
            continue
        if all(targets.count(name) == 1 for name in (pair.front, pair.back, pair.norm) if name is not None):
            found.append(pair)
    return found


def _pair(model: nn.Module, node: fx.Node) -> Pair | None:
    """The pair that the layer of `node` is the front of."""
    front, norm, bound = str(node.target), None, math.inf
    following = only_user(node)
    while following is not None:
        module = model.get_submodule(str(following.target)) if following.op == "call_module" else None
        relu = RELU_BOUNDS.get(following.target if module is None else type(module))
        if isinstance(module, QuantLayer):
            back = str(following.target)
            fits = module.kind.multiplies and _inputs(module) == _outputs(model.get_submodule(front))
            return Pair(front, norm, back, bound) if fits else None
        if isinstance(module, SwitchableBatchNorm):
            plain = norm is None and math.isinf(bound) and following.args == (node,)
            if not plain or batch_norm_type(module.active) is None or module.active.weight is None:
                return None
            norm = str(following.target)
        elif relu is not None:
            bound = min(bound, relu)
        elif not isinstance(module, _SCALE_FREE):
            return None
        following = only_user(following)
    return None


def _outputs(layer: Any) -> int:
    return int(layer.weight_rows().shape[0])


def _inputs(layer: Any) -> int:
    return int(layer.weight_rows().shape[1]) * int(getattr(layer, "groups", 1))


@torch.no_grad()
def equalize(model: nn.Module, blocks: list[Block], inputs: list[Batch]) -> int:
    """Equalise the pairs of `model`, in place, by the ranges that `inputs` give; how many there are.

    The model computes the same in float, but for values behind a ReLU6 beyond what `inputs` show.
    """
    pairs = find_pairs(model, blocks)
    ranges = _ranges(float_copy(model), {pair.back for pair in pairs}, inputs)
    for pair in pairs:
        front, back = model.get_submodule(pair.front), model.get_submodule(pair.back)
        assert isinstance(front, QuantLayer)
        assert isinstance(back, QuantLayer)
        factors = _factors(back, ranges[pair.back], pair.bound)
        if pair.norm is None:
            front.weight.copy_(front.kind.from_rows(front, _by_row(front.weight_rows(), factors)))
            if front.bias is not None:
                front.bias.mul_(factors)
        else:
            norm = model.get_submodule(pair.norm)
            assert isinstance(norm, SwitchableBatchNorm)
            for parameter in set(norm.parameters()):  # sets may share some
                parameter.mul_(factors)
        rows = back.weight_rows()
        divided = rows / _by_input(back, factors).view(*rows.shape[:2], *(1,) * (rows.dim() - 2))
        back.weight.copy_(back.kind.from_rows(back, divided))
    return len(pairs)


def _by_row(rows: Tensor, factors: Tensor) -> Tensor:
    return rows * factors.view(-1, *(1,) * (rows.dim() - 1))


def _by_input(layer: QuantLayer, factors: Tensor) -> Tensor:
    """`factors` (in channels,) for each row and input of `layer`: (rows, inputs of a row)."""
    rows, groups = layer.weight_rows().shape[0], int(getattr(layer, "groups", 1))
    return factors.view(groups, -1).repeat_interleave(rows // groups, dim=0)


def _factors(back: QuantLayer, ranges: Tensor, bound: float) -> Tensor:
    """What each channel of the input of `back`, whose largest magnitudes are `ranges`, is multiplied with."""
    most = ranges.max()
    if not bool(most > 0):
        return torch.ones_like(ranges)
    dead = ranges < most / MOST_FACTOR**2
    safe = torch.where(dead, most, ranges)
    if back.weight_rows().shape[1] == 1:
        wanted = most / safe
    else:
        rows = back.weight_rows().abs().flatten(2).amax(dim=2) if back.weight.dim() > 2 else back.weight_rows().abs()
        share = rows / rows.amax(dim=1, keepdim=True).clamp_min(1e-30)
        groups = int(getattr(back, "groups", 1))
        share = share.view(groups, -1, share.shape[1]).amax(dim=1).flatten()  # by input channel
        wanted = (share.clamp_min(1e-4) * most / safe).sqrt()
        wanted = wanted * (most / (wanted * safe).max())
    wanted = torch.where(dead, 1.0, wanted).clamp(1 / MOST_FACTOR, MOST_FACTOR)
    if math.isinf(bound):
        return wanted
    reaches = ranges >= bound
    return torch.where(reaches, 1.0, torch.minimum(wanted, bound / safe))


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
