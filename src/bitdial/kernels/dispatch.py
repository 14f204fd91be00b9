"""Where Triton kernels run: on a GPU that is new enough, or on the CPU under Triton's interpreter."""

import functools
import importlib.util
import os

import torch
from torch import Tensor

NEEDED_CAPABILITY = (8, 0)  # int8 tensor cores that Triton knows
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDEXABLE = 2**31  # elements of a tensor, beyond which 32-bit numbers do not count them


@functools.cache
def triton_installed() -> bool:
    """Whether Triton can be imported; it is not, for that takes long."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run on CPU tensors: TRITON_INTERPRET=1."""
    return os.environ.get("TRITON_INTERPRET") == "1" and triton_installed()


def triton_runs(tensor: Tensor) -> bool:
    """Whether Triton kernels run where `tensor` is."""
    return (tensor.is_cuda and triton_installed()) or interpreted()


def use_triton(tensor: Tensor) -> bool:
    """Whether the training kernels serve `tensor`: float32, bfloat16 or float16 where Triton runs."""
    return tensor.dtype in FLOATS and triton_runs(tensor)


def missing_on(device: torch.device) -> str | None:
    """What `device` lacks for the kernels of inference; None if it lacks nothing."""
    if device.type == "cuda":
        return _missing_on_gpu(device)
    if not triton_installed():
        return "Triton is not installed"
    return None if interpreted() else "it is no GPU"


@functools.cache
def _missing_on_gpu(device: torch.device) -> str | None:
    if not triton_installed():
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < NEEDED_CAPABILITY and not interpreted():
        return f"its compute capability is {capability[0]}.{capability[1]}, below {NEEDED_CAPABILITY[0]}.0"
    return None
