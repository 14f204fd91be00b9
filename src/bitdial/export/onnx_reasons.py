"""Why a model cannot be exported, in two lines: what and where, then the way out. torch's own text runs to pages."""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import Dim

from bitdial.errors import ExportError

NOT_THE_MODEL = (Path(torch.__file__).parent, Path(__file__).parents[1])  # torch, bitdial
FULL_TEXT = "logging.getLogger('bitdial.export').setLevel('DEBUG') shows torch's own text."


Axes = Mapping[str, Mapping[int, Dim]]


def untraceable(problem: BaseException, running: Sequence[str], axes: Axes, fixed_works: bool) -> ExportError:
    """Why torch.export failed in the innermost of the modules that were `running`.

    `axes` are the free ones of each input; `fixed_works`: it does not fail without them.
    """
    where = f"in {running[-1]!r}" if running and running[-1] else "in the model itself"
    line = _line_of_the_model(problem)
    if any(_depends_on_values(cause) for cause in _causes(problem)):
        return ExportError(
            f"{where}, the path of the forward depends on the values of a tensor, and a file has one path{line}.\n"
            "Write it with operators on tensors, such as torch.where; make checks of values outside the model."
        )
    if "Constraints violated" in str(problem):
        return _violated(problem, axes, fixed_works)
    if isinstance(problem, UnsupportedOperatorException):
        return ExportError(
            f"{where}, torch.export does not know the operator {first_line(problem)}{line}.\n"
            "Write it with other operators of torch."
        )
    if fixed_works:
        way = "It can if every size is fixed: dynamic_batch=False, without dynamic_axes."
    else:
        way = f"Write it with operators of torch alone. {FULL_TEXT}"
    return ExportError(f"{where}, torch.export cannot follow: {first_line(problem)}{line}.\n{way}")


def _depends_on_values(problem: BaseException) -> bool:
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # brings sympy

    kinds = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
    return isinstance(problem, kinds)


def _violated(problem: BaseException, axes: Axes, fixed_works: bool) -> ExportError:
    """The model takes only some sizes of an axis that is to be free."""
    named = re.search(r"Constraints violated \(([^)]*)\)", str(problem))
    names = named[1].split(", ") if named else []
    _, _, text = str(problem).partition("Suggested fixes:")
    fixes = dict(re.findall(r"^  (\w+) = (.+)$", text, re.M))
    found = f"; torch.export finds: {', '.join(f'{k} = {v}' for k, v in fixes.items())}" if fixes else ""
    what = f"the model does not take every size of {' and '.join(map(repr, names)) or 'a free axis'}{found}."
    if not fixed_works:
        return ExportError(f"{what}\nWith fixed sizes it fails too. {FULL_TEXT}")
    ways = [f"leave {name!r} out of dynamic_axes" if name != "batch" else "dynamic_batch=False" for name in names]
    way = f"Fix the size: {', '.join(ways) or 'dynamic_batch=False, without dynamic_axes'}"
    for name, fix in fixes.items():
        places = [(i, axis) for i, found in axes.items() for axis, dim in found.items() if dim.__name__ == name]
        if fix.startswith("Dim(") and places:
            way += f"; or give the range: dynamic_axes={{{places[0][0]!r}: {{{places[0][1]}: torch.export.{fix}}}}}"
    return ExportError(f"{what}\n{way}.")


def untranslatable(problem: BaseException) -> ExportError:
    """Why torch's ONNX exporter failed: the operator and its module, which torch has only in frames of a traceback."""
    for cause in _causes(problem):
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node) and node.op == "call_function":
                modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
                name = modules[-1].partition(".")[2] if modules else ""  # behind the module around the model
                where = f"module {name!r}" if name else "the model itself"
                return ExportError(
                    f"{where} uses {node.target}, which torch's ONNX exporter cannot translate.\n"
                    "Write it with other operators of torch, or leave it out of the model and apply it to the outputs."
                )
    return ExportError(f"torch's ONNX exporter cannot translate the model: {first_line(problem)}.\n{FULL_TEXT}")


def first_line(problem: BaseException, longest: int = 300) -> str:
    """The first line of an error's text, cut if it is very long."""
    line = (str(problem).strip() or type(problem).__name__).splitlines()[0].rstrip(".")
    return line if len(line) <= longest else line[:longest] + " ..."


def _causes(problem: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = problem
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _line_of_the_model(problem: BaseException) -> str:
    """(file.py:12: `if x.sum() > 0:`), the innermost line that is neither torch's nor bitdial's; else nothing."""
    found = ""
    for frame in traceback.extract_tb(problem.__traceback__):
        if not any(Path(frame.filename).is_relative_to(place) for place in NOT_THE_MODEL):
            found = f" ({Path(frame.filename).name}:{frame.lineno}: `{frame.line}`)" if frame.line else ""
    return found
