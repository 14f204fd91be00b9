"""Figures of mixed precision: sensitivities, the bits of a plan over them, and fronts of plans."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from bitdial.errors import ConfigError
from bitdial.plots.drawing import GREY, PALETTE, drawing, label_layers, log_axis, make_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@drawing
def sensitivity_by_layer(layers: Mapping[str, Mapping[str, Any]], *, normalized: bool = False) -> "Figure":
    """The Hessian trace of each layer, on a logarithmic axis, with its standard error (the paper's Figure 4 c).

    `layers` is `Sensitivity.to_dict()["layers"]`. With `normalized`, both are divided by the layer's number of weights.
    Traces that are not above 0, which have no place on that axis, are crosses at its foot.
    """
    if not layers:
        raise ConfigError("there is no layer to draw; pass Sensitivity.to_dict()['layers']")
    share = [entry["parameters"] if normalized else 1 for entry in layers.values()]
    traces = np.array([entry["trace"] for entry in layers.values()], dtype=np.float64) / share
    errors = np.array([entry["error"] for entry in layers.values()], dtype=np.float64) / share
    names, above = list(layers), traces > 0
    what = "Hessian trace per weight" if normalized else "Hessian trace"
    title = f"No layer's {what} is above 0"
    if above.any():
        most = int(traces.argmax())
        times = f"{traces[most] / np.median(traces[above]):.2g} times the median"
        title = f"The largest {what} is that of {names[most]}: {times}"
    figure, (axes,) = make_panels(title, 1, height=2.6, foot=0.1 + 0.07 * max(map(len, names)))
    drawn = np.where(above, traces, np.nan) if above.any() else traces
    axes.errorbar(range(len(names)), drawn, errors, color=PALETTE[8], ecolor=GREY, marker="o", markersize=5)
    if above.any():
        log_axis(axes)
        axes.set_ylim(10 ** math.floor(math.log10(traces[above].min() / 2)), 2 * (traces + errors)[above].max())
    if above.any() and not above.all():
        foot: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "markersize": 7, "label": "not above 0"}
        axes.plot(np.flatnonzero(~above), [0.04] * int((~above).sum()), "X", color=PALETTE[2], **foot)
        axes.legend(loc="upper right")
    label_layers(axes, names, bottom=True)
    axes.set_ylabel(what)
    return figure
