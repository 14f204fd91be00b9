"""The epilogue in plain PyTorch; see `kernels.epilogue` for its steps."""

import math

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.kernels.epilogue import Epilogue, Outputs, arranged, filled


def integer_finish(x: Tensor, epilogue: Epilogue) -> Outputs:
    """The epilogue of the float32 x: (N, C, H, W) or (..., C)."""
    return apply_epilogue(arranged(x).clone(), epilogue)


def scale_sums(sums: Tensor, factor: Tensor, bias: Tensor | None, epilogue: Epilogue) -> Outputs:
    """Scale, bias and epilogue of the float32 sums, which lie as outputs do and are overwritten."""
    y = sums.mul_(factor.view(-1, 1, 1))
    if bias is not None:
        y.add_(bias.view(-1, 1, 1))
    return apply_epilogue(y, epilogue)


def apply_epilogue(y: Tensor, epilogue: Epilogue) -> Outputs:
    """The epilogue of the float32 y, which lies as outputs do and is overwritten."""
    norm_affine, residual, relu_max, quantizer_a, quantizer_b, keep_value = epilogue
    if norm_affine is not None:
        multiplier, offset = (line.view(-1, 1, 1) if y.dim() == 4 else line for line in norm_affine)
        y.mul_(multiplier).add_(offset)
    if residual is not None:
        y.add_(residual)
    if relu_max is not None:
        y.clamp_(0.0, None if math.isinf(relu_max) else relu_max)
    codes_a, codes_b = (
        None if quantizer is None else _stored_codes(y, quantizer) for quantizer in (quantizer_a, quantizer_b)
    )
    return filled((y if keep_value else None, codes_a, codes_b), y.device)


def _stored_codes(y: Tensor, quantizer: Tensor) -> Tensor:
    """Stored codes (int8) of the float32 y."""
    scale, zero_point, least, most, shift = quantizer
    return bf.activation_codes(y, scale, zero_point, (least, most)).sub_(shift).to(torch.int8)
