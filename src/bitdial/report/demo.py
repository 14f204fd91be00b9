"""The demo's page."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import nn

from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.dial.dial import unwrap
from bitdial.errors import ConfigError
from bitdial.live.layers import LiveLayer
from bitdial.report import plots
from bitdial.report.page import write_report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def demo_report(
    path: str | os.PathLike[str],
    result: Mapping[str, Any],
    history: Mapping[str, Any],
    artifact: Artifact,
    live: nn.Module,
    float_bytes: int,
) -> None:
    """Write the demo's page to `path`.

    `result` has `float_top1`, `top1` by width, `bytes` (`artifact`, and `separate` by width) and `artifact`, the file's
    name; `history` is History.to_dict(), `live` what `load` gives, `float_bytes` the size of the float model.
    """
    name = Path(result["artifact"]).name
    size = {**result["bytes"], "float": float_bytes}
    separate = plots.by_bits(size["separate"])
    one, many = size["artifact"], sum(separate.values())
    write_report(
        path,
        title="bitdial demo: one file, every bit-width",
        lead=f"A network trained once and stored once, in {name} ({plots.format_bytes(one)}). "
        f"The same file runs at {_listed(artifact.bit_choices)} bits.",
        summary_rows=_summary(result, separate, float_bytes),
        summary_note=f"One file for all bit-widths: {one:,} bytes. A separate file for each: {many:,} bytes together. "
        f"The one file takes {100 * one / many:.0f} % of that.",
        figures=_demo_figures(result, history, artifact, live, size),
        facts=_artifact_facts(name, artifact),
        notes=_demo_notes(artifact),
    )


def _listed(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def _summary(result: Mapping[str, Any], separate: dict[int, int], float_bytes: int) -> list[tuple[str, ...]]:
    level = result["float_top1"]
    rows: list[tuple[str, ...]] = [
        ("Bit-width", "Accuracy", "Difference to float", "Size as a separate file", "Share of float size"),
        ("float", f"{100 * level:.1f} %", "–", f"{float_bytes:,} bytes", "100 %"),
    ]
    for bits, top1 in plots.by_bits(result["top1"]).items():
        # Adding 0.0 makes a zero of a minus zero.
        difference = f"{round(100 * (top1 - level), 1) + 0.0:+.1f} points".replace("-", "−")
        share = f"{100 * separate[bits] / float_bytes:.0f} %"
        rows.append((f"{bits} bits", f"{100 * top1:.1f} %", difference, f"{separate[bits]:,} bytes", share))
    return rows


def _demo_figures(
    result: Mapping[str, Any],
    history: Mapping[str, Any],
    artifact: Artifact,
    live: nn.Module,
    size: Mapping[str, Any],
) -> "list[tuple[str, str, Figure]]":
    accuracy = (
        "Each mark is the accuracy of the file at one bit-width; the dashed line is the float model that the training "
        "began from. It goes on from there, so a mark can lie above the line. The axis does not begin at 0."
    )
    training = (
        "Accuracy after each epoch, a line for each bit-width. All of them train in the same run, on the same weights: "
        "each batch passes through every bit-width in turn."
    )
    bytes_ = (
        "The coloured bar lays the separate files end to end, a colour and number for each bit-width. A separate file "
        "counts its packed integers, scales, norms and float layers; the one file also counts its header and manifest."
    )
    return [
        ("Accuracy by bit-width", accuracy, plots.accuracy_by_bits(result["float_top1"], result["top1"])),
        ("Training", training, plots.convergence(history)),
        *_gradient_figures(history),
        _weight_figure(artifact, live),
        ("Bytes", bytes_, plots.sizes_by_bits(size)),
    ]


def _gradient_figures(history: Mapping[str, Any]) -> "list[tuple[str, str, Figure]]":
    """The figures of the scales' gradients, for those kinds of scale that the run learned."""
    caption = (
        "The largest gradient of each layer's {} scales at sampled steps of the run. A box holds the middle half of "
        "the samples, with a line at the median; whiskers end at the last sample within one and a half box heights; "
        "outliers are hidden. The logarithmic axis is the same in every panel. The adaptive learning rate of the "
        "scales (ALRS) is there to even out such differences between bit-widths."
    )
    figures = []
    for which, name in (("weight", "weight"), ("act", "activation")):
        samples = [sample[which] for entries in history["gradients"].values() for sample in entries]
        if any(value > 0 for sample in samples for value in sample):
            figure = plots.scale_gradients(history, which)
            figures.append((f"Gradients of the {name} scales", caption.format(name), figure))
    return figures


def _weight_figure(artifact: Artifact, live: nn.Module) -> "tuple[str, str, Figure]":
    high, scheme = artifact.bit_choices[0], bf.scheme_of(artifact.scheme)
    name = max(artifact.layers, key=lambda layer: math.prod(artifact.layers[layer]["shape"]))
    caption = (
        f"The weights of the largest layer, {name}, at each bit-width, as multiples of the {high}-bit step of their "
        "channel. Weights beyond the range are clipped to its ends."
    )
    if scheme.narrows:
        caption += " Each lower bit-width is made from the stored integers alone."
    below = next((bits for bits in artifact.bit_choices if bits in (high - 1, high - 2)), None)
    if artifact.scheme == "double_rounding" and artifact.manifest["ties"] == "even" and below:
        caption += f" At {below} bits every other value is rarer, because what lies half-way goes to the even integer."
    values = {bits: weight_steps(live, name, bits) for bits in artifact.bit_choices}
    figure = plots.weight_histograms(values, layer=name, unit=f"weight ({high}-bit steps)")
    return "Weights", caption, figure


def weight_steps(live: nn.Module, name: str, bits: int) -> npt.NDArray[np.float64]:
    """The weights of a loaded model's layer at `bits`, 1-D, as multiples of the highest width's step of their channel.

    So channels of different scales share one axis. The model's setting does not change.
    """
    layer = unwrap(live).get_submodule(name)
    if not isinstance(layer, LiveLayer):
        raise ConfigError(f"layer {name!r} is a {type(layer).__name__}; pass the model that load(path) gives")
    codes = layer.codes
    ratio = codes.integer_step(bits).double() / codes.scale[0].double()
    return np.asarray(bf.values_by_scale(codes.weight_integers(bits).double(), ratio).flatten().cpu())


def _artifact_facts(name: str, artifact: Artifact) -> dict[str, str]:
    weights = sum(math.prod(entry["shape"]) for entry in artifact.layers.values() if "tied_to" not in entry)
    architecture = artifact.manifest["architecture"]
    return {
        "File": f"{name}, {artifact.file_bytes:,} bytes",
        "Bit-widths": _listed(artifact.bit_choices),
        "Scheme": f"{artifact.scheme}, ties {artifact.manifest['ties']}",
        "Quantised layers": f"{len(artifact.layers)}, with {weights:,} weights",
        "Norms by bit-width": f"{len(artifact.norms)}",
        **({"Architecture": str(architecture["name"])} if architecture else {}),
        "Format": f"version {artifact.manifest['version']}, written by {artifact.manifest['written_by']}",
        "Digest": artifact.digest,
    }


def _demo_notes(artifact: Artifact) -> list[str]:
    if bf.scheme_of(artifact.scheme).narrows:
        kept = f"The file keeps the {artifact.bit_choices[0]}-bit integers of the quantised layers and no float copy."
    else:
        kept = f"The scheme {artifact.scheme} rounds each bit-width from float weights, so the file keeps those."
    return [
        kept,
        "Accuracies are of one run. Another seed moves them; differences of a few test samples mean little.",
    ]
