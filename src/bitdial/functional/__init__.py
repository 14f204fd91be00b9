"""The arithmetic: tensors in, tensors out, no state.

Every weight scheme here is one formula with different parts. A weight becomes a high-bit integer code by
a *first rounding*; a lower width is made from that code alone by a *second rounding*; the value of a code is

    value = (code + offset) * scale * 2**shift          shift = high - low

| scheme            | first rounding         | second rounding of code / 2**shift | offset             | scale        |
|-------------------|-------------------------|------------------------------------|--------------------|--------------|
| `double_rounding` | nearest                 | nearest (tie rule), then clipped   | 0                  | learned      |
| `nested`          | nearest                 | floor (an arithmetic shift)        | 0, below high 1/2  | learned      |
| `centred`         | floor                   | floor                              | 1/2                | learned      |
| `truncate`        | nearest                 | floor                              | 0                  | learned      |
| `adabits`         | floor, of tanh(W)       | floor                              | 0                  | from weights |
| `lsq`             | nearest, at each width  | cannot be narrowed                 | 0                  | one a width  |
| `dorefa`          | nearest, of tanh(W)     | cannot be narrowed                 | 1/2                | from weights |

`double_rounding` is the paper's Eqs. 1-3, `truncate` Bit-Mixer, `lsq` also MultiQuant and the paper's "Ours*",
`dorefa` Any-Precision, `adabits` the modified DoReFa of AdaBits. `nested` and `centred` are ours: at lower widths a
value is the middle of its cell; `nested` is plain integers at the highest width, `centred` is not.

`nested` takes a phase, a whole number that is added to a code before it is stored (`nested+8`). It moves the cells of
all lower widths: the offset is -phase at the highest width and 1/2 - phase / 2**shift below, so that a phase of
2**(shift - 1) gives the width `shift` bits down a level at zero.

Integers reach training as floats that hold whole numbers and run time as int8. Both give the same code
because every step between the first division and the last multiplication is exact in float32.
Division is a true IEEE division (not a product with a reciprocal), so CPU, GPU and ONNX agree on it.
"""

from bitdial.functional.activations import (
    activation_codes,
    check_activation,
    dequantize_activation,
    fake_quantize_activation,
    integer_zero_point,
    quantize_activation,
)
from bitdial.functional.granularity import (
    GROUP_SCALES,
    MOST_MULTIPLIER,
    Granularity,
    by_scale,
    has_groups,
    has_half_rows,
    join_scale,
    scale_bytes,
    split_scale,
    spread,
    two_level,
    two_level_above,
    values_by_scale,
)
from bitdial.functional.schemes import (
    ACTIVATION_KINDS,
    DYNAMIC,
    SCHEMES,
    SIGNED_KINDS,
    TIE_RULES,
    Scheme,
    apply,
    check_codes,
    check_phase,
    code_range,
    lsq_gradient_scale,
    narrow,
    scheme_of,
)
from bitdial.functional.tokens import (
    LEAST_CLIP_RATIO,
    LEAST_TOKEN_SCALE,
    MOST_CLIP_RATIO,
    token_factor,
    token_scale,
    usable_clip_ratio,
)
from bitdial.functional.weights import (
    check_fake_quantize,
    dequantize,
    derived_scale,
    fake_quantize,
    quantize,
    unclipped_range,
    weight_of_codes,
)

__all__ = [
    "activation_codes",
    "ACTIVATION_KINDS",
    "DYNAMIC",
    "GROUP_SCALES",
    "LEAST_CLIP_RATIO",
    "LEAST_TOKEN_SCALE",
    "MOST_CLIP_RATIO",
    "MOST_MULTIPLIER",
    "SCHEMES",
    "SIGNED_KINDS",
    "TIE_RULES",
    "Granularity",
    "Scheme",
    "apply",
    "by_scale",
    "check_activation",
    "check_codes",
    "check_fake_quantize",
    "check_phase",
    "code_range",
    "dequantize",
    "dequantize_activation",
    "derived_scale",
    "fake_quantize",
    "fake_quantize_activation",
    "has_groups",
    "has_half_rows",
    "integer_zero_point",
    "join_scale",
    "lsq_gradient_scale",
    "narrow",
    "quantize",
    "quantize_activation",
    "scale_bytes",
    "scheme_of",
    "split_scale",
    "spread",
    "token_factor",
    "token_scale",
    "two_level",
    "two_level_above",
    "unclipped_range",
    "usable_clip_ratio",
    "values_by_scale",
    "weight_of_codes",
]
