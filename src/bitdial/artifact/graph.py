"""What the saved model computes, as its file has it: the operations in the order of their calls, and a digest of them.

Tensors of the same shapes fit a model that calls its layers in another order. So `load` compares the operations too,
where both models can be followed (`bitdial.graph.operations`).
"""

import hashlib
import re
from typing import Any

from torch import nn

from bitdial.artifact.format import Artifact
from bitdial.errors import ArtifactError
from bitdial.graph.operations import MOST_OPERATIONS, operations

MOST_LINES = 1000  # that a file keeps, to say where models differ
MOST_CHARACTERS = 160  # of a line
FIELDS = ("digest", "count", "lines")


def graph_entry(model: nn.Module, leaves: tuple[str, ...]) -> dict[str, Any] | None:
    """What the manifest says of the operations of `model`, whose layers and norms are `leaves`; None if unknown."""
    found = operations(model, leaves)
    if found is None:
        return None
    shown = [line[:MOST_CHARACTERS] for line in found[:MOST_LINES]]
    return {"digest": hashlib.sha256("\n".join(found).encode()).hexdigest(), "count": len(found), "lines": shown}


def check_graph_entry(entry: Any) -> None:
    """Raise ArtifactError unless `entry` is such a description."""
    if not isinstance(entry, dict) or set(entry) != {*FIELDS}:
        raise ArtifactError(f"graph: it is no JSON object of {', '.join(FIELDS)}")
    digest, count, lines = (entry[field] for field in FIELDS)
    if not isinstance(digest, str) or re.fullmatch("[0-9a-f]{64}", digest) is None:
        raise ArtifactError("graph: its digest is not 64 hexadecimal digits")
    if type(count) is not int or not 0 < count <= MOST_OPERATIONS + 1:
        raise ArtifactError(f"graph: count={count!r} is no number of operations")
    if not isinstance(lines, list) or len(lines) != min(count, MOST_LINES):
        raise ArtifactError(f"graph: its lines are not the first {MOST_LINES}, or all")
    if not all(isinstance(line, str) and 0 < len(line) <= MOST_CHARACTERS for line in lines):
        raise ArtifactError(f"graph: a line is no text of at most {MOST_CHARACTERS} characters")


def check_same_graph(artifact: Artifact, model: nn.Module) -> None:
    """Raise ArtifactError if the float `model` is known to compute something else than the one that was saved."""
    stored = artifact.manifest.get("graph")
    found = None if stored is None else graph_entry(model, (*artifact.layers, *artifact.norms))
    if stored is None or found is None or found["digest"] == stored["digest"]:
        return
    raise ArtifactError(
        f"the model has the tensors of the file but computes something else: {_difference(stored, found)}. Pass the "
        "model as it was when it was saved. If you know that both compute the same: artifact = read_artifact(path); "
        "del artifact.manifest['graph']; load(artifact, model)"
    )


def _difference(stored: dict[str, Any], found: dict[str, Any]) -> str:
    """Where two descriptions differ first."""
    theirs, mine = stored["lines"], found["lines"]
    for i, (one, other) in enumerate(zip(theirs, mine, strict=False)):
        if one != other:
            there, here = _readable(one, theirs), _readable(other, mine)
            there, here = (one, other) if there == here else (there, here)
            after = f"after {_called(mine[i - 1])}" if i else "at first"
            return f"{after}, the file's model computes {there} and this one {here}"
    return f"they agree in {min(len(theirs), len(mine))} operations and differ later"


def _called(line: str) -> str:
    return line.partition("(")[0]


def _readable(line: str, lines: list[str]) -> str:
    """`line` with names in the place of the numbers of operations."""

    def name(match: re.Match[str]) -> str:
        number = int(match[1])
        return _called(lines[number]) if number < len(lines) else match[0]

    return re.sub(r"%(\d{1,6})", name, line)
