"""Starting scales, from the weights and from what calibration saw."""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import QuantizationError
from bitdial.nn import ActivationQuantizer
from bitdial.prepare.activation_ranges import LayerInput
from bitdial.prepare.config import QuantConfig

log = logging.getLogger(__name__)

PERCENTILE = 0.999
LOW_BITS, LOW_BITS_RATIO = 4, 0.9  # up to that width, a dynamic range is clipped to that share
_LEAST_ERROR = 1e-10  # relative, squared; 8 bits have 1e-5 to 1e-6
_QUANTILE_LIMIT = 1 << 24  # torch.quantile takes no more values
AT_ONCE, AT_ONCE_ON_GPU = 1 << 16, 1 << 25  # values that are quantised at once where scales are tried


def weight_scales(
    weight: Tensor,
    shape: tuple[int, ...],
    *,
    name: str,
    config: QuantConfig,
    fixed_bits: int | None = None,
    input_squares: Tensor | None = None,
) -> dict[int, Tensor]:
    """Starting scales of `shape` for a `weight` in rows, by the width they belong to; empty if the scheme derives them.

    A shared scale belongs to the highest width. With start='mse' it minimises the squared error summed over all widths,
    sum_b |W - W_b|^2, which is nearly that of the lowest. With start='balanced' it minimises the sum of logarithms,
    sum_b importance_b log |W - W_b|^2: to halve the error of one width is worth to double that of another. For a layer
    that stays at `fixed_bits`, no other width counts. `input_squares` (inputs,) are the mean squares of what a weight
    (rows, inputs) is multiplied with: in both rules the error of each weight then counts by that of its input.
    """
    if not bool(torch.isfinite(weight).all()):
        raise QuantizationError(f"layer {name!r}: the weight holds NaN or infinity")
    rows, widths = weight.detach().reshape(math.prod(shape), -1), config.bit_choices
    rule = bf.scheme_of(config.scheme)
    largest = _largest(rows, shape)
    counts = None if input_squares is None else input_squares.expand(weight.shape).reshape(rows.shape)
    if rule.shares_scale:
        used = widths if fixed_bits is None else (fixed_bits,)
        scale = _weight_scale(rows, largest, widths[0], used, config, counts).reshape(shape)
        if config.start == "max" and bf.has_groups(shape) and config.group_scales != "float":
            scale = bf.two_level_above(scale, half=config.group_scales == "half")
        return {widths[0]: scale}
    if rule.has_scale_per_width:
        return {b: _weight_scale(rows, largest, b, (b,), config, counts).reshape(shape) for b in widths}
    return {}


def _largest(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The largest magnitude of each row of `rows`, which are those that share a scale; never 0.

    Zeros take the range of their channel, or that of the tensor: any positive scale gives them the right codes.
    """
    largest = rows.abs().amax(dim=1)
    if bf.has_groups(shape):
        by_channel = largest.view(shape)
        largest = torch.where(by_channel > 0, by_channel, by_channel.amax(dim=1, keepdim=True)).reshape(-1)
    largest = torch.where(largest > 0, largest, largest.max())
    return torch.where(largest > 0, largest, torch.ones_like(largest))


def _weight_scale(
    rows: Tensor, largest: Tensor, high: int, widths: tuple[int, ...], config: QuantConfig, counts: Tensor | None
) -> Tensor:
    levels = 2 ** (high - 1)
    if config.start == "max":
        # What is not clipped on the positive side is not on the negative one, which has a code more. Rounded to the
        # nearest, the last code that is not clipped is 2^(high - 1) - 1; a floor has cells up to 2^(high - 1).
        return largest / bf.unclipped_range(bf.scheme_of(config.scheme), high, high)[1]
    mean, deviation = rows.mean(dim=1), rows.std(dim=1, correction=0)
    three = torch.maximum((mean - 3 * deviation).abs(), (mean + 3 * deviation).abs())
    three = torch.where(three > 0, three, largest) / levels
    if config.start == "3std":
        return three
    # LSQ's start, at the lowest width: taken at the highest it would leave every 2-bit code at 0.
    low = min(widths)
    lsq = 2 * rows.abs().mean(dim=1) * bf.code_range(low)[1] ** -0.5 / 2 ** (high - low)
    lsq = torch.where(lsq > 0, lsq, largest / levels)
    if config.start == "lsq":
        return lsq

    def total_of(squares: Tensor) -> Tensor:
        return (squares if counts is None else squares.mul_(counts)).sum(dim=-1)

    floor = total_of(rows.square()) * _LEAST_ERROR  # of codes that hit every weight exactly

    def errors(reaches: Tensor) -> Tensor:
        scales = largest * reaches / levels
        total, many = torch.zeros_like(scales), rows if len(reaches) == 1 else rows.repeat(len(reaches), 1)
        for low in widths:
            at = bf.fake_quantize(many, scales.view(-1), high=high, low=low, scheme=config.scheme, ties=config.ties)
            found = total_of(at.view(-1, *rows.shape).sub_(rows).square_())
            total += (found + floor).log_() * config.importance_of(low) if config.start == "balanced" else found
        return total

    tried = torch.cat([_grid(largest, 0.1, 2.3, 55), torch.stack([three, lsq]) * levels / largest])
    return largest * _minimise(errors, tried, spacing=0.04, at_once=_at_once(rows)) / levels


def activation_start(
    samples: Tensor, *, name: str, bit_choices: tuple[int, ...], kind: str, start: str
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Starting scales and (for an asymmetric kind) zero-points, (1,) each, by width."""
    if not bool(samples.any()):
        log.warning("layer %r: its calibration input is all zero; its activation range starts at 1", name)
        samples = torch.ones_like(samples)
    samples = samples.flatten()
    scales, zero_points = {}, {}
    for bits in bit_choices:
        scale, zero_point = _activation_scale(samples, bits, kind, start)
        scales[bits] = scale.reshape(1)
        if zero_point is not None:
            zero_points[bits] = zero_point.reshape(1)
    return scales, zero_points


def _activation_scale(samples: Tensor, bits: int, kind: str, start: str) -> tuple[Tensor, Tensor | None]:
    magnitude = samples.abs()
    levels = 2 ** (bits - 1) if kind == "signed" else 2**bits - 1
    if kind == "asymmetric":
        low, high = samples.min().clamp(max=0), samples.max().clamp(min=0)
    else:
        low, high = samples.new_zeros(()), magnitude.max()

    def at(reach: Tensor) -> tuple[Tensor, Tensor | None]:
        scale = (high - low) * reach / levels
        zero_point = (-low * reach / scale).round() if kind == "asymmetric" else None
        return scale, zero_point

    if start == "max":  # nothing that was seen is clipped; an unsigned kind reads what is negative as 0 in any case
        most = bf.code_range(bits, signed=kind == "signed")[1]
        reach = samples.new_ones(()) if kind == "asymmetric" else high.new_tensor(levels / most)
        return at(reach)
    if start == "3std":
        kept = torch.quantile(magnitude[:: magnitude.numel() // _QUANTILE_LIMIT + 1], PERCENTILE)
        return at(torch.where(kept > 0, kept / magnitude.max(), 1.0))
    if start == "lsq":
        size = 2 * magnitude.mean() * bf.code_range(bits, signed=kind == "signed")[1] ** -0.5
        return at((size * levels / (high - low)).clamp(max=1.0))

    def errors(reaches: Tensor) -> Tensor:
        scales, zero_points = at(reaches[:, None])
        out = bf.fake_quantize_activation(samples, scales, zero_points, bits=bits, kind=kind)
        return out.sub_(samples).square_().sum(dim=1)

    tried = _grid(magnitude.max(), 0.02, 1.1, 40)
    return at(_minimise(errors, tried, spacing=0.027, at_once=_at_once(samples)))


def clip_ratios(tokens: Tensor, *, bit_choices: tuple[int, ...], start: str) -> dict[int, Tensor]:
    """Starting clip ratios (1,) by width, for dynamic activations of which `tokens` (tokens, inputs) are samples."""
    found = {}
    for bits in bit_choices:
        if start not in ("mse", "balanced") or not bool(tokens.any()):
            found[bits] = tokens.new_full((1,), LOW_BITS_RATIO if bits <= LOW_BITS else bf.MOST_CLIP_RATIO)
            continue

        def errors(ratios: Tensor, bits: int = bits) -> Tensor:
            at = bf.fake_quantize_activation(tokens, ratios[..., None], bits=bits, kind=bf.DYNAMIC)
            return at.sub_(tokens).square_().sum(dim=(1, 2))[:, None]

        tried = _grid(tokens.new_ones(1), 0.1, bf.MOST_CLIP_RATIO, 36)
        best = _minimise(errors, tried, spacing=0.025, at_once=_at_once(tokens))
        found[bits] = bf.usable_clip_ratio(best)
    return found


def act_quantizer_of(name: str, seen: LayerInput, kind: str, config: QuantConfig) -> ActivationQuantizer:
    """A quantizer for what the layer called `name` has `seen`; `kind` is a kind of activations, or 'auto'."""
    if kind == bf.DYNAMIC:
        tokens = torch.cat(seen.tokens).float()
        return ActivationQuantizer(
            clip_ratios(tokens, bit_choices=config.bit_choices, start=config.start), None, kind=kind
        )
    if kind == "auto":
        kind = "unsigned" if seen.minimum >= 0 else "signed"
    elif kind == "unsigned" and seen.minimum < 0:
        log.warning(
            "layer %r: activations are set to unsigned but calibration saw %g; negative values will read as 0",
            name,
            seen.minimum,
        )
    samples = torch.cat(seen.samples)
    if config.start == "max":  # of all that was seen, not of a sample
        samples = samples.new_tensor([seen.minimum, seen.maximum])
    scales, zero_points = activation_start(
        samples.float(), name=name, bit_choices=config.bit_choices, kind=kind, start=config.start
    )
    return ActivationQuantizer(scales, zero_points, kind=kind)


def _grid(like: Tensor, low: float, high: float, steps: int) -> Tensor:
    """Numbers from `low` to `high` in even steps, each in the shape of `like`: (numbers, ...)."""
    numbers = like.new_tensor([low + (high - low) * i / steps for i in range(steps + 1)])
    return numbers.view(-1, *(1,) * like.dim()).expand(-1, *like.shape)


def _at_once(data: Tensor) -> int:
    """How many candidates are tried on `data` at once: on a GPU many, for it waits for each launch."""
    return max(1, (AT_ONCE_ON_GPU if data.is_cuda else AT_ONCE) // max(data.numel(), 1))


def _minimise(errors: Callable[[Tensor], Tensor], tried: Tensor, *, spacing: float, at_once: int) -> Tensor:
    """The candidate of least error, elementwise: first of those `tried` (candidates, ...), then finer around the best.

    `errors` gives those of some candidates, in their shape; it gets `at_once` of them.
    """

    def better(candidates: Tensor, best: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        for some in candidates.split(at_once):
            found = errors(some)
            now, places = torch.where(found.isnan(), math.inf, found).min(dim=0)
            best = torch.where(now < least, some.gather(0, places[None])[0], best)
            least = torch.minimum(now, least)
        return best, least

    best, least = better(tried, tried[0], torch.full_like(tried[0], math.inf))
    steps = best.new_tensor([spacing * step for step in (-0.75, -0.5, -0.25, 0.25, 0.5, 0.75)])
    around = (best + steps.view(-1, *(1,) * best.dim())).clamp_min_(spacing / 4)
    return better(around, best, least)[0]
