"""Which layer gets how many bits: plans by integer programming, and the front of those worth having."""

from bitdial.search.find import Candidate, candidates, search
from bitdial.search.front import evaluate_plans, mean_accuracy, pareto_front
from bitdial.search.measured import MeasuredFront, MeasuredPlan, measure_front
from bitdial.search.problem import OBJECTIVES, quantization_errors

__all__ = [
    "OBJECTIVES",
    "Candidate",
    "MeasuredFront",
    "MeasuredPlan",
    "candidates",
    "evaluate_plans",
    "mean_accuracy",
    "measure_front",
    "pareto_front",
    "quantization_errors",
    "search",
]
