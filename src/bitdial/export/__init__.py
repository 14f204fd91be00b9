"""Live models for other run times: ONNX files with integers of 8, 4 and 2 bits."""

from bitdial.export.session import onnx_session_options
from bitdial.export.to_onnx import OnnxExport, export_onnx

__all__ = ["OnnxExport", "export_onnx", "onnx_session_options"]
