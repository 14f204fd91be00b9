"""Linear layers on few bits from other libraries, for `linear.py` to measure beside ours. A weight has one width.

    pip install humming-kernels==0.1.19      2 to 8 bits; needs nvcc
    pip install gemlite                      8, 4, 2 bits
    pip install torchao                      8, 4 bits

A maker takes a bf16 weight (rows, columns) on the GPU and a width, and gives a function of the tokens, or None where
the library does not have the width. The weights are quantised by the library's own rule, one scale a row where it can.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

Layer = Callable[[Tensor], Tensor]


def humming(weight: Tensor, bits: int) -> Layer | None:
    """humming-kernels with its own choice of kernel for each shape."""
    from humming.layer import HummingLayer

    rows, columns = weight.shape
    layer = HummingLayer(
        shape_n=rows, shape_k=columns, weight_config={"dtype": f"int{bits}"}, torch_dtype=weight.dtype
    ).to(weight.device)
    layer.load_from_unquantized(weight)
    layer.transform()
    return layer


def gemlite(weight: Tensor, bits: int) -> Layer | None:
    """gemlite with one scale and one zero a row."""
    from gemlite import DType, GemLiteLinear

    if bits not in (8, 4, 2):
        return None
    rows, columns = weight.shape
    layer = GemLiteLinear(
        bits, group_size=columns, in_features=columns, out_features=rows, input_dtype=DType.BF16,
        output_dtype=DType.BF16, scaled_activations=False,
    )  # fmt: skip
    scale = weight.abs().amax(dim=1, keepdim=True).float() / 2 ** (bits - 1)
    codes = (weight.float() / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) + 2 ** (bits - 1)
    zeros = torch.full_like(scale, 2 ** (bits - 1))
    layer.pack(codes.to(torch.uint8), scale.to(weight.dtype), zeros.to(weight.dtype), None)
    return layer


def torchao(weight: Tensor, bits: int) -> Layer | None:
    """torchao's weight-only layers; its 4 bits have a scale for each 128 columns."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    if bits not in (8, 4):
        return None
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    four = bits == 4
    quantize_(
        linear,
        Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
        if four
        else Int8WeightOnlyConfig(),
    )
    return linear


MODULES = {"humming": "humming", "gemlite": "gemlite", "torchao": "torchao"}
PEERS: dict[str, Callable[[Tensor, int], Layer | None]] = {"humming": humming, "gemlite": gemlite, "torchao": torchao}


def installed() -> list[str]:
    """The peers that can be imported."""
    return [name for name, module in MODULES.items() if importlib.util.find_spec(module) is not None]
