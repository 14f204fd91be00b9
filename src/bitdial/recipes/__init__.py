"""Runnable recipes, each a plain function from options to an outcome."""

from collections.abc import Callable

from torch import Tensor

from bitdial.recipes.cifar10_mixed import cifar10_mobilenetv2_mixed, cifar10_resnet20_mixed
from bitdial.recipes.cifar10_training import cifar10_mobilenetv2, cifar10_resnet20
from bitdial.recipes.digits import digits, digits_test
from bitdial.recipes.imagenet import imagenet
from bitdial.recipes.outcome import NORM_FORMS, TEACHERS, RecipeOptions, RecipeOutcome

RECIPES: dict[str, Callable[[RecipeOptions], RecipeOutcome]] = {
    "digits": digits,
    "cifar10-resnet20": cifar10_resnet20,
    "cifar10-mobilenetv2": cifar10_mobilenetv2,
    "cifar10-resnet20-mixed": cifar10_resnet20_mixed,
    "cifar10-mobilenetv2-mixed": cifar10_mobilenetv2_mixed,
    "imagenet": imagenet,
}
INPUT_SHAPES: dict[str, tuple[int, ...]] = {
    "digits": (1, 8, 8),
    "cifar10-resnet20": (3, 32, 32),
    "cifar10-mobilenetv2": (3, 32, 32),
}
TEST_DATA: dict[str, Callable[[], list[tuple[Tensor, Tensor]]]] = {"digits": digits_test}

__all__ = ["INPUT_SHAPES", "NORM_FORMS", "RECIPES", "TEACHERS", "TEST_DATA", "RecipeOptions", "RecipeOutcome"]
