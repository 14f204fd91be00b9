"""What a live model holds in memory."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from bitdial.dial.dial import unwrap
from bitdial.live.layers import LiveLayer

PARTS = ("active", "master", "host_master")


def resident_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes that the live `model` holds, by what they are; each tensor counts once.

    `active`: weights as layers use them now. `master`: the stored codes that a switch starts from, beside `active` on
    the same device. `host_master`: the same, in host memory. `other`: scales, biases, norms, embeddings, unquantised
    layers, tables. Where one buffer serves every width it counts as `active`.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in PARTS}
    everything = [*model.parameters(), *model.buffers()]
    for layer in unwrap(model).modules():
        if isinstance(layer, LiveLayer):
            holders: list[Any] = [layer.codes.source, layer.engine]
            for part in holders:
                for name, tensors in part.tensors().items():
                    everything += tensors
                    if name in found:
                        found[name] += tensors
    sizes = {name: _bytes(tensors) for name, tensors in found.items()}
    return {**sizes, "other": _bytes(everything) - sum(sizes.values())}


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in {(t.device, _place(t), t.nbytes): t for t in tensors if t.numel()}.values())


def _place(tensor: Tensor) -> int:
    """Where it lies; oneDNN's tensors do not say, and share their memory with no other."""
    return id(tensor) if tensor.is_mkldnn else tensor.data_ptr()
