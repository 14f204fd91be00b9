"""One page that shows a result: tables, figures and how to read them, in a single HTML file that loads nothing else.

write_report("report.html", title="A run", summary_rows=[("bits", "accuracy"), ("4 bits", "99.2 %")], figures=[
    ("Accuracy", "The dashed line is the float model.", accuracy_by_bits(0.974, {8: 0.99, 4: 0.992})),
])
"""

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import nn

from bitdial import functional as bf
from bitdial import plots
from bitdial._version import __version__
from bitdial.artifact import Artifact
from bitdial.container import replacing
from bitdial.errors import BitdialError, ConfigError
from bitdial.nn import PackedLayer
from bitdial.plan import unwrap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #1f2328; --quiet: #59636e; --line: #d8dde3; }
@media (prefers-color-scheme: dark) {
  :root { --page: #12161b; --card: #1b2128; --ink: #e8ebef; --quiet: #a2acb8; --line: #36404b; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main, footer { max-width: 56rem; margin: 0 auto; padding: 0 1.25rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 2.5rem 0 0.75rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 2.5rem 0 0.75rem; }
p, ul, dl { margin: 0.75rem 0; max-width: 46rem; }
.lead { font-size: 1.1rem; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { padding: 0.5rem 1rem; text-align: right; white-space: nowrap; border-top: 1px solid var(--line); }
th:first-child { text-align: left; }
th { font-weight: 600; }
thead th { white-space: normal; vertical-align: bottom; border-top: 0; color: var(--quiet); font-size: 0.875rem; }
figure { margin: 0; }
figure .wide { background: #fff; padding: 0.75rem; }
svg { display: block; width: 100%; min-width: 34rem; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
figcaption { margin: 0.75rem 0; max-width: 46rem; color: var(--quiet); font-size: 0.95rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.35rem 1.25rem; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
footer { margin-top: 3rem; padding-bottom: 2rem; color: var(--quiet); font-size: 0.875rem; }
@media (max-width: 36rem) {
  th, td { padding: 0.45rem 0.6rem; font-size: 0.875rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 0.5rem; }
}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
<footer>Made with bitdial {version}. This page is one file and loads nothing from elsewhere.</footer>
</body>
</html>
"""


def write_report(
    path: str | os.PathLike[str],
    *,
    title: str,
    summary_rows: Sequence[Sequence[str]],
    figures: "Sequence[tuple[str, str, Figure]]",
    notes: Sequence[str] = (),
    lead: str = "",
    summary_note: str = "",
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write one self-contained HTML page to `path`, atomically; BitdialError if that fails.

    `summary_rows` is a table: the names of the columns, then the rows, the first cell of each naming it. `figures` are
    (heading, caption, figure). `lead` stands below the title, `summary_note` below the table, `facts` and `notes` at
    the end. All text is plain text.
    """
    parts = [
        f'<p class="lead">{_text(lead)}</p>' if lead else "",
        _table("Summary", summary_rows) if summary_rows else "",
        f"<p>{_text(summary_note)}</p>" if summary_note else "",
        *(_figure(number, *entry) for number, entry in enumerate(figures, start=1)),
        _facts(facts) if facts else "",
        _notes(notes) if notes else "",
    ]
    body = "\n".join(filter(None, parts))
    page = PAGE.format(title=_text(title), style=STYLE, body=body, version=_text(__version__))
    with replacing(Path(path), error=BitdialError) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")


def _text(text: str) -> str:
    """Plain text as HTML; a number stays on one line with its per cent sign."""
    return escape(text).replace(" %", "\u00a0%")


def _table(name: str, rows: Sequence[Sequence[str]]) -> str:
    if any(len(row) != len(rows[0]) for row in rows):
        raise ConfigError(f"the rows of the table {name!r} differ in length; each needs {len(rows[0])} cells")
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in rows[0])
    body = "\n".join(
        f'<tr><th scope="row">{_text(row[0])}</th>{"".join(f"<td>{_text(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[1:]
    )
    return (
        f'<div class="wide"><table><caption>{_text(name)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _figure(number: int, heading: str, caption: str, figure: "Figure") -> str:
    svg = plots.to_svg(figure, prefix=f"figure{number}-")
    return (
        f'<section aria-labelledby="figure{number}">\n<h2 id="figure{number}">{_text(heading)}</h2>\n'
        f'<figure><div class="wide">{svg}</div>\n<figcaption>{_text(caption)}</figcaption></figure>\n</section>'
    )


def _facts(facts: Mapping[str, str]) -> str:
    entries = "\n".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())
    return f"<section><h2>Details</h2>\n<dl>\n{entries}\n</dl></section>"


def _notes(notes: Sequence[str]) -> str:
    entries = "\n".join(f"<li>{_text(note)}</li>" for note in notes)
    return f"<section><h2>Notes</h2>\n<ul>\n{entries}\n</ul></section>"


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
    if not isinstance(layer, PackedLayer):
        raise ConfigError(f"layer {name!r} is a {type(layer).__name__}; pass the model that load(path) gives")
    codes, scale = layer.weight_codes(bits)
    values = bf.dequantize(codes, scale.double(), scheme=layer.scheme)
    step = layer.weight_codes(layer.bit_choices[0])[1].double()
    return np.asarray((values / bf.per_channel(step, values)).flatten().cpu())


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
