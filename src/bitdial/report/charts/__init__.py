"""Figures of pages: plain data in, a `Chart` out: a sentence, an SVG drawing and the same numbers as a table.

Where data are by width, the keys are numbers or the text that JSON makes of them.
"""

from bitdial.report.charts.calibration import agreement_by_bits, errors_by_block
from bitdial.report.charts.detection import errors_by_part, precision_by_bits
from bitdial.report.charts.mixed import bits_over_traces, pareto_fronts, predicted_and_measured, sensitivity_by_layer
from bitdial.report.charts.plot import Chart
from bitdial.report.charts.training import convergence, scale_gradients
from bitdial.report.charts.widths import accuracy_by_bits, sizes_by_bits, weight_histograms

__all__ = [
    "Chart",
    "accuracy_by_bits",
    "agreement_by_bits",
    "bits_over_traces",
    "convergence",
    "errors_by_block",
    "errors_by_part",
    "pareto_fronts",
    "precision_by_bits",
    "predicted_and_measured",
    "scale_gradients",
    "sensitivity_by_layer",
    "sizes_by_bits",
    "weight_histograms",
]
