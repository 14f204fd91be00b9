"""Calibration: codes of a weight, column by column."""
