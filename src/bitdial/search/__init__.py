"""Which layer gets how many bits: plans by integer programming, and the front of those worth having."""

from bitdial.search.find import Candidate, candidates, search
from bitdial.search.front import evaluate_plans, mean_accuracy, pareto_front
from bitdial.search.measured import MeasuredFront, MeasuredPlan, compare_fronts, measure_front
from bitdial.search.problem import OBJECTIVES, quantization_errors
from bitdial.search.solve import require_highspy

__all__ = [
    "OBJECTIVES",
    "Candidate",
    "MeasuredFront",
    "MeasuredPlan",
    "candidates",
    "compare_fronts",
    "evaluate_plans",
    "mean_accuracy",
    "measure_front",
    "pareto_front",
    "quantization_errors",
    "require_highspy",
    "search",
]
