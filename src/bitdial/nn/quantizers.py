"""Quantizers own the learned scales; the arithmetic is in `bitdial.functional`.

Scales of different widths are separate parameters, so that a width which takes no part in a pass has no gradient
and an optimizer leaves its scale and its moments alone.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from bitdial import functional as bf
from bitdial import kernels


class WeightQuantizer(nn.Module):
    """Fake-quantises a weight at any of `bit_choices`.

    The weight comes in rows (output channels, inputs, ...). Parameters: `scale` of `scale_shape`, shared by all widths
    and belonging to the highest; or, for `lsq`, one such tensor per width in `scales`; or none, for the schemes that
    derive it from the weight.

    A scale (rows, groups) belongs to groups of inputs. With `group_scales` 'integer' it is used as the nearest scale of
    two levels, a number per row times a whole number per group; with 'half' the row's has 7 significant bits; 'float'
    uses it as it is.

    `scale_gradient` 'printed' leaves the factor 2^shift out of the shared scale's gradient, as the paper's text does.
    """

    def __init__(
        self,
        scales: Mapping[int, Tensor],
        *,
        bit_choices: tuple[int, ...],
        scheme: str,
        ties: str,
        scale_shape: tuple[int, ...],
        group_scales: str = "integer",
        scale_gradient: str = "exact",
    ):
        super().__init__()
        self.bit_choices, self.scheme, self.ties, self.scale_shape = bit_choices, scheme, ties, scale_shape
        self.group_scales, self.scale_gradient = group_scales, scale_gradient
        self.two_levels = bf.has_groups(scale_shape) and group_scales != "float"
        self.rule = bf.scheme_of(scheme)
        if self.rule.shares_scale:
            self.scale = nn.Parameter(scales[bit_choices[0]].clone())
        elif self.rule.has_scale_per_width:
            self.scales = nn.ParameterDict({str(b): nn.Parameter(scales[b].clone()) for b in bit_choices})

    def stored_bits(self, bits: int) -> int:
        """The width whose codes `bits` is made from: the highest, or `bits` itself if the scheme cannot narrow."""
        return self.bit_choices[0] if self.rule.narrows else bits

    def learned_scale(self, bits: int) -> Tensor | None:
        """The scale parameter that width `bits` uses; None if the scheme derives it from the weight."""
        if self.rule.shares_scale:
            return self.scale
        return self.scales[str(bits)] if self.rule.has_scale_per_width else None

    def scale_of(self, weight: Tensor, bits: int) -> Tensor:
        """The scale (`scale_shape`) of the codes that width `bits` is made from; the gradient reaches the learned one.

        `weight` is in rows.
        """
        scale = self._scale_as_it_is(weight, bits)
        return bf.two_level(scale, half=self.group_scales == "half") if self.two_levels else scale

    def _scale_as_it_is(self, weight: Tensor, bits: int) -> Tensor:
        """The learned or derived scale, before one of two levels is made of it."""
        scale = self.learned_scale(bits)
        if scale is not None:
            return scale
        return bf.derived_scale(weight, bits=self.stored_bits(bits), scheme=self.scheme, shape=self.scale_shape)

    @property
    def learns_row_scales(self) -> bool:
        """Whether the scales are parameters as they are: not derived from the weight, nor those of groups of inputs."""
        return not self.rule.derives_scale and not bf.has_groups(self.scale_shape)

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one width, as a file stores it."""
        return bf.scale_bytes(self.scale_shape, self.group_scales)

    def codes(self, weight: Tensor, bits: int) -> Tensor:
        """Integer codes (int8) of `weight` at `bits`."""
        high = self.stored_bits(bits)
        stored = bf.quantize(weight.detach(), self.scale_of(weight, bits).detach(), bits=high, scheme=self.scheme)
        if not self.rule.narrows:
            return stored
        return bf.narrow(stored, high=high, low=bits, scheme=self.scheme, ties=self.ties)

    def gradient_scale(self, weight: Tensor, bits: int) -> float:
        """What the gradient of the scale is multiplied with at `bits`: LSQ's factor, and that of `scale_gradient`."""
        left_out = self.stored_bits(bits) - bits if self.scale_gradient == "printed" else 0
        return bf.lsq_gradient_scale(weight.numel() // math.prod(self.scale_shape), bits, signed=True) * 2.0**-left_out

    def settings(self, weight: Tensor, bits: int) -> dict[str, Any]:
        """What a fake quantization of `weight` at `bits` is told: scale, widths, scheme, tie rule, gradient scale."""
        return {"scale": self.scale_of(weight, bits), **self._rules(weight, bits)}

    def _rules(self, weight: Tensor, bits: int) -> dict[str, Any]:
        """The same without the scale."""
        return {
            "high": self.stored_bits(bits),
            "low": bits,
            "scheme": self.scheme,
            "ties": self.ties,
            "gradient_scale": self.gradient_scale(weight, bits),
        }

    def forward(self, weight: Tensor, bits: int) -> Tensor:
        """`weight` as its `bits`-bit codes say it, differentiable."""
        scale = self._scale_as_it_is(weight, bits)
        return kernels.fake_quantize(weight, scale, **self._rules(weight, bits), group_scales=self.group_scales)

    def extra_repr(self) -> str:
        return f"{self.scheme}, scale_shape={self.scale_shape}"


class ActivationQuantizer(nn.Module):
    """Fake-quantises an activation with one learned scale (and zero-point, if asymmetric) per width.

    For the kind 'dynamic' the learned numbers in `scales` are clip ratios: a scale in units of what each token's
    largest magnitude calls for; see `bitdial.functional.tokens`.
    """

    def __init__(self, scales: Mapping[int, Tensor], zero_points: Mapping[int, Tensor] | None, *, kind: str):
        super().__init__()
        self.kind = kind
        self.scales = nn.ParameterDict({str(b): nn.Parameter(s.clone()) for b, s in scales.items()})
        self.zero_points = nn.ParameterDict({str(b): nn.Parameter(z.clone()) for b, z in (zero_points or {}).items()})

    def zero_point_of(self, bits: int) -> Tensor | None:
        """The learned zero-point (1,) at `bits`, None unless asymmetric."""
        return self.zero_points[str(bits)] if self.kind == "asymmetric" else None

    def gradient_scale(self, x: Tensor, bits: int) -> float:
        """LSQ's factor of the gradient of the scale, for inputs like `x`."""
        elements = x.numel() // max(x.shape[0], 1)  # a sample's: the same however the batch is split
        return bf.lsq_gradient_scale(elements, bits, signed=self.kind in bf.SIGNED_KINDS)

    def forward(self, x: Tensor, bits: int) -> Tensor:
        """`x` as its `bits`-bit codes say it, differentiable; computed in float32 even under autocast."""
        return kernels.fake_quantize_activation(
            x,
            self.scales[str(bits)],
            self.zero_point_of(bits),
            bits=bits,
            kind=self.kind,
            gradient_scale=self.gradient_scale(x, bits),
        )

    def codes(self, x: Tensor, bits: int) -> Tensor:
        """Integer codes of `x` at `bits`."""
        return bf.quantize_activation(
            x, self.scales[str(bits)].detach(), self.zero_point_of(bits), bits=bits, kind=self.kind
        )

    def extra_repr(self) -> str:
        return self.kind
