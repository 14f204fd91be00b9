"""Biases that make up for a shift of the mean, in layers that no norm follows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.calibrate.blocks import Block
from bitdial.graph.patterns import only_user
from bitdial.nn import QuantLayer


def followed_by_norm(model: nn.Module, block: Block) -> list[str]:
    """The layers of `block` whose output goes to one of its norms and nowhere else."""
    readers = {node: only_user(node) for node in block.nodes if node.op == "call_module"}
    return [
        str(node.target)
        for node, reader in readers.items()
        if reader is not None and reader.op == "call_module" and reader.target in block.norms
        if isinstance(model.get_submodule(str(node.target)), QuantLayer)
    ]


def bare_layers(model: nn.Module, block: Block) -> list[str]:
    """The layers of `block` with a bias and without a norm behind them."""
    followed, found = followed_by_norm(model, block), []
    for node in block.nodes:
        layer = model.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(layer, QuantLayer) and layer.kind.multiplies and layer.bias is not None:
            found.append(str(node.target))
    return [name for name in found if name not in followed]


@contextmanager
def watch_means(root: nn.Module, names: list[str]) -> Iterator[dict[str, Tensor]]:
    """Filled at the end of the block: the mean output of each channel of the layers `names`, over all calls in it."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    means: dict[str, Tensor] = {}

    def hook(name: str, image_dims: int) -> Any:
        def record(module: nn.Module, args: Any, out: Tensor) -> None:
            rows = out.detach().movedim(-1 - image_dims, 0).flatten(1)
            sums[name] = sums.get(name, 0) + rows.sum(dim=1, dtype=torch.float64)
            counts[name] = counts.get(name, 0) + rows.shape[1]

        return record

    modules: dict[str, Any] = {name: root.get_submodule(name) for name in names}
    handles = [m.register_forward_hook(hook(name, m.weight.dim() - 2)) for name, m in modules.items()]
    try:
        yield means
        means.update({name: total / counts[name] for name, total in sums.items()})
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def correct_bias(layer: QuantLayer, reference: Tensor, means: Mapping[int, Tensor]) -> None:
    """Change the bias of `layer`, in place, by what its mean output (channels,) has moved from `reference`, by width.

    One bias serves all widths, whose shifts differ. The change c has the least sum over widths of |c - shift|^2 /
    |shift|^2: relative to each width's own, so that a large shift at the lowest width is not forced on the highest.
    """
    shifts = [mean - reference for mean in means.values()]
    weights = [1 / shift.square().mean().clamp_min(1e-30) for shift in shifts]
    total = torch.stack(weights).sum()
    change = torch.stack([weight / total * shift for weight, shift in zip(weights, shifts, strict=True)]).sum(dim=0)
    layer.bias -= change.to(layer.bias.dtype)
