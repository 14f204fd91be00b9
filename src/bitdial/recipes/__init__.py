"""Runnable recipes, each a plain function from options to an outcome."""

from collections.abc import Callable

from torch import Tensor

from bitdial.recipes.cifar10_resnet20 import cifar10_resnet20
from bitdial.recipes.digits import digits, digits_test
from bitdial.recipes.outcome import RecipeOptions, RecipeOutcome

RECIPES: dict[str, Callable[[RecipeOptions], RecipeOutcome]] = {
    "digits": digits,
    "cifar10-resnet20": cifar10_resnet20,
}
TEST_DATA: dict[str, Callable[[], list[tuple[Tensor, Tensor]]]] = {"digits": digits_test}

__all__ = ["RECIPES", "TEST_DATA", "RecipeOptions", "RecipeOutcome"]
