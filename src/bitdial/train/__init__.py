"""Joint training of all widths."""

from bitdial.train.callbacks import Callback, CsvLog, EarlyStopping, Ema
from bitdial.train.checkpoint import load_checkpoint, save_checkpoint
from bitdial.train.config import TrainConfig
from bitdial.train.data import ArrayData, Shift
from bitdial.train.evaluate import accuracy, batched, evaluate, recalibrate_norms
from bitdial.train.history import History
from bitdial.train.loop import train
from bitdial.train.step_report import StepReport
from bitdial.train.steps import JointStep
from bitdial.train.tensorboard import TensorBoard
from bitdial.train.text import tokenize_text
from bitdial.train.tokens import TokenData
from bitdial.train.transformers_trainer import joint_trainer

__all__ = [
    "ArrayData",
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "Ema",
    "History",
    "JointStep",
    "Shift",
    "StepReport",
    "TensorBoard",
    "TokenData",
    "TrainConfig",
    "accuracy",
    "batched",
    "evaluate",
    "joint_trainer",
    "load_checkpoint",
    "recalibrate_norms",
    "save_checkpoint",
    "tokenize_text",
    "train",
]
