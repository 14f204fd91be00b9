"""A prepared model made good at every width in minutes, without labels."""

from bitdial.calibrate.calibrate import calibrate
from bitdial.calibrate.config import CalibrateConfig
from bitdial.calibrate.report import BlockReport, CalibrationReport

__all__ = ["BlockReport", "CalibrateConfig", "CalibrationReport", "calibrate"]
