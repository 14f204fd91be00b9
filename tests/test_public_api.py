"""The public names, spelled out: a change here is a change for every user, and belongs into the CHANGELOG."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bitdial

PUBLIC = [
    "ArrayData",
    "Artifact",
    "BitPlan",
    "BitdialError",
    "CalibrateConfig",
    "CalibrationReport",
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "Ema",
    "ImageBatches",
    "ImageSettings",
    "ImageViews",
    "InstanceFolder",
    "JointStep",
    "LayerOutputs",
    "OwnLosses",
    "QuantConfig",
    "Rule",
    "Sensitivity",
    "Shift",
    "TensorBoard",
    "TokenData",
    "TrainConfig",
    "__version__",
    "accuracy",
    "add_transitions",
    "at_bits",
    "batched",
    "build_model",
    "calibrate",
    "candidates",
    "code_exact",
    "decode_graphs",
    "describe",
    "detection_metrics",
    "evaluate",
    "evaluate_language",
    "evaluate_plans",
    "export_compressed_tensors",
    "export_gguf",
    "export_onnx",
    "export_pretrained",
    "file_parts",
    "get_bits",
    "grow",
    "hessian_trace",
    "joint_trainer",
    "load",
    "load_checkpoint",
    "load_pretrained",
    "load_trainable",
    "measure_costs",
    "measured_search",
    "narrow",
    "onnx_session_options",
    "pareto_front",
    "perplexity",
    "prepare",
    "quantized_cache",
    "read_artifact",
    "read_questions",
    "recalibrate_norms",
    "relative_error",
    "repack",
    "resident_bytes",
    "rotate",
    "save",
    "save_checkpoint",
    "search",
    "set_bits",
    "speculate",
    "token_rows",
    "tokenize_text",
    "train",
    "view_at_bits",
]
PACKAGE = Path(bitdial.__file__).parent
HERE = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}  # other processes test this tree too
OPTIONAL = (
    "rich",
    "matplotlib",
    "sklearn",
    "triton",
    "highspy",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "transformers",
    "gguf",
    "tensorboard",
    "PIL",
)


def test_the_public_names() -> None:
    assert sorted(bitdial.__all__) == PUBLIC
    assert len(set(bitdial.__all__)) == len(bitdial.__all__)
    for name in PUBLIC:
        assert getattr(bitdial, name) is not None


def test_nothing_else_looks_public() -> None:
    """Besides its own modules, which `import bitdial` binds, the package holds no public name."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    found = {name for name in vars(bitdial) if not name.startswith("_")}
    assert found - set(PUBLIC) - modules == {"guard_onednn"} & found


def documented(node: ast.AST) -> bool:
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
    return bool((ast.get_docstring(node) or "").strip())


def test_every_module_and_every_public_function_and_class_says_what_it_is() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 300
    silent = []
    for path in paths:
        tree, place = ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(PACKAGE))
        silent += [] if documented(tree) else [place]
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if public and not node.name.startswith("_") and not documented(node):
                silent.append(f"{place}: {node.name}")
    assert silent == []


@pytest.mark.parametrize("name", [name for name in PUBLIC if not name.startswith("_")])
def test_public_objects_and_their_methods_are_documented(name: str) -> None:
    thing = getattr(bitdial, name)
    assert (inspect.getdoc(thing) or "").strip()
    if not inspect.isclass(thing):
        return
    assert not (thing.__doc__ or "").startswith(f"{name}("), "that is the text a dataclass makes up"
    for key, member in vars(thing).items():
        if not key.startswith("_") and (inspect.isroutine(member) or isinstance(member, property | classmethod)):
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            assert (function.__doc__ or "").strip(), f"{name}.{key} has no docstring"


def test_public_functions_are_annotated() -> None:
    for name in PUBLIC:
        thing = getattr(bitdial, name)
        if inspect.isfunction(thing):
            signature = inspect.signature(thing)
            assert signature.return_annotation is not inspect.Signature.empty, name
            assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values()), name


def test_importing_is_light() -> None:
    script = f"""
import sys
import torch
before = set(sys.modules)
import bitdial
from bitdial import *
print(*sorted({{m.partition(".")[0] for m in set(sys.modules) - before}} & {set(OPTIONAL)!r}))
print(*sorted({{m.partition(".")[0] for m in sys.modules}} & {{"rich", "matplotlib", "sklearn", "highspy"}}))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=HERE)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def test_type_checkers_see_what_users_get() -> None:
    """The imports for type checkers name each public object, and where it is imported from when it is asked for."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == bitdial._homes
    assert sorted([*seen, "__version__"]) == PUBLIC


LAZY = """
import sys
import bitdial
assert bitdial.__version__ and "train" in dir(bitdial)
assert "torch" not in sys.modules, "it is imported with the first name"
try:
    bitdial.nothing
except AttributeError as problem:
    assert str(problem) == "module 'bitdial' has no attribute 'nothing'"
from bitdial.train import TrainConfig  # folders of these names are imported first ...
import bitdial.prepare.config
from bitdial import functional, train
for function in (bitdial.train, bitdial.prepare, train):
    assert callable(function), "... and do not take the functions' place"
assert bitdial.TrainConfig is TrainConfig and functional.__name__ == "bitdial.functional"
names = {}
exec("from bitdial import *", names)
assert set(bitdial.__all__) <= set(names) and names["train"] is train
bitdial.train = "a user's own"
assert bitdial.train == "a user's own"
"""


def test_names_are_imported_when_they_are_asked_for_and_in_silence() -> None:
    command = [sys.executable, "-W", "error", "-c", LAZY]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=HERE)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
