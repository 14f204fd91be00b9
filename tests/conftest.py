"""What all tests share."""

import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Processes that tests start see this tree too, installed or not.
ROOT = Path(__file__).resolve().parent.parent
SOURCE = str(ROOT / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])


def quicken_the_interpreter() -> None:
    """Spare Triton's interpreter two things that come to nothing and take half of its time.

    It rewires its language at every call from one kernel function to another; after the first of a launch there is
    nothing left to rewire. And it computes whether integers overflow, which it only looks at if it debugs. In a Triton
    that does these in another way, nothing is changed.
    """
    from triton.runtime import interpreter

    names = ("_patch_lang", "_LangPatchScope", "GridExecutor", "interpreter_builder", "tl")
    if not all(hasattr(interpreter, name) for name in names):
        return
    builder = interpreter.interpreter_builder
    if getattr(builder.options, "sanitize_overflow", False) and not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    rewire, launch, language = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter.tl
    rewired: set[tuple[bool, bool]] = set()  # in this launch

    @functools.cache
    def visible(function: Any) -> tuple[bool, bool]:
        """Whether a function sees the language, and its core: what is rewired depends on these."""
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return language in modules, language.core in modules

    def rewire_once(function: Any) -> Any:
        if visible(function) in rewired:
            return interpreter._LangPatchScope()
        rewired.add(visible(function))
        return rewire(function)

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        rewired.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = rewire_once, launch_anew


if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    quicken_the_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only kernels can run where there are none; begin with what takes a minute, so that it ends in time."""
    kernels_run = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        marker = item.get_closest_marker("interpreter")
        if marker is not None and marker.kwargs.get("only") and not kernels_run:
            item.add_marker(pytest.mark.skip(reason="runs on a GPU or under the interpreter; see test_interpreter.py"))
    items.sort(key=lambda item: "under_the_interpreter" not in item.name)


@dataclasses.dataclass
class StandIn:
    """In the place of `bitdial.calibrate`, where a test is about what is around it: changes nothing, reports errors.

    `stop` ends the next call after its checkpoint is written, as a kill would; `calls` and `resumed` count.
    """

    stop: BaseException | None = None
    calls: int = 0
    resumed: int = 0

    def __post_init__(self) -> None:
        self.CalibrateConfig = lambda effort: types.SimpleNamespace(effort=effort)

    def calibrate(self, model: Any, batches: Any, config: Any, *, checkpoint: Path, progress: bool = True) -> Any:
        """Two walks over the batches, one block for each layer."""
        self.calls += 1
        if checkpoint.exists():
            self.resumed += 1
        else:
            assert [len(batch) for batch in batches] == [len(batch) for batch in batches]
            checkpoint.write_text("half")
        if self.stop is not None:
            stop, self.stop = self.stop, None
            raise stop
        checkpoint.unlink()
        widths = {8: 1e-4, 4: 1e-2}
        block = types.SimpleNamespace(
            name="fc", layers=("fc",), error=widths, error_before={8: float("nan")}, seconds=1.0
        )
        facts = {"effort": config.effort, "samples": 3, "steps": ("norms",), "warnings": ("mind this",), "seconds": 2.0}
        return types.SimpleNamespace(blocks=[block], **facts)


@pytest.fixture
def stand_in_calibrate(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """`bitdial.calibrate` for tests of what is around it."""
    made = StandIn()
    monkeypatch.setitem(sys.modules, "bitdial.calibrate", made)
    return made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit for bit comparisons need one thread count; tiny tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without what was compiled before, and nothing left behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on a GPU this imports modules of torch that warn
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()
