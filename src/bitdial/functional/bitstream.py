"""Pack b-bit codes (b = 1..8) into bytes, and back.

A code is stored as its low ``b`` bits: two's complement when ``signed``, so the range is
[-2^(b-1), 2^(b-1) - 1], else [0, 2^b - 1]. Tensors of any shape are read in row-major order.
The bits of a byte are numbered from the least significant (bit 0) to the most (bit 7).

One dense little-endian bit stream of ceil(n * b / 8) bytes. Bit j of code i is bit
s = i * b + j of the stream, and bit s of the stream is bit s % 8 of byte s // 8. The padding
bits after the last code are zero. With b = 3, codes c0, c1, c2, ... (``c0.0``: bit 0 of code 0)::

              bit 7   bit 6   bit 5   bit 4   bit 3   bit 2   bit 1   bit 0
    byte 0    c2.1    c2.0    c1.2    c1.1    c1.0    c0.2    c0.1    c0.0
    byte 1    c5.0    c4.2    c4.1    c4.0    c3.2    c3.1    c3.0    c2.2
    byte 2    c7.2    c7.1    c7.0    c6.2    c6.1    c6.0    c5.2    c5.1

Eight codes always fill exactly b bytes. Worked example: the codes 1, -2, 3, -4 at b = 3 are
001, 110, 011, 100 and pack into the two bytes 0xF1, 0x08.

Bit planes are the other layout: plane k has bit b - 1 - k of every code, so plane 0 is the signs and the first p
planes are the codes' upper p bits. A plane is ceil(n / 8) bytes; bit i % 8 of byte i // 8 is that of code i. With
b = 3, the codes 1, -2, 3, -4 are the planes 0x0A, 0x06, 0x05.

Implementation: eight codes travel in one int64 word, so every step is a few shifts over n / 8
words, in chunks that bound the working memory. Nothing depends on the machine's byte order.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bitdial.errors import ConfigError, QuantizationError

_CODE_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_CHUNK = 1 << 20  # codes at a time; a multiple of 8, so that every chunk starts on a whole byte


def pack_bytes(codes: Tensor, bits: int, *, signed: bool = True) -> Tensor:
    """Return ``codes`` as a dense little-endian bit stream: uint8, shape (ceil(n * bits / 8),).

    ``byte[s // 8] bit (s % 8) = codes[i] bit j`` for ``s = i * bits + j``, ``0 <= j < bits``.
    Raises QuantizationError when a code does not fit into ``bits``.
    """
    flat = _checked_codes(codes, bits, signed)
    packed = torch.empty(_ceil_div(flat.numel() * bits, 8), dtype=torch.uint8, device=codes.device)
    for start in range(0, flat.numel(), _CHUNK):
        words = _join(_low_bits(flat[start : start + _CHUNK], bits), step=bits)
        target = packed[start // 8 * bits :][: words.numel() * bits]
        target.copy_(_split(words, lanes=bits, step=8).view(-1)[: target.numel()])
    return packed


def unpack_bytes(packed: Tensor, bits: int, count: int, *, signed: bool = True) -> Tensor:
    """Return the ``count`` codes that ``pack_bytes`` wrote: int8 (signed) or uint8, shape (count,).

    Raises QuantizationError when ``packed`` has the wrong length or nonzero padding bits.
    """
    _check_bits(bits)
    _check_buffer(packed, width=_ceil_div(_checked_count(count) * bits, 8), count=count)
    _check_padding(packed[-1:], used=count * bits % 8)
    codes = torch.empty(count, dtype=torch.uint8, device=packed.device)
    for start in range(0, count, _CHUNK):
        first = start // 8 * bits
        lanes = _pad_to_lanes(packed[first : first + _CHUNK // 8 * bits], bits)
        target = codes[start : start + _CHUNK]
        target.copy_(_split(_join(lanes, step=8), lanes=8, step=bits).view(-1)[: target.numel()])
    return _extend(codes, bits, signed)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """Return signed ``codes`` as bit planes, the signs first: uint8, shape (bits, ceil(n / 8)).

    Raises QuantizationError when a code does not fit into ``bits``.
    """
    flat = _checked_codes(codes, bits, signed=True)
    planes = torch.empty(bits, _ceil_div(flat.numel(), 8), dtype=torch.uint8)
    for start in range(0, flat.numel(), _CHUNK):
        chunk = flat[start : start + _CHUNK].cpu()
        for k in range(bits):
            digits = ((chunk >> (bits - 1 - k)) & 1).to(torch.uint8)
            packed = torch.from_numpy(np.packbits(digits.numpy(), bitorder="little"))
            planes[k, start // 8 :][: len(packed)] = packed
    return planes.to(codes.device)


def unpack_planes(planes: Tensor, bits: int, count: int, *, first: int = 0) -> Tensor:
    """Return ``count`` codes of ``bits`` bits of which only ``planes`` are known: int8, shape (count,).

    ``planes`` (p, ceil(count / 8)) are those from plane ``first`` on; bits of other planes are zero. So codes of the
    first planes and those of the next ones are put together by a bitwise or. Raises QuantizationError when a plane has
    the wrong length or nonzero padding bits.
    """
    _check_bits(bits)
    if planes.dim() != 2 or not 0 <= first < first + len(planes) <= bits:
        raise QuantizationError(f"planes of shape {tuple(planes.shape)} are not some of {bits} from plane {first} on")
    for plane in planes:
        _check_buffer(plane, width=_ceil_div(_checked_count(count), 8), count=count)
        _check_padding(plane[-1:], used=count % 8)
    tables = [_spread_bits(7 - k, planes.device) for k in range(first, first + len(planes))]
    codes = torch.empty(planes.shape[1] * 8, dtype=torch.uint8, device=planes.device)
    for start in range(0, planes.shape[1], _CHUNK // 8):
        words = torch.zeros(1, dtype=torch.int64, device=planes.device)
        for plane, table in zip(planes, tables, strict=True):
            words = words | table.index_select(0, plane[start : start + _CHUNK // 8].int())
        codes[start * 8 :][: 8 * len(words)] = words.view(torch.uint8)
    return _extend(codes[:count], bits, signed=True, aligned=True)


def _spread_bits(place: int, device: torch.device) -> Tensor:
    """For each byte (256,), the eight bytes, as one int64, that have its bits from the lowest on, each at ``place``."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (bits << place).to(torch.uint8).view(torch.int64)[:, 0].to(device)


def _join(lanes: Tensor, step: int) -> Tensor:
    """Join uint8 ``lanes`` (groups, m) into int64 words: ``OR_k lanes[:, k] << (k * step)``."""
    words = torch.zeros(lanes.shape[0], dtype=torch.int64, device=lanes.device)
    for k in range(lanes.shape[1]):
        words |= lanes[:, k].long() << (k * step)
    return words


def _split(words: Tensor, lanes: int, step: int) -> Tensor:
    """Split int64 ``words`` (groups,) into uint8 (groups, lanes): byte 0 of ``>> (k * step)``."""
    out = torch.empty(words.shape[0], lanes, dtype=torch.uint8, device=words.device)
    for k in range(lanes):
        out[:, k] = (words >> (k * step)) & 0xFF
    return out


def _low_bits(codes: Tensor, bits: int) -> Tensor:
    """Return integer ``codes`` (n,) as their low ``bits``, uint8 lanes (ceil(n / 8), 8)."""
    return _pad_to_lanes(codes.to(torch.uint8) & ((1 << bits) - 1), 8)


def _pad_to_lanes(flat: Tensor, lanes: int) -> Tensor:
    """Return ``flat`` (n,) as (ceil(n / lanes), lanes), zeros after the end."""
    missing = -flat.numel() % lanes
    return torch.nn.functional.pad(flat, (0, missing)).view(-1, lanes)


def _extend(codes: Tensor, bits: int, signed: bool, *, aligned: bool = False) -> Tensor:
    """Change ``codes`` (uint8) in place: clear the bits above ``bits``, or extend the sign.

    ``aligned`` codes have their highest bit where a byte has it.
    """
    if not aligned:
        codes <<= 8 - bits
    typed = codes.view(torch.int8) if signed else codes
    typed >>= 8 - bits
    return typed


def _ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor`` rounded up."""
    return -(-value // divisor)


def _check_bits(bits: int) -> None:
    """Raise ConfigError unless ``bits`` is an int in 1..8."""
    if type(bits) is not int or not 1 <= bits <= 8:  # a bool is not a width
        raise ConfigError(f"bits={bits!r} cannot be packed; choose an integer from 1 to 8")


def _checked_count(count: int) -> int:
    """Return ``count`` if it is not negative."""
    if count < 0:
        raise QuantizationError(f"count={count} is negative; pass the number of packed codes")
    return count


def _checked_codes(codes: Tensor, bits: int, signed: bool) -> Tensor:
    """Return ``codes`` flattened row-major, after checking dtype and range."""
    _check_bits(bits)
    if codes.dtype not in _CODE_DTYPES:
        raise QuantizationError(
            f"codes have dtype {codes.dtype}, expected one of {', '.join(map(str, _CODE_DTYPES))}; "
            "quantize to integer codes before packing"
        )
    flat = codes.reshape(-1)
    if flat.numel() == 0:
        return flat
    bottom, top = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    low, high = (int(value) for value in torch.aminmax(flat))
    if low < bottom or high > top:
        kind = "signed" if signed else "unsigned"
        raise QuantizationError(
            f"codes lie between min {low} and max {high}, but {kind} {bits}-bit codes lie in "
            f"[{bottom}, {top}]; clamp them, use more bits, or check signed={signed}"
        )
    return flat


def _check_buffer(buffer: Tensor, *, width: int, count: int) -> None:
    """Raise unless ``buffer`` is uint8 with one axis of ``width`` bytes."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise QuantizationError(
            f"the packed buffer is {buffer.dtype} of shape {tuple(buffer.shape)}, "
            "expected torch.uint8 with 1 axis; pass what the pack function returned"
        )
    if buffer.shape[0] != width:
        raise QuantizationError(
            f"the packed buffer holds {buffer.shape[0]} bytes, but "
            f"count={count} codes take {width}; check bits and count, or the file is damaged"
        )


def _check_padding(last: Tensor, used: int) -> None:
    """Raise unless the last bytes are zero above their ``used`` low bits (0: all eight used)."""
    if used and bool((last >> used).any()):
        raise QuantizationError(
            "the padding bits after the last code are not zero; check bits and count, or the file is damaged"
        )
