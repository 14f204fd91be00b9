"""Figures: plain data in, a matplotlib Figure out. The only folder that imports matplotlib.

figure = accuracy_by_bits(0.974, {8: 0.99, 4: 0.992, 2: 0.97})
to_svg(figure)                    # text to put into a page
to_png(figure, "accuracy.png")

No pyplot and no global state: the style holds inside a call, whatever the user's own settings are, and the same data
give the same bytes. Where data are by width, the keys are numbers or the text that JSON makes of them.
"""

from bitdial.report.plots.drawing import (
    GREY,
    MARKERS,
    PALETTE,
    STYLE,
    WIDTH,
    by_bits,
    counted,
    format_bytes,
    require_matplotlib,
    to_png,
    to_svg,
)
from bitdial.report.plots.figures import (
    accuracy_by_bits,
    convergence,
    scale_gradients,
    sizes_by_bits,
    weight_histograms,
)
from bitdial.report.plots.mixed import bits_over_traces, pareto_fronts, predicted_and_measured, sensitivity_by_layer

__all__ = [
    "GREY",
    "MARKERS",
    "PALETTE",
    "STYLE",
    "WIDTH",
    "accuracy_by_bits",
    "bits_over_traces",
    "by_bits",
    "convergence",
    "counted",
    "format_bytes",
    "pareto_fronts",
    "predicted_and_measured",
    "require_matplotlib",
    "scale_gradients",
    "sensitivity_by_layer",
    "sizes_by_bits",
    "to_png",
    "to_svg",
    "weight_histograms",
]
