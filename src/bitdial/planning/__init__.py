"""Which layer gets how many bits: plans by integer programming, and the front of those worth having."""

from bitdial.planning.by_measuring import MeasuredSearch, measured_search
from bitdial.planning.find import Candidate, candidates, search
from bitdial.planning.front import evaluate_plans, mean_accuracy, pareto_front
from bitdial.planning.measured import MeasuredFront, MeasuredPlan, compare_fronts, measure_front
from bitdial.planning.problem import OBJECTIVES, quantization_errors
from bitdial.planning.solve import require_highspy

__all__ = [
    "OBJECTIVES",
    "Candidate",
    "MeasuredFront",
    "MeasuredPlan",
    "MeasuredSearch",
    "candidates",
    "compare_fronts",
    "evaluate_plans",
    "mean_accuracy",
    "measure_front",
    "measured_search",
    "pareto_front",
    "quantization_errors",
    "require_highspy",
    "search",
]
