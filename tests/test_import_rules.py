"""The shape of the sources, read with ast: imports go down only, and a few things are not done.

A new module fails here until it has a place in LEVELS: that is the point of the table.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent / "src" / "bitdial"

# A module, or a folder as a whole, and its level. It may import from lower levels.
LEVELS: dict[str, int] = {
    "errors": 0, "_cpu": 0, "_version": 0,
    "functional": 1, "packing": 1, "plan": 1, "config": 1, "models": 1, "container": 1, "traced": 1, "grouped_conv": 1,
    "fixed_point": 1,
    "nn": 2, "kernels": 2,
    "observe": 3, "start": 3, "prepare": 3, "sensitivity": 3, "hessian": 3, "cost": 3,
    "train": 4, "artifact": 4, "runtime": 4, "exact": 4, "search": 4,
    "integer": 4, "weight_only": 4, "kernel_choice": 4,
    "recipes": 5, "report": 5, "plots": 5, "export": 5, "pretrained": 5, "progress": 5, "demo": 5, "mixed_demo": 5,
    "cli": 6, "__main__": 6,
    "__init__": 7,
}  # fmt: skip

# Within these levels anything goes as long as there is no circle ...
FREE_LEVELS = {1, 3}
# ... and elsewhere only this.
SAME_LEVEL = {
    ("nn", "kernels"),
    ("runtime", "artifact"),
    ("exact", "artifact"),
    ("exact", "runtime"),
    ("integer", "exact"),
    ("runtime", "integer"),
    ("weight_only", "artifact"),
    ("runtime", "weight_only"),
    ("kernel_choice", "artifact"),
    ("runtime", "kernel_choice"),
    ("report", "plots"),
    ("demo", "plots"),
    ("demo", "recipes"),
    ("demo", "report"),
    ("mixed_demo", "plots"),
    ("mixed_demo", "recipes"),
    ("mixed_demo", "report"),
    ("__main__", "cli"),
}

# What `pip install bitdial` brings; everything else is optional and imported where it is needed.
REQUIRED = {"torch", "numpy", "safetensors"}
# A file of kernels is imported by the function that needs it, so it may import their compiler at once.
KERNEL_COMPILERS = {"triton"}
MAY_PRINT = {"cli", "__main__"}

# --- reading ------------------------------------------------------------------------------------


def unit_of(path: Path) -> str:
    """The module, or the folder, that a file belongs to: `nn/layers.py` -> `nn`."""
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return parts[0]


def files() -> list[Path]:
    found = sorted(SOURCES.rglob("*.py"))
    assert len(found) > 10, SOURCES
    return found


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    """Every imported dotted name and its line, at any depth; relative imports made absolute."""
    package = ("bitdial", *path.relative_to(SOURCES).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *([node.module] if node.module else [])))
            for alias in node.names:
                yield f"{stem}.{alias.name}", node.lineno


def bitdial_units(tree: ast.AST, path: Path) -> set[str]:
    """The units of bitdial that a file imports; the package itself counts as `__init__`."""
    found = set()
    for name, _ in imported(tree, path):
        parts = name.split(".")
        if parts[0] != "bitdial":
            continue
        is_unit = len(parts) > 1 and (parts[1] in LEVELS or _exists(parts[1]))
        found.add(parts[1] if is_unit else "__init__")
    return found


def _exists(unit: str) -> bool:
    return (SOURCES / unit).is_dir() or (SOURCES / f"{unit}.py").is_file()


def forbidden(importer: str, target: str) -> bool:
    if importer == target or importer == "__init__":
        return False
    if target == "__init__":  # it imports everything: only the top may go through it
        return LEVELS[importer] < 5
    if LEVELS[importer] != LEVELS[target]:
        return LEVELS[importer] < LEVELS[target]
    return LEVELS[importer] not in FREE_LEVELS and (importer, target) not in SAME_LEVEL


def module_level_imports(tree: ast.Module) -> Iterator[str]:
    """What is imported when the file is, by its dotted name; so not in functions nor for type checkers."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


def needless(tree: ast.Module, path: Path) -> list[str]:
    """Optional packages that a file imports as it is imported, and files of kernels, which do so themselves.

    Files of kernels may import their compiler and each other.
    """
    known = REQUIRED | {"bitdial", "__future__"} | sys.stdlib_module_names
    names = set(module_level_imports(tree))
    if path.parent == SOURCES / "kernels" and path.name.startswith("triton_"):
        return sorted(n for n in names if n.partition(".")[0] not in known | KERNEL_COMPILERS)
    return sorted(n for n in names if n.partition(".")[0] not in known or n.startswith("bitdial.kernels.triton_"))


UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}
UNSAFE_NAMES = {"torch.load", "torch.save", "torch.jit.load", "torch.serialization"}


def unsafe(tree: ast.AST, path: Path) -> list[str]:
    """Ways to run what a file says: pickle in its guises, eval and exec."""
    found = []
    for name, line in imported(tree, path):
        if name.partition(".")[0] in UNSAFE_MODULES or _starts(name, UNSAFE_NAMES):
            found.append(f"{line}: {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNSAFE_NAMES:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                found.append(f"{node.lineno}: {node.func.id}()")
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False":
                    found.append(f"{node.lineno}: allow_pickle")
    return found


def _starts(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def talks(tree: ast.AST, path: Path) -> list[str]:
    """Printing, parsing of arguments and leaving the process: for the command line only."""
    found = [f"{n}: {m}" for m, n in imported(tree, path) if m.partition(".")[0] == "argparse"]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = ast.unparse(node.func)
            if name in {"print", "input", "exit", "quit", "sys.exit", "os._exit"}:
                found.append(f"{node.lineno}: {name}()")
        if isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise SystemExit"):
            found.append(f"{node.lineno}: SystemExit")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"sys.argv", "sys.stdout"}:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# --- the rules ----------------------------------------------------------------------------------

PATHS = files()
IDS = [str(path.relative_to(SOURCES)) for path in PATHS]
each_file = pytest.mark.parametrize("path", PATHS, ids=IDS)


def test_every_module_has_a_level() -> None:
    missing = sorted({unit_of(path) for path in PATHS} - set(LEVELS))
    assert not missing, f"give {missing} a level in LEVELS, after thinking about which"


@each_file
def test_imports_go_down_only(path: Path) -> None:
    importer = unit_of(path)
    if importer not in LEVELS:
        pytest.skip("has no level: the test above fails")
    targets = bitdial_units(parse(path), path)
    unknown = sorted(targets - set(LEVELS))
    assert not unknown, f"{unknown} have no level"
    wrong = sorted(target for target in targets if forbidden(importer, target))
    assert not wrong, f"{importer} (level {LEVELS[importer]}) imports {wrong}"


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that are left when those without unvisited imports are taken away again and again."""
    left = {node: set(targets) - {node} for node, targets in graph.items()}
    while free := [node for node, targets in left.items() if not targets & set(left)]:
        for node in free:
            del left[node]
    return sorted(left)


def test_there_is_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in PATHS:
        if unit_of(path) != "__init__":
            graph.setdefault(unit_of(path), set()).update(bitdial_units(parse(path), path))
    assert find_circle(graph) == []


@each_file
def test_optional_packages_are_imported_where_they_are_needed(path: Path) -> None:
    assert needless(parse(path), path) == [], "import these inside the function that needs them"


@each_file
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    assert unsafe(parse(path), path) == []


@each_file
def test_only_the_command_line_talks(path: Path) -> None:
    if unit_of(path) not in MAY_PRINT:
        assert talks(parse(path), path) == []


# --- the rules on samples: each of them can fail ------------------------------------------------

HERE = SOURCES / "nn" / "sample.py"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from bitdial.plan import BitPlan", {"plan"}),
        ("from bitdial import functional as bf", {"functional"}),
        ("import bitdial.train.loop", {"train"}),
        ("from bitdial import QuantConfig", {"__init__"}),
        ("import bitdial", {"__init__"}),
        ("from ..prepare import prepare", {"prepare"}),
        ("from .layers import QuantLinear", {"nn"}),
        ("from .. import errors", {"errors"}),
        ("def f():\n    from bitdial.cli import main", {"cli"}),
        ("import torch\nfrom torch import nn", set()),
    ],
)
def test_imports_are_found(text: str, expected: set[str]) -> None:
    assert bitdial_units(ast.parse(text), HERE) == expected


@pytest.mark.parametrize(
    ("importer", "target", "expected"),
    [
        ("nn", "functional", False),
        ("nn", "prepare", True),
        ("functional", "nn", True),
        ("nn", "kernels", False),
        ("kernels", "nn", True),
        ("kernels", "functional", False),
        ("functional", "kernels", True),
        ("train", "kernels", False),
        ("config", "functional", False),
        ("prepare", "observe", False),
        ("errors", "_cpu", True),
        ("runtime", "artifact", False),
        ("artifact", "runtime", True),
        ("exact", "runtime", False),
        ("runtime", "exact", True),
        ("train", "artifact", True),
        ("train", "runtime", True),
        ("search", "train", True),
        ("report", "plots", False),
        ("plots", "report", True),
        ("recipes", "report", True),
        ("cli", "train", False),
        ("train", "cli", True),
        ("__init__", "cli", False),
        ("nn", "__init__", True),
        ("cli", "__init__", False),
        ("nn", "nn", False),
    ],
)
def test_levels(importer: str, target: str, expected: bool) -> None:
    assert forbidden(importer, target) == expected


def test_a_circle_is_found() -> None:
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import rich.table", {"rich"}),
        ("from matplotlib import pyplot", {"matplotlib"}),
        ("try:\n    import triton\nexcept ImportError:\n    pass", {"triton"}),
        ("class A:\n    import onnx", {"onnx"}),
        ("def f():\n    import sklearn", set()),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import rich", {"typing"}),
        ("from . import plots", set()),
    ],
)
def test_module_level_imports_are_found(text: str, expected: set[str]) -> None:
    assert {name.partition(".")[0] for name in module_level_imports(ast.parse(text))} == expected


def test_triton_is_imported_by_kernel_files_only() -> None:
    triton, kernels = ast.parse("import triton.language as tl"), SOURCES / "kernels"
    assert needless(triton, kernels / "triton_sample.py") == []
    for place in (HERE, kernels / "sample.py", SOURCES / "triton_sample.py", SOURCES / "nn" / "triton_sample.py"):
        assert needless(triton, place) == ["triton.language"], place
    assert needless(ast.parse("import rich"), kernels / "triton_sample.py") == ["rich"]
    for text in ("from bitdial.kernels import triton_sample", "import bitdial.kernels.triton_sample",
                 "from bitdial.kernels.triton_sample import forward"):  # fmt: skip
        assert needless(ast.parse(text), kernels / "sample.py"), text
        assert needless(ast.parse(text), kernels / "triton_other.py") == [], text
        assert needless(ast.parse(f"def f():\n    {text}"), kernels / "sample.py") == [], text


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "from torch import save as s",
        "eval('1')",
        "exec('1')",
        "np.load('x', allow_pickle=True)",
        "np.load('x', allow_pickle=flag)",
    ],
)
def test_unsafe_code_is_found(text: str) -> None:
    assert unsafe(ast.parse(text), HERE)


@pytest.mark.parametrize(
    "text",
    [
        "model.eval()",
        "import torch\ntorch.compile(model)",
        "np.load('x', allow_pickle=False)",
        "from safetensors.torch import load_file, save_file",
        "executor.exec_()",
    ],
)
def test_safe_code_is_not_found(text: str) -> None:
    assert unsafe(ast.parse(text), HERE) == []


@pytest.mark.parametrize(
    "text",
    ["print(1)", "import argparse", "from argparse import ArgumentParser", "sys.exit(1)", "exit()",
     "raise SystemExit", "raise SystemExit(2)", "options = sys.argv[1:]", "sys.stdout.write('x')"],
)  # fmt: skip
def test_talking_is_found(text: str) -> None:
    assert talks(ast.parse(text), HERE)


@pytest.mark.parametrize("text", ["log.info('x')", "raise ValueError", "console.print(1)"])
def test_silence_is_not_found(text: str) -> None:
    assert talks(ast.parse(text), HERE) == []
