"""The part of a model's output that is wanted, and the axis of its classes: found or refused, never guessed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bitdial.errors import ConfigError, TrainingError
from bitdial.prepare.model_output import find_class_axis, known_class_axis, no_tensor, selected


def test_what_is_selected() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    returned: Any
    for returned, output, expected in (
        (one, None, one),
        ({"loss": one, "logits": two}, "logits", two),
        (SimpleNamespace(logits=two), "logits", two),
        ((one, two), 1, two),
        ([one, two], -1, two),
        ((one, {"logits": two}), lambda out: out[1]["logits"], two),
    ):
        assert selected(returned, output) is expected


@pytest.mark.parametrize(
    ("returned", "output", "words"),
    [
        ({"loss": 1, "logits": 2}, "logit", r"output='logit': the model returns a dict of 'loss', 'logits'"),
        (SimpleNamespace(a=1), "b", "returns a SimpleNamespace, which has no part of that name"),
        (torch.zeros(2, 2), "data", "returns a Tensor, which has no part of that name"),
        ((1, 2), 2, "returns a tuple of 2, which has no such place"),
        (torch.zeros(2, 2), 0, "returns a Tensor, which has no such place"),
        ({0: 1}, 0, "returns a dict, which has no such place"),
        ((1, 2), True, "output=True must be a name"),
    ],
)
def test_what_is_not_there(returned: Any, output: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        selected(returned, output)


def test_what_is_said_of_an_output_that_is_no_tensor() -> None:
    for returned, words in (
        ({"loss": 1, "logits": 2}, "a dict of 'loss', 'logits'; say which part is meant: output='logits'"),
        ({"scores": 1}, "a dict of 'scores'; say which part is meant: output='scores'"),
        ((1, 2, 3), "a tuple of 3; say which part is meant: output=0, its first"),
        (SimpleNamespace(logits=1), "a SimpleNamespace instead of a tensor; say which part of it is meant: output='l"),
    ):
        assert words in no_tensor(returned)


def shaped(output: tuple[int, ...], targets: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.zeros(output), torch.zeros(targets, dtype=torch.int64)


def test_the_axis_that_the_targets_lack() -> None:
    for output, targets, axis in (
        ((5, 3), (5,), 1),
        ((3, 3), (3,), 1),  # the first axis is the batch's
        ((1, 3), (1,), 1),
        ((3,), (), 0),
        ((2, 4, 3), (2, 4), 2),
        ((2, 3, 4), (2, 4), 1),
        ((4, 4, 3), (4, 4), 2),
        ((2, 7, 5, 6), (2, 5, 6), 1),
        ((2, 5, 6, 7), (2, 5, 6), 3),
    ):
        pair = shaped(output, targets)
        assert find_class_axis(*pair) == known_class_axis(*pair) == axis, (output, targets)
        assert find_class_axis(*pair, class_axis=axis - len(output)) == axis


def test_several_axes_are_an_error_until_one_is_said() -> None:
    pair = shaped((2, 5, 5), (2, 5))
    with pytest.raises(TrainingError, match=r"can lie along axis 1 or 2\. Say which: class_axis=1"):
        find_class_axis(*pair)
    assert known_class_axis(*pair) is None
    assert (find_class_axis(*pair, class_axis=1), find_class_axis(*pair, class_axis=-1)) == (1, 2)
    for wrong in (0, 3, -4):
        with pytest.raises(TrainingError, match=rf"class_axis={wrong} does not go with"):
            find_class_axis(*shaped((2, 5, 4), (2, 5)), class_axis=wrong)


@pytest.mark.parametrize(
    ("output", "targets", "words"),
    [
        ((5, 1), (5,), "the model has one logit, so the largest says nothing; a measure of your own"),
        ((5,), (5,), "no axis has the classes. For one logit, or several labels"),
        ((5, 1), (5, 1), "no axis has the classes"),
        ((5, 3), (5, 3), "one-hot targets, take"),
        ((5, 3), (4,), r"an output of shape \(5, 3\) and targets of shape \(4,\) do not go together"),
        ((5, 3), (5, 1), "do not go together"),
    ],
)
def test_outputs_without_classes(output: tuple[int, ...], targets: tuple[int, ...], words: str) -> None:
    pair = shaped(output, targets)
    with pytest.raises(TrainingError, match=words):
        find_class_axis(*pair)
    assert known_class_axis(*pair) is None
