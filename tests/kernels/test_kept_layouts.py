"""One layout for each tensor of words, made anew where what it was made of has changed."""

import torch
from torch import Tensor

from bitdial.kernels.kept_layouts import Use, forget, held_for, kept_layout


class Made:
    def __init__(self, number: int):
        self.number = torch.tensor(number)

    def tensors(self) -> list[Tensor]:
        return [self.number]


def test_a_layout_is_made_when_something_is_new() -> None:
    count = 0
    words, scale, other, use = torch.zeros(4), torch.ones(2), torch.ones(2), Use((4,), 4, 8, 0.0)

    def ask(words: Tensor = words, scale: Tensor = scale, group: Tensor | None = None, use: Use = use) -> bool:
        """Whether it was made."""
        nonlocal count
        before = count

        def make() -> Made:
            nonlocal count
            count += 1
            return Made(count)

        assert kept_layout(words, scale, group, use, make).number <= count
        return count > before

    assert [ask(), ask(), ask()] == [True, False, False]
    assert [ask(use=use._replace(bits=2)), ask(use=use._replace(bits=2)), ask(), ask()] == [True, False, True, False]
    assert [ask(scale=other), ask(scale=other), ask()] == [True, False, True]
    assert [ask(group=other), ask(group=other)] == [True, False]
    other.add_(1)
    assert [ask(group=other), ask(group=other)] == [True, False]
    words.add_(1)
    assert [ask(group=other), ask(group=other)] == [True, False]
    alias = words.detach()
    assert [ask(alias), ask(group=other), ask(alias)] == [True, False, False], "a tensor of its own has its own layout"
    assert held_for(words)
    forget(words)
    assert held_for(words) == []
    assert held_for(alias)
    with torch.inference_mode():
        uncounted = torch.zeros(4)
    assert [ask(uncounted), ask(uncounted)] == [True, True], "it could change unseen"
