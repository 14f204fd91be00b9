"""Sums of layers on integer codes by PyTorch: oneDNN's integer products on the CPU where exact, else float64."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from bitdial.kernels.conv_shape import ConvShape, Pair
from bitdial.kernels.epilogue import channels_last


def exact_sums(
    x: Tensor, weight: Tensor, pad: Tensor, correction: Tensor, doubled: Tensor | None, shape: ConvShape
) -> Tensor:
    """The sums (N, K, OH, OW) in float32, each rounded once, channels last; arguments as for `integer_conv2d`.

    The codes x may also come `raised`. The number of terms must be one whose sums fit int32.
    """
    twice = doubled is not None and bool(doubled)  # the weight stands for 2 * weight + 1
    if x.device.type == "cpu" and qconv_is_exact():
        bytes_of_x = x if x.dtype == torch.uint8 else raised(x)
        if not twice:
            return qconv_sums(bytes_of_x, weight, pad, shape)
        if weight[0].numel() < _MOST_TERMS and (parts := exact_parts(weight, pad, shape.groups)) is not None:
            return doubled_qconv_sums(bytes_of_x, parts, pad, shape)
    x = lowered(x) if x.dtype == torch.uint8 else x
    if x.device.type == "cpu" and shape.groups == 1 and int_mm_is_exact():
        sums = int_mm_sums(x, weight, pad, correction, shape, twice=twice)
    else:
        sums = float64_sums(x, weight, pad, doubled, shape)
    return channels_last(sums.float())


def raised(x: Tensor) -> Tensor:
    """Stored codes plus 128, as unsigned bytes."""
    return (x ^ -128).view(torch.uint8)


def lowered(x: Tensor) -> Tensor:
    """Stored codes from raised ones."""
    return x.view(torch.int8) ^ -128


def float64_sums(x: Tensor, weight: Tensor, pad: Tensor, doubled: Tensor | None, shape: ConvShape) -> Tensor:
    """The definition: whole numbers in float64, exact below 2^53."""
    integers = weight.permute(0, 3, 1, 2).double()
    integers = integers if doubled is None else integers * (1 + doubled) + doubled
    with torch.backends.cudnn.flags(enabled=False):  # it may choose transforms that are not exact
        return F.conv2d(x.double() - pad[0].double(), integers, None, *shape.moves)


# --- oneDNN's convolution ---------------------------------------------------------------------------

_prepacked: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by weight: (its version, {for what: as oneDNN wants it})
_MOST_ARRANGED = 2  # for as many sizes of the input a weight is kept: of batches, and of the last one


def qconv_sums(x: Tensor, weight: Tensor, pad: Tensor, shape: ConvShape) -> Tensor:
    """The sums by oneDNN's convolution of unsigned bytes, here raised codes.

    Their zero-point, also around the image, is the code of 0. It is asked for float32 and scales of 1: int32 sums,
    rounded once.
    """
    zero = int(pad[0]) + 128
    x = channels_last(x)
    scales, zeros = _ones_and_zeros(weight.shape[0])
    return torch.ops.onednn.qconv2d_pointwise(
        x, 1.0, zero, _prepacked_for(x, weight, zero, shape.moves), scales, zeros, None, *shape.moves, 1.0, 0,
        torch.float32, "none", [], "",
    )  # fmt: skip


def _prepacked_for(x: Tensor, weight: Tensor, zero: int, moves: tuple[Pair, Pair, Pair, int]) -> Tensor:
    """`weight` as oneDNN wants it for inputs like x; kept until it changes.

    Without the sizes of x it may be arranged so that some 1x1 convolutions take forty times as long.
    """
    version = None if weight.is_inference() else weight._version
    kept = _prepacked.get(weight)
    if kept is None or version is None or kept[0] != version:
        kept = _prepacked[weight] = version, {}
    about = (zero, *x.shape, moves, torch.get_num_threads())
    arranged = kept[1].pop(about, None)
    if arranged is None:
        filters, scales = weight.permute(0, 3, 1, 2), _ones_and_zeros(weight.shape[0])[0]
        arranged = torch.ops.onednn.qconv_prepack(filters, scales, 1.0, zero, *moves, list(x.shape))
        if len(kept[1]) >= _MOST_ARRANGED:
            kept[1].pop(next(iter(kept[1]), None), None)  # used the longest ago; another thread may have been here
    kept[1][about] = arranged
    return arranged


Part = tuple[slice, Tensor]  # input channels, and the weights of these
_EXACT = 1 << 24  # below, float32 has every whole number
_MOST_TERMS = _EXACT // 255  # of a sum of codes
_MOST_PARTS = 16
_parts: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by weight: (what they were made for, the parts)


def exact_parts(weight: Tensor, pad: Tensor, groups: int) -> list[Part] | None:
    """`weight` in the fewest parts whose sums float32 has exactly, kept until it changes; None if they are too many."""
    zero = int(pad[0]) + 128
    about = (None if weight.is_inference() else weight._version, zero, groups)
    kept = _parts.get(weight)
    if kept is None or kept[0] != about or about[0] is None:
        kept = _parts[weight] = about, _copied_parts(weight, max(zero, 255 - zero), groups)
    found = kept[1]
    return [(slice(None), weight)] if found == [] else found


def _copied_parts(weight: Tensor, most: int, groups: int) -> list[Part] | None:
    """Such parts as copies, or none of them if `weight` is one; `most`: the largest code less that of 0."""
    channels = weight.shape[3]
    sizes = weight.to(torch.int16).abs().sum(dim=(1, 2), dtype=torch.int32)  # an int8 has no room for |-128|
    count = 1
    while count <= min(channels, _MOST_PARTS if groups == 1 else 1):
        step = -(-channels // count)
        cuts = [slice(first, min(first + step, channels)) for first in range(0, channels, step)]
        if all(int(sizes[:, cut].sum(dim=1).max()) * most < _EXACT for cut in cuts):
            return [(cut, weight[..., cut].contiguous()) for cut in cuts] if count > 1 else []
        count *= 2
    return None


def doubled_qconv_sums(x: Tensor, parts: list[Part], pad: Tensor, shape: ConvShape) -> Tensor:
    """The sums with 2 * w + 1 of the raised codes x, for the `exact_parts` of w: rounded once, where all is added."""
    outputs, groups = shape.out_channels, shape.groups
    ones = _all_ones((groups, shape.rows, shape.columns, shape.channels // groups), int(pad[0]), shape.moves)
    totals = qconv_sums(x, ones, pad, shape)
    if outputs > groups > 1:
        totals = totals.repeat_interleave(outputs // groups, dim=1)
    if len(parts) == 1:
        return qconv_sums(x, parts[0][1], pad, shape).mul_(2).add_(totals)
    sums = sum(qconv_sums(x[:, channels], part, pad, shape).double() for channels, part in parts)
    return channels_last((2 * sums + totals).float())


@functools.lru_cache(maxsize=64)
def _all_ones(shape: tuple[int, ...], *about: object) -> Tensor:
    """The same tensor for the same use, so that it is arranged once."""
    return torch.ones(shape, dtype=torch.int8)


@functools.lru_cache(maxsize=64)
def _ones_and_zeros(count: int) -> tuple[Tensor, Tensor]:
    return torch.ones(count), torch.zeros(count, dtype=torch.int64)


@functools.cache
def qconv_is_exact() -> bool:
    """Whether oneDNN's convolution is there and exact: instructions before VNNI add pairs of products in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-128, 128, (32, 3, 3, 64), generator=generator, dtype=torch.int8)
    weight[:16] = -128
    shape = ConvShape.of((64, 6, 6), (32, 3, 3), (1, 1), (1, 1))
    try:
        for value, zero in ((-128, 127), (127, -128), (127, 5)):
            x, pad = torch.full((1, 64, 6, 6), value, dtype=torch.int8), torch.tensor([zero], dtype=torch.int8)
            expected = float64_sums(x, weight, pad, None, shape).float()
            if not torch.equal(qconv_sums(raised(x), weight, pad, shape), expected):
                return False
    except (AttributeError, RuntimeError):  # a PyTorch without oneDNN, or of another signature
        return False
    return True


# --- an integer product over windows ----------------------------------------------------------------


def int_mm_sums(x: Tensor, weight: Tensor, pad: Tensor, correction: Tensor, shape: ConvShape, *, twice: bool) -> Tensor:
    """int32 sums by one integer product over the windows, laid out as a matrix."""
    n, k, oh, ow = shape.output(x.shape[0])
    _, r, s, c = weight.shape
    stride, padding, dilation, _ = shape.moves
    image = x.permute(0, 2, 3, 1).contiguous()
    if any(padding):
        image = F.pad(image, (0, 0, padding[1], padding[1], padding[0], padding[0]), value=int(pad[0]))
    by_image, by_row, by_column, _ = image.stride()
    windows = image.as_strided(
        (n, oh, ow, r, s, c),
        (by_image, by_row * stride[0], by_column * stride[1], by_row * dilation[0], by_column * dilation[1], 1),
    ).reshape(n * oh * ow, r * s * c)
    sums = torch._int_mm(windows, weight.reshape(k, -1).t())
    if twice:
        sums.mul_(2).add_(windows.sum(dim=1, keepdim=True, dtype=torch.int32))
    return sums.add_(correction).view(n, oh, ow, k).permute(0, 3, 1, 2)


@functools.cache
def int_mm_is_exact() -> bool:
    """Whether this CPU's integer product is: instructions before VNNI add pairs of products in 16 bits."""
    generator = torch.Generator().manual_seed(0)
    for value in (-128, 127):
        a = torch.full((32, 128), value, dtype=torch.int8)
        b = torch.randint(-128, 128, (128, 32), generator=generator, dtype=torch.int8)
        b[:, :16] = -128
        if not torch.equal(torch._int_mm(a, b), (a.double() @ b.double()).int()):
            return False
    return True
