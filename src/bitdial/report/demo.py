"""The demo's page."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
import numpy.typing as npt
from torch import nn

from bitdial import functional as bf
from bitdial.artifact import Artifact
from bitdial.dial.dial import unwrap
from bitdial.errors import ConfigError
from bitdial.live.layers import LiveLayer
from bitdial.report import charts
from bitdial.report.dial import FloatModel, Setting, dial
from bitdial.report.markup import element, table
from bitdial.report.numbers import Samples, by_bits, difference, format_bytes, interval_text, percent, width_name
from bitdial.report.page import details, figure, remarks, write_report

BYTES, SHARE, DIFFERENCE, BITS = "Bytes as a separate file", "Share of float size", "Difference to float", "Weight bits"


def demo_report(
    path: str | os.PathLike[str],
    result: Mapping[str, Any],
    history: Mapping[str, Any],
    artifact: Artifact,
    live: nn.Module,
    samples: Samples,
) -> None:
    """Write the demo's page to `path`.

    `result` has `float_top1`, `top1` by width, both measured on `samples`, `bytes` (`float`, `artifact`, and `separate`
    by width) and `artifact`, the file's name; `history` is History.to_dict(), `live` what `load` gives.
    """
    name, size = Path(result["artifact"]).name, result["bytes"]
    one, many = size["artifact"], sum(size["separate"].values())
    note = (
        f"One file for all bit-widths: {one:,} bytes. A separate file for each: {many:,} bytes together. "
        f"The one file takes {100 * one / many:.0f} % of that."
    )
    settings = _settings(result, artifact)
    whole = {DIFFERENCE: "–", BITS: "32", BYTES: f"{size['float']:,}", SHARE: "100 %"}
    write_report(
        path,
        title="bitdial demo: one file, every bit-width",
        lead=f"A network trained once and stored once, in {name} ({format_bytes(one)}). "
        f"The same file runs at {_listed(artifact.bit_choices)} bits.",
        body=[
            dial(settings, samples, FloatModel(result["float_top1"], whole), chosen=len(settings) // 2),
            element("h2", "Every setting"),
            table("Every setting", _summary(result, samples)),
            element("p", note),
            *_figures(result, history, artifact, live, samples),
            details(_artifact_facts(name, artifact)),
            remarks(_notes(artifact, samples)),
        ],
    )


def _listed(values: Sequence[object]) -> str:
    *most, last = map(str, values)
    return f"{', '.join(most)} and {last}" if most else last


def _facts(result: Mapping[str, Any], bits: int) -> dict[str, str]:
    size = by_bits(result["bytes"]["separate"])[bits]
    return {
        DIFFERENCE: difference(by_bits(result["top1"])[bits], result["float_top1"]),
        BITS: f"{bits}",
        BYTES: f"{size:,}",
        SHARE: f"{100 * size / result['bytes']['float']:.0f} %",
    }


def _settings(result: Mapping[str, Any], artifact: Artifact) -> list[Setting]:
    """The widths, from the lowest."""
    return [
        Setting(
            name=width_name(bits),
            short=width_name(bits),
            code=f"set_bits(model, {bits})",
            bits=dict.fromkeys(artifact.layers, (bits, bits)),
            accuracy=top1,
            facts=_facts(result, bits),
        )
        for bits, top1 in reversed(by_bits(result["top1"]).items())
    ]


def _summary(result: Mapping[str, Any], samples: Samples) -> list[tuple[str, ...]]:
    level = result["float_top1"]
    rows: list[tuple[str, ...]] = [("Setting", f"Accuracy on {samples}", "95 % interval", DIFFERENCE, BYTES, SHARE)]
    rows.append(
        ("float", percent(level), interval_text(samples.interval(level)), "–", f"{result['bytes']['float']:,}", "100 %")
    )
    for bits, top1 in by_bits(result["top1"]).items():
        facts = _facts(result, bits)
        interval = interval_text(samples.interval(top1))
        rows.append((width_name(bits), percent(top1), interval, facts[DIFFERENCE], facts[BYTES], facts[SHARE]))
    return rows


def _figures(
    result: Mapping[str, Any], history: Mapping[str, Any], artifact: Artifact, live: nn.Module, samples: Samples
) -> list[Element]:
    accuracy = (
        "Each mark is the accuracy of the file at one bit-width; the dashed line is the float model that the training "
        "began from. It goes on from there, so a mark can lie above the line. Bars are what the number of test samples "
        "leaves open. The axis does not begin at 0."
    )
    training = (
        "Accuracy after each epoch, a line for each bit-width. All of them train in the same run, on the same weights: "
        "each batch passes through every bit-width in turn."
    )
    bytes_ = (
        "The coloured bar lays the separate files end to end, a colour for each bit-width. A separate file "
        "counts its packed integers, scales, norms and float layers; the one file also counts its header and manifest."
    )
    by_width = charts.accuracy_by_bits(result["float_top1"], result["top1"], samples)
    return [
        figure("Accuracy by bit-width", accuracy, by_width),
        figure("Training", training, charts.convergence(history, samples)),
        *_gradients(history),
        _weights(artifact, live),
        figure("Bytes", bytes_, charts.sizes_by_bits(result["bytes"])),
    ]


def _gradients(history: Mapping[str, Any]) -> list[Element]:
    """The figures of the scales' gradients, for those kinds of scale that the run learned."""
    caption = (
        "The largest gradient of each layer's {} scales at sampled steps of the run. A box holds the middle half of "
        "the samples, with a line at the median; whiskers end at the last sample within one and a half box lengths; "
        "outliers are hidden. The adaptive learning rate of the scales (ALRS) is there to even out such differences "
        "between bit-widths."
    )
    figures = []
    for which, name in (("weight", "weight"), ("act", "activation")):
        samples = [sample[which] for entries in history["gradients"].values() for sample in entries]
        if any(value > 0 for sample in samples for value in sample):
            chart = charts.scale_gradients(history, which)
            figures.append(figure(f"Gradients of the {name} scales", caption.format(name), chart))
    return figures


def _weights(artifact: Artifact, live: nn.Module) -> Element:
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
    return figure("Weights", caption, charts.weight_histograms(values, layer=name, unit=f"weight ({high}-bit steps)"))


def weight_steps(live: nn.Module, name: str, bits: int) -> npt.NDArray[np.float64]:
    """The weights of a loaded model's layer at `bits`, 1-D, as multiples of the highest width's step of their channel.

    So channels of different scales share one axis. The model's setting does not change.
    """
    layer = unwrap(live).get_submodule(name)
    if not isinstance(layer, LiveLayer):
        raise ConfigError(f"layer {name!r} is a {type(layer).__name__}; pass the model that load(path) gives")
    codes = layer.codes
    ratio = codes.step(bits).double() / codes.step(codes.bit_choices[0]).double()
    steps, ratio = bf.by_scale(codes.weight_codes(bits).double() + codes.offset(bits), ratio)
    return np.asarray((steps * bf.spread(ratio, steps)).flatten().cpu())


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


def _notes(artifact: Artifact, samples: Samples) -> list[str]:
    if bf.scheme_of(artifact.scheme).narrows:
        kept = f"The file keeps the {artifact.bit_choices[0]}-bit integers of the quantised layers and no float copy."
    else:
        kept = f"The scheme {artifact.scheme} rounds each bit-width from float weights, so the file keeps those."
    return [
        kept,
        f"Accuracies are of one run on {samples}: one of them is {100 / samples.count:.2g} points. Another seed moves "
        "them too, which the intervals do not show.",
    ]
