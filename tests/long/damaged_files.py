"""Damaged files through `read_artifact` and `load`: each is refused with a BitdialError, or loads and is consistent.

    python tests/long/damaged_files.py            # 100,000 files, results/reliability.json

A case is one of some thirty small artifacts (tests/long/bases.py), a third of them progressive, with one kind of damage
(tests/long/damage.py):

    bits        1 to 8 flipped bits, anywhere or in the header
    cut         the file ends early, or has more bytes at its end
    splice      bytes replaced, put in or taken out, by random ones or those of another artifact
    manifest    the manifest, or the list of parts, edited at a random place, the digest computed anew
    tensors     bytes, types or shapes of tensors changed, the digests computed anew

A file that loads must give, at every width and stored plan, finite or not, the outputs of a fresh load at that setting;
so must one that is loaded at its lowest width and then grown.
What fails the campaign: another exception, a process that dies, 30 seconds of processor time for one file, 10 minutes
by the clock (the process is ended), more than 1 GiB of memory, two different outputs. Cases are numbered:
`--first N --count 1` repeats case N. The figures so far are in the results file at every moment, so they stay if the
campaign is ended from outside; `planned` says how many files it was to be.
"""

import argparse
import faulthandler
import gc
import logging
import multiprocessing
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bases import Base, make_bases, read_bases
from campaign import counted, end, options, record
from damage import damaged
from torch import Tensor

from bitdial import BitdialError, get_bits, grow, load, read_artifact, set_bits

SECONDS = 30  # of processor time, so that other work on the machine fails no file
CLOCK_SECONDS = 600
SHARES_A_PROCESS = 20
MEMORY = 1 << 30
GOOD = ("refused", "consistent")


class TooLong(BaseException):
    """Raised where a file takes longer than SECONDS."""


@dataclass
class Found:
    """What came of some cases."""

    ends: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    growth: float = 0.0  # MiB that a process has grown by, at most
    longest: float = 0.0  # seconds of processor time for a file, at most
    seconds: float = 0.0  # of processor time for all

    def add(self, other: "Found") -> None:
        """Take in what came of other cases."""
        self.ends += other.ends
        self.failures += other.failures
        self.growth, self.longest = max(self.growth, other.growth), max(self.longest, other.longest)
        self.seconds += other.seconds

    def figures(self, planned: int, artifacts: int, began: float) -> dict[str, Any]:
        """For the results file."""
        ended = {name: sum(n for key, n in self.ends.items() if key.endswith(name)) for name in GOOD}
        return {
            "planned": planned,
            "files": self.ends.total(),
            "artifacts": artifacts,
            **ended,
            "failed": len(self.failures),
            "kinds": dict(sorted(self.ends.items())),
            "largest_growth_mib": round(self.growth, 1),
            "longest_cpu_seconds": round(self.longest, 3),
            "cpu_seconds": round(self.seconds, 1),
            "seconds": round(time.monotonic() - began, 1),
        }


# --- one file -------------------------------------------------------------------------------------


def outcome(path: Path, base: Base) -> str:
    """'refused', 'consistent', or what went wrong."""
    try:
        artifact = read_artifact(path, cut=True)
        live = load(path, base.model)
        if artifact.parts:
            live = load(path, base.model, bit_choices=artifact.bit_choices[-1:])
            grow(live, path)
        for setting in (*artifact.available, *artifact.available_plans()):
            set_bits(live, setting)
            again = read_artifact(path, cut=True)
            again.manifest.pop("graph", None)  # compared for `live`; the rest of the manifest makes the model
            fresh = load(again, base.model)
            set_bits(fresh, setting)
            if get_bits(live) != get_bits(fresh) or again.digest != artifact.digest:
                return f"two loads differ at {setting}"
            one, other = (result(model, base.inputs) for model in (live, fresh))
            if not torch.equal(one.nan_to_num(1e9), other.nan_to_num(1e9)):
                return f"two outputs at {setting}"
    except BitdialError:
        return "refused"
    return "consistent"


def result(model: torch.nn.Module, inputs: Tensor) -> Tensor:
    """What `model` computes, or the text of its refusal, as numbers."""
    try:
        with torch.no_grad():
            out = model(inputs)
            return out if isinstance(out, Tensor) else out.logits
    except BitdialError as problem:
        return torch.tensor(list(str(problem).encode()))


def tried(path: Path, base: Base) -> str:
    """`outcome`, with limits on its time; the one by the clock ends the process, wherever that hangs."""

    def stop(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    faulthandler.dump_traceback_later(CLOCK_SECONDS, exit=True)
    try:
        return outcome(path, base)
    except TooLong:
        return f"more than {SECONDS} s"
    except MemoryError:
        return f"more than {MEMORY >> 20} MiB"
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()


# --- all of them ----------------------------------------------------------------------------------


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def work(folder: Path, seed: int, first: int, count: int) -> Found:
    """Try some cases."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # of files that are cut
    bases = read_bases(folder)
    path = folder / f"case.{first}"
    path.write_bytes(bases[0].data)
    assert tried(path, bases[0]) == "consistent"  # and everything that is loaded once is loaded now
    gc.freeze()  # and need not be looked through again
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + MEMORY, resource.RLIM_INFINITY))
    whole, found, before, start = [base.data for base in bases], Found(), resident(), time.process_time()
    for number in range(first, first + count):
        chosen, kind, data = damaged(whole, seed, number)
        path.unlink()  # to write over a file, ext4 waits for the disk
        path.write_bytes(data)
        began = time.process_time()
        ended = tried(path, bases[chosen])
        found.longest = max(found.longest, time.process_time() - began)
        found.ends[f"{kind}, {ended if ended in GOOD else 'failed'}"] += 1
        if ended not in GOOD:
            found.failures.append(f"case {number} ({kind}): {ended}")
    path.unlink()
    found.growth, found.seconds = resident() - before, time.process_time() - start
    return found


def shares(folder: Path, chosen: argparse.Namespace, starts: list[int]) -> Iterator[tuple[int, Found | None]]:
    """The first case of each share and what came of it, None if its process died; processes are new now and then.

    (`max_tasks_per_child` would renew them, but in Python 3.11 the pool waits forever once all have ended at a time.)
    """
    after, most = chosen.first + chosen.count, SHARES_A_PROCESS * chosen.workers
    for at in range(0, len(starts), most):
        with ProcessPoolExecutor(chosen.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            waiting = {
                pool.submit(work, folder, chosen.seed, start, min(chosen.chunk, after - start)): start
                for start in starts[at : at + most]
            }
            for done in as_completed(waiting):
                try:
                    yield waiting[done], done.result()
                except BrokenProcessPool:
                    yield waiting[done], None


def main() -> None:
    """Run the campaign."""
    chosen = options(__doc__, 100_000, first=0, workers=2, chunk=500)
    began, found = time.monotonic(), Found()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_bases(folder)
        artifacts = len(list(folder.iterdir()))
        starts = list(range(chosen.first, chosen.first + chosen.count, chosen.chunk))
        for start, share in counted(shares(folder, chosen, starts), len(starts), f"damaged files, {chosen.chunk} each"):
            if share is None:
                found.failures.append(f"the process died in cases {start} to {start + chosen.chunk - 1}")
            else:
                found.add(share)
            figures = found.figures(chosen.count, artifacts, began)
            record(chosen.out, "damaged_files", "damaged_files", chosen.seed, figures)
            if share is None:
                break
    print({key: value for key, value in figures.items() if key != "kinds"})
    end(found.failures)


if __name__ == "__main__":
    main()
