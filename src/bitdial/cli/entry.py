"""Where the command line begins and ends: usage in two lines, every error explained in one."""

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence

from bitdial.cli.allocator import keep_freed_memory
from bitdial.cli.detection_options import DETECTOR
from bitdial.cli.llm_options import LLM
from bitdial.cli.parser import build_parser
from bitdial.cli.usage import printable
from bitdial.errors import BitdialError, ConfigError

RESUMED = ("train", "calibrate", "calibrate-llm")  # commands that go on from what was saved
# Commands whose inputs are so much of their usage that what is wrong with them is 2.
ANSWERED_AS_USAGE = ("calibrate", "calibrate-llm", "eval-llm", "search-llm", f"train {LLM}", f"train {DETECTOR}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted."""
    if arguments is None:  # the process is this command's
        keep_freed_memory()
        arguments = sys.argv[1:]
    options = build_parser().parse_args(arguments)
    options.command = shlex.join(["bitdial", *arguments])
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        _action(options.action)(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ConfigError as problem:
        recipe = getattr(options, "recipe", None)
        command = f"train {recipe}" if recipe in (LLM, DETECTOR) else options.action
        if command not in ANSWERED_AS_USAGE:
            return _explain(problem)
        name = f"bitdial {command}"
        print(f"{name}: {_in_one_line(problem)}\nFor help: {name} --help", file=sys.stderr)
        return 2
    except (BitdialError, OSError) as problem:
        return _explain(problem)
    except KeyboardInterrupt as stop:
        goes_on = "; run the same command again to go on from what was saved" if options.action in RESUMED else ""
        print(f"bitdial: {str(stop) or f'interrupted{goes_on}'}", file=sys.stderr)
        return 130
    return 0


def _explain(problem: BaseException) -> int:
    print(f"bitdial: {_in_one_line(problem)}", file=sys.stderr)
    return 1


def _in_one_line(problem: BaseException) -> str:
    return printable(re.sub(r"\s*\n\s*", " ", str(problem)).strip())


def _action(name: str) -> Callable[[argparse.Namespace], None]:
    """What a command does; imported once it is clear that there is something to do, for PyTorch takes a second."""
    from bitdial.cli import (
        calibrate,
        calibrate_llm,
        demo,
        evaluate,
        export,
        inspection,
        language,
        mixed,
        repack,
        search_llm,
        train,
    )

    return {
        "demo": demo.run,
        "train": train.run,
        "calibrate": calibrate.run,
        "calibrate-llm": calibrate_llm.run,
        "eval": evaluate.run_eval,
        "eval-llm": language.run,
        "inspect": inspection.run,
        "switch": evaluate.run_switch,
        "export": export.run,
        "repack": repack.run,
        "sensitivity": mixed.run_sensitivity,
        "search": mixed.run_search,
        "search-llm": search_llm.run,
        "pareto": mixed.run_pareto,
    }[name]
