"""Train a network once, ship one integer file, run it at any bit-width.

model = prepare(float_model, QuantConfig(bit_choices=(8, 6, 4, 2)), sample_inputs)
train(model, data, TrainConfig(epochs=90))
save(model, "model.safetensors")

live = load("model.safetensors", float_model)
set_bits(live, 4)
"""

from bitdial._cpu import guard_onednn
from bitdial._version import __version__

guard_onednn()  # before anything imports torch

from bitdial.artifact import Artifact, describe, read_artifact, save  # noqa: E402
from bitdial.dial.dial import at_bits, get_bits, set_bits  # noqa: E402
from bitdial.dial.plan import BitPlan  # noqa: E402
from bitdial.errors import BitdialError  # noqa: E402
from bitdial.export import export_onnx, onnx_session_options  # noqa: E402
from bitdial.export.transformers import export_pretrained, load_pretrained  # noqa: E402
from bitdial.functional import narrow  # noqa: E402
from bitdial.live.engines.exact import code_exact  # noqa: E402
from bitdial.live.engines.packed import view_at_bits  # noqa: E402
from bitdial.live.load import load, load_trainable  # noqa: E402
from bitdial.live.memory import resident_bytes  # noqa: E402
from bitdial.models import build_model  # noqa: E402
from bitdial.planning import candidates, evaluate_plans, pareto_front, search  # noqa: E402
from bitdial.planning.cost import measure_costs  # noqa: E402
from bitdial.prepare.config import QuantConfig, Rule  # noqa: E402
from bitdial.prepare.prepare import prepare  # noqa: E402
from bitdial.prepare.transitions import add_transitions  # noqa: E402
from bitdial.sensitivity.hutchinson import hessian_trace  # noqa: E402
from bitdial.sensitivity.result import Sensitivity  # noqa: E402
from bitdial.train import (  # noqa: E402
    ArrayData,
    JointStep,
    Shift,
    TrainConfig,
    accuracy,
    batched,
    evaluate,
    load_checkpoint,
    recalibrate_norms,
    save_checkpoint,
    train,
)

__all__ = [
    "ArrayData",
    "Artifact",
    "BitPlan",
    "BitdialError",
    "JointStep",
    "QuantConfig",
    "Rule",
    "Sensitivity",
    "Shift",
    "TrainConfig",
    "__version__",
    "accuracy",
    "add_transitions",
    "at_bits",
    "batched",
    "build_model",
    "candidates",
    "code_exact",
    "describe",
    "evaluate",
    "evaluate_plans",
    "export_onnx",
    "export_pretrained",
    "get_bits",
    "hessian_trace",
    "load",
    "load_checkpoint",
    "load_pretrained",
    "load_trainable",
    "measure_costs",
    "narrow",
    "onnx_session_options",
    "pareto_front",
    "prepare",
    "read_artifact",
    "recalibrate_norms",
    "resident_bytes",
    "save",
    "save_checkpoint",
    "search",
    "set_bits",
    "train",
    "view_at_bits",
]
