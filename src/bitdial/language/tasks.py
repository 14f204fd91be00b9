"""The zero-shot tasks: how a document becomes a question, and which accuracy counts.

Prompts are those of EleutherAI's lm-evaluation-harness (lm-eval 0.4): the model answers with that choice whose text is
the likeliest continuation. `acc_norm` divides each log-likelihood by the characters of its choice; it counts where
lm-eval reports it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A question with several answers: (context, continuation) of each, and the number of the right one.

    `lengths` are the characters of the answers, by which `acc_norm` divides.
    """

    pairs: tuple[tuple[str, str], ...]
    lengths: tuple[int, ...]
    gold: int


@dataclass(frozen=True)
class Task:
    """The file of a task's documents, how they become questions, and which accuracy counts: acc or acc_norm."""

    file: str
    metric: str
    question: Callable[[Document], Question]


def choices_after(context: str, choices: Sequence[str], gold: int) -> Question:
    """A question whose answers are continuations of one context, a space between."""
    return Question(tuple((context, f" {choice}") for choice in choices), tuple(map(len, choices)), gold)


def _hellaswag(document: Document) -> Question:
    """An event and four ways to go on. Marks in brackets, which WikiHow's pages left behind, are taken out."""
    query = f"{document['activity_label']}: {document['ctx_a']} {document['ctx_b'].capitalize()}"
    return choices_after(
        _unmarked(query), [_unmarked(ending) for ending in document["endings"]], int(document["label"])
    )


def _unmarked(text: str) -> str:
    marked = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", marked).replace("  ", " ")


def _arc(document: Document) -> Question:
    """The query as it is: the question, and "Answer:"."""
    return choices_after(document["query"], document["choices"], document["gold"])


def _piqa(document: Document) -> Question:
    solutions = [document["sol1"], document["sol2"]]
    return choices_after(f"Question: {document['goal']}\nAnswer:", solutions, document["label"])


def _openbookqa(document: Document) -> Question:
    """The stem alone, without the words around it."""
    stem = document["query"].removeprefix("Question: ").removesuffix("\nAnswer:")
    return choices_after(stem, document["choices"], document["gold"])


def _boolq(document: Document) -> Question:
    answers = ("no", "yes")
    return choices_after(document["query"], answers, answers.index(document["choices"][document["gold"]]))


def _winogrande(document: Document) -> Question:
    """Each option fills the blank, and the rest of the sentence is judged: partial evaluation."""
    before, after = document["sentence"].split("_", 1)
    contexts = [before + document["option1"], before + document["option2"]]
    pairs = tuple((context, f" {after.strip()}") for context in contexts)
    return Question(pairs, tuple(map(len, contexts)), ("1", "2").index(document["answer"]))


def _requests(folder: str) -> str:
    return f"oe_eval_tasks/{folder}/requests.jsonl.gz"


# ARC and OpenBookQA are judged on their test questions, the others on validation: as lm-eval does. The five examples
# that the files of test questions bring along are not in their documents. HellaSwag's file of requests has other full
# stops than lm-eval's prompts, so its own documents are read.
TASKS = {
    "hellaswag": Task("hf_datasets/hellaswag/none/validation/data-00000-of-00001.arrow", "acc_norm", _hellaswag),
    "piqa": Task(_requests("piqa/rc_0shot"), "acc_norm", _piqa),
    "arc_easy": Task(_requests("arc_easy/test_rc_5shot"), "acc_norm", _arc),
    "arc_challenge": Task(_requests("arc_challenge/test_rc_5shot"), "acc_norm", _arc),
    "boolq": Task(_requests("boolq/rc_0shot"), "acc", _boolq),
    "winogrande": Task(_requests("winogrande/rc_0shot"), "acc", _winogrande),
    "openbookqa": Task(_requests("openbookqa/test_rc_5shot"), "acc_norm", _openbookqa),
}
