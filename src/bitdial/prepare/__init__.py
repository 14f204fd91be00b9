"""A float model in, a model that trains at several widths out."""

from bitdial.prepare.config import QuantConfig, Rule
from bitdial.prepare.prepare import prepare
from bitdial.prepare.transitions import add_transitions

__all__ = ["QuantConfig", "Rule", "add_transitions", "prepare"]
