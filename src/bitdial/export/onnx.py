"""An ONNX file of a live model at one setting, its weights as integers of 8, 4 or 2 bits.

torch's own exporter carries the graph around the quantised layers, so any model goes that it can follow. The quantised
layers become ONNX operators (`bitdial.export.onnx_layers`); their codes, int8 until then, are packed at the end.
"""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial._version import __version__
from bitdial.dial.dial import at_bits, dialled_layers, get_bits, unwrap
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError, ExportError, MissingDependencyError
from bitdial.export.onnx_layers import BITS, INPUT, LAYER, PART, WEIGHT, traceable_copy
from bitdial.export.onnx_reasons import FULL_TEXT, first_line
from bitdial.export.onnx_signature import Axes, bind
from bitdial.export.onnx_trace import trace, translate, try_sample
from bitdial.files.atomic import replacing
from bitdial.functional.bitstream import pack_bytes
from bitdial.live.layers import LiveLayer
from bitdial.prepare.model_call import Batch

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
    dynamic_axes: Axes | None = None,
    part: str | None = None,
) -> OnnxExport:
    """Write the live `model` (from `load`) as an ONNX file that runs at one setting; `model` is left as it is.

    It may run on any kernels: the file is made of its codes.

    `sample` is a batch that fits the model; only its shapes and types matter. `bits` is a setting (default: the present
    one). Codes lie in the smallest integer that ONNX has for them: INT8 for 8 to 5 bits, INT4 for 4 and 3, INT2 for 2.
    `opset` 21 has no INT2, so 2-bit codes take INT4 there (default: 25 where a layer has 2 bits, else 21). With
    `dynamic_batch`, dimension 0 of every input is free; `dynamic_axes` frees others: `{"input_ids": {1: "sequence"}}`.

    Inputs have the names of the forward's arguments, outputs their keys. What is no tensor, such as
    a decoder's cache, is left out, and a warning says so. `part` names a module of the model, such as a detector's
    "backbone": the file is of that alone, and `sample` is what it takes.
    """
    _need_packages()
    layers = {name: layer for name, layer in _live_layers(model).items() if _is_inside(name, part)}
    if not layers:
        raise ConfigError(f"part={part!r} names no module of the model with quantised layers in it")
    with at_bits(model, get_bits(model) if bits is None else bits):
        opset = _opset(opset, {layer.weight_bits for layer in layers.values()})
        returned = try_sample(_module(model if part is None else unwrap(model), part), sample)
        setting = get_bits(model)
        traceable = _module(traceable_copy(model, opset), part)
        scheme = next(iter(layers.values())).codes.scheme
    inputs = bind(traceable, sample, dynamic_batch=dynamic_batch, dynamic_axes=dynamic_axes)
    onnx_model = translate(trace(traceable, inputs), opset, inputs)
    weights = _pack_weights(onnx_model, opset)
    _name_parts(onnx_model)
    facts = {"version": __version__, "scheme": scheme, "plan": json.dumps(setting.to_dict())}
    size = _write(onnx_model, Path(path), facts)
    export = OnnxExport(path=Path(path), bytes=size, opset=opset, weights=weights)
    _say_what_is_left_out(export.path, returned)
    _say_what_grew(export)
    return export


def _need_packages() -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as problem:
        raise MissingDependencyError.missing("onnx", problem.name or "onnx") from problem


def _is_inside(name: str, part: str | None) -> bool:
    return part is None or name.startswith(f"{part}.")


def _module(model: nn.Module, part: str | None) -> nn.Module:
    return model if part is None else model.get_submodule(part)


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
        if node.metadata_props.get(PART) == INPUT and (node.op_type == "QuantizeLinear" or _gives_token_codes(node)):
            layer = node.metadata_props[LAYER]
            call_number = seen[layer] = seen.get(layer, 0) + 1
            node.outputs[0].name = f"{layer}.input_codes" + (f"_{call_number}" if call_number > 1 else "")
        for key in [key for key in node.metadata_props if not key.startswith("bitdial.")]:
            del node.metadata_props[key]  # among them stack traces, with paths of this machine
        for value in node.outputs:
            value.metadata_props.clear()


def _gives_token_codes(node: Any) -> bool:
    """Whether `node` is what makes the codes of tokens that have scales: the Clip behind their Round."""
    source = node.inputs[0].producer() if node.op_type == "Clip" else None
    return source is not None and source.op_type == "Round" and source.metadata_props.get(PART) == INPUT


def _write(model: Any, path: Path, facts: dict[str, str]) -> int:
    import onnx
    import onnx_ir

    model.producer_name, model.producer_version = "bitdial", __version__
    model.metadata_props.clear()
    model.metadata_props.update({f"bitdial.{key}": value for key, value in facts.items()})
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    model.ir_version = onnx.helper.find_min_ir_version_for(imports, ignore_unknown=True)
    onnx_ir.passes.common.NameFixPass()(model)  # an output may have the name of a value inside
    weight_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values())
    if weight_bytes > LARGEST_FILE:
        raise ExportError(f"the weights take {weight_bytes:,} bytes, and an ONNX file holds at most {LARGEST_FILE:,}")
    proto = onnx_ir.to_proto(model)
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as problem:
        log.debug("onnx.checker refused the graph", exc_info=True)
        why = first_line(problem)
        raise ExportError(f"torch's ONNX exporter made a graph that is not valid: {why}.\n{FULL_TEXT}") from None
    data = proto.SerializeToString()
    with replacing(path, error=ExportError) as temporary:
        temporary.write_bytes(data)
    return len(data)


def _say_what_is_left_out(path: Path, returned: dict[str, Any]) -> None:
    """Warn of what the model returns (by name) and the file does not: what is no tensor, such as a cache."""
    if lost := [f"{name} ({type(part).__name__})" for name, part in returned.items() if not isinstance(part, Tensor)]:
        log.warning("%s: left out, for a file gives tensors and keeps no cache: %s", path, ", ".join(lost))


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
