"""The operators of bitdial, each declared once with `torch.library`: its schema, its fake, and where it runs.

    integer_conv2d       a convolution (or linear layer: 1x1) of integer codes, and its epilogue
    integer_finish       the epilogue of a float32 value
    integer_sums         the sums of a convolution of codes alone, for compilers on the CPU
    fixed_point_conv2d   an unquantised convolution (or linear layer) in fixed point, and its epilogue
    sample_powers        the power of two of each sample in fixed point
    fixed_point_mean     the mean of each image in fixed point
    max_pool_codes       a max pool of codes
    switch_              every layer of a model to other widths, in place
    repack_              packed words to other widths, in place

`packed_linear` is declared in `packed_ops.py`, on the same backends and on that of the CPU.

Schemas are flat; `declare` is told how to make records of the arguments, and everything behind it takes those. Any
device runs the reference (`kernels/reference`); a `Backend` has kernels for one. Another one is another folder, with a
file that has a function for each operator, and another Backend below. Results are the same, bit for bit.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitdial.errors import QuantizationError
from bitdial.kernels import dispatch
from bitdial.kernels.conv_shape import ConvShape, conv_shape
from bitdial.kernels.epilogue import Epilogue, Outputs, filled
from bitdial.kernels.operands import FixedPointOperands, IntegerOperands
from bitdial.kernels.reference import epilogue, fixed_point, integer, max_pool, repack, switch
from bitdial.kernels.repack import RepackRule, RepackTables
from bitdial.kernels.switch import SwitchTables

Records = Callable[..., tuple[Any, ...]]

_LIBRARY = torch.library.Library("bitdial", "FRAGMENT")
_MOVES = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_EPILOGUE = (
    "Tensor? norm_affine, Tensor? residual, float? relu_max, Tensor? quantizer_a, Tensor? quantizer_b, bool keep_value"
)
_OUTPUTS = "(Tensor, Tensor, Tensor)"


class Backend(NamedTuple):
    """Kernels for one kind of device: a module with a function for each operator, of its name.

    The module is imported by the first call that it `serves`. Of several for one device the first that serves runs;
    where none does, the reference.
    """

    device: str
    module: str
    serves: Callable[[torch.device], bool]


TRITON_OPS = "bitdial.kernels.triton.ops"
INTERPRETER = Backend("CPU", TRITON_OPS, lambda device: dispatch.interpreted())
TRITON = (Backend("CUDA", TRITON_OPS, lambda device: dispatch.missing_on(device) is None), INTERPRETER)
TRITON_ON_ANY_GPU = (Backend("CUDA", TRITON_OPS, lambda device: dispatch.triton_installed()), INTERPRETER)
CPU = Backend("CPU", "bitdial.kernels.cpu.ops", lambda device: True)
PACKED = (*TRITON_ON_ANY_GPU, CPU)


def declare(
    schema: str,
    *,
    records: Records,
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    backends: tuple[Backend, ...],
) -> Any:
    """Declare `bitdial::schema`; `fake`, `reference` and kernels take what `records` makes of its arguments.

    As by `torch.library.custom_op`, but for the layers that guard gradients and aliases: these take longer than all
    else on the way to a kernel. No operator here has a gradient; torch warns where one is asked for.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    torch.library.register_fake(f"bitdial::{name}", lambda *args: fake(*records(*args)), lib=_LIBRARY)
    _LIBRARY.impl(name, lambda *args: reference(*records(*args)), "CompositeExplicitAutograd")
    for device, kernel in kernels_by_device(name, backends, records, reference).items():
        _LIBRARY.impl(name, kernel, device)
    return getattr(torch.ops.bitdial, name).default


def kernels_by_device(
    name: str, backends: tuple[Backend, ...], records: Records, reference: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """What operator `name` runs on each device of `backends`."""
    of = {device: [b for b in backends if b.device == device] for device in dict.fromkeys(b.device for b in backends)}
    return {device: _kernel(name, found, records, reference) for device, found in of.items()}


def _kernel(name: str, backends: list[Backend], records: Records, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of the first of `backends` that serves, else the `reference`."""

    @functools.cache
    def imported(module: str) -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(importlib.import_module(module), name)
        return kernel

    def run(first: Tensor, *rest: Any) -> Any:
        device = first.device
        chosen = next((imported(backend.module) for backend in backends if backend.serves(device)), reference)
        return chosen(*records(first, *rest))

    return run


# --- convolutions and what follows them -------------------------------------------------------------


def _integer_records(x: Tensor, *args: Any) -> tuple[Tensor, IntegerOperands, ConvShape, Epilogue]:
    operands = IntegerOperands(*args[:6])
    return x, operands, _shape(x, operands.weight, *args[6:10]), Epilogue(*args[10:])


def _sums_records(x: Tensor, weight: Tensor, pad: Tensor, *args: Any) -> tuple[Any, ...]:
    correction, doubled, *moves = args
    return x, weight, pad, correction, doubled, _shape(x, weight, *moves)


def _fixed_point_records(x: Tensor, *args: Any) -> tuple[Tensor, FixedPointOperands, ConvShape, Epilogue]:
    operands = FixedPointOperands(*args[:4])
    return x, operands, _shape(x, operands.weight, args[4], args[5], (1, 1), 1), Epilogue(*args[6:])


def _shape(x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> ConvShape:
    return conv_shape(x, weight, tuple(stride), tuple(padding), tuple(dilation), groups)


def _fake_conv(x: Tensor, operands: Any, shape: ConvShape, epilogue: Epilogue) -> Outputs:
    return filled(epilogue.outputs(shape.output(x.shape[0]), x.device), x.device)


def _fake_sums(x: Tensor, *args: Any) -> Tensor:
    shape: ConvShape = args[-1]
    size, layout = shape.output(x.shape[0]), torch.channels_last
    return torch.empty(size, dtype=torch.float32, device=x.device, memory_format=layout)


integer_conv2d: Callable[..., Outputs] = declare(
    "integer_conv2d(Tensor x, Tensor weight, Tensor pad, Tensor correction, Tensor factor, Tensor? doubled, "
    f"Tensor? bias, {_MOVES}, {_EPILOGUE}) -> {_OUTPUTS}",
    records=_integer_records, fake=_fake_conv, reference=integer.integer_conv2d, backends=TRITON,
)  # fmt: skip

integer_finish: Callable[..., Outputs] = declare(
    f"integer_finish(Tensor x, {_EPILOGUE}) -> {_OUTPUTS}",
    records=lambda x, *args: (x, Epilogue(*args)),
    fake=lambda x, epilogue: filled(epilogue.outputs(x.shape, x.device), x.device),
    reference=epilogue.integer_finish,
    backends=TRITON,
)

integer_sums: Callable[..., Tensor] = declare(
    f"integer_sums(Tensor x, Tensor weight, Tensor pad, Tensor correction, Tensor? doubled, {_MOVES}) -> Tensor",
    records=_sums_records, fake=_fake_sums, reference=integer.integer_sums, backends=(),
)  # fmt: skip

fixed_point_conv2d: Callable[..., Outputs] = declare(
    "fixed_point_conv2d(Tensor x, Tensor weight, Tensor sample_scales, Tensor weight_power, Tensor? bias, "
    f"SymInt[] stride, SymInt[] padding, {_EPILOGUE}) -> {_OUTPUTS}",
    records=_fixed_point_records, fake=_fake_conv, reference=fixed_point.fixed_point_conv2d, backends=TRITON,
)  # fmt: skip


# --- fixed point, pools -----------------------------------------------------------------------------


def _as_given(*args: Any) -> tuple[Any, ...]:
    return args


def _pool_records(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> tuple[Tensor, ConvShape]:
    """QuantizationError unless x is images that are no smaller than a window."""
    if x.dim() != 4:
        raise QuantizationError(f"a max pool: its input is {tuple(x.shape)}, expected images")
    _, channels, height, width = x.shape
    moves = tuple(stride), tuple(padding), tuple(dilation)
    shape = ConvShape.of((channels, height, width), (channels, *kernel), *moves, channels)
    if min(shape.out_height, shape.out_width) < 1:
        raise QuantizationError(f"a max pool: its input {tuple(x.shape)} is smaller than its window {tuple(kernel)}")
    return x, shape


def _fake_pool(x: Tensor, shape: ConvShape) -> Tensor:
    size, layout = shape.output(x.shape[0]), torch.channels_last
    return torch.empty(size, dtype=torch.int8, device=x.device, memory_format=layout)


sample_powers: Callable[[Tensor, int], Tensor] = declare(
    "sample_powers(Tensor x, SymInt bits) -> Tensor",
    records=_as_given,
    fake=lambda x, bits: x.new_empty((2, x.shape[0]), dtype=torch.float64),
    reference=fixed_point.sample_powers,
    backends=TRITON,
)

fixed_point_mean: Callable[[Tensor, Tensor], Tensor] = declare(
    "fixed_point_mean(Tensor x, Tensor sample_scales) -> Tensor",
    records=_as_given,
    fake=lambda x, sample_scales: x.new_empty((*x.shape[:2], 1, 1)),
    reference=fixed_point.fixed_point_mean,
    backends=TRITON,
)

max_pool_codes: Callable[..., Tensor] = declare(
    "max_pool_codes(Tensor x, SymInt[] kernel, SymInt[] stride, SymInt[] padding, SymInt[] dilation) -> Tensor",
    records=_pool_records, fake=_fake_pool, reference=max_pool.max_pool_codes, backends=TRITON,
)  # fmt: skip


# --- switches, in place -----------------------------------------------------------------------------


def _fake_nothing(*args: Any) -> None:
    return None


switch_: Callable[..., None] = declare(
    "switch_(Tensor master, Tensor(a!) active, Tensor table, Tensor(b!) words, Tensor code_blocks, "
    "Tensor word_blocks, Tensor wanted) -> ()",
    records=lambda *args: (SwitchTables(*args),),
    fake=_fake_nothing, reference=switch.switch_, backends=TRITON_ON_ANY_GPU,
)  # fmt: skip

repack_: Callable[..., None] = declare(
    "repack_(Tensor master, Tensor(a!) active, Tensor blocks, Tensor layers, Tensor bits, Tensor(b!) held, "
    "SymInt high, SymInt widest, str scheme, str ties) -> ()",
    records=lambda *args: (RepackTables(*args[:6]), RepackRule(*args[6:])),
    fake=_fake_nothing, reference=repack.repack_, backends=TRITON_ON_ANY_GPU,
)  # fmt: skip
