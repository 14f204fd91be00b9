"""Pages that show a result, each a single HTML file that loads nothing else."""

from bitdial.report.demo import demo_report, weight_steps
from bitdial.report.page import write_report

__all__ = ["demo_report", "weight_steps", "write_report"]
