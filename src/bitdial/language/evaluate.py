"""Perplexity and zero-shot accuracy of a language model at its present setting."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from bitdial.config import check_choice
from bitdial.errors import ConfigError
from bitdial.language.likelihoods import check_length, check_tokens, encode, log_likelihoods
from bitdial.language.tasks import TASKS, Question
from bitdial.train.perplexity import perplexity


def evaluate_language(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    rows: Tensor | None = None,
    questions: Mapping[str, Sequence[Question]] | None = None,
    batch_tokens: int = 2048,
    progress: bool = False,
) -> dict[str, Any]:
    """How good a causal language model is at its present setting, in float or in integers, as plain data.

    `rows` are tokens as `token_rows` cuts them, `questions` by task as `read_questions` gives them; one of both may be
    left out, and `tokenizer` with the questions. `batch_tokens` tokens go through the model at once. The result has
    `perplexity`, `zero_shot` by task (`acc`, `acc_norm`, the `metric` that lm-eval reports and the number of
    `questions`), and `zero_shot_average`, the mean of these metrics over the tasks.
    """
    if rows is None and not questions:
        raise ConfigError("there is nothing to evaluate on: give rows of a text, or questions")
    if questions and tokenizer is None:
        raise ConfigError("questions are texts: give the model's tokenizer too")
    if batch_tokens < 1:
        raise ConfigError(f"batch_tokens={batch_tokens} must be at least 1")
    found: dict[str, Any] = {}
    if rows is not None:
        check_tokens(model, int(rows.max()))
        check_length(model, rows.shape[-1])
        found["perplexity"] = perplexity(model, rows, batch=max(1, batch_tokens // rows.shape[-1]))
    if questions:
        zero_shot: dict[str, dict[str, Any]] = {}
        for name, some in questions.items():
            check_choice("task", name, tuple(TASKS))
            encoded = encode(tokenizer, [pair for question in some for pair in question.pairs])
            judged = log_likelihoods(model, encoded, batch_tokens=batch_tokens, label=name if progress else None)
            zero_shot[name] = {**accuracies(some, judged), "metric": TASKS[name].metric, "questions": len(some)}
        counted = [scores[scores["metric"]] for scores in zero_shot.values()]
        found |= {"zero_shot": zero_shot, "zero_shot_average": sum(counted) / len(counted)}
    return found


def accuracies(questions: Sequence[Question], judged: Sequence[float]) -> dict[str, float]:
    """The share of questions whose right answer is the likeliest: by itself, and by its number of characters.

    `judged` are the log-likelihoods of all pairs of all questions, in order.
    """
    if not questions:
        raise ConfigError("there are no questions to answer")
    values, right = iter(judged), {"acc": 0, "acc_norm": 0}
    for question in questions:
        raw = [next(values) for _ in question.pairs]
        by_length = [value / length for value, length in zip(raw, question.lengths, strict=True)]
        right["acc"] += raw.index(max(raw)) == question.gold
        right["acc_norm"] += by_length.index(max(by_length)) == question.gold
    return {name: count / len(questions) for name, count in right.items()}
