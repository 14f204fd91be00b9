"""Training killed at random moments: resumed, each ends with the content of a run that was left alone, bit for bit.

    python tests/long/kills.py                    # 200 kills, results/reliability.json

A run is a process of its own: it trains a small network for some seconds, keeps a checkpoint after every step or every
third, and saves an artifact; or it is `bitdial train llm` on a Llama of 20,000 weights. It is sent SIGKILL at a random
moment after training began, started again with the same command, and left to end. One in four is killed a second time
on its way. A run that had ended before the signal came counts as no kill, and is repeated with an earlier moment.

Contents are compared by the artifact's digest, which is over its manifest and the bytes of all tensors; where the
manifest says how many seconds the run took, by its tensors and perplexities. The bytes of the file are not compared:
safetensors writes the entries of its metadata in an order that differs from process to process.
"""

import hashlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from campaign import counted, end, options, record

from bitdial import Artifact, read_artifact

KINDS: list[dict[str, Any]] = [
    {"checkpoint_every": 1, "distill": "progressive"},
    {"checkpoint_every": 3, "optimizer": "sgd", "lr": 0.02},
    {"checkpoint_every": 1, "optimizer": "adamw", "update": "accumulated", "alrs": "off"},
]
LANGUAGE = len(KINDS)  # the kind of run that trains a language model
READY = "training"


# --- the run that is killed -----------------------------------------------------------------------


def run(folder: Path, kind: int, epochs: int) -> None:
    """Train and save; called by a process of its own."""
    if kind == LANGUAGE:
        return run_language(folder, 8 * epochs)
    import torch

    from bitdial import ArrayData, QuantConfig, TrainConfig, build_model, prepare, save, train

    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(kind)
    inputs = torch.randn(48, 1, 8, 8, generator=generator)
    targets = torch.randint(0, 10, (48,), generator=generator)
    net = build_model("cifar_resnet", blocks=1, width=8, in_channels=1)
    schemes = ("double_rounding", "nested", "lsq")
    model = prepare(net, QuantConfig(bit_choices=(8, 4, 2), scheme=schemes[kind], start="3std"), inputs)
    config = TrainConfig(**{"epochs": epochs, "lr": 1e-2, **KINDS[kind]})
    print(READY, flush=True)
    data = ArrayData(inputs, targets, batch_size=8)
    train(model, data, config, checkpoint=folder / "checkpoint", progress=False)
    save(model, folder / "model.safetensors")
    return None


def run_language(folder: Path, steps: int) -> None:
    """Train a tiny language model at all widths with the command's own code; its teacher writes a part of the text."""
    import torch

    from bitdial.cli import main as command

    torch.set_num_threads(1)
    if not (folder / "llama").exists():  # no run is killed before it says that it is ready
        make_language(folder)
    print(READY, flush=True)
    files = [
        "--model",
        str(folder / "llama"),
        "--text",
        str(folder / "text.txt"),
        "--out",
        str(folder),
        "--name",
        "model",
    ]
    settings = "--bits 8,4,2 --group-size 16 --length 16 --batch 4 --held-out 64 --lr 2e-3 --evaluations 4 --generate 3"
    length = ["--steps", str(steps), "--checkpoint-every", "1"]
    code = command(["train", "llm", *files, *length, *settings.split()])
    if code:
        raise SystemExit(code)


def make_language(folder: Path) -> None:
    """A text and a Llama of random weights with a tokenizer of single letters, the same ones each time."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    letters = "abcdefghijklmnopqrstuvwxyz .,"
    drawn = torch.randint(len(letters), (4000,), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "text.txt").write_text("".join(letters[i] for i in drawn))
    core = Tokenizer(models.BPE({"<end>": 0, **{letter: i for i, letter in enumerate(letters, start=1)}}, []))
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(folder / "llama")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "llama")


def start(folder: Path, kind: int, epochs: int) -> subprocess.Popen[str]:
    """Start a run, and wait until it trains."""
    command = [sys.executable, __file__, "--run", str(folder), str(kind), str(epochs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if not any(line.strip() == READY for line in process.stdout):
        raise RuntimeError(f"a run did not begin: {process.communicate()[1][-2000:]}")
    return process


def finish(process: subprocess.Popen[str], folder: Path) -> str:
    """Wait for the end of a run; the digest of its file."""
    try:
        _, errors = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"a run ended with {process.returncode}: {errors[-2000:]}")
    return content(read_artifact(folder / "model.safetensors"))


def content(artifact: Artifact) -> str:
    """What tells a run's result from another one: its digest; of a language model, that of what does not take time."""
    if "perplexity" not in artifact.metrics:
        return artifact.digest
    found = hashlib.sha256(repr((artifact.metrics["start_perplexity"], artifact.metrics["perplexity"])).encode())
    for name, value in sorted(artifact.tensors.items()):
        found.update(name.encode() + str(value.dtype).encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


# --- kills ----------------------------------------------------------------------------------------


def killed(folder: Path, kind: int, epochs: int, moment: float) -> bool:
    """Start a run and kill it so many seconds after it began to train; False if it had ended."""
    process = start(folder, kind, epochs)
    try:
        process.wait(timeout=moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a run ended with {process.returncode}: {errors[-2000:]}")
    return process.returncode == -signal.SIGKILL


def disturbed(number: int, seed: int, epochs: int, lengths: list[float]) -> tuple[int, int, str, bool]:
    """Kill run `number` and resume it: its kind, its kills, the digest of its file, whether it met a checkpoint."""
    draw = random.Random(f"{seed}/{number}")
    kind, met, kills = draw.randrange(len(lengths)), False, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(draw.choice((1, 1, 1, 2))):
            moment = draw.uniform(0, lengths[kind])
            while not (struck := killed(folder, kind, epochs, moment)):
                moment /= 2
                for path in folder.iterdir():  # it ended: from the beginning, unless it had been killed before
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                kills = 0
            kills += struck
            met |= any((folder / name).exists() for name in ("checkpoint", "model.ckpt"))
        return kind, kills, finish(start(folder, kind, epochs), folder), met


def undisturbed(epochs: int, kinds: int) -> Iterator[tuple[str, float]]:
    """The digest that each of the first `kinds` of runs ends with, and how long it trains."""
    for kind in range(kinds):
        with tempfile.TemporaryDirectory() as name:
            process = start(Path(name), kind, epochs)
            began = time.monotonic()
            yield finish(process, Path(name)), time.monotonic() - began


def main() -> None:
    """Run the campaign."""
    if sys.argv[1:2] == ["--run"]:
        return run(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    chosen = options(__doc__, 200, epochs=4, kinds=LANGUAGE + 1, workers=2)
    began, failures = time.monotonic(), []
    digests, lengths = map(list, zip(*undisturbed(chosen.epochs, chosen.kinds), strict=True))
    print(f"undisturbed runs train for {', '.join(f'{length:.1f}' for length in lengths)} s", flush=True)
    kills = runs = resumed = 0
    with ThreadPoolExecutor(chosen.workers) as pool:
        waiting = [pool.submit(disturbed, i, chosen.seed, chosen.epochs, lengths) for i in range(chosen.count)]
        for one in counted(as_completed(waiting), chosen.count, "kills"):
            try:
                kind, struck, digest, met = one.result()
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                failures.append(str(problem))
                continue
            runs, kills, resumed = runs + 1, kills + struck, resumed + met
            if digest != digests[kind]:
                failures.append(f"a run of kind {kind} ended with another content")
    figures = {
        "kills": kills,
        "runs": runs,
        "resumed_from_a_checkpoint": resumed,
        "failed": len(failures),
        "seconds_of_a_run": [round(length, 2) for length in lengths],
        "seconds": round(time.monotonic() - began, 1),
    }
    print(figures)
    record(chosen.out, "kills", "kills", chosen.seed, figures)
    end(failures)
    return None


if __name__ == "__main__":
    main()
