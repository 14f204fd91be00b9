"""Pages that show a result, each a single HTML file that loads nothing else."""

from bitdial.report.calibration import calibration_report
from bitdial.report.demo import demo_report, weight_steps
from bitdial.report.detection import Shots, detection_report
from bitdial.report.front import Known, check_comparable, front_report
from bitdial.report.numbers import Samples
from bitdial.report.page import write_report
from bitdial.report.pictures import Panel, panel

__all__ = [
    "Known",
    "Panel",
    "Samples",
    "Shots",
    "calibration_report",
    "check_comparable",
    "demo_report",
    "detection_report",
    "front_report",
    "panel",
    "weight_steps",
    "write_report",
]
