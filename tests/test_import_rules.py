"""The shape of the sources, read with ast: imports go down only, and a few things are not done.

A new folder fails here until it has a place in ORDER: that is the point of the table.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent / "src" / "bitdial"

# Folders and modules in the order in which data flows. Each may import from the lines above its own; within a line,
# only what SAME_LINE names. Imports inside functions count like any other.
ORDER: list[list[str]] = [
    ["errors", "_cpu", "_version", "_package", "_when_imported"],
    ["config"],
    ["functional", "dial", "files", "models"],
    ["kernels", "images"],
    ["nn", "graph"],
    ["prepare"],
    ["train", "calibrate", "sensitivity", "planning", "artifact"],
    ["live"],
    ["export"],
    ["language"],
    ["recipes", "report"],
    ["demos"],
    ["cli"],
    ["__main__"],
    ["__init__"],
]
LEVELS = {unit: level for level, line in enumerate(ORDER) for unit in line}
SAME_LINE = {("train", "calibrate"), ("train", "sensitivity"), ("planning", "sensitivity"), ("artifact", "sensitivity")}
THROUGH_THE_TOP = LEVELS["export"]  # from here on, `from bitdial import load` will do

# What `pip install bitdial` brings; everything else is optional and imported where it is needed.
REQUIRED = {"torch", "numpy", "safetensors", "filelock"}
# A file of kernels is imported by the function that needs it, so it may import their compiler at once.
KERNEL_COMPILERS = {"triton"}
KERNEL_FILES = SOURCES / "kernels" / "triton"
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
        return LEVELS[importer] < THROUGH_THE_TOP
    if LEVELS[importer] != LEVELS[target]:
        return LEVELS[importer] < LEVELS[target]
    return (importer, target) not in SAME_LINE


def module_name(path: Path) -> str:
    """`nn/layers.py` -> `bitdial.nn.layers`, `nn/__init__.py` -> `bitdial.nn`."""
    parts = path.relative_to(SOURCES).with_suffix("").parts
    return ".".join(("bitdial", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def module_graph(paths: list[Path]) -> dict[str, set[str]]:
    """The modules that each module imports, at any depth; a name that is no module counts for the module it is of."""
    names = {module_name(path) for path in paths}
    graph: dict[str, set[str]] = {}
    for path in paths:
        found = set()
        for name, _ in imported(parse(path), path):
            if name.partition(".")[0] == "bitdial":
                found.add(name if name in names else name.rpartition(".")[0])
        graph[module_name(path)] = found
    return graph


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
    if KERNEL_FILES in path.parents:
        return sorted(n for n in names if n.partition(".")[0] not in known | KERNEL_COMPILERS)
    return sorted(n for n in names if n.partition(".")[0] not in known or n.startswith("bitdial.kernels.triton."))


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


SCHEME_FIELDS = {"first", "second", "scale", "middle", "phase"}


def scheme_fields(tree: ast.AST) -> list[str]:
    """Fields of a `Scheme` that are read where one is known: from `scheme_of`, a `rule`, or an annotation."""
    known = {"rule"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None and _is_scheme(node.value, known):
                known |= {ast.unparse(target) for target in targets}
        if isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation).endswith("Scheme"):
            known.add(node.arg)
    read = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr in SCHEME_FIELDS]
    return [f"{n.lineno}: {ast.unparse(n)}" for n in read if _is_scheme(n.value, known)]


def _is_scheme(node: ast.AST, known: set[str]) -> bool:
    text = ast.unparse(node)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] == "scheme_of"
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value).rpartition(".")[2] == "SCHEMES"
    return text in known or text.endswith((".rule", ".scheme"))


def class_assignments(tree: ast.AST) -> list[str]:
    """Where an object is given another class."""
    found = []
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Attribute) and t.attr == "__class__" for t in targets):
            found.append(f"{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and "setattr" in ast.unparse(node.func) and "'__class__'" in ast.unparse(node):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


# --- the rules ----------------------------------------------------------------------------------

PATHS = files()


def in_files(found: Callable[[ast.Module, Path], list[str]], paths: list[Path] = PATHS) -> list[str]:
    """What `found` finds, each with its file."""
    return [f"{path.relative_to(SOURCES)}: {one}" for path in paths for one in found(parse(path), path)]


def test_every_module_has_a_level() -> None:
    missing = sorted({unit_of(path) for path in PATHS} - set(LEVELS))
    assert not missing, f"give {missing} a level in ORDER, after thinking about which"


def test_imports_go_down_only() -> None:
    def wrong(tree: ast.Module, path: Path) -> list[str]:
        targets = sorted(bitdial_units(tree, path))
        unknown = [f"{t} has no level" for t in targets if t not in LEVELS]
        return unknown or [f"imports {t}" for t in targets if forbidden(unit_of(path), t)]

    assert in_files(wrong) == []


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that are left when those without unvisited imports are taken away again and again."""
    left = {node: set(targets) - {node} for node, targets in graph.items()}
    while free := [node for node, targets in left.items() if not targets & set(left)]:
        for node in free:
            del left[node]
    return sorted(left)


def test_there_is_no_circle_of_modules() -> None:
    graph = module_graph(PATHS)
    del graph["bitdial"]  # nobody below the top imports it: the rule above
    assert find_circle(graph) == []


def test_folders_do_not_import_in_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path in PATHS:
        if unit_of(path) != "__init__":
            graph.setdefault(unit_of(path), set()).update(bitdial_units(parse(path), path))
    assert find_circle(graph) == []


def test_optional_packages_are_imported_where_they_are_needed() -> None:
    assert in_files(needless) == [], "import these inside the function that needs them"


def test_one_file_opens_images() -> None:
    """Whatever reads an image, for calibration or training, reads it in the same way."""
    found = [p for p in files() if any(n.partition(".")[0] == "PIL" for n, _ in imported(ast.parse(p.read_text()), p))]
    assert [path.relative_to(SOURCES).as_posix() for path in found] == ["images/decode.py"]


def test_nothing_is_unpickled_or_evaluated() -> None:
    assert in_files(unsafe) == []


def test_only_the_command_line_talks() -> None:
    assert in_files(talks, [path for path in PATHS if unit_of(path) not in MAY_PRINT]) == []


def test_only_functional_looks_into_schemes() -> None:
    outside = [path for path in PATHS if unit_of(path) != "functional"]
    assert in_files(lambda tree, _: scheme_fields(tree), outside) == [], "ask the scheme what follows from its fields"


def test_no_object_is_given_another_class() -> None:
    assert [str(path.relative_to(SOURCES)) for path in PATHS if class_assignments(parse(path))] == []


TESTS = Path(__file__).resolve().parent
FREE = {"integration", "golden", "benchmarks", "long"}  # folders of tests that are about no one module
# Tests of what several modules do together; think before adding one.
NO_MODULE = {
    "test_import_rules.py", "test_public_api.py", "test_readme.py", "test_interpreter.py",
    "artifact/test_dynamic.py", "artifact/test_groups.py", "export/test_torch_export.py",
    "prepare/test_kinds.py", "live/test_groups.py",
    "kernels/triton/inference/test_compiles.py", "kernels/triton/packed/test_compiles.py",
    "kernels/triton/training/test_compiles.py",
    "live/engines/integer/test_pooled_codes.py", "live/engines/packed/test_on_kernels.py",
    "report/test_browser.py", "report/test_style.py",  # of page.js and page.css
}  # fmt: skip


def mirrored(test: Path) -> bool:
    """Whether tests/a/test_b.py has a src/bitdial/a/b.py or a/b/, or is tests/a/test_a.py; `_b.py` will do."""
    folder, name = SOURCES / test.parent, test.stem.removeprefix("test_")
    places = [folder / name, folder / f"{name}.py", folder / f"_{name}.py"]
    return name == folder.name or any(place.exists() for place in places)


def test_tests_mirror_the_sources() -> None:
    tests = [path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")]
    assert len(tests) > 60
    lost = {str(t) for t in tests if t.parts[0] not in FREE and not mirrored(t)}
    assert lost - NO_MODULE == set(), "tests/a/test_b.py is for src/bitdial/a/b.py"
    assert all((TESTS / name).is_file() for name in NO_MODULE), "take it from the list"


# --- the rules on samples: each of them can fail ------------------------------------------------

HERE = SOURCES / "nn" / "sample.py"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from bitdial.dial.plan import BitPlan", {"dial"}),
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
        ("nn", "graph", True),
        ("kernels", "nn", True),
        ("kernels", "functional", False),
        ("functional", "dial", True),
        ("train", "kernels", False),
        ("config", "errors", False),
        ("config", "functional", True),
        ("errors", "_cpu", True),
        ("live", "artifact", False),
        ("artifact", "live", True),
        ("artifact", "sensitivity", False),
        ("sensitivity", "artifact", True),
        ("train", "artifact", True),
        ("train", "live", True),
        ("planning", "train", True),
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
    inside = kernels / "triton" / "packed" / "sample.py"
    assert needless(triton, inside) == []
    for place in (HERE, kernels / "sample.py", SOURCES / "triton_sample.py", SOURCES / "nn" / "triton" / "sample.py"):
        assert needless(triton, place) == ["triton.language"], place
    assert needless(ast.parse("import rich"), inside) == ["rich"]
    for text in ("from bitdial.kernels.triton.packed import linear", "import bitdial.kernels.triton.packed.linear",
                 "from bitdial.kernels.triton.packed.linear import forward"):  # fmt: skip
        assert needless(ast.parse(text), kernels / "sample.py"), text
        assert needless(ast.parse(text), inside) == [], text
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


@pytest.mark.parametrize(
    "text",
    ["if scheme_of(name).scale == 'derived': pass", "x = bf.scheme_of(s).phase", "rule = scheme_of(s)\ny = rule.first",
     "def f(s: bf.Scheme): return s.middle", "self.rule.second", "if (r := scheme_of(s)): r.phase",
     "bf.SCHEMES['nested'].second", "layer.weight_quantizer.rule.scale"],
)  # fmt: skip
def test_looks_into_schemes_are_found(text: str) -> None:
    assert scheme_fields(ast.parse(text))


@pytest.mark.parametrize(
    "text", ["scheme_of(s).nests", "layer.scale", "first, second = pair", "finish.second", "x.phase()"]
)
def test_other_fields_are_not_found(text: str) -> None:
    assert scheme_fields(ast.parse(text)) == []


@pytest.mark.parametrize("text", ["m.__class__ = A", "x = m.__class__ = A", "object.__setattr__(m, '__class__', A)",
                                  "m.__class__: type = A"])  # fmt: skip
def test_new_classes_are_found(text: str) -> None:
    assert class_assignments(ast.parse(text))
    assert class_assignments(ast.parse("a = m.__class__")) == []


def test_mirrors_are_found() -> None:
    for test in ("nn/test_layers.py", "test_cpu.py", "models/test_models.py", "live/test_engines.py"):
        assert mirrored(Path(test)), test
    for test in ("nn/test_layer.py", "test_layers.py", "nn/layers/test_nn.py"):
        assert not mirrored(Path(test)), test


@pytest.mark.parametrize("text", ["log.info('x')", "raise ValueError", "console.print(1)"])
def test_silence_is_not_found(text: str) -> None:
    assert talks(ast.parse(text), HERE) == []
