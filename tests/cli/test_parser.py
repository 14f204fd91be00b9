"""The command line without PyTorch: what it says of the library is what the library says."""

import argparse
import dataclasses
import re
import subprocess
import sys
from typing import Any

import pytest

from bitdial import recipes
from bitdial.calibrate.config import EFFORTS
from bitdial.cli import (
    calibrate,
    calibrate_options,
    detection_options,
    export,
    image_options,
    language_options,
    llm_options,
    mixed_options,
    parser,
    train_options,
)
from bitdial.cli.parser import build_parser
from bitdial.export.onnx import OPSETS
from bitdial.functional import SCHEMES, TIE_RULES
from bitdial.images.settings import INTERPOLATIONS, ORDERS
from bitdial.language.tasks import TASKS
from bitdial.live.kernel_choice import KERNELS
from bitdial.nn.rotation import RESIDUAL
from bitdial.planning import OBJECTIVES
from bitdial.planning.cost import QUANTITIES
from bitdial.prepare.config import SCALE_GRADIENTS, STARTS
from bitdial.recipes import RecipeOptions
from bitdial.recipes.detector_options import METHODS, DetectorOptions
from bitdial.recipes.llm_options import LlmOptions
from bitdial.train.alrs import READINGS
from bitdial.train.config import DISTILLATIONS, OPTIMIZERS, SAMPLINGS, SCALE_STATES, UPDATES

COMMANDS = [
    "demo",
    "train",
    "calibrate",
    "calibrate-llm",
    "eval",
    "eval-llm",
    "inspect",
    "switch",
    "export",
    "repack",
    "sensitivity",
    "search",
    "search-llm",
    "pareto",
]


def parser_of(command: str) -> argparse.ArgumentParser:
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert list(commands.choices) == COMMANDS
    return commands.choices[command]


def test_choices_are_those_of_the_library() -> None:
    assert parser.KERNELS == KERNELS
    assert parser.OPSETS == OPSETS
    assert tuple(export.TYPES) == parser.INPUT_TYPES
    assert tuple(calibrate.FIRST_LAST) == calibrate_options.FIRST_LAST
    assert calibrate_options.EFFORTS == EFFORTS
    assert {*llm_options.ROTATIONS, None} == {*RESIDUAL}
    assert image_options.ORDERS == ORDERS
    assert tuple(TASKS) == language_options.TASKS
    assert image_options.INTERPOLATIONS == INTERPOLATIONS
    assert mixed_options.OBJECTIVES == OBJECTIVES
    assert tuple(mixed_options.BUDGETS) == QUANTITIES
    for name, known in {
        "RECIPES": recipes.RECIPES, "TEACHERS": recipes.TEACHERS, "NORM_FORMS": recipes.NORM_FORMS,
        "SCHEMES": SCHEMES, "TIE_RULES": TIE_RULES, "STARTS": STARTS, "SCALE_GRADIENTS": SCALE_GRADIENTS,
        "OPTIMIZERS": OPTIMIZERS, "UPDATES": UPDATES, "READINGS": READINGS, "SCALE_STATES": SCALE_STATES,
        "DISTILLATIONS": DISTILLATIONS, "SAMPLINGS": SAMPLINGS,
    }.items():  # fmt: skip
        assert getattr(train_options, name) == tuple(known), name


def test_options_of_train_are_those_of_recipes() -> None:
    """Every option has a field, every field but three an option; a default that the help names is the field's."""
    fields = {f.name: f for f in dataclasses.fields(RecipeOptions)}
    options = {a.dest: a for a in parser_of("train")._actions if a.dest not in ("help", "recipe")}
    assert set(fields) - set(options) == {"name", "command", "progress"}
    assert set(options) <= set(fields)
    assert parser_of("train").parse_args(["digits", "--out", "x"]).__dict__.keys() == {"recipe", "out"}
    said = {}
    for name, action in options.items():
        assert action.help
        found: Any = re.search(r"\(default: ([\w.-]+)\)", action.help)
        default = fields[name].default
        if found and default is not None and default not in (0, False):
            said[name] = str(default)
            assert found[1] == str(default), name
    assert len(said) >= 15
    assert "(default: 0)" in str(options["seed"].help)


def test_options_of_train_llm_are_those_of_the_recipe() -> None:
    """Every option has a field, every field but two an option; a default that the help names is the field's."""
    fields = {f.name: f for f in dataclasses.fields(LlmOptions)}
    llm: Any = parser_of("train").apart["llm"]  # type: ignore[attr-defined]
    options = {a.dest: a for a in llm._actions if a.dest != "help"}
    assert set(fields) - set(options) == {"command", "progress"}
    assert set(options) <= set(fields)
    given = build_parser().parse_args(["train", "llm", "--model", "m", "--text", "a", "b", "--out", "x"])
    assert given.__dict__.keys() == {"action", "recipe", "verbose", "model", "text", "out"}
    said = 0
    for name, action in options.items():
        found: Any = re.search(r"\(default: ([\w.,-]+)\)", action.help)
        default = fields[name].default
        if found and default and default is not dataclasses.MISSING:
            text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            assert found[1] == text, name
            said += 1
    assert said >= 13


def test_options_of_train_nuclei_maskrcnn_are_those_of_the_recipe() -> None:
    """Every option but --dry-run has a field, every field but two an option; defaults that the help names are its."""
    fields = {f.name: f for f in dataclasses.fields(DetectorOptions)}
    detector: Any = parser_of("train").apart["nuclei-maskrcnn"]  # type: ignore[attr-defined]
    options = {a.dest: a for a in detector._actions if a.dest not in ("help", "dry_run")}
    assert set(fields) - set(options) == {"command", "progress"}
    assert set(options) <= set(fields)
    assert detection_options.METHODS == METHODS
    said = 0
    for name, action in options.items():
        found: Any = re.search(r"\(default: ([\w.,:-]+)\)", action.help)
        default = fields[name].default
        if found and default and default is not dataclasses.MISSING:
            text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
            assert found[1] == text, name
            said += 1
    assert said >= 18
    with pytest.raises(SystemExit):
        build_parser().parse_args(["train", "nuclei-maskrcnn", "--out", "x"])  # neither --data nor --dry-run


LIGHT = """
import sys
import bitdial.cli
for words in (["--help"], ["--version"], ["train", "llm", "--help"], *([name, "--help"] for name in sys.argv[1:])):
    try:
        bitdial.cli.main(words)
    except SystemExit as stop:
        assert stop.code == 0, words
found = {name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "rich", "safetensors", "filelock"}
assert not found, found
"""


def test_help_imports_no_torch() -> None:
    run = subprocess.run([sys.executable, "-c", LIGHT, *COMMANDS], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("usage: bitdial") == len(COMMANDS) + 2


@pytest.mark.parametrize(
    ("words", "problem", "command"),
    [
        ("", "the following arguments are required: COMMAND", ""),
        ("trian digits", "argument COMMAND: 'trian' is not known, did you mean train?", ""),
        ("xyz", "argument COMMAND: 'xyz' is not known; choose one of demo, train, calibrate, calibrate-llm, ", ""),
        ("train", "the following arguments are required: RECIPE, --out", "train"),
        ("train digit --out x", "argument RECIPE: 'digit' is not known, did you mean digits?", "train"),
        ("train digits --ouut x", "there is no option --ouut, did you mean --out?", "train"),
        ("train digits --out x --sceme=lsq", "there is no option --sceme, did you mean --scheme?", "train"),
        ("train digits --out x --qqq", "there is no option --qqq\n", "train"),
        (
            "train digits --out x --scheme nestd",
            "argument --scheme: 'nestd' is not known, did you mean nested?",
            "train",
        ),
        ("train digits --out x --ties evn", "argument --ties: 'evn' is not known, did you mean even?", "train"),
        ("train digits --out x --epochs 0", "argument --epochs: '0' is not a whole number of at least 1", "train"),
        ("train digits --out x --seed -1", "argument --seed: '-1' is not a whole number from 0 to 2147483647", "train"),
        ("train llm --model m --out x", "the following arguments are required: --text", "train llm"),
        ("train llm --model m --lenght 3", "there is no option --lenght, did you mean --length?", "train llm"),
        ("inspect a b", "this is too much: b", "inspect"),
        ("search x --input 3xx2", "argument --input: '3xx2' is not a shape such as 3x32x32", "search"),
        ("eval x --mean 1,2", "argument --mean: '1,2' is not three numbers with commas", "eval"),
        ("eval x --resize -1", "argument --resize: '-1' is not a whole number of at least 1", "eval"),
        ("export x", "one of the arguments --onnx --hf --compressed-tensors --gguf is required", "export"),
    ],
)
def test_wrong_usage_is_said_in_two_lines(
    capsys: pytest.CaptureFixture[str], words: str, problem: str, command: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        build_parser().parse_args(words.split())
    assert stop.value.code == 2
    prog, error = f"bitdial {command}".strip(), capsys.readouterr().err
    assert error.startswith(f"{prog}: {problem}")
    assert error.endswith(f"\nFor help: {prog} --help\n")
    assert error.count("\n") == 2
