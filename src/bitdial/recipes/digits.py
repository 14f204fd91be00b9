"""Handwritten digits (scikit-learn's, 1,797 images of 8 x 8): small enough to train in a minute on two cores."""

import torch
from torch import Tensor

from bitdial.artifact import save
from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.models import build_model
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.recipes.outcome import OF_FOLDERS, RecipeOptions, RecipeOutcome, run_name, settings_of
from bitdial.recipes.run import RecipeRun
from bitdial.train import ArrayData, Shift, TrainConfig, accuracy, batched, evaluate, train
from bitdial.train.float_loop import train_float

TEST_IMAGES = 500
HELD_OUT = 401  # leaves 896, whole batches of 64: statistics of norms suffer from a last batch of one


def digits_data(*, holdout: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (1297, 1, 8, 8) in [0, 1] and labels, test images and labels; always the same split.

    With `holdout`, both come from the training images: the last 401 are held out.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as problem:
        raise MissingDependencyError.missing("demo", "scikit-learn") from problem
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    if holdout:
        x, y = x[TEST_IMAGES:], y[TEST_IMAGES:]
        return x[:-HELD_OUT], y[:-HELD_OUT], x[-HELD_OUT:], y[-HELD_OUT:]
    return x[TEST_IMAGES:], y[TEST_IMAGES:], x[:TEST_IMAGES], y[:TEST_IMAGES]


def digits_test() -> list[tuple[Tensor, Tensor]]:
    """The test images in batches."""
    _, _, x, y = digits_data()
    return batched(x, y)


def digits(options: RecipeOptions) -> RecipeOutcome:
    """Train a small residual network in float, then jointly at every width, and save the artifact in `options.out`.

    With `options.holdout`, train on 896 images and evaluate on the other 401 of the training set.
    """
    not_here = "data", "start_from", "batch", "cutout", "float_epochs", "recalibrate", "teacher", "results", "history"
    options.refuse(OF_FOLDERS, "digits")
    for name in not_here:
        if getattr(options, name):
            raise ConfigError(
                f"the digits recipe has its own data and a small network: it takes no --{name.replace('_', '-')}"
            )
    settings, changed = options.settings(epochs=16, lr=2e-3)
    run = RecipeRun(
        recipe="digits",
        name=run_name("digits", changed),
        options=options,
        settings=settings,
        changed=changed,
        artifact=options.out / f"{options.name or 'digits'}.safetensors",
        checkpoint=options.out / f"{run_name('joint', changed)}.ckpt",
    )
    with run.alone():
        return _train(run)


def _train(run: RecipeRun[RecipeOptions]) -> RecipeOutcome:
    options = run.options
    quant = QuantConfig(**settings_of(QuantConfig, run.settings))
    config = TrainConfig(**settings_of(TrainConfig, run.settings))
    x, y, x_test, y_test = digits_data(holdout=options.holdout)
    data = ArrayData(x, y, batch_size=64, seed=options.seed, augment=Shift(pixels=1))
    test = batched(x_test, y_test)
    float_checkpoint = options.out / ("float-holdout.ckpt" if options.holdout else "float.ckpt")
    with torch.random.fork_rng():
        torch.manual_seed(options.seed)
        float_model = build_model("cifar_resnet", blocks=1, width=16, in_channels=1)
    train_float(
        float_model,
        data,
        epochs=config.epochs,
        lr=3e-3,
        weight_decay=5e-5,
        checkpoint=float_checkpoint,
        progress=options.progress,
    )
    float_top1 = accuracy(float_model, test)

    model = prepare(float_model, quant, x[:256])
    history = train(
        model,
        data,
        config,
        teacher=float_model if options.taught else None,
        evaluate_on=test,
        checkpoint=run.checkpoint,
        progress=options.progress,
    )
    top1 = evaluate(model, test, options.bit_choices)
    metrics = run.metrics(float_top1=float_top1, top1=top1, data="digits", test=test)
    save(model, run.artifact, metrics=metrics)
    for checkpoint in (float_checkpoint, run.checkpoint):  # the artifact is safe: nothing to go on from
        checkpoint.unlink()
    return RecipeOutcome(
        model=model,
        float_model=float_model,
        artifact=run.artifact,
        history=history,
        metrics=metrics,
        float_top1=float_top1,
        top1=top1,
        test=test,
    )
