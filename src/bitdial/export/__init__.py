"""Live models for other run times: ONNX files with integers of 8, 4 and 2 bits."""

from bitdial.export.onnx import OnnxExport, export_onnx
from bitdial.export.onnx_session import onnx_session_options

__all__ = ["OnnxExport", "export_onnx", "onnx_session_options"]
