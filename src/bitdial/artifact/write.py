"""Write an artifact."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bitdial import functional as bf
from bitdial._version import __version__
from bitdial.artifact.fit import fit
from bitdial.artifact.format import (
    FLOAT,
    LARGEST_CODE,
    VERSION,
    check_named,
    check_sensitivity,
    float_state,
    layer_table_entry,
    norm_table_entry,
)
from bitdial.artifact.graph import graph_entry
from bitdial.artifact.parts import Layout, write_tensors
from bitdial.artifact.read import read_artifact
from bitdial.artifact.widened import shorten
from bitdial.dial.dial import is_live, leader_of, resolve_plan, unwrap
from bitdial.dial.plan import BitPlan
from bitdial.errors import ArtifactError, PlanError
from bitdial.functional.bitstream import pack_bytes
from bitdial.models import MODELS
from bitdial.nn import UNKNOWN, ActivationSite, QuantLayer, SwitchableBatchNorm, WeightQuantizer
from bitdial.nn.decompose import decomposed_modules
from bitdial.nn.rotation import rotation_entry
from bitdial.nn.single_width import check_trained_widths
from bitdial.nn.untouched import check_learned
from bitdial.prepare.report import REPORT, ModelReport
from bitdial.sensitivity.result import Sensitivity


def save(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    plans: Mapping[str, BitPlan] | None = None,
    metrics: Mapping[str, Any] | None = None,
    sensitivity: Sensitivity | None = None,
    progressive: bool = False,
) -> str:
    """Write the prepared, trained `model` to `path` (atomically) and return its digest.

    Only the highest width's integer codes are stored, with the scales, zero-points, norm sets and float layers. `plans`
    are named BitPlans to keep with it, `metrics` any JSON values, `sensitivity` is what `hessian_trace` found. Schemes
    that cannot narrow (`lsq`, `dorefa`) store float weights. What was written is read back, checked as `load` checks
    it, and compared with `model` before it takes its name. If anything is off, what was at `path` stays.

    A `progressive` file holds the same, in parts: the first is the lowest width's, and each further one adds a width.
    It is for schemes whose low codes are prefixes, such as 'nested'.
    """
    check_named(plans, metrics)
    model = unwrap(model)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLayer)}
    if not layers and is_live(model):
        raise ArtifactError("the model is a live one; save takes one from prepare() or load_trainable(path)")
    if not layers:
        raise ArtifactError("the model has no quantised layer to save; save takes a model from prepare()")
    if sharded := [name for name, parameter in model.named_parameters() if hasattr(parameter, "to_local")]:
        raise ArtifactError(
            f"{sharded[0]!r} is spread over processes (fully_shard); load the whole state, which get_model_state_dict "
            "of torch.distributed.checkpoint.state_dict gives, into a prepared model that is not, and save that"
        )
    _check_names(model)
    _check_alike(layers)
    check_trained_widths(model)
    tensors, entries = _contents(model, layers)
    check_learned(model)
    _check_plans(model, plans or {})
    if sensitivity is not None:
        if not isinstance(sensitivity, Sensitivity):
            raise ArtifactError(f"sensitivity is a {type(sensitivity).__name__}; give what hessian_trace returns")
        check_sensitivity(sensitivity, entries["layers"])
    first_layer = next(iter(layers.values()))
    manifest = {
        "kind": "artifact",
        "version": VERSION,
        "written_by": f"bitdial {__version__}",
        "scheme": first_layer.weight_quantizer.scheme,
        "ties": first_layer.weight_quantizer.ties,
        "bit_choices": list(first_layer.bit_choices),
        **{key: entries.pop(key) for key in ("layers", "norms", "aliases")},
        "architecture": _architecture(model),
        "plans": {name: plan.to_dict() for name, plan in (plans or {}).items()},
        "metrics": dict(metrics or {}),
        "sensitivity": None if sensitivity is None else sensitivity.to_dict(),
    }
    manifest |= {key: entry for key, entry in entries.items() if entry}
    layout = Layout(manifest) if progressive else None
    return _write(path, tensors, manifest, model, layout)


def _contents(model: nn.Module, layers: dict[str, QuantLayer]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of the file, and the entries of the manifest that say what they are and what the model is."""
    norms = {n: m for n, m in model.named_modules() if isinstance(m, SwitchableBatchNorm)}
    sites = {n: m for n, m in model.named_modules() if isinstance(m, ActivationSite)}
    layer_tensors, table = _layer_table(layers)
    norm_tensors, norm_table = _norm_table(norms, layers)
    site_tensors, site_table = _site_table(sites, layers)
    floats, aliases = float_state(model, (*layers.values(), *norms.values(), *sites.values()))
    tensors = {
        **layer_tensors,
        **norm_tensors,
        **site_tensors,
        **{f"{FLOAT}{key}": tensor for key, tensor in floats.items()},
    }
    _check_values(tensors)
    report = getattr(model, REPORT, None)
    return tensors, {
        "layers": table,
        "norms": norm_table,
        "aliases": aliases,
        "decomposed": decomposed_modules(model),
        "rotation": rotation_entry(model),
        "widened": shorten(model, layers, tensors),
        "sites": site_table,
        "graph": graph_entry(model, (*layers, *norms)),
        "report": report.to_dict() if isinstance(report, ModelReport) else None,
    }


def _check_plans(model: nn.Module, plans: Mapping[str, BitPlan]) -> None:
    """Raise PlanError for what is not a plan of `model`."""
    for name, plan in plans.items():
        if not isinstance(plan, BitPlan):
            raise PlanError(f"plan {name!r} is {plan!r}; give a BitPlan, such as BitPlan(default=4)")
        resolve_plan(model, plan)


def _write(
    path: str | os.PathLike[str],
    tensors: dict[str, Tensor],
    manifest: dict[str, Any],
    model: nn.Module,
    layout: Layout | None,
) -> str:
    """Write the file, but only if it can be read and fits `model`; `tensors` are gone then."""

    def check(written: Path) -> None:
        tensors.clear()  # these, and those that are read, need not be there at once
        try:
            fit(read_artifact(written), model)
        except ArtifactError as problem:
            why = str(problem).removeprefix(f"{written}: ").replace(str(written), "the file")
            raise ArtifactError(
                f"{path} was not written, since load() would refuse it: {why}. What was there before is untouched; "
                "change that in the model (a type, for example, by .float()) and save it again"
            ) from problem

    return write_tensors(path, tensors, manifest, layout, check)


def _check_names(model: nn.Module) -> None:
    """Raise ArtifactError if a part of the model was compiled by `torch.compile`, which gives it another name."""
    if compiled := [name for name, _ in model.named_modules() if name.endswith("._orig_mod")]:
        part = compiled[0].removesuffix("._orig_mod")
        raise ArtifactError(
            f"{part!r} is a compiled module, in which all names are others than in the float model, so load() would "
            f"not find them; put the module itself back (model.{part} = model.{compiled[0]}), and compile it by "
            f"model.{part}.compile()"
        )


def _check_alike(layers: Mapping[str, QuantLayer]) -> None:
    """Raise ArtifactError unless all layers have the settings of which a file has one."""
    first, *others = layers
    for setting in ("bit_choices", "scheme", "ties"):
        wanted = getattr(layers[first].weight_quantizer, setting)
        for name in others:
            if (found := getattr(layers[name].weight_quantizer, setting)) != wanted:
                raise ArtifactError(
                    f"layer {name!r} has {setting}={found!r} and layer {first!r} {wanted!r}, but a file has one for "
                    "all; prepare the whole model by one QuantConfig"
                )


def _check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raise ArtifactError unless all tensors have values, and those are finite."""
    for name, tensor in tensors.items():
        if is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided:
            what = "lazy and" if is_lazy(tensor) else "on the meta device and" if tensor.is_meta else "sparse and so"
            raise ArtifactError(
                f"{name!r} is {what} without plain values to store; give it some, or keep it out of the model's state "
                "(persistent=False)"
            )
        mask = name.startswith(FLOAT) and not isinstance(tensor, nn.Parameter)  # a buffer may be infinite on purpose
        if tensor.is_floating_point() and bool((tensor.isnan() if mask else ~tensor.isfinite()).any()):
            raise ArtifactError(f"{name!r} holds NaN or infinity; the file was not written")


def _architecture(model: nn.Module) -> dict[str, Any] | None:
    """How to rebuild `model`, if `build_model` made it; a user's attribute of that name means nothing to us."""
    found = getattr(model, "architecture", None)
    ours = isinstance(found, dict) and set(found) == {"name", "arguments"} and found["name"] in tuple(MODELS)
    return found if ours else None


def _layer_table(layers: Mapping[str, QuantLayer]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    table: dict[str, Any] = {}
    stored_by: dict[nn.Parameter, str] = {}
    for name, layer in layers.items():
        parts, entry = _layer_parts(name, layer, stored_by)
        tensors |= {f"{name}/{part}": tensor for part, tensor in parts.items()}
        table[name] = entry | {"fed_by": _name_here(name, layer.fed_by, layers)}
        if layer.fixed_bits is not None:
            table[name]["fixed_bits"] = layer.fixed_bits
    return tensors, table


def _norm_table(
    norms: Mapping[str, SwitchableBatchNorm], layers: Mapping[str, QuantLayer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    table: dict[str, Any] = {}
    for name, norm in norms.items():
        tensors |= {f"{name}/{part}": tensor for part, tensor in _norm_parts(name, norm).items()}
        leaders = {key: _name_here(name, getattr(norm, key), layers) for key in ("follows", "fed_by")}
        table[name] = norm_table_entry(norm.active) | leaders
        if norm.transitions == "statistics":
            table[name]["transitions"] = norm.transitions
    return tensors, table


def _site_table(
    sites: Mapping[str, ActivationSite], layers: Mapping[str, QuantLayer]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors: dict[str, Tensor] = {}
    table: dict[str, Any] = {}
    for name, site in sites.items():
        tensors[f"{name}/act_scale"] = torch.cat([site.quantizer.scales[str(b)] for b in site.bit_choices])
        table[name] = {"follows": _name_here(name, site.follows, layers), "kind": site.quantizer.kind}
    return tensors, table


def _name_here(name: str, other: str | None, layers: Mapping[str, QuantLayer]) -> str | None:
    """What the layer that `name` knows as `other` is called in this model, of which the prepared one may be a part."""
    if other in (None, UNKNOWN):
        return other
    try:
        return leader_of(name, other, layers)
    except PlanError as problem:
        raise ArtifactError(
            f"{name!r} goes by layer {other!r}, which the model does not have under that name; save the model that "
            "prepare() gave, with its layers in their places"
        ) from problem


def _layer_parts(
    name: str, layer: QuantLayer, stored_by: dict[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    quantizer, weight, rows = layer.weight_quantizer, layer.weight, layer.weight_rows().detach().contiguous()
    if weight.dtype != torch.float32:
        raise ArtifactError(f"layer {name!r}: its weight is {weight.dtype}; convert the model with .float() first")
    if not bool(torch.isfinite(weight).all()):
        raise ArtifactError(f"layer {name!r}: its weight holds NaN or infinity; the file was not written")
    for key, scale in layer.named_parameters():
        if "quantizer.scale" in key and not bool(((scale > 0) & (scale * LARGEST_CODE).isfinite()).all()):
            raise ArtifactError(f"layer {name!r}: {key} is not positive and of usable size; the file was not written")
    entry = layer_table_entry(name, layer)
    entry["group_size"] = rows.shape[1] // quantizer.scale_shape[1] if bf.has_groups(quantizer.scale_shape) else None
    entry["activations"] = "float" if layer.act_quantizer is None else layer.act_quantizer.kind
    high = layer.bit_choices[0]
    parts: dict[str, Tensor] = {}
    if tied := stored_by.setdefault(weight, name) != name:  # type: ignore[arg-type]
        entry["tied_to"] = stored_by[weight]  # type: ignore[index]
    if not tied and quantizer.rule.narrows:
        parts |= _narrowing_scale(name, quantizer, rows)
        codes = quantizer.codes(rows, high)
        parts["codes"] = codes if high == 8 else pack_bytes(codes, high)
    elif not tied:
        parts["weight"] = rows
        parts["weight_scale"] = torch.stack([quantizer.scale_of(rows, b) for b in layer.bit_choices])
    if layer.bias is not None:
        parts["bias"] = layer.bias
    act = layer.act_quantizer
    if act is not None and act.kind == bf.DYNAMIC:
        parts["act_clip_ratio"] = torch.cat([bf.usable_clip_ratio(act.scales[str(b)]) for b in layer.bit_choices])
    elif act is not None:
        parts["act_scale"] = torch.cat([act.scales[str(b)] for b in layer.bit_choices])
        if act.kind == "asymmetric":
            whole = [bf.integer_zero_point(act.zero_points[str(b)], b) for b in layer.bit_choices]
            parts["act_zero_point"] = torch.cat(whole).to(torch.uint8)
    return parts, entry


def _narrowing_scale(name: str, quantizer: WeightQuantizer, rows: Tensor) -> dict[str, Tensor]:
    """The scale of codes that narrow, as the file has it; of two levels, a float per row and an integer per group."""
    scale = quantizer.scale_of(rows, quantizer.bit_choices[0]).detach()
    if not quantizer.two_levels:
        return {"weight_scale": scale[None]}
    row_scale, multipliers = bf.split_scale(scale)
    if not bool((row_scale > 0).all()) or not torch.equal(bf.join_scale(row_scale, multipliers), scale):
        raise ArtifactError(
            f"layer {name!r}: its weight scales are too small for scales of two levels; the file was not written"
        )
    return {"weight_scale": row_scale[None], "group_scale": multipliers}


def _norm_parts(name: str, norm: SwitchableBatchNorm) -> dict[str, Tensor]:
    sets = {key: each.state_dict() for key, each in norm.sets.items()}
    for value in (v for s in sets.values() for v in s.values()):
        if value.is_floating_point() and value.dtype != torch.float32:
            raise ArtifactError(f"norm {name!r} is {value.dtype}; convert the model with .float() first")
    return {part: torch.stack([sets[key][part] for key in norm.holders(part)]) for part in sets[norm.key]}
