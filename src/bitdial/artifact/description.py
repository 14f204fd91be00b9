"""The report of a model: what `prepare` made of it."""

from torch import nn

from bitdial.artifact.format import Artifact
from bitdial.dial.dial import unwrap
from bitdial.errors import ConfigError
from bitdial.prepare.report import REPORT, ModelReport


def describe(model: nn.Module | Artifact) -> ModelReport:
    """How much of a prepared or loaded `model`, or of an artifact, is quantised, what is not and why, and its bytes.

    `print(describe(model))` shows a table; `to_dict()` gives plain data. A loaded model has the report of its file.
    """
    found = model.report if isinstance(model, Artifact) else getattr(unwrap(model), REPORT, None)
    if not isinstance(found, ModelReport):
        raise ConfigError(
            "there is no report: it comes from prepare(), and files that an earlier bitdial wrote have none; give a "
            "prepared model, or one loaded from a newer file"
        )
    return found
