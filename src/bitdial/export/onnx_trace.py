"""From a live model's traceable copy to a graph in ONNX operators, by torch's own exporters.

torch.export runs the forward on tensors without values (`strict=False`): what it does with sizes, Python values and
modules is followed, what it does with the values of tensors cannot be.
"""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from bitdial.errors import BitdialError, ExportError
from bitdial.export.onnx_reasons import first_line, untraceable, untranslatable
from bitdial.export.onnx_signature import Inputs, named_outputs, output_names
from bitdial.prepare.model_call import Batch, call

# They talk about packages that are not needed here, and about their own insides.
TALKATIVE = (
    "torch.onnx", "torch.export", "torch._export", "torch._dynamo", "torch.fx.experimental.symbolic_shapes",
    "onnxscript",
)  # fmt: skip

log = logging.getLogger(__name__)


def try_sample(model: nn.Module, sample: Batch) -> dict[str, Any]:
    """What `model` returns for `sample`, by name."""
    try:
        with torch.no_grad():
            found = call(model, sample)
    except BitdialError:
        raise
    except Exception as problem:  # whatever a user's model raises
        raise ExportError(f"the model does not run on the sample: {first_line(problem)}") from problem
    return named_outputs(found)


class _Flat(nn.Module):
    """The model as torch.export sees it: the sample's tensors in, a dict of tensors out."""

    def __init__(self, wrapped: nn.Module, inputs: Inputs):
        super().__init__()
        self.wrapped, self.inputs = wrapped, inputs

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """The tensors that the model returns, each of its own: an ONNX file has no output twice."""
        args, kwargs = self.inputs.filled(tensors)
        found: dict[str, Tensor] = {}
        for name, part in named_outputs(self.wrapped(*args, **kwargs)).items():
            if isinstance(part, Tensor):
                found[name] = part.clone() if any(part is one for one in (*tensors, *found.values())) else part
        if not found:
            raise ExportError("the model returns no tensor, and an ONNX file gives nothing else")
        return found


def trace(model: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    """The model as torch.export sees it, its outputs a dict by name; ExportError says what it cannot follow."""
    running = _follow(model)
    try:
        return _export(model, inputs, inputs.axes)
    except BitdialError:
        raise
    except Exception as problem:  # torch.export has no error class of its own
        log.debug("torch.export failed", exc_info=True)
        reason = problem
    innermost = list(running)
    running.clear()
    raise untraceable(reason, innermost, inputs.axes, _works_with_fixed_sizes(model, inputs)) from None


def _works_with_fixed_sizes(model: nn.Module, inputs: Inputs) -> bool:
    """Whether an export would do without free axes, so that the hint to fix them is right."""
    if not any(inputs.axes.values()):
        return False
    try:
        _export(model, inputs, {name: {} for name in inputs.axes})
    except Exception:  # as above
        return False
    return True


def _export(model: nn.Module, inputs: Inputs, axes: dict[str, dict[int, Dim]]) -> torch.export.ExportedProgram:
    shapes = {"tensors": tuple(axes.values())}
    with _quiet():
        return torch.export.export(
            _Flat(model, inputs), tuple(inputs.tensors.values()), dynamic_shapes=shapes, strict=False
        )


def _follow(model: nn.Module) -> list[str]:
    """The names of the modules that are running, innermost last, for as long as `model` lives."""
    running: list[str] = []

    def leave(*_: object) -> None:
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(leave)
    return running


def translate(program: torch.export.ExportedProgram, opset: int, inputs: Inputs) -> Any:
    """The program in ONNX operators; ExportError names the operator that has none and the module that uses it."""
    names = output_names(program.call_spec.out_spec.context, inputs.tensors)
    try:
        with _quiet():
            made = torch.onnx.export(
                program,
                opset_version=opset,
                dynamo=True,
                verbose=False,
                external_data=False,
                input_names=list(inputs.tensors),
                output_names=names,
                dynamic_shapes=inputs.axis_names(),
            )
    except Exception as problem:  # OnnxExporterError, and others from inside
        log.debug("torch.onnx.export failed", exc_info=True)
        reason = untranslatable(problem)
    else:
        assert made is not None
        for value in list(made.model.graph.initializers.values()):
            value.name = (value.name or "").removeprefix("wrapped.")
        return made.model
    raise reason from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's exporters; what they print goes to our log, at DEBUG."""
    levels = {name: logging.getLogger(name).level for name in TALKATIVE}
    printed = io.StringIO()
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(printed):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if printed.getvalue():
            log.debug("printed by torch:\n%s", printed.getvalue())
