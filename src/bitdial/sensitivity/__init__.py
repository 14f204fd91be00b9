"""How much each layer's quantisation costs: Hessian traces."""

from bitdial.sensitivity.hutchinson import hessian_trace
from bitdial.sensitivity.result import Sensitivity

__all__ = ["Sensitivity", "hessian_trace"]
