"""Models from everywhere through the whole path: prepare, two training steps, save, load, every width, ONNX.

    python benchmarks/gallery.py                    # ours, people's own, transformers'; results/gallery.json, the page
    python benchmarks/gallery.py --timm             # timm's and torchvision's too, where they are installed
    python benchmarks/gallery.py --only UNet BERT   # some of them, anew
    python benchmarks/gallery.py --page             # docs/gallery.md from the rows alone

Every model is small, has random weights and runs in a process of its own kind: one that crashes ends neither the run
nor the other rows. Rows are written as they come, and a run goes on where another was stopped (`--anew` begins again).

`quantised_share` is the share of the model's parameters that are integers in the file. `trained_equals_live` says that
the loaded model gave the outputs of the trained one at every width, bit for bit. `integer_equals_exact` says that of
integer kernels and `code_exact`. `onnx_max_difference` is the largest difference between outputs of onnxruntime and of
the live model, in shares of the largest output; `exact_difference` is the same for `code_exact`, the yardstick: a value
on the border between two codes may fall on either side when a float sum is taken in another order.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import logging
import multiprocessing
import platform
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gallery_page
import torch
from gallery_models import OURS, OWN, TIMM, TORCHVISION, TRANSFORMERS, Case
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitdial import (
    BitdialError,
    JointStep,
    QuantConfig,
    TrainConfig,
    code_exact,
    describe,
    export_onnx,
    load,
    load_trainable,
    onnx_session_options,
    prepare,
    save,
    set_bits,
)
from bitdial.dial.dial import dialled_layers
from bitdial.files.atomic import write_json
from bitdial.prepare.model_call import call
from bitdial.prepare.report import ModelReport

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "results" / "gallery.json"
BIT_CHOICES = (8, 6, 4, 3, 2)
ONNX_WIDTHS = (8, 4)
SOURCES: dict[str, dict[str, Callable[[], Case]]] = {
    "bitdial": OURS,
    "own": OWN,
    "transformers": TRANSFORMERS,
    "timm": TIMM,
    "torchvision": TORCHVISION,
}
OPTIONAL = ("timm", "torchvision")  # sources that --timm asks for
PACKAGES = ("transformers", "timm", "torchvision", "onnx", "onnxruntime", "onnxscript")
Row = dict[str, Any]


# --- one model ------------------------------------------------------------------------------------


def measure(source: str, name: str, seed: int = 0) -> Row:
    """Take one model through every step; what cannot be done is in the row's `problems`."""
    began = time.perf_counter()
    row: Row = {
        "model": name, "source": _source(source), "quantised_share": None, "trained_equals_live": None,
        "onnx_max_difference": None, "note": "", "problems": [], "warnings": [],
    }  # fmt: skip
    with _heard(row["warnings"]), tempfile.TemporaryDirectory() as folder:
        _through(row, SOURCES[source][name], Path(folder) / "model.safetensors", seed)
    row["seconds"] = round(time.perf_counter() - began, 1)
    row["note"] = gallery_page.note(row)
    return row


def _through(row: Row, make: Callable[[], Case], path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    case = make()
    row["parameters"] = sum(p.numel() for p in case.model.parameters())
    prepared = live = None
    with _step(row, "prepare"):
        prepared = _prepare(row, case)
    if prepared is None:
        return
    with _step(row, "train"):
        _train(prepared, case)
    torch.manual_seed(seed + 1)
    skeleton = make().model  # its weights are other ones
    with _step(row, "save and load"):
        save(prepared.eval(), path)
        row["file_bytes"] = path.stat().st_size
        live = load(path, skeleton, kernels="float")
    if live is None:
        return
    with _step(row, "compare"):
        row["trained_equals_live"] = _same(prepared, live, case)
        row["trainable_equals_live"] = _same(load_trainable(path, skeleton).eval(), live, case)
    with _step(row, "integer kernels"):
        exact = code_exact(live)
        row["exact_difference"] = _most([_difference(a, b) for a, b in _outputs(exact, live, case, part=True)])
        row["integer_equals_exact"] = _same(load(path, skeleton, kernels="integer"), exact, case)
    if case.config.get("activations") == "float":
        with _step(row, "packed kernels"):
            packed = load(path, skeleton, kernels="packed")
            row["packed_difference"] = _most([_difference(a, b) for a, b in _outputs(packed, live, case, part=True)])
    with _step(row, "onnx"):
        differences = [_onnx(live, case, bits, path.with_suffix(".onnx")) for bits in ONNX_WIDTHS]
        row["onnx_max_difference"] = _most(differences)


def _prepare(row: Row, case: Case) -> nn.Module:
    """Prepare, and note what became of the layers; the float model must stay what it was."""
    model = case.model.eval()
    with torch.no_grad():
        before, part = call(model, case.inputs), _part(model, case)
    batches = [case.inputs] if isinstance(case.inputs, list) else case.inputs  # a list of images is one batch
    prepared = prepare(model, QuantConfig(bit_choices=BIT_CHOICES, **case.config), batches)
    layers = dialled_layers(prepared)
    weights = {layer.weight: layer.weight.numel() for layer in layers.values()}
    row["quantised_share"] = round(sum(weights.values()) / row["parameters"], 4)
    row["quantised_layers"] = len(layers)
    report = describe(prepared)
    row["float_layers"] = _float_layers(report)
    row["switched_norms"] = len(report.switched_norms)
    row["norms"] = row["switched_norms"] + len(report.kept_norms)
    with torch.no_grad():
        if not _equal(before, call(model, case.inputs)):
            raise AssertionError("prepare changed the float model")
        row["difference_at_8_bits"] = _difference(_part(prepared.eval(), case), part)
    return prepared


def _part(model: nn.Module, case: Case) -> Any:
    """What differences are taken of."""
    return call(model.get_submodule(case.part), case.compared)


def _float_layers(report: ModelReport) -> dict[str, list[str]]:
    """The modules that keep a matrix in float, by the reason that `prepare` gives."""
    found: dict[str, list[str]] = {}
    for layer in report.float_layers:
        reason = layer.reason.partition(";")[0].partition(":")[0].partition(", which")[0]
        found.setdefault(f"{layer.type} {reason}", []).append(layer.name)
    return found


def _train(prepared: nn.Module, case: Case) -> None:
    step = JointStep(prepared, TrainConfig(epochs=1, lr=1e-3), steps_per_epoch=2, loss=case.loss)
    for _ in range(2):
        step(case.inputs, case.targets)
    step.end_epoch()


def _outputs(left: nn.Module, right: nn.Module, case: Case, *, part: bool = False) -> Iterator[tuple[Any, Any]]:
    """What both models give, or their part, width by width."""
    for bits in BIT_CHOICES:
        set_bits(left, bits)
        set_bits(right, bits)
        with torch.no_grad():
            yield (
                (_part(left, case), _part(right, case)) if part else tuple(call(m, case.inputs) for m in (left, right))
            )


def _same(left: nn.Module, right: nn.Module, case: Case) -> bool:
    pairs = list(_outputs(left, right, case))
    if _equal(pairs[0][0], pairs[-1][0]):
        raise AssertionError("the outputs at the highest and at the lowest width are the same")
    return all(_equal(a, b) for a, b in pairs)


def _onnx(live: nn.Module, case: Case, bits: int, path: Path) -> float:
    import onnxruntime

    set_bits(live, bits)
    export_onnx(live, path, case.compared, bits=bits, part=case.part or None)
    options = onnx_session_options()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    inputs = case.compared
    given = inputs if isinstance(inputs, dict) else dict(zip(names, tree_leaves(inputs), strict=True))
    found = session.run(None, {name: given[name].numpy() for name in names})
    with torch.no_grad():
        return _difference([torch.from_numpy(array) for array in found], _part(live, case))


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _equal(left: Any, right: Any) -> bool:
    a, b = _tensors(left), _tensors(right)
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _difference(found: Any, expected: Any) -> float:
    """The largest difference, in shares of the largest expected number."""
    pairs = list(zip(_tensors(found), _tensors(expected), strict=True))
    return float(f"{max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs):.2g}")


def _most(values: list[float]) -> float:
    return max(values, key=lambda v: float("inf") if v != v else v)


@contextmanager
def _step(row: Row, name: str) -> Iterator[None]:
    """Note what a step raises: 'refused' if bitdial meant to, else 'crashed', with the place."""
    try:
        yield
    except BitdialError as problem:
        row["problems"].append({"step": name, "refused": f"{type(problem).__name__}: {problem}"})
    except Exception as problem:  # whatever a model or a package does
        frames = [f for f in traceback.extract_tb(problem.__traceback__) if "bitdial" in f.filename]
        place = f"{Path(frames[-1].filename).name}, {frames[-1].name}" if frames else ""
        text = f"{type(problem).__name__}: {(str(problem).strip() or '-').splitlines()[0][:300]}"
        row["problems"].append({"step": name, "crashed": text, "place": place})


@contextmanager
def _heard(messages: list[str]) -> Iterator[None]:
    """Collect what bitdial warns of."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger("bitdial"), Listener(logging.WARNING)
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)


def _source(source: str) -> str:
    if source in ("bitdial", "own"):
        return source
    try:
        return f"{source} {importlib.metadata.version(source)}"
    except importlib.metadata.PackageNotFoundError:
        return source


# --- all of them ----------------------------------------------------------------------------------


def measure_all(wanted: list[tuple[str, str]], seed: int, jobs: int, limit: float) -> Iterator[Row]:
    """Rows as they come; a model whose process dies, or takes longer than `limit` seconds, has a row that says so."""
    todo: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    done: queue.SimpleQueue[Row] = queue.SimpleQueue()
    for each in wanted:
        todo.put(each)
    for _ in range(jobs):
        threading.Thread(target=_work, args=(todo, done, seed, limit), daemon=True).start()
    for _ in wanted:
        yield done.get()


def _work(todo: Any, done: Any, seed: int, limit: float) -> None:
    """Measure, in one other process at a time, what is to do."""
    pool = None
    while True:
        try:
            source, name = todo.get_nowait()
        except queue.Empty:
            break
        pool = pool or _new_pool()
        try:
            done.put(pool.submit(measure, source, name, seed).result(limit))
        except Exception as problem:  # the process died, hangs, or the model cannot even be built
            crashed = {"step": "build", "crashed": f"{type(problem).__name__}: {problem}"}
            row = {"model": name, "source": _source(source), "quantised_share": None, "trained_equals_live": None,
                   "onnx_max_difference": None, "problems": [crashed], "warnings": []}  # fmt: skip
            done.put(row | {"note": gallery_page.note(row)})
            if isinstance(problem, (concurrent.futures.BrokenExecutor, TimeoutError)):
                for process in list(pool._processes.values()):
                    process.terminate()
                pool = None
    if pool is not None:
        pool.shutdown()


def _new_pool() -> concurrent.futures.ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(
        1, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    )


def main(arguments: list[str] | None = None) -> int:
    """Run what is wanted and not there yet, write the rows and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm", action="store_true", help="timm's and torchvision's models too")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="these models, anew")
    parser.add_argument("--anew", action="store_true", help="all rows, not only those that are missing")
    parser.add_argument("--page", action="store_true", help="write the page from the rows, run nothing")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    record = json.loads(options.out.read_text()) if options.out.exists() else {"rows": []}
    if not options.page:
        _run(options, record)
    if options.out == OUT:
        gallery_page.write(record)
    return 0


def _run(options: argparse.Namespace, record: dict[str, Any]) -> None:
    names = [(s, n) for s, models in SOURCES.items() if s not in OPTIONAL or options.timm for n in models]
    if options.only:
        names = [(s, n) for s, models in SOURCES.items() for n in models if n in options.only]
        if missing := set(options.only) - {n for _, n in names}:
            sys.exit(f"no such model: {', '.join(sorted(missing))}")
    kept = {} if options.anew else {(r["source"].split()[0], r["model"]): r for r in record["rows"]}
    wanted = [each for each in names if options.only or each not in kept]
    order = [(s, n) for s, models in SOURCES.items() for n in models]
    head = {
        "command": "python benchmarks/gallery.py --timm", "seed": options.seed, "bit_choices": list(BIT_CHOICES),
        "device": f"CPU, 1 thread a model, {platform.machine()}", "versions": record.get("versions", {}) | _versions(),
    }  # fmt: skip
    for row in measure_all(wanted, options.seed, options.jobs, options.limit):
        kept[row["source"].split()[0], row["model"]] = row
        record.clear()
        record.update(head, rows=[kept[key] for key in order if key in kept])
        write_json(options.out, record)
        print(gallery_page.line(row), flush=True)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
