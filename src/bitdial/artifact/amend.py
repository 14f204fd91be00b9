"""Add to an artifact that is there already: plans, figures, sensitivities. Its tensors stay as they are."""

import os
from collections.abc import Mapping
from typing import Any

from bitdial._version import __version__
from bitdial.artifact.format import check_named, check_sensitivity
from bitdial.artifact.parts import Layout, write_tensors
from bitdial.artifact.read import read_artifact
from bitdial.dial.plan import BitPlan, resolve_bits
from bitdial.errors import PlanError
from bitdial.sensitivity.result import Sensitivity


def amend(
    path: str | os.PathLike[str],
    *,
    plans: Mapping[str, BitPlan | None] | None = None,
    metrics: Mapping[str, Any] | None = None,
    sensitivity: Sensitivity | None = None,
) -> str:
    """Rewrite the artifact at `path`, atomically, with more in its manifest; returns the new digest.

    `plans` and `metrics` replace what has the same name and leave the rest; a plan that is None is taken out.
    `sensitivity` replaces the stored one. What does not fit the file's model is an error, and nothing is written. A
    progressive file stays one.
    """
    check_named(plans, metrics)
    artifact = read_artifact(path)
    choices = dict.fromkeys(artifact.layers, artifact.bit_choices)
    stored = dict(artifact.plans)
    for name, plan in (plans or {}).items():
        if plan is None:
            stored.pop(name, None)
            continue
        try:
            resolve_bits(choices, plan)
        except PlanError as problem:
            raise PlanError(f"plan {name!r} is not one for the model in {path}: {problem}") from problem
        stored[name] = plan
    manifest = {
        **artifact.manifest,
        "written_by": f"bitdial {__version__}",
        "plans": {name: plan.to_dict() for name, plan in stored.items()},
        "metrics": {**artifact.metrics, **(metrics or {})},
    }
    if sensitivity is not None:
        check_sensitivity(sensitivity, artifact.layers)
        manifest["sensitivity"] = sensitivity.to_dict()
    return write_tensors(path, artifact.tensors, manifest, Layout(manifest) if artifact.parts else None)
