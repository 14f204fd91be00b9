"""A float language model and its tokenizer from a transformers folder; nothing is downloaded, no code of it is run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bitdial.errors import ConfigError, MissingDependencyError

Folder = str | os.PathLike[str]


def load_tokenizer(folder: Folder) -> Any:
    """The tokenizer in a transformers `folder`."""
    transformers = _transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # whatever transformers makes of a folder
        raise ConfigError(
            f"{folder} has no tokenizer that transformers can read ({_first_line(problem)}); "
            "tokenizer.save_pretrained(folder) writes one"
        ) from problem
    if not tokenizer.get_vocab():
        raise ConfigError(f"the tokenizer of {folder} has no vocabulary; is its file missing?")
    return tokenizer


def load_float(folder: Folder, *, dtype: torch.dtype | None = torch.float32) -> nn.Module:
    """The causal language model in a transformers `folder` as it is, in `dtype` (None: its own) and in eval mode."""
    transformers = _transformers()
    try:
        with _without_bars(transformers.utils.logging):
            model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto" if dtype is None else dtype, local_files_only=True, trust_remote_code=False
            )
    except Exception as problem:
        raise ConfigError(
            f"{folder} has no causal language model that transformers can read ({_first_line(problem)})"
        ) from problem
    return model.eval()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as problem:
        raise MissingDependencyError.missing("hf", "transformers") from problem
    return transformers


@contextmanager
def _without_bars(messages: Any) -> Iterator[None]:
    """Keep transformers from showing a bar of its own."""
    shown = messages.is_progress_bar_enabled()
    messages.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            messages.enable_progress_bar()


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].strip().rstrip(".:")
