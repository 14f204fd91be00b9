"""The page of a front of plans: a dial over them, the front, sensitivities, and bits by layer."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from bitdial.dial.plan import BitPlan
from bitdial.errors import ConfigError
from bitdial.planning import MeasuredFront, MeasuredPlan, compare_fronts
from bitdial.report import charts
from bitdial.report.charts.mixed import PlanPoint, Series
from bitdial.report.dial import FloatModel, Setting, bits_table, dial
from bitdial.report.markup import element, table
from bitdial.report.numbers import Samples, counted, difference, interval_text, percent
from bitdial.report.page import figure, remarks, write_report
from bitdial.sensitivity.result import Sensitivity

COSTS = {
    "average_bits": "Average weight bits",
    "layer_average_bits": "Average over layers",
    "bytes": "Bytes as a separate file",
    "bitops": "BitOps for one input",
    "activation_bytes": "Activation bytes",
    "latency": "Latency",
}


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known beside a front.

    float_accuracy  of the float model on the front's own samples; `float_tested` on `test`
    float_bytes     the float model's size
    tested          accuracy by plan on `test`, samples that chose nothing
    """

    float_accuracy: float | None = None
    float_tested: float | None = None
    float_bytes: int | None = None
    tested: Mapping[BitPlan, float] = field(default_factory=dict)
    test: Samples | None = None


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
    known: Known = Known(),  # noqa: B008 - it is frozen
    others: Sequence[MeasuredFront] = (),
    notes: Sequence[str] = (),
) -> None:
    """Write the page of `front`, found for the artifact named `file`, to `path`; `others` are drawn beside it."""
    check_comparable(front.label, front.quantity, others)
    samples = _samples(front)
    plans = _plans(front)
    settings = [_setting(one, name, list(sensitivity.layers), known) for name, one in plans]
    write_report(
        path,
        title=f"{file}: plans by layer",
        lead=f"Of {counted(len(front.candidates), 'plan')}, measured on {samples}, "
        f"{len(front.front)} are beaten by no other in accuracy and {_axis(front.quantity)}. One file holds them.",
        body=[
            dial(settings, samples, _float_model(known), chosen=len(settings) // 2),
            figure(
                "The front",
                "Each filled mark is a plan of the front, each small dot another candidate; open marks are the "
                "settings of one bit-width. Choose a mark to turn the dial there. Bars are what the number of samples "
                "leaves open. The axis does not begin at 0.",
                _front_chart(front, plans),
            ),
            element("h2", "Every setting"),
            table("Every setting", _summary(plans, known, samples)),
            bits_table(settings),
            *_correlation(front),
            *_figures(front, sensitivity, others),
            remarks(
                [
                    f"Accuracies are of one run on {samples}: one of them is {100 / front.samples:.2g} points.",
                    "The front was chosen by these samples, so its accuracies are a little optimistic. "
                    + (f"Those on {known.test} chose nothing." if known.test else "Test a plan on others."),
                    *notes,
                ]
            ),
        ],
    )


def _samples(front: MeasuredFront) -> Samples:
    return Samples(front.samples, "held-out samples")


def _float_model(known: Known) -> FloatModel | None:
    """The column of the float model, if something is known of it."""
    facts = {} if known.float_bytes is None else {COSTS["bytes"]: f"{known.float_bytes:,}"}
    if known.float_tested is not None:
        facts[f"Accuracy on {known.test}"] = percent(known.float_tested)
    if known.float_accuracy is None and not facts:
        return None
    return FloatModel(known.float_accuracy, {**facts, COSTS["average_bits"]: "32", COSTS["layer_average_bits"]: "32"})


def _axis(quantity: str) -> str:
    return COSTS[quantity][0].lower() + COSTS[quantity][1:] if quantity != "bitops" else COSTS[quantity]


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _plans(front: MeasuredFront) -> list[tuple[str, MeasuredPlan]]:
    """The settings of the page by rising cost, each once: the plans of the front and the uniform ones."""
    uniform = {one.plan: one.uniform_name for one in front.uniform}
    found = {one.plan: (str(one.name), one) for one in front.front}
    for one in front.uniform:
        if one.plan not in found:
            found[one.plan] = uniform[one.plan], one
    named = [
        (f"{name} ({uniform[plan]})" if plan in uniform and name != uniform[plan] else name, one)
        for plan, (name, one) in found.items()
    ]
    return sorted(named, key=lambda pair: (pair[1].costs[front.quantity], pair[1].accuracy))


def _setting(one: MeasuredPlan, name: str, layers: list[str], known: Known) -> Setting:
    facts = (
        {} if known.float_accuracy is None else {"Difference to float": difference(one.accuracy, known.float_accuracy)}
    )
    if known.test is not None:
        facts[f"Accuracy on {known.test}"] = percent(known.tested[one.plan]) if one.plan in known.tested else "–"
    facts |= {text: _shown(one.costs[quantity]) for quantity, text in COSTS.items() if quantity in one.costs}
    return Setting(
        name=name,
        short=f"{one.costs['average_bits']:.3g}",
        code=f"set_bits(model, {one.uniform_width if one.name is None else json.dumps(one.name)})",
        bits={layer: one.plan[layer] for layer in layers},
        accuracy=one.accuracy,
        facts=facts,
    )


def _summary(plans: list[tuple[str, MeasuredPlan]], known: Known, samples: Samples) -> list[tuple[str, ...]]:
    quantities = [q for q in COSTS if q in plans[0][1].costs and q != "layer_average_bits"]
    test = () if known.test is None else (f"Accuracy on {known.test}", "95 % interval")
    rows: list[tuple[str, ...]] = [
        ("Setting", f"Accuracy on {samples}", "95 % interval", *test, *(COSTS[q] for q in quantities))
    ]
    for name, one in plans:
        cells = [percent(one.accuracy), interval_text(samples.interval(one.accuracy))]
        if known.test is not None:
            found = known.tested.get(one.plan)
            cells += ["–", "–"] if found is None else [percent(found), interval_text(known.test.interval(found))]
        rows.append((name, *cells, *(_shown(one.costs[q]) for q in quantities)))
    return rows


def _front_chart(front: MeasuredFront, plans: list[tuple[str, MeasuredPlan]]) -> charts.Chart:
    places = {one.plan: place for place, (_, one) in enumerate(plans)}
    names = {one.plan: name for name, one in plans}
    uniform = {
        one.uniform_width: PlanPoint(one.costs[front.quantity], one.accuracy, names[one.plan], places[one.plan])
        for one in front.uniform
        if one.plan not in {other.plan for other in front.front}
    }
    return charts.pareto_fronts([_series(front, places)], uniform=uniform, cost=COSTS[front.quantity])


def _series(front: MeasuredFront, places: Mapping[BitPlan, int]) -> Series:
    """`places` are those of plans on the dial."""
    chosen: list[PlanPoint] = []
    others: list[PlanPoint] = []
    for one in front.candidates:
        name = one.name or f"another plan of {one.costs['average_bits']:.3g} bits"
        point = PlanPoint(one.costs[front.quantity], one.accuracy, name, places.get(one.plan))
        (others if one.name is None else chosen).append(point)
    return Series(front.label, chosen, others, samples=_samples(front))


def _correlation(front: MeasuredFront) -> list[Element]:
    spearman = front.correlation["spearman"]
    if spearman is None:
        return []
    text = (
        f"Predicted loss orders {len(front.predictions[0])} plans with a rank correlation of {spearman:.2f} to "
        "measured accuracy; −1 would be perfect."
    )
    return [element("p", text.replace("-", "−"))]


def _figures(front: MeasuredFront, sensitivity: Sensitivity, others: Sequence[MeasuredFront]) -> list[Element]:
    layers = sensitivity.to_dict()["layers"]
    losses, accuracies = front.predictions
    figures = [_comparison(front, others)] if others else []
    if mixed := _some_mixed(front):
        plans = {str(one.name): {layer: one.plan[layer] for layer in layers} for one in mixed}
        caption = (
            "Bars are the weight bits that a plan gives each layer; the mark on them is the layer's Hessian trace per "
            "weight, its sensitivity. Size counts too: bits for a small layer are cheap."
        )
        figures.append(figure("Bits by layer over the Hessian trace", caption, charts.bits_over_traces(layers, plans)))
    trace = (
        f"The trace of the loss's Hessian in each layer's weights, on {sensitivity.images:,} training samples; bars "
        "are the standard error of the estimate. The search weighs quantization error by the trace per weight."
    )
    dots = "Each dot is a candidate. The search ranks plans by the loss on the left-right axis, before any is run."
    predicted = charts.predicted_and_measured(losses, accuracies, front.correlation["spearman"])
    return [
        *figures,
        figure("Hessian trace by layer", trace, charts.sensitivity_by_layer(layers)),
        figure("Predicted and measured", dots, predicted),
    ]


def _some_mixed(front: MeasuredFront, most: int = 3) -> list[MeasuredPlan]:
    """Up to `most` plans of the front that give layers different bits, spread over it."""
    mixed = [one for one in front.front if len(set(one.plan.values())) > 1]
    count = min(most, len(mixed))
    return [mixed[int(len(mixed) * (2 * part + 1) / (2 * count))] for part in range(count)]


def _comparison(front: MeasuredFront, others: Sequence[MeasuredFront]) -> Element:
    means = compare_fronts([front, *others])
    texts = [f"{label} {100 * value:.2f} %" for label, value in means.items()]
    caption = (
        "Large marks are the front of each, small dots its other candidates. Averaged over the budgets that all can "
        f"meet, the best accuracy within a budget is: {', '.join(texts)}."
        if texts
        else "Large marks are the front of each, small dots its other candidates. They share no budget."
    )
    chart = charts.pareto_fronts(
        [_series(one, {}) for one in (front, *others)], cost=COSTS[front.quantity], title=_comparison_title(means)
    )
    return figure("Fronts compared", caption, chart)


def _comparison_title(means: Mapping[str, float]) -> str:
    if not means:
        return "The fronts share no budget"
    first, *rest = means
    gaps = [f"{100 * (means[first] - means[label]):+.1f} points to {label}".replace("-", "−") for label in rest]
    return f"{first}, averaged over budgets: {', '.join(gaps)}"
