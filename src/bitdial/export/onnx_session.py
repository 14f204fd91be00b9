"""How onnxruntime has to be told to compute what the file says."""

from typing import Any

from bitdial.errors import MissingDependencyError


def onnx_session_options() -> Any:
    """New `onnxruntime.SessionOptions` under which an exported file gives this library's numbers.

    They turn off the fusion of QuantizeLinear and DequantizeLinear into integer operators. Fused, onnxruntime rounds
    the input of a weight-only linear layer to 8 bits, and it cannot load 2-bit weights where a quantizer follows a
    convolution. Everything else (threads, float fusions) stays at onnxruntime's default and can be set on the result.
    """
    try:
        import onnxruntime
    except ImportError as problem:
        raise MissingDependencyError.missing("onnx", "onnxruntime") from problem
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    return options
