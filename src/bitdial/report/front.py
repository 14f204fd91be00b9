"""The page of a front of plans: sensitivities, bits by layer, and a front whose points can be chosen."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitdial.errors import ConfigError
from bitdial.planning import MeasuredFront, MeasuredPlan, compare_fronts
from bitdial.report import plots
from bitdial.report.page import table_html, text_html, write_report
from bitdial.sensitivity.result import Sensitivity

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCRIPT = Path(__file__).with_name("front.js")
COSTS = {
    "average_bits": "Average weight bits",
    "layer_average_bits": "Average over layers",
    "bytes": "Bytes as a separate file",
    "bitops": "BitOps for one input",
    "activation_bytes": "Activation bytes",
    "latency": "Latency",
}


def check_comparable(label: str, quantity: str, others: Sequence[MeasuredFront]) -> None:
    """Raise ConfigError unless `others` weigh accuracy against the same cost and have labels of their own."""
    for other in others:
        if other.quantity != quantity:
            raise ConfigError(
                f"the front of {other.label!r} is over {other.quantity}, this one over {quantity}; make both with the "
                "same --cost"
            )
    labels = [label, *(other.label for other in others)]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"two fronts have one label: {', '.join(map(repr, labels))}; rename one of the files")


def front_report(
    path: str | os.PathLike[str],
    front: MeasuredFront,
    sensitivity: Sensitivity,
    *,
    file: str,
    others: Sequence[MeasuredFront] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write the page of `front`, found for the artifact named `file`, to `path`; `others` are drawn beside it."""
    check_comparable(front.label, front.quantity, others)
    spearman = front.correlation["spearman"]
    points = f"{100 / front.samples:.2g}"
    write_report(
        path,
        title=f"{file}: plans by layer",
        lead=f"Of {plots.counted(len(front.candidates), 'plan')}, measured on {front.samples:,} held-out samples, "
        f"{len(front.front)} are beaten by no other in accuracy and {_axis(front.quantity)}. One file holds them.",
        section=_interactive(front, list(sensitivity.layers)),
        script=SCRIPT.read_text(encoding="utf-8"),
        summary_rows=_summary(front),
        summary_note=""
        if spearman is None
        else f"Predicted loss orders {len(front.predictions[0])} plans with a "
        f"rank correlation of {spearman:.2f} to measured accuracy; −1 would be perfect.".replace("-", "−"),
        figures=_figures(front, sensitivity, others),
        notes=[
            f"Accuracies are of one run on {front.samples:,} samples: one of them is {points} points.",
            "The front was chosen by these samples, so its accuracies are a little optimistic. Test a plan on others.",
            *notes,
        ],
    )


def _axis(quantity: str) -> str:
    return COSTS[quantity][0].lower() + COSTS[quantity][1:] if quantity != "bitops" else COSTS[quantity]


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _width(one: MeasuredPlan) -> int:
    """The width of a uniform plan."""
    return next(iter(one.plan.values()))[0]


def _summary(front: MeasuredFront) -> list[tuple[str, ...]]:
    quantities = [q for q in COSTS if q in front.candidates[0].costs and q != "layer_average_bits"]
    points = [(str(one.name), one) for one in front.front]
    points += [(f"{_width(one)} bits everywhere", one) for one in front.uniform]
    rows = [("Plan", "Accuracy", *(COSTS[q] for q in quantities))]
    rows += [(name, _percent(one.accuracy), *(_shown(one.costs[q]) for q in quantities)) for name, one in points]
    return rows


def _interactive(front: MeasuredFront, layers: list[str]) -> str:
    """The front as a figure, a list to choose from, and what is shown of a choice; as tables where no script runs."""
    plans = front.front
    figure = plots.pareto_fronts(
        {front.label: _points(plans, front.quantity)},
        candidates={front.label: _points(front.candidates, front.quantity)},
        uniform={_width(one): (one.costs[front.quantity], one.accuracy) for one in front.uniform},
        cost=COSTS[front.quantity],
    )
    data = {
        "plans": [_choice(one, layers) for one in plans],
        "layers": layers,
        "most": max(bits for one in plans for bits, _ in one.plan.values()),
        "colours": plots.PALETTE,
        "chosen": len(plans) // 2,
    }
    table = [("Layer", *(str(one.name) for one in plans))]
    table += [(layer, *(_bits(one, layer) for one in plans)) for layer in layers]
    text = json.dumps(data).replace("<", "\\u003c")  # so that no text can end the element
    return (
        '<section aria-labelledby="front">\n<h2 id="front">Choose a plan</h2>\n'
        f'<figure><div class="wide">{plots.to_svg(figure, prefix="front-")}</div>\n<figcaption>'
        + text_html(
            "Each large mark is a plan of the front, each small dot another candidate; open marks are the settings of "
            "one bit-width."
        )
        + '</figcaption></figure>\n<div id="front-choice" hidden>\n'
        "<p>Choose a mark, or a plan from the list, to see what it is made of.</p>\n"
        '<p><label>Plan <select id="front-list"></select></label></p>\n'
        '<div class="choice" aria-live="polite"><div><dl id="front-facts"></dl>'
        '<p><code id="front-code"></code></p></div><ul id="front-bars"></ul></div>\n</div>\n'
        f"<details><summary>Bits of every plan as a table</summary>{table_html('Bits by layer', table)}</details>\n"
        f'<script type="application/json" id="front-data">{text}</script>\n</section>'
    )


def _points(plans: Sequence[MeasuredPlan], quantity: str) -> list[tuple[float, float]]:
    return [(one.costs[quantity], one.accuracy) for one in plans]


def _choice(one: MeasuredPlan, layers: list[str]) -> dict[str, Any]:
    facts = [("Accuracy", _percent(one.accuracy))]
    facts += [(text, _shown(one.costs[quantity])) for quantity, text in COSTS.items() if quantity in one.costs]
    facts += [] if one.predicted_loss is None else [("Predicted loss", f"{one.predicted_loss:.4g}")]
    size = plots.format_bytes(one.costs["bytes"])
    return {
        "title": f"{one.name}: {_percent(one.accuracy)}, {size}",
        "facts": facts,
        "code": f"set_bits(model, {json.dumps(one.name)})",
        "layers": [(one.plan[layer][0], f"{_bits(one, layer)} bits") for layer in layers],
    }


def _bits(one: MeasuredPlan, layer: str) -> str:
    weights, activations = one.plan[layer]
    return f"{weights}" if weights == activations else f"{weights}:{activations}"


def _figures(
    front: MeasuredFront, sensitivity: Sensitivity, others: Sequence[MeasuredFront]
) -> "list[tuple[str, str, Figure]]":
    layers = sensitivity.to_dict()["layers"]
    losses, accuracies = front.predictions
    figures = [_comparison(front, others)] if others else []
    if mixed := _some_mixed(front):
        plans = {str(one.name): {layer: one.plan[layer] for layer in layers} for one in mixed}
        caption = (
            "Bars are the weight bits that a plan gives each layer; the line is the layer's Hessian trace per weight, "
            "its sensitivity. Size counts too: bits for a small layer are cheap."
        )
        figures.append(("Bits by layer over the Hessian trace", caption, plots.bits_over_traces(layers, plans)))
    trace = (
        f"The trace of the loss's Hessian in each layer's weights, on {sensitivity.images:,} training samples; bars "
        "are the standard error of the estimate. The search weighs quantization error by the trace per weight."
    )
    dots = "Each dot is a candidate. The search ranks plans by the loss on the left-right axis, before any is run."
    return [
        *figures,
        ("Hessian trace by layer", trace, plots.sensitivity_by_layer(layers)),
        (
            "Predicted and measured",
            dots,
            plots.predicted_and_measured(losses, accuracies, front.correlation["spearman"]),
        ),
    ]


def _some_mixed(front: MeasuredFront, most: int = 3) -> list[MeasuredPlan]:
    """Up to `most` plans of the front that give layers different bits, spread over it."""
    mixed = [one for one in front.front if len(set(one.plan.values())) > 1]
    count = min(most, len(mixed))
    return [mixed[int(len(mixed) * (2 * part + 1) / (2 * count))] for part in range(count)]


def _comparison(front: MeasuredFront, others: Sequence[MeasuredFront]) -> "tuple[str, str, Figure]":
    fronts = {one.label: _points(one.front, one.quantity) for one in (front, *others)}
    means = compare_fronts([front, *others])
    texts = [f"{label} {100 * value:.2f} %" for label, value in means.items()]
    caption = (
        "Large marks are the front of each, small dots its other candidates. Averaged over the budgets that all can "
        f"meet, the best accuracy within a budget is: {', '.join(texts)}."
        if texts
        else "Large marks are the front of each, small dots its other candidates. They share no budget."
    )
    figure = plots.pareto_fronts(
        fronts,
        candidates={one.label: _points(one.candidates, one.quantity) for one in (front, *others)},
        cost=COSTS[front.quantity],
        title=_comparison_title(means),
    )
    return "Fronts compared", caption, figure


def _comparison_title(means: Mapping[str, float]) -> str:
    if not means:
        return "The fronts share no budget"
    first, *rest = means
    gaps = [f"{100 * (means[first] - means[label]):+.1f} points to {label}".replace("-", "−") for label in rest]
    return f"{first}, averaged over budgets: {', '.join(gaps)}"
