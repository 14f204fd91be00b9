"""A float language model and its tokenizer from a transformers folder, and the texts that go with them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.errors import ConfigError
from bitdial.language.folder import load_float, load_tokenizer
from bitdial.nn.own_dtypes import widen
from bitdial.recipes.teacher_text import teacher_text
from bitdial.train import distributed
from bitdial.train.text import map_tokens, text_digest, tokenize_text, tokenizer_digest
from bitdial.train.tokens import Tokens

SHARE_HELD_OUT = 10  # at most one in so many tokens


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model of transformers in eval mode, with its tokenizer.

    It is in float32; what was in 16 bits is stored so by files, if training leaves it as it is.
    """

    model: nn.Module
    tokenizer: Any
    name: str

    @classmethod
    def read(cls, folder: Path) -> "LanguageModel":
        """From a transformers folder; nothing is downloaded, and no code of the folder is run."""
        tokenizer = load_tokenizer(folder)
        model: Any = load_float(folder, dtype=None)
        widen(model)
        model.config.use_cache = False
        found = cls(model, tokenizer, folder.resolve().name)
        found._check_vocabulary(folder)
        return found

    @property
    def vocabulary(self) -> int:
        """How many tokens the model knows."""
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        return int(table.weight.shape[0])

    def _check_vocabulary(self, folder: Path) -> None:
        words: dict[str, int] = self.tokenizer.get_vocab()
        word = max(words, key=words.__getitem__)
        if words[word] >= self.vocabulary:
            raise ConfigError(
                f"the tokenizer of {folder} has the token {word!r} as number {words[word]}, and the model knows only "
                f"{self.vocabulary}; are they of two models?"
            )

    @property
    def digest(self) -> str:
        """What tells its weights from others."""
        total = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            total.update(name.encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return total.hexdigest()

    def first_tokens(self) -> Tensor:
        """Those that text may begin with: all but the special ones."""
        special = set(self.tokenizer.all_special_ids)
        return torch.tensor(sorted(i for i in self.tokenizer.get_vocab().values() if i not in special))


@dataclass(frozen=True)
class Texts:
    """Tokens to train on, of texts and of the teacher's own, and rows that are held out (rows, length)."""

    streams: tuple[Tokens, ...]
    held_out: Tensor
    digest: str  # of the texts and the tokenizer

    @classmethod
    def read(
        cls,
        files: tuple[Path, ...],
        language: LanguageModel,
        folder: Path,
        *,
        length: int,
        held_out: int,
        tell: Callable[[str], None],
    ) -> "Texts":
        """Tokenise `files` once into a file below `folder`; the last `held_out` tokens are not trained on."""
        digest = hashlib.sha256((text_digest(files) + tokenizer_digest(language.tokenizer)).encode()).hexdigest()
        path = folder / f"tokens-{digest[:12]}.int32"
        if distributed.rank() == 0 and not path.exists():
            tell(f"Tokenising {', '.join(file.name for file in files)}")
            folder.mkdir(parents=True, exist_ok=True)
            tokenize_text(files, language.tokenizer, path)
        distributed.barrier()
        tokens = map_tokens(path)
        held = max(min(held_out, len(tokens) // SHARE_HELD_OUT) // length, 1) * length
        if len(tokens) < held + length + 1:
            names = ", ".join(map(str, files))
            raise ConfigError(
                f"{names}: {len(tokens)} tokens are less than a row of {length} to train on and one to hold out; give "
                "more text, or a smaller --length"
            )
        rows = torch.from_numpy(tokens[len(tokens) - held :].astype("int64")).reshape(-1, length)
        return cls((tokens[: len(tokens) - held],), rows, digest)

    def with_generated(self, language: LanguageModel, folder: Path, *, rows: int, length: int, seed: int) -> "Texts":
        """The same, and `rows` of the model's own text, kept in a file below `folder`."""
        if not rows:
            return self
        path = folder / f"generated-{language.digest[:8]}-{rows}x{length}-{seed}.int32"
        if distributed.rank() == 0:
            first = language.first_tokens()
            teacher_text(language.model, path, rows=rows, length=length, seed=seed, first=first)
        distributed.barrier()
        return Texts((*self.streams, map_tokens(path)), self.held_out, self.digest)
