"""What a live model holds in memory."""

from collections.abc import Iterable

from torch import Tensor, nn

from bitdial.dial.dial import unwrap
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.live.engines.packed.layers import ArenaLinear, NestedLinear
from bitdial.live.layers import PackedLayer


def resident_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes that the live `model` holds, by what they are; each tensor counts once.

    `active`: weights as layers use them now. `master`: the stored codes that a switch starts from, beside `active` on
    the same device. `host_master`: the same, in host memory. `other`: scales, biases, norms, embeddings, float layers,
    tables. Where one buffer serves every width it counts as `active`.
    """
    layers = list(unwrap(model).modules())
    arenas = list({id(m.board): m.board.arena for m in layers if isinstance(m, ArenaLinear)}.values())
    plain = [m for m in layers if isinstance(m, PackedLayer)]
    on_host = [a for a in arenas if "master" not in a.on_device]
    parts = {
        "active": [m.words for m in layers if isinstance(m, NestedLinear)] + [m.active for m in plain],
        "master": [m.stored for m in plain] + [a.master for a in arenas if a not in on_host],
        "host_master": [a.master for a in on_host],
    }
    parts["active"] += [a.active for a in arenas]
    everything = [*model.parameters(), *model.buffers(), *(t for a in arenas for t in _tensors(a))]
    found = {name: _bytes(tensors) for name, tensors in parts.items()}
    return {**found, "other": _bytes([*everything, *(t for ts in parts.values() for t in ts)]) - sum(found.values())}


def _tensors(arena: PackedWeightPool) -> list[Tensor]:
    return [getattr(arena, part) for part in arena.on_device]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in {(t.device, t.data_ptr(), t.nbytes): t for t in tensors if t.numel()}.values())
