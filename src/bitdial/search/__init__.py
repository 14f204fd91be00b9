"""Which layer gets how many bits: plans by integer programming, and the front of those worth having."""

from bitdial.search.find import Candidate, candidates, search
from bitdial.search.front import evaluate_plans, pareto_front
from bitdial.search.problem import quantization_errors

__all__ = ["Candidate", "candidates", "evaluate_plans", "pareto_front", "quantization_errors", "search"]
