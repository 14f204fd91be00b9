"""Every error bitdial raises on purpose: one root, a few children.

``except BitdialError`` catches them all. Messages say what is wrong with which value (and in
which layer), what was expected, and what to do about it.
"""

from __future__ import annotations

from typing import Self


class BitdialError(Exception):
    """Root of all errors that bitdial raises on purpose."""


class ConfigError(BitdialError, ValueError):
    """A configuration, a rule, an argument or a bit-width is not usable."""


class PlanError(BitdialError, ValueError):
    """A bit plan is malformed, or asks a layer for bits that it does not offer."""


class BudgetError(BitdialError, ValueError):
    """No plan meets the budgets of a search; `nearest` has, by quantity, the least value that can be met."""

    def __init__(self, message: str, nearest: dict[str, float]):
        super().__init__(message)
        self.nearest = nearest


class QuantizationError(BitdialError):
    """A tensor cannot be quantized, packed or unpacked: NaN, infinity, collapsed scale, bad codes.

    Where a layer is involved, the message starts with its name.
    """


class HiddenWeightError(BitdialError, AttributeError):
    """The weight of a layer that runs on integer codes was asked for more than its shape, type and device."""


class TrainingError(BitdialError):
    """A training run cannot go on: the loss diverged or became non-finite."""


class CheckpointError(BitdialError):
    """A training checkpoint is damaged, or belongs to another model or configuration."""


class ArtifactError(BitdialError):
    """An artifact file is damaged, has an unknown version, or does not fit the model."""


class ExportError(BitdialError):
    """A model cannot be written for another run time; the message names the module and the operator where known."""


class MissingDependencyError(BitdialError, ImportError):
    """An optional package is needed and not installed; the message names the extra to install."""

    @classmethod
    def missing(cls, extra: str, package: str) -> Self:
        """Return the error for an absent ``package`` that the extra ``bitdial[extra]`` brings.

        ``raise MissingDependencyError.missing("cli", "rich") from error`` reads
        "rich is not installed; install it with: pip install 'bitdial[cli]'".
        """
        return cls(
            f"{package} is not installed; install it with: pip install 'bitdial[{extra}]'",
            name=package,
        )
