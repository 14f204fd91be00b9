"""Language models: a float model of transformers teaches its own copy at every width, on text that is packed to rows.

The loss is the KL divergence from the float model's logits, at temperature 1, and no labels: what the model knew is to
be kept, not another text learned. The rate is small (2e-5) with a cosine to 0, as in LLM-QAT, ParetoQ and EfficientQAT.
Perplexity on the end of the text, which is not trained on, is taken at each width at intervals.

Under torchrun each process trains on its share of every batch, and process 0 writes. With `shard` each process holds
its part of every block (FSDP2), for models that no single GPU can train.
"""

import copy
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial._version import __version__
from bitdial.artifact import Artifact, read_artifact, save
from bitdial.errors import ConfigError
from bitdial.files.atomic import write_json
from bitdial.language.likelihoods import check_length
from bitdial.live.load import load_trainable
from bitdial.nn import QuantLayer
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.prepare.rotate import rotate
from bitdial.recipes.language_model import LanguageModel, Texts
from bitdial.recipes.llm_options import LlmOptions
from bitdial.recipes.outcome import add_result, run_name, settings_of
from bitdial.recipes.run import RecipeRun
from bitdial.recipes.whole_rows import whole_rows
from bitdial.train import Callback, History, TrainConfig, distributed, evaluate, train
from bitdial.train.callbacks import Run
from bitdial.train.gpu.fused_blocks import fused_blocks
from bitdial.train.perplexity import perplexity
from bitdial.train.sharding import shard, whole
from bitdial.train.tokens import TokenData

ROWS_TO_PREPARE = 8
TOKENS_TO_COMPARE = 16
ROWS_TOGETHER = 4  # of those that perplexity is taken on
Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class LlmOutcome:
    """A finished run: the trained model (whole in process 0), where its artifact is, a result row for each width."""

    model: nn.Module
    artifact: Path
    history: History
    metrics: dict[str, Any]  # of the artifact
    rows: list[dict[str, Any]]


def llm(options: LlmOptions, *, tell: Tell = lambda line: None) -> LlmOutcome:
    """Train the model of `options.model` at all widths; save the artifact and its numbers; `tell` shows a line."""
    device = distributed.own_device()
    with distributed.joined(device):
        say: Tell = tell if distributed.rank() == 0 else lambda line: None
        if options.shard and distributed.world_size() == 1:
            raise ConfigError("--shard needs several processes: torchrun --nproc-per-node 2 -m bitdial train llm ...")
        if options.batch % (distributed.world_size() * options.accumulate):
            raise ConfigError(
                f"--batch {options.batch} does not go into {distributed.world_size()} processes of --accumulate "
                f"{options.accumulate} equal parts"
            )
        language = LanguageModel.read(options.model)
        check_length(language.model, options.length)
        artifact = None if options.calibrated is None else read_artifact(options.calibrated)
        texts = Texts.read(
            options.text, language, options.out, length=options.length, held_out=options.held_out, tell=say
        )
        run = _run_of(options, language, artifact, texts)
        with run.alone():
            language.model.to(device)
            if options.generate:
                say(f"The model writes {options.generate:,} rows of {options.length} tokens")
            texts = texts.with_generated(
                language, options.out, rows=options.generate, length=options.length, seed=options.seed
            )
            outcome = _train(run, language, texts, artifact, say)
            distributed.barrier()  # what process 0 wrote is there
        return outcome


def _run_of(
    options: LlmOptions, language: LanguageModel, artifact: Artifact | None, texts: Texts
) -> RecipeRun[LlmOptions]:
    settings, changed = options.settings()
    if artifact is not None:
        settings |= {"bit_choices": artifact.bit_choices, "scheme": artifact.scheme, "start": None, "group_size": None}
        settings = {name: value for name, value in settings.items() if value is not None}
    name = options.name or run_name(f"llm-{language.name}", changed)
    sources = {
        "model": language.digest,
        "text": texts.digest,
        "calibrated": artifact and artifact.digest,
    }
    return RecipeRun(
        recipe="llm",
        name=name,
        options=options,
        settings=settings | sources,
        changed=changed,
        artifact=options.out / f"{name}.safetensors",
        checkpoint=options.out / f"{name}.ckpt",
    )


def _train(
    run: RecipeRun[LlmOptions], language: LanguageModel, texts: Texts, artifact: Artifact | None, say: Tell
) -> LlmOutcome:
    options, teacher = run.options, language.model
    intervals, steps = options.intervals
    device = next(teacher.parameters()).device
    data = TokenData(
        texts.streams, length=options.length, batch_size=options.batch, seed=options.seed, steps=steps, device=device
    )
    config = TrainConfig(
        **settings_of(TrainConfig, run.settings),
        epochs=intervals,
        weight_decay=0.0,
        warmup_steps=intervals * steps // 20,
        distill="teacher",
        checkpoint_every=options.checkpoint_every,
        cuda_graph=options.record,
        fused=False,  # models of transformers have kernels of their own: `fused_blocks`
    )
    trained = model = _prepared(run, language, data, artifact)
    if options.shard:
        trained = copy.deepcopy(model).cpu() if distributed.rank() == 0 else model
        for one in (model, teacher):
            distributed.share_state(one)
            shard(one)
    widths = tuple(run.settings["bit_choices"])
    held_out: Any = texts.held_out.split(ROWS_TOGETHER)  # rows are their own targets
    watch = _Watch(teacher, held_out, widths, options.batch * options.length, say)
    some = texts.held_out[:2, :TOKENS_TO_COMPARE].to(device)
    with whole_rows(model, teacher, tokens=some), fused_blocks(model, teacher, tokens=some):
        history = train(
            model,
            data,
            config,
            loss=token_loss,
            output=flat_logits,
            teacher=teacher,
            evaluate_on=held_out,
            measure=perplexity,
            callbacks=[watch],
            checkpoint=run.checkpoint,
            progress=options.progress,
        )
    if options.shard:
        state = {name: whole(value).cpu() for name, value in model.state_dict().items()}
        if distributed.rank() == 0:
            trained.load_state_dict(state)
    metrics = _metrics(run, history, watch, texts)
    rows = _rows(run, language, metrics, trained, device)
    if distributed.rank() == 0:
        save(trained, run.artifact, metrics=metrics)
        write_json(run.artifact.with_suffix(".json"), {"rows": rows, "history": history.rows})
        if options.results is not None:
            add_result(options.results, *rows)
        run.checkpoint.unlink(missing_ok=True)
    return LlmOutcome(model=trained, artifact=run.artifact, history=history, metrics=metrics, rows=rows)


def flat_logits(returned: Any) -> Tensor:
    """The logits of each token (tokens, vocabulary) in what a model of transformers returned."""
    logits: Tensor = returned.logits
    return logits.flatten(0, 1)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the next tokens; it counts where `distill_weight` is below 1."""
    return F.cross_entropy(logits.float(), targets.flatten())


def _prepared(
    run: RecipeRun[LlmOptions], language: LanguageModel, data: TokenData, artifact: Artifact | None
) -> nn.Module:
    """The model to train: that of the artifact, or the float one prepared on some rows of the text."""
    teacher = language.model
    if artifact is not None:
        model = load_trainable(artifact, teacher).to(next(teacher.parameters()).device)
    else:
        rows = next(data.batches(0)).inputs
        assert isinstance(rows, Tensor)
        how = run.options.rotate
        source = teacher if how is None else rotate(teacher, residual=how)  # which says the same
        model = prepare(source, QuantConfig(**settings_of(QuantConfig, run.settings)), rows[:ROWS_TO_PREPARE])
    inner: Any = model
    inner.config.use_cache = False
    for module in (inner.get_input_embeddings(), inner.get_output_embeddings()):
        if module is not None and not isinstance(module, QuantLayer):
            module.requires_grad_(run.options.train_embeddings)
    if run.options.checkpointing:
        if not getattr(inner, "supports_gradient_checkpointing", False):
            raise ConfigError(f"--checkpointing: {type(model).__name__} has no blocks that transformers checkpoints")
        inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


class _Watch(Callback):
    """Takes perplexities before the first step, keeps them in checkpoints, and tells what each interval came to."""

    def __init__(self, teacher: nn.Module, held_out: Any, widths: tuple[int, ...], tokens: int, say: Tell):
        self.teacher, self.held_out, self.widths = teacher, held_out, widths
        self.tokens, self.say = tokens, say  # of a step; how lines are shown
        self.float: float | None = None
        self.start: dict[str, float] = {}
        self.began = time.monotonic()

    def on_start(self, run: Run) -> None:
        """Measure the float model and each width, unless a checkpoint knows them."""
        if self.float is None:
            self.float = perplexity(self.teacher, self.held_out)
            found = evaluate(run.model, self.held_out, self.widths, measure=perplexity)
            self.start = {str(bits): value for bits, value in found.items()}
            self.say(f"Perplexity at the start: float {self.float:.2f}  {_listed(self.start)}")
        elif run.step:
            self.say(f"Going on from step {run.step} of {run.total_steps}")

    def on_epoch(self, run: Run) -> None:
        """Tell the perplexities."""
        assert run.row is not None
        spent = f"{run.step * self.tokens:,} tokens, {time.monotonic() - self.began:.0f} s"
        self.say(f"Step {run.step} of {run.total_steps} ({spent}): perplexity {_listed(run.row['measured'])}")

    def state_dict(self) -> dict[str, Any]:
        """The perplexities of the start."""
        return {"float": self.float, "start": self.start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.float, self.start = state["float"], state["start"]


def _listed(perplexities: dict[str, Any]) -> str:
    return "  ".join(f"{bits}b {'-' if value is None else f'{value:.2f}'}" for bits, value in perplexities.items())


def _metrics(run: RecipeRun[LlmOptions], history: History, watch: _Watch, texts: Texts) -> dict[str, Any]:
    options = run.options
    return {
        "recipe": "llm",
        "float_perplexity": watch.float,
        "start_perplexity": watch.start,
        "perplexity": history.rows[-1]["measured"],
        "held_out": {
            "rows": len(texts.held_out),
            "length": options.length,
            "text": [file.name for file in options.text],
        },
        "tokens": run.settings["steps"] * options.batch * options.length,
        "seconds": round(sum(row["seconds"] for row in history.rows), 1),
        "run": run.record(),
    }


def _rows(
    run: RecipeRun[LlmOptions], language: LanguageModel, metrics: dict[str, Any], model: nn.Module, device: torch.device
) -> list[dict[str, Any]]:
    """A result row for each width."""
    layer: Any = next(m for m in model.modules() if hasattr(m, "weight_quantizer"))
    options, shape = run.options, layer.weight_quantizer.scale_shape
    groups = shape[1] if len(shape) > 1 else 1
    always = {
        "model": language.name,
        "method": "trained",
        "weights": layer.weight_quantizer.scheme,
        "group_size": layer.weight.shape[1] // groups if groups > 1 else None,
        "activations": "float" if layer.act_quantizer is None else layer.act_quantizer.kind,
        "bit_choices": list(layer.bit_choices),
        "calibrated": None if options.calibrated is None else options.calibrated.name,
    }
    found = {name: metrics[name] for name in ("float_perplexity", "tokens", "seconds", "held_out")}
    where = {
        "seed": options.seed,
        "lr": options.lr,
        "processes": distributed.world_size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {"bitdial": __version__, "python": platform.python_version(), "torch": torch.__version__},
        "command": options.command,
    }
    return [
        {**always, "bits": int(bits), "perplexity": value, "start_perplexity": metrics["start_perplexity"][bits]}
        | found
        | where
        for bits, value in metrics["perplexity"].items()
    ]
