"""Read an artifact, and check everything that must hold of it before a model sees it. Hostile files are expected."""

import os
from pathlib import Path
from typing import Any

from bitdial import functional as bf
from bitdial.artifact.fixed import check_fixed_bits
from bitdial.artifact.format import (
    FLOAT,
    OLD_KINDS,
    OLD_SCHEMES,
    VERSION,
    Artifact,
    check_sensitivity,
)
from bitdial.artifact.graph import check_graph_entry
from bitdial.artifact.layers import check_layer
from bitdial.artifact.norms import check_norm
from bitdial.artifact.parts import Layout
from bitdial.artifact.rotation import check_rotation
from bitdial.artifact.sites import check_sites
from bitdial.artifact.tensors import ExpectedTensors, Fields, check_fields
from bitdial.artifact.widened import check_widened
from bitdial.config import check_bit_choices
from bitdial.dial.plan import BitPlan
from bitdial.errors import ArtifactError, BitdialError, ConfigError, PlanError
from bitdial.files.container import read_container
from bitdial.files.parts import PartedFile, read_parts
from bitdial.nn.decompose import DECOMPOSITIONS
from bitdial.prepare.report import ModelReport
from bitdial.sensitivity.result import Sensitivity

_MANIFEST: Fields = {
    "kind": str,
    "version": int,
    "written_by": str,
    "scheme": str,
    "ties": str,
    "bit_choices": list,
    "layers": dict,
    "norms": dict,
    "aliases": dict,
    "architecture": (dict, type(None)),
    "plans": dict,
    "metrics": dict,
    "sensitivity": (dict, type(None)),
}


def read_artifact(path: str | os.PathLike[str], *, bits: int | None = None, cut: bool = False) -> Artifact:
    """Read and check the artifact at `path`; ArtifactError names the file and what is wrong with it.

    Of a progressive file, only the parts of up to `bits` bits are read. One that ends before the last of these is
    refused, unless `cut`: then it is taken as far as it goes (`artifact.available`).
    """
    path = Path(path)
    file = read_parts(path, error=ArtifactError, upto=8 if bits is None else bits)
    if file is None:
        tensors, manifest, digest = read_container(path, error=ArtifactError, shared=True)
        artifact = Artifact(manifest, tensors, digest, path.stat().st_size)
    else:
        widest = _widest(path, file, bits, cut=cut)
        artifact = Artifact(file.manifest, {}, file.digest, file.size, parts=file.parts, widest=widest)
    try:
        _Checker(artifact, file).check()
    except BitdialError as problem:
        raise ArtifactError(f"{path}: {problem}") from problem
    return artifact


def _widest(path: Path, file: PartedFile, bits: int | None, *, cut: bool) -> int | None:
    """The width of the last part that was read, None if that is the last of all; ArtifactError if it will not do."""
    wanted = [part.bits for part in file.parts if bits is None or part.bits <= bits]
    read = [each for each in wanted if each in file.there]
    end = file.parts[-1].end
    if not file.there:
        raise ArtifactError(
            f"{path} ends within its first part, at byte {file.size} of {file.parts[0].end} ({end} with all parts); "
            "get a fresh copy, or the rest"
        )
    if not wanted:
        raise ArtifactError(
            f"bits={bits}: the lowest width of {path} is {file.parts[0].bits}; ask for that, or a wider"
        )
    if read != wanted and not cut:
        raise ArtifactError(
            f"{path} is cut: it ends at byte {file.size} of {end}, and its last whole part is that of {read[-1]} bits. "
            "load(path) runs the widths that it has; for this, get the rest"
        )
    return None if read[-1] == file.parts[-1].bits else read[-1]


class _Checker:
    """One pass over an artifact; fills in what its manifest holds, and the tensors of one whose `file` is in parts."""

    def __init__(self, artifact: Artifact, file: PartedFile | None):
        self.artifact, self.file = artifact, file
        self.tensors = ExpectedTensors(artifact)

    def check(self) -> None:
        manifest = self.artifact.manifest
        optional = self._form()
        if self.file is not None:
            self.artifact.tensors = Layout(manifest).join(self.file)
            self.file.tensors.clear()
        for name, how in manifest.get("decomposed", {}).items():
            if not isinstance(how, str) or how not in DECOMPOSITIONS:
                raise ArtifactError(f"module {name!r}: {how!r} is not one of {', '.join(DECOMPOSITIONS)}")
        check_widened(self.artifact)
        if "rotation" in optional:
            check_rotation(manifest["rotation"])
        for name, entry in manifest["layers"].items():
            check_layer(self.tensors, name, entry)
        check_fixed_bits(self.artifact)
        for name, entry in manifest["norms"].items():
            check_norm(self.tensors, name, entry)
        check_sites(self.artifact)
        for name in self.artifact.sites:
            self.tensors.take_scale(f"{name}/act_scale", (len(self.artifact.bit_choices),))
        self._floats()
        self._plans()
        if manifest["sensitivity"] is not None:
            self._sensitivity()
        if "graph" in optional:
            check_graph_entry(manifest["graph"])
        if "report" in optional:
            self._report()

    def _form(self) -> dict[str, type]:
        """Check the fields of the manifest and what holds for the whole file; the optional fields that it has."""
        manifest = self.artifact.manifest
        if manifest.get("kind") != "artifact":
            raise ArtifactError("it is not an artifact (a checkpoint?); save(model, path) writes artifacts")
        if type(version := manifest.get("version")) is not int or version not in (1, VERSION):
            raise ArtifactError(
                f"its format version is {version!r}, this bitdial reads 1 and {VERSION}; "
                "use the release of bitdial that wrote it, or a newer one"
            )
        known = ("decomposed", "graph", "report", "rotation", "sites") if version == VERSION else ()
        optional: dict[str, type] = {key: dict for key in known if key in manifest}
        optional |= {"widened": list} if version == VERSION and "widened" in manifest else {}
        check_fields("the manifest", manifest, {**_MANIFEST, **optional})
        if version == 1:
            _renew(manifest)
        try:
            high = check_bit_choices(manifest["bit_choices"])[0]
            bf.scheme_of(manifest["scheme"])
            bf.check_phase(manifest["scheme"], high)
        except ConfigError as problem:
            raise ArtifactError(str(problem)) from problem
        if manifest["ties"] not in bf.TIE_RULES:
            raise ArtifactError(f"its tie rule {manifest['ties']!r} is not known")
        if not manifest["layers"]:
            raise ArtifactError("it has no quantised layer")
        return optional

    def _floats(self) -> None:
        tensors = self.artifact.tensors
        for name in tensors:
            if name.startswith(FLOAT) and tensors[name].is_floating_point() and bool(tensors[name].isnan().any()):
                raise ArtifactError(f"the tensor {name!r} holds NaN")
        if extra := sorted(name for name in tensors if name not in self.tensors.names and not name.startswith(FLOAT)):
            raise ArtifactError(f"the tensor {extra[0]!r} belongs to nothing in the manifest")
        for key, target in self.artifact.manifest["aliases"].items():
            if f"{FLOAT}{target}" not in tensors or f"{FLOAT}{key}" in tensors:
                raise ArtifactError(f"the alias {key!r} of {target!r} leads nowhere")

    def _plans(self) -> None:
        layers, choices = self.artifact.layers, self.artifact.bit_choices
        for name, values in self.artifact.manifest["plans"].items():
            try:
                plan = BitPlan.from_dict(values)
            except PlanError as problem:
                raise ArtifactError(f"plan {name!r}: {problem}") from problem
            pairs = [plan[layer] for layer in plan] + ([plan.default] if plan.default else [])
            if any(layer not in layers for layer in plan) or any(b not in choices for pair in pairs for b in pair):
                raise ArtifactError(f"plan {name!r} names a layer or a width that the file does not have")
            if plan.default is None and len(plan) != len(layers):
                raise ArtifactError(f"plan {name!r} does not cover every layer")
            self.artifact.plans[name] = plan

    def _sensitivity(self) -> None:
        try:
            found = Sensitivity.from_dict(self.artifact.manifest["sensitivity"])
        except ConfigError as problem:
            raise ArtifactError(f"sensitivity: {problem}") from problem
        check_sensitivity(found, self.artifact.layers)
        self.artifact.sensitivity = found

    def _report(self) -> None:
        try:
            self.artifact.report = ModelReport.from_dict(self.artifact.manifest["report"])
        except ConfigError as problem:
            raise ArtifactError(str(problem)) from problem


def _renew(manifest: dict[str, Any]) -> None:
    """Bring a manifest of version 1 to the present one, in place. It had other names, two kinds of layer, no groups."""
    manifest["version"], manifest["scheme"] = VERSION, OLD_SCHEMES.get(manifest["scheme"], manifest["scheme"])
    for name, entry in manifest["layers"].items():
        if not isinstance(entry, dict):
            continue  # refused later
        newer = {"group_size", "fixed_bits"} & set(entry) or entry.get("activations") == bf.DYNAMIC
        if newer or entry.get("type") not in OLD_KINDS:
            raise ArtifactError(
                f"layer {name!r}: version 1 has {' and '.join(OLD_KINDS)}, and no 'group_size', 'fixed_bits' or "
                "dynamic activations"
            )
        entry["group_size"] = None
