"""Max pools of stored codes.

A quantizer never turns a larger value into a smaller code, so the largest code of a window is the code of its largest
value: where nobody needs the value, a pool reads and writes a byte a number instead of four.
"""

from torch import Tensor

from bitdial.kernels import ops


def run_max_pool(x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """The largest of the int8 codes in each window of images x (N, C, H, W), or of one image (C, H, W), channels last.

    As `F.max_pool2d`, the numbers for rows and columns; -128 in a window without a pixel.
    """
    if x.dim() == 3:
        return ops.max_pool_codes(x[None], kernel, stride, padding, dilation)[0]
    return ops.max_pool_codes(x, kernel, stride, padding, dilation)
