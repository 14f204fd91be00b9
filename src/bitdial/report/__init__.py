"""Pages that show a result, each a single HTML file that loads nothing else."""

from bitdial.report.calibration import calibration_report
from bitdial.report.demo import demo_report, weight_steps
from bitdial.report.front import Known, check_comparable, front_report
from bitdial.report.numbers import Samples
from bitdial.report.page import write_report

__all__ = [
    "Known",
    "Samples",
    "calibration_report",
    "check_comparable",
    "demo_report",
    "front_report",
    "weight_steps",
    "write_report",
]
