"""Which kernels a live model runs on."""

import functools
import logging
from collections.abc import Sequence

import torch

from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.config import check_bit_choices, check_choice
from bitdial.errors import ConfigError
from bitdial.kernels.cpu.digits import products_are_exact
from bitdial.kernels.dispatch import missing_on
from bitdial.kernels.packed_ops import DTYPES, dtypes_on

log = logging.getLogger(__name__)

KERNELS = ("float", "integer", "packed")
MASTERS = ("device", "host")


def unsupported_reason(artifact: Artifact, name: str) -> str | None:
    """Why packed words cannot serve the layer called `name`; None if they can."""
    entry = artifact.layers[name]
    if not bf.scheme_of(artifact.scheme).narrows:
        return f"scheme {artifact.scheme!r} has no integers to pack"
    if entry["type"] != "Linear":
        return f"it is a {entry['type']}"
    if entry["activations"] != "float":
        return "its activations are quantised"
    group_size = entry.get("group_size")
    return None if group_size is None or group_size % 32 == 0 else f"its group_size={group_size} is no multiple of 32"


def choose_kernels(artifact: Artifact, device: torch.device, dtype: torch.dtype | None, kernels: str | None) -> str:
    """The kernels that `load` uses: those asked for, or for None the best that `device` has; checks both arguments."""
    if kernels is not None:
        check_choice("kernels", kernels, KERNELS)
    if dtype not in (None, torch.float32, *DTYPES):
        raise ConfigError(f"dtype={dtype} is not supported; choose torch.float32, torch.bfloat16 or torch.float16")
    quantised = [name for name, entry in artifact.layers.items() if entry["activations"] != "float"]
    if dtype in DTYPES and (quantised or kernels == "integer"):
        why = f"layer {quantised[0]!r} quantises its activations" if quantised else "integer kernels are asked for"
        raise ConfigError(f"dtype={dtype} is for weight-only models, but {why}, which is defined in float32")
    if kernels is None:
        grouped = any(entry.get("group_size") is not None for entry in artifact.layers.values())
        served = len(quantised) == len(artifact.layers) and not grouped
        kernels = _best(artifact, device, dtype, all_served=served)
    elif kernels == "packed":
        _check_packed(artifact, device, dtype)
    missing = missing_on(device) if device.type == "cuda" else None
    if missing is not None and kernels != "float":
        _say_once(f"no {kernels} kernels on {device}: {missing}; slow, exact sums run instead")
    return kernels


def _best(artifact: Artifact, device: torch.device, dtype: torch.dtype | None, *, all_served: bool) -> str:
    """The kernels for `device`; `all_served` says whether integer kernels run every layer."""
    wanted = "float"
    if device.type == "cuda" and all_served:
        wanted = "integer"
    elif device.type == "cuda" and any(unsupported_reason(artifact, name) is None for name in artifact.layers):
        if dtype in DTYPES:
            wanted = "packed"
        else:
            _say_once("float kernels run: packed ones need 16 bits, load(..., dtype=torch.bfloat16) or torch.float16")
    elif device.type == "cpu" and dtype in DTYPES and any(_has_bytes(artifact, name) for name in artifact.layers):
        wanted = "packed" if products_are_exact() else "float"
    if device.type == "cuda" and wanted != "float" and (missing := missing_on(device)) is not None:
        _say_once(f"no {wanted} kernels on {device}: {missing}; float kernels run instead")
        return "float"
    if wanted == "packed":
        _check_packed(artifact, device, dtype)
    return wanted


def _has_bytes(artifact: Artifact, name: str) -> bool:
    """Whether packed kernels serve the layer called `name`, on the CPU by integers: its groups' scales are such."""
    grouped = artifact.layers[name].get("group_size") is not None
    return unsupported_reason(artifact, name) is None and (not grouped or artifact.group_scale(name) is not None)


def _check_packed(artifact: Artifact, device: torch.device, dtype: torch.dtype | None) -> None:
    reasons = {name: why for name in artifact.layers if (why := unsupported_reason(artifact, name)) is not None}
    first = next((f"layer {name!r}: {why}" for name, why in reasons.items()), "")
    if len(reasons) == len(artifact.layers):
        raise ConfigError(
            f"packed kernels serve no layer of this file ({first}); they are for weight-only Linear layers"
        )
    if reasons:
        _say_once(
            f"packed kernels do not serve {len(reasons)} of {len(artifact.layers)} layers ({first}); float ones do"
        )
    if (dtype or torch.float32) not in dtypes_on(device):
        _say_once("in float32, packed weights are dequantised at every call; dtype=torch.bfloat16 is fast")


def check_offer(artifact: Artifact, kernels: str, bit_choices: Sequence[int] | None, master: str) -> tuple[int, ...]:
    """The widths that a live model offers; ConfigError if `bit_choices` or `master` ask for what there is not."""
    check_choice("master", master, MASTERS)
    if master == "host" and (kernels != "packed" or bf.scheme_of(artifact.scheme).nests):
        held = (
            f"with {kernels} kernels" if kernels != "packed" else f"for {artifact.scheme!r}, one buffer for all widths"
        )
        raise ConfigError(
            f"master='host' keeps the codes of double_rounding on packed kernels in host memory; {held}, there is no "
            "such master"
        )
    if bit_choices is None:
        return artifact.available
    offered = check_bit_choices(bit_choices)
    if kernels != "packed" and not artifact.parts:
        raise ConfigError(
            f"bit_choices={offered} limits what packed kernels hold, or what is read of a progressive file; this model "
            f"runs on {kernels} kernels, of a file that is whole"
        )
    if unknown := [bits for bits in offered if bits not in artifact.bit_choices]:
        raise ConfigError(f"bit_choices={offered}: the file has {artifact.bit_choices}, not {unknown[0]}")
    if offered[0] not in artifact.available:
        raise ConfigError(
            f"bit_choices={offered}: the file is cut, or was read, behind its part of {artifact.available[0]} bits; "
            "get the rest, or leave out what is above"
        )
    for name, bits in artifact.fixed_bits.items():
        if bits not in offered and not artifact.parts and unsupported_reason(artifact, name) is None:
            raise ConfigError(f"bit_choices={offered}: layer {name!r} stays at {bits} bits; offer {bits} too")
    return offered


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)
