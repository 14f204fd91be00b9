"""The command `bitdial inspect`: what a file holds, section by section in plain text, or as JSON."""

import argparse
import json
from typing import Any

from bitdial.artifact import Artifact, read_artifact, sizes
from bitdial.cli.tables import percent, show_table, stored_accuracies
from bitdial.errors import ConfigError
from bitdial.functional import scheme_of
from bitdial.images import ImageSettings
from bitdial.images.settings import STORED
from bitdial.recipes.run import describe_images


def run(options: argparse.Namespace) -> None:
    """Print the sections; each is a function below."""
    artifact = read_artifact(options.file, cut=True)
    size = sizes(artifact)
    if options.json:
        print(json.dumps(_as_json(str(options.file), artifact, size), indent=2))
        return
    show_table(str(options.file), ["", ""], _facts(artifact, size))
    _show_parts(artifact)
    _show_widths(artifact, size)
    _show_layers(artifact)
    if artifact.report is not None:
        print(f"\nWhat prepare made of the model\n{artifact.report}")


def _as_json(file: str, artifact: Artifact, size: dict[str, Any]) -> dict[str, Any]:
    return {
        "file": file,
        "digest": artifact.digest,
        "narrows": scheme_of(artifact.scheme).narrows,
        "parts": [{**part._asdict(), "there": part.end <= artifact.file_bytes} for part in artifact.parts],
        "sizes": {**size, "separate": {str(b): v for b, v in size["separate"].items()}},
        **artifact.manifest,
    }


def _facts(artifact: Artifact, size: dict[str, Any]) -> list[list[str]]:
    manifest, architecture = artifact.manifest, artifact.manifest["architecture"]
    whole = f"{artifact.bit_choices[0]}-bit integer codes{', in parts' if artifact.parts else ''}"
    stored = (
        whole if scheme_of(artifact.scheme).narrows else "float weights: this scheme cannot be narrowed from integers"
    )
    return [
        ["scheme", f"{artifact.scheme}, ties {manifest['ties']}"],
        ["widths", _describe_available(artifact)],
        ["stored", stored],
        ["architecture", _describe(architecture) if architecture else "the user's own: pass a model to load"],
        [
            "file",
            f"{size['file']:,} bytes (codes {size['codes']:,}, scales {size['scales']:,}, norms "
            f"{size['norms']:,}, float layers {size['float']:,})",
        ],
        ["norms", _describe_norms(size)],
        *_describe_rotation(manifest.get("rotation")),
        ["plans", ", ".join(artifact.plans) or "none"],
        ["sensitivity", f"on {found.images:,} images" if (found := artifact.sensitivity) else "none"],
        *_describe_inputs(artifact.metrics.get(STORED)),
        ["made by", _describe_run(artifact.metrics.get("run"))],
        ["written by", f"{manifest['written_by']}, format version {manifest['version']}"],
        ["digest", f"{artifact.digest} (checked)"],
    ]


def _show_parts(artifact: Artifact) -> None:
    """The parts of a progressive file: bytes from and to, and whether the file has them."""
    if not artifact.parts:
        return
    rows = [
        [
            f"{part.bits} bits",
            f"{part.begin:,}",
            f"{part.end:,}",
            f"{part.end - part.begin:,}",
            "yes" if part.end <= artifact.file_bytes else "no",
        ]
        for part in artifact.parts
    ]
    show_table("Parts, each with those before it", ["part", "from byte", "to byte", "bytes", "there"], rows)


def _show_widths(artifact: Artifact, size: dict[str, Any]) -> None:
    top1 = stored_accuracies(artifact.metrics)
    rows = [
        [f"{bits} bits", f"{size['separate'][bits]:,}", percent(top1.get(str(bits)))] for bits in artifact.bit_choices
    ]
    images = f"; stored accuracy on: {describe_images(artifact.metrics.get('images'))}" if top1 else ""
    show_table(f"By width{images}", ["width", "bytes if alone", "stored accuracy"], rows)


def _show_layers(artifact: Artifact) -> None:
    rows = [
        [
            name,
            entry["type"],
            "x".join(map(str, entry["shape"])),
            _activations(artifact, name),
            entry.get("tied_to", ""),
        ]
        for name, entry in artifact.layers.items()
    ]
    heads = ["layer", "type", "weight", "activations", "tied to"]
    if artifact.fixed_bits:
        heads.append("fixed bits")
        rows = [[*row, str(artifact.fixed_bits.get(row[0], ""))] for row in rows]
    show_table("Layers", heads, rows)


def _activations(artifact: Artifact, name: str) -> str:
    """The kind of a layer's activations; where tokens have scales, with the clip ratio of each width."""
    kind, ratios = str(artifact.layers[name]["activations"]), artifact.part(name, "act_clip_ratio")
    return kind if ratios is None else f"{kind}, clip {' / '.join(f'{ratio:.3g}' for ratio in ratios.tolist())}"


def _describe_available(artifact: Artifact) -> str:
    """The widths of the file; of one that is cut, those that it has."""
    every, here = (", ".join(map(str, widths)) for widths in (artifact.bit_choices, artifact.available))
    return every if here == every else f"{here} (the file is cut; whole, it has {every})"


def _describe_run(stored: object) -> str:
    """The recipe's run that made the file, by its name, which has the settings that are not the default."""
    match stored:
        case {"recipe": str(recipe), "name": str(name)}:
            return f"the recipe {recipe}, run {name}"
        case _:
            return "not recorded"


def _describe_inputs(stored: object) -> list[list[str]]:
    """A line on how images become inputs, if the file says it."""
    if stored is None:
        return []
    try:
        return [["images", str(ImageSettings.from_dict(stored))]]  # type: ignore[arg-type]
    except (ConfigError, TypeError) as problem:
        return [["images", f"not usable: {problem}"]]


def _describe_rotation(rotation: dict[str, Any] | None) -> list[list[str]]:
    """A line on what is rotated, if anything is."""
    if rotation is None:
        return []
    merged = [*(["residual"] if rotation["residual"] == "merged" else []), *(["values"] if rotation["values"] else [])]
    return [["rotated", f"{', '.join(merged) or 'nothing'} in the weights, {len(rotation['online'])} modules online"]]


def _describe_norms(size: dict[str, Any]) -> str:
    """What the norms cost against the weights, as they are and with transitions (see add_transitions)."""
    forms = size["norms_by_transitions"]
    if not size["norms"]:
        return "none with a set per width"
    shares = {name: f"{100 * value / size['codes']:.1f} %" for name, value in forms.items()}
    return (
        f"{100 * size['norms'] / size['codes']:.1f} % of the codes' bytes; without transitions {shares['none']}, with "
        f"those of statistics {shares['statistics']}, with full ones {shares['full']}"
    )


def _describe(architecture: dict[str, Any]) -> str:
    arguments = ", ".join(f"{k}={v}" for k, v in architecture.get("arguments", {}).items())
    return f"{architecture.get('name')}({arguments})"
