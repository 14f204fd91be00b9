"""Joint training of all widths."""

from bitdial.train.checkpoint import load_checkpoint, save_checkpoint
from bitdial.train.config import TrainConfig
from bitdial.train.data import ArrayData, Shift
from bitdial.train.evaluate import accuracy, batched, evaluate, recalibrate_norms
from bitdial.train.loop import History, train
from bitdial.train.steps import JointStep, StepReport

__all__ = [
    "ArrayData",
    "History",
    "JointStep",
    "Shift",
    "StepReport",
    "TrainConfig",
    "accuracy",
    "batched",
    "evaluate",
    "load_checkpoint",
    "recalibrate_norms",
    "save_checkpoint",
    "train",
]
