"""Train a network once, ship one integer file, run it at any bit-width.

model = prepare(float_model, QuantConfig(bit_choices=(8, 6, 4, 2)), sample_inputs)
train(model, data, TrainConfig(epochs=90))
save(model, "model.safetensors")

live = load("model.safetensors", float_model)
set_bits(live, 4)
"""

import importlib as _importlib
import typing as _typing

from bitdial._cpu import guard_onednn
from bitdial._package import load_when_asked as _load_when_asked
from bitdial._version import __version__
from bitdial._when_imported import when_imported as _when_imported

guard_onednn()  # before anything imports torch

if _typing.TYPE_CHECKING:
    from bitdial.artifact import Artifact, describe, file_parts, read_artifact, repack, save
    from bitdial.calibrate.calibrate import calibrate
    from bitdial.calibrate.config import CalibrateConfig
    from bitdial.calibrate.report import CalibrationReport
    from bitdial.dial.dial import at_bits, get_bits, set_bits
    from bitdial.dial.plan import BitPlan
    from bitdial.errors import BitdialError
    from bitdial.export import export_onnx, onnx_session_options
    from bitdial.export.compressed_tensors import export_compressed_tensors
    from bitdial.export.gguf import export_gguf
    from bitdial.export.transformers import export_pretrained, load_pretrained
    from bitdial.functional import narrow
    from bitdial.images import ImageBatches, ImageSettings, ImageViews, InstanceFolder
    from bitdial.language import evaluate_language, read_questions
    from bitdial.live.decode_graphs import decode_graphs
    from bitdial.live.engines.exact import code_exact
    from bitdial.live.grow import grow
    from bitdial.live.kv_cache import quantized_cache
    from bitdial.live.load import load, load_trainable
    from bitdial.live.memory import resident_bytes
    from bitdial.live.speculation import speculate
    from bitdial.live.views import view_at_bits
    from bitdial.models import build_model
    from bitdial.planning import candidates, evaluate_plans, measured_search, pareto_front, search
    from bitdial.planning.cost import measure_costs
    from bitdial.planning.distance import relative_error
    from bitdial.prepare.config import QuantConfig, Rule
    from bitdial.prepare.layer_outputs import LayerOutputs
    from bitdial.prepare.own_losses import OwnLosses
    from bitdial.prepare.prepare import prepare
    from bitdial.prepare.rotate import rotate
    from bitdial.prepare.transitions import add_transitions
    from bitdial.sensitivity.hutchinson import hessian_trace
    from bitdial.sensitivity.result import Sensitivity
    from bitdial.train import (
        ArrayData,
        Callback,
        CsvLog,
        EarlyStopping,
        Ema,
        JointStep,
        Shift,
        TensorBoard,
        TokenData,
        TrainConfig,
        joint_trainer,
        load_checkpoint,
        save_checkpoint,
        tokenize_text,
        train,
    )
    from bitdial.train.average_precision import detection_metrics
    from bitdial.train.evaluate import accuracy, batched, evaluate, recalibrate_norms
    from bitdial.train.perplexity import perplexity, token_rows

__all__ = [
    "ArrayData",
    "Artifact",
    "BitPlan",
    "BitdialError",
    "CalibrateConfig",
    "CalibrationReport",
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "Ema",
    "ImageBatches",
    "ImageSettings",
    "ImageViews",
    "InstanceFolder",
    "JointStep",
    "LayerOutputs",
    "OwnLosses",
    "QuantConfig",
    "Rule",
    "Sensitivity",
    "Shift",
    "TensorBoard",
    "TokenData",
    "TrainConfig",
    "__version__",
    "accuracy",
    "add_transitions",
    "at_bits",
    "batched",
    "build_model",
    "calibrate",
    "candidates",
    "code_exact",
    "decode_graphs",
    "describe",
    "detection_metrics",
    "evaluate",
    "evaluate_language",
    "evaluate_plans",
    "export_compressed_tensors",
    "export_gguf",
    "export_onnx",
    "export_pretrained",
    "file_parts",
    "get_bits",
    "grow",
    "hessian_trace",
    "joint_trainer",
    "load",
    "load_checkpoint",
    "load_pretrained",
    "load_trainable",
    "measure_costs",
    "measured_search",
    "narrow",
    "onnx_session_options",
    "pareto_front",
    "perplexity",
    "prepare",
    "quantized_cache",
    "read_artifact",
    "read_questions",
    "recalibrate_norms",
    "relative_error",
    "repack",
    "resident_bytes",
    "rotate",
    "save",
    "save_checkpoint",
    "search",
    "set_bits",
    "speculate",
    "token_rows",
    "tokenize_text",
    "train",
    "view_at_bits",
]

# Where each name is: as above, but imported when it is asked for. PyTorch comes with the first of them.
_load_when_asked(
    __name__,
    {
        "bitdial.artifact": "Artifact describe file_parts read_artifact repack save",
        "bitdial.calibrate.calibrate": "calibrate",
        "bitdial.calibrate.config": "CalibrateConfig",
        "bitdial.calibrate.report": "CalibrationReport",
        "bitdial.dial.dial": "at_bits get_bits set_bits",
        "bitdial.dial.plan": "BitPlan",
        "bitdial.errors": "BitdialError",
        "bitdial.export": "export_onnx onnx_session_options",
        "bitdial.export.compressed_tensors": "export_compressed_tensors",
        "bitdial.export.gguf": "export_gguf",
        "bitdial.export.transformers": "export_pretrained load_pretrained",
        "bitdial.functional": "narrow",
        "bitdial.images": "ImageBatches ImageSettings ImageViews InstanceFolder",
        "bitdial.language": "evaluate_language read_questions",
        "bitdial.live.decode_graphs": "decode_graphs",
        "bitdial.live.engines.exact": "code_exact",
        "bitdial.live.grow": "grow",
        "bitdial.live.kv_cache": "quantized_cache",
        "bitdial.live.views": "view_at_bits",
        "bitdial.live.load": "load load_trainable",
        "bitdial.live.memory": "resident_bytes",
        "bitdial.live.speculation": "speculate",
        "bitdial.models": "build_model",
        "bitdial.planning": "candidates evaluate_plans measured_search pareto_front search",
        "bitdial.planning.cost": "measure_costs",
        "bitdial.planning.distance": "relative_error",
        "bitdial.prepare.config": "QuantConfig Rule",
        "bitdial.prepare.layer_outputs": "LayerOutputs",
        "bitdial.prepare.own_losses": "OwnLosses",
        "bitdial.prepare.prepare": "prepare",
        "bitdial.prepare.rotate": "rotate",
        "bitdial.prepare.transitions": "add_transitions",
        "bitdial.sensitivity.hutchinson": "hessian_trace",
        "bitdial.sensitivity.result": "Sensitivity",
        "bitdial.train": "ArrayData Callback CsvLog EarlyStopping Ema JointStep Shift TensorBoard TokenData "
        "TrainConfig joint_trainer load_checkpoint save_checkpoint tokenize_text train",
        "bitdial.train.average_precision": "detection_metrics",
        "bitdial.train.evaluate": "accuracy batched evaluate recalibrate_norms",
        "bitdial.train.perplexity": "perplexity token_rows",
    },
)

# So that `AutoModelForCausalLM.from_pretrained(folder)` gives a live model.
_when_imported(
    "transformers.quantizers.auto",
    lambda: _importlib.import_module("bitdial.export.transformers_quantizer").register(),
)
