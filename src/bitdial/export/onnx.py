"""An ONNX file of a live model at one setting, its weights as integers of 8, 4 or 2 bits.

torch's own exporter carries the graph around the quantised layers, so any model goes that it can follow. The quantised
layers become ONNX operators (`bitdial.export.onnx_layers`); their codes, int8 until then, are packed at the end.
"""

import json
import logging
import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from bitdial._version import __version__
from bitdial.dial.dial import at_bits, dialled_layers, get_bits
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import BitdialError, ConfigError, ExportError, MissingDependencyError
from bitdial.export.onnx_layers import BITS, INPUT, LAYER, PART, WEIGHT, traceable_copy
from bitdial.files.atomic import replacing
from bitdial.functional.bitstream import pack_bytes
from bitdial.live.layers import LiveLayer
from bitdial.prepare.model_call import Batch, call

# The integers that ONNX has for weights, and the opset that brought them.
CONTAINERS = {2: 25, 4: 21, 8: 21}
OPSETS = range(21, 26)
LARGEST_FILE = (1 << 31) - 1  # protobuf's limit

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class OnnxExport:
    """What was written: the file, its size, its opset, and for each layer (bits of a code, bits that ONNX stores)."""

    path: Path
    bytes: int
    opset: int
    weights: dict[str, tuple[int, int]]


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    sample: Batch,
    *,
    bits: LayerBits | BitPlan | str | None = None,
    opset: int | None = None,
    dynamic_batch: bool = True,
) -> OnnxExport:
    """Write the live `model` (from `load`) as an ONNX file that runs at one setting; `model` is left as it is.

    It may run on any kernels: the file is made of its codes.

    `sample` is a batch that fits the model; only its shapes and types matter. `bits` is a setting (default: the present
    one). Codes lie in the smallest integer that ONNX has for them: INT8 for 8 to 5 bits, INT4 for 4 and 3, INT2 for 2.
    `opset` 21 has no INT2, so 2-bit codes take INT4 there (default: 25 where a layer has 2 bits, else 21). With
    `dynamic_batch`, dimension 0 of every input is free.
    """
    _need_packages()
    layers = _live_layers(model)
    with at_bits(model, get_bits(model) if bits is None else bits):
        opset = _opset(opset, {layer.weight_bits for layer in layers.values()})
        _try_sample(model, sample)
        setting = get_bits(model)
        traceable = traceable_copy(model, opset)
        scheme = next(iter(layers.values())).codes.scheme
    inputs = tree_map_only(Tensor, lambda t: _at_least_two(t.detach().cpu(), dynamic_batch), sample)
    program = _trace(traceable, inputs, dynamic_batch)
    onnx_program = _translate(program, opset, _free_dimensions(inputs, "batch") if dynamic_batch else None)
    weights = _pack_weights(onnx_program.model, opset)
    _name_parts(onnx_program.model)
    facts = {"version": __version__, "scheme": scheme, "plan": json.dumps(setting.to_dict())}
    size = _write(onnx_program.model, Path(path), facts)
    export = OnnxExport(path=Path(path), bytes=size, opset=opset, weights=weights)
    _say_what_grew(export)
    return export


def _need_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as problem:
        raise MissingDependencyError.missing("onnx", problem.name or "onnx") from problem


def _live_layers(model: nn.Module) -> dict[str, LiveLayer]:
    layers = {}
    for name, layer in dialled_layers(model).items():
        if not isinstance(layer, LiveLayer):
            raise ConfigError(f"layer {name!r} is a {type(layer).__name__}; export_onnx takes a live model: load(path)")
        layers[name] = layer
    return layers


def _opset(opset: int | None, widths: set[int]) -> int:
    if opset is None:
        return CONTAINERS[2] if 2 in widths else CONTAINERS[4]
    if type(opset) is not int or opset not in OPSETS:
        raise ConfigError(f"opset={opset!r} is not supported; choose 21 (INT8, INT4) to 25 (also INT2)")
    return opset


def _container(bits: int, opset: int) -> int:
    """The bits of the smallest ONNX integer of `opset` that holds a `bits`-bit code."""
    return next(size for size, since in CONTAINERS.items() if size >= bits and opset >= since)


# --- from the model to a graph --------------------------------------------------------------------


def _try_sample(model: nn.Module, sample: Batch) -> None:
    try:
        with torch.no_grad():
            call(model, sample)
    except BitdialError:
        raise
    except Exception as problem:  # whatever a user's model raises
        raise ExportError(f"the model does not run on the sample: {_first_line(problem)}") from problem


def _at_least_two(tensor: Tensor, dynamic_batch: bool) -> Tensor:
    """`tensor` with at least two samples if the batch is free: torch.export takes a batch of one for a constant."""
    alone = dynamic_batch and tensor.dim() and tensor.shape[0] == 1
    return torch.cat([tensor, tensor]) if alone else tensor


def _free_dimensions(inputs: Batch, batch: object) -> Any:
    """The exporters' `dynamic_shapes`: dimension 0 of every tensor is `batch`."""
    shapes = tree_map(lambda v: ({0: batch} if v.dim() else {}) if isinstance(v, Tensor) else None, inputs)
    return (shapes,) if isinstance(inputs, Tensor) else shapes


def _trace(model: nn.Module, inputs: Batch, dynamic_batch: bool) -> torch.export.ExportedProgram:
    """The model as torch.export sees it; ExportError names the module in which that fails."""
    shapes = _free_dimensions(inputs, torch.export.Dim("batch")) if dynamic_batch else None
    arguments = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    keywords = inputs if isinstance(inputs, dict) else None
    running = _follow(model)
    try:
        with _quiet():
            return torch.export.export(model, arguments, keywords, dynamic_shapes=shapes)
    except BitdialError:
        raise
    except Exception as problem:  # torch.export has no error class of its own
        where = f"in {running[-1]!r}" if running and running[-1] else "in the model itself"
        hint = "; if dimension 0 is not the batch, or the model fixes it: dynamic_batch=False" if dynamic_batch else ""
        raise ExportError(f"torch.export cannot follow the model, {where}: {_first_line(problem)}{hint}") from problem


def _follow(model: nn.Module) -> list[str]:
    """The names of the modules that are running, innermost last, for as long as `model` lives."""
    running: list[str] = []

    def leave(*_: object) -> None:
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        module.register_forward_hook(leave)
    return running


def _translate(program: torch.export.ExportedProgram, opset: int, shapes: Any) -> Any:
    """The program in ONNX operators; ExportError names the operator that has none and the module that uses it."""
    outputs = len(program.graph_signature.user_outputs)
    try:
        with _quiet():
            return torch.onnx.export(
                program,
                opset_version=opset,
                dynamo=True,
                verbose=False,
                external_data=False,
                dynamic_shapes=shapes,
                output_names=["output"] if outputs == 1 else [f"output_{i}" for i in range(outputs)],
            )
    except torch.onnx.errors.OnnxExporterError as problem:
        raise ExportError(_untranslatable(problem)) from problem


def _untranslatable(problem: BaseException) -> str:
    """What went wrong, with the operator and the module; torch tells these only in the frames of its traceback."""
    cause: BaseException | None = problem
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            node = frame.f_locals.get("node")
            if isinstance(node, torch.fx.Node) and node.op == "call_function":
                modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path]
                where = f"module {modules[-1]!r}" if modules else "the model itself"
                return f"{where} uses {node.target}, which torch's ONNX exporter cannot translate"
        cause = cause.__cause__
    return f"torch's ONNX exporter cannot translate the model: {_first_line(problem)}"


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences what torch's exporters say about packages that are not needed here and about their own insides."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# --- from the graph to a file ---------------------------------------------------------------------


def _pack_weights(model: Any, opset: int) -> dict[str, tuple[int, int]]:
    """Pack the codes in the ONNX `model` in place; {layer: (bits, bits stored)}.

    Layers with the same codes share one tensor, which then has the widest of their containers.
    """
    import onnx_ir

    uses: dict[str, list[tuple[str, int]]] = {}
    for node in model.graph:
        if node.metadata_props.get(PART) == WEIGHT and node.op_type == "DequantizeLinear":
            use = node.metadata_props[LAYER], int(node.metadata_props[BITS])
            uses.setdefault(node.inputs[0].name, []).append(use)
    weights = {}
    for name, users in uses.items():
        container = max(_container(bits, opset) for _, bits in users)
        weights.update({layer: (bits, container) for layer, bits in users})
        if container == 8:
            continue
        value = model.graph.initializers[name]
        kind = onnx_ir.DataType[f"INT{container}"]
        codes = torch.from_numpy(value.const_value.numpy())
        packed = pack_bytes(codes, container).numpy()  # the layout that ONNX has too
        value.const_value = onnx_ir.PackedTensor(packed, kind, shape=onnx_ir.Shape(codes.shape), name=name)
        value.type = onnx_ir.TensorType(kind)
    return weights


def _name_parts(model: Any) -> None:
    """Change `model` in place: input codes are named after their layer, and what torch noted on nodes goes."""
    seen: dict[str, int] = {}
    for node in model.graph:
        if node.metadata_props.get(PART) == INPUT and node.op_type == "QuantizeLinear":
            layer = node.metadata_props[LAYER]
            call_number = seen[layer] = seen.get(layer, 0) + 1
            node.outputs[0].name = f"{layer}.input_codes" + (f"_{call_number}" if call_number > 1 else "")
        for key in [key for key in node.metadata_props if not key.startswith("bitdial.")]:
            del node.metadata_props[key]  # among them stack traces, with paths of this machine
        for value in node.outputs:
            value.metadata_props.clear()


def _write(model: Any, path: Path, facts: dict[str, str]) -> int:
    import onnx
    import onnx_ir

    model.producer_name, model.producer_version = "bitdial", __version__
    model.metadata_props.clear()
    model.metadata_props.update({f"bitdial.{key}": value for key, value in facts.items()})
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    model.ir_version = onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    weight_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    if weight_bytes > LARGEST_FILE:
        raise ExportError(f"the weights take {weight_bytes:,} bytes, and an ONNX file holds at most {LARGEST_FILE:,}")
    proto = onnx_ir.to_proto(model)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as problem:
        raise ExportError(f"torch's ONNX exporter made a graph that is not valid: {_first_line(problem)}") from problem
    data = proto.SerializeToString()
    with replacing(path, error=ExportError) as temporary:
        temporary.write_bytes(data)
    return len(data)


def _say_what_grew(export: OnnxExport) -> None:
    grown: dict[tuple[int, int], int] = {}
    for bits, container in export.weights.values():
        if container > bits:
            grown[bits, container] = grown.get((bits, container), 0) + 1
    for (bits, container), count in sorted(grown.items()):
        log.warning(
            "%s: %d layer(s) of %d bits take %d bits a weight, INT%d: opset %d has no smaller integer for them",
            export.path, count, bits, container, container, export.opset,
        )  # fmt: skip
