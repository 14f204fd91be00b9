"""Greedy text from a live decoder that drafts with its own low bits.

fast = speculate(live, draft_bits=2)
text = fast.generate(**inputs, max_new_tokens=100)

Both widths use one cache. It always holds keys and values of the model's own width, for all tokens but the last:

    draft     the low width reads that cache, and adds its own keys and values while it drafts n tokens
    forget    the cache is cropped to where it was, so nothing of the low width stays
    check     the model reads the last token and the n drafted ones in one pass, at its own width
    accept    the drafted tokens up to the first that the model would not have chosen, and the model's own choice there
    forget    the cache is cropped behind the last token accepted
"""

import functools
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitdial.dial.dial import get_bits, set_bits, unwrap
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.live.speculation.checks import check_cache, check_call, check_model, check_settings
from bitdial.live.speculation.draft_length import DraftLength
from bitdial.live.speculation.identical import runs_sdpa, view_token_by_token
from bitdial.live.views import view_at_bits


@dataclass(frozen=True)
class SpeculationStatistics:
    """What one call of `generate` did: counts of tokens, and of passes of the model at its own width."""

    tokens: int = 0  # new ones
    passes: int = 0  # one for the prompt, then one for each draft
    drafted: int = 0
    judged: int = 0  # drafted tokens up to the first wrong one of each draft, and that one
    accepted: int = 0

    @property
    def acceptance(self) -> float:
        """The share of right ones among the drafted tokens that were judged; NaN if none was."""
        return self.accepted / self.judged if self.judged else float("nan")

    @property
    def tokens_per_pass(self) -> float:
        """New tokens for each pass of the model; 1 in plain decoding."""
        return self.tokens / self.passes if self.passes else float("nan")


def speculate(
    model: nn.Module, draft_bits: LayerBits | BitPlan | str, *, draft_length: int | None = None
) -> "SpeculativeDecoder":
    """A decoder whose `generate` writes what `model.generate` does, greedily, with drafts at `draft_bits`.

    `model` is a live decoder of transformers. It checks drafts at the setting that it has when `generate` is called.
    Drafts come from a view of it (`view_at_bits`). `draft_length` is the number of tokens to draft at a time, 1 to 32;
    None chooses it by what is measured.
    """
    if draft_length is not None and (type(draft_length) is not int or not 1 <= draft_length <= 32):
        raise ConfigError(f"draft_length={draft_length!r} must be a whole number from 1 to 32, or None to adapt it")
    try:
        import transformers  # noqa: F401  # the model's own module has imported it already
    except ImportError as problem:
        raise MissingDependencyError.missing("hf", "transformers") from problem
    model = unwrap(model)
    check_model(model)
    return SpeculativeDecoder(model, view_at_bits(model, draft_bits), DraftLength(draft_length))


class SpeculativeDecoder:
    """Made by `speculate`. For one thread at a time, as a view is; the `model` may be in use elsewhere."""

    def __init__(self, model: nn.Module, draft: nn.Module, length: DraftLength):
        self.model, self.draft = model, draft
        self.statistics = SpeculationStatistics()  # of the last call of `generate`
        self._length = length
        self._by_token = view_token_by_token(model)

    @property
    def bit_exact(self) -> bool:
        """Whether logits equal those of plain decoding bit for bit, so that no tie can make another text."""
        return self._by_token is not None and runs_sdpa(self.model)

    def generate(self, *args: Any, **settings: Any) -> Any:
        """What `model.generate` returns for the same arguments, for one prompt, greedily; fills `statistics`."""
        check_settings(settings)
        decode = functools.partial(self._decode, settings.pop("streamer", None))
        return self.model.generate(*args, custom_generate=decode, **settings)  # type: ignore[operator]

    def _decode(
        self,
        streamer: Any,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **extra: Any,
    ) -> Any:
        """The loop that takes the place of transformers' own; it has prepared everything."""
        check_settings({"synced_gpus": synced_gpus})
        check_call(input_ids, generation_config, extra)
        text = _Text(input_ids, logits_processor, stopping_criteria, generation_config, extra)
        done = SpeculationStatistics(passes=1)
        if streamer is not None:
            streamer.put(input_ids.cpu())
        checker = self._checker()
        past = text.cache.get_seq_length()
        logits = text.read(model, input_ids[:, past:], **text.keep)
        check_cache(text.cache)
        new = [text.add(logits[:, -1])]
        while True:
            if streamer is not None:
                for token in new:
                    streamer.put(torch.tensor([token]))
            if text.finished:
                break
            new, done = self._step(text, checker, done)
        if streamer is not None:
            streamer.end()
        self.statistics = replace(done, tokens=text.ids.shape[1] - input_ids.shape[1])
        return text.returned()

    def _step(
        self, text: "_Text", checker: nn.Module, done: SpeculationStatistics
    ) -> tuple[list[int], SpeculationStatistics]:
        """Draft, check and accept; returns the new tokens, and `done` with this step."""
        began = time.perf_counter()
        drafted = text.draft(self.draft, self._length.choose(text.left - 1))
        wanted = drafted[0].tolist()  # waits for the device
        between = time.perf_counter()
        logits = text.read(checker, torch.cat([text.ids[:, -1:].to(drafted.device), drafted], dim=1))
        new: list[int] = []
        for i in range(len(wanted) + 1):
            new.append(text.add(logits[:, i]))
            if text.finished or i == len(wanted) or new[i] != wanted[i]:
                break
        text.forget()
        ended = time.perf_counter()
        judged = min(len(new), len(wanted))
        accepted = sum(a == b for a, b in zip(new, wanted, strict=False))
        self._length.record(len(wanted), judged, accepted, draft_seconds=between - began, check_seconds=ended - between)
        counted = SpeculationStatistics(
            passes=done.passes + 1,
            drafted=done.drafted + len(wanted),
            judged=done.judged + judged,
            accepted=done.accepted + accepted,
        )
        return new, counted

    def _checker(self) -> nn.Module:
        """What checks drafts, at the present setting of the model."""
        if self._by_token is None or not runs_sdpa(self.model):
            return self.model
        if (bits := get_bits(self.model)) != get_bits(self._by_token):
            set_bits(self._by_token, bits)
        return self._by_token


class _Text:
    """A text that grows, its cache, which holds all of its tokens but the last, and the settings of its `generate`."""

    def __init__(self, ids: Tensor, processors: Any, criteria: Any, config: Any, extra: dict[str, Any]):
        self.ids, self.finished = ids, False
        self.cache = extra["past_key_values"]
        self.keep = {name: extra[name] for name in ("logits_to_keep",) if extra.get(name) is not None}
        self._processors, self._criteria, self._config = processors, criteria, config
        self._mask, self._positions = extra.get("attention_mask"), extra.get("position_ids")
        as_dict = bool(config.return_dict_in_generate)
        self._scores: tuple[Tensor, ...] | None = () if as_dict and config.output_scores else None
        self._logits: tuple[Tensor, ...] | None = () if as_dict and config.output_logits else None

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return int(self._config.max_length) - self.ids.shape[1]

    def read(self, model: Any, tokens: Tensor, **more: Any) -> Tensor:
        """The logits (1, tokens, vocabulary) of `model` for `tokens` behind those in the cache, which it extends."""
        start = self.cache.get_seq_length()
        end = start + tokens.shape[1]
        if self._mask is not None:
            more["attention_mask"] = F.pad(self._mask, (0, max(0, end - self._mask.shape[1])), value=1)[:, :end]
        if self._positions is not None:
            known = self._positions
            beyond = torch.arange(1, max(0, end - known.shape[1]) + 1, device=known.device)
            more["position_ids"] = torch.cat([known, known[:, -1:] + beyond], dim=1)[:, start:end].to(model.device)
        tokens = tokens.to(model.device)
        out = model(input_ids=tokens, past_key_values=self.cache, use_cache=True, return_dict=True, **more)
        return out.logits

    def draft(self, model: Any, count: int) -> Tensor:
        """The next `count` tokens (1, count) by `model`; the cache stays what it was."""
        token = self.ids[:, -1:].to(model.device)
        drafted = token[:, :0]
        for _ in range(count):
            token = self.read(model, token)[:, -1].argmax(dim=-1, keepdim=True)
            drafted = torch.cat([drafted, token], dim=1)
        self.forget()
        return drafted

    def forget(self) -> None:
        """Crop the cache to all tokens but the last."""
        beyond = self.cache.get_seq_length() - (self.ids.shape[1] - 1)
        if beyond > 0:
            self.cache.crop(-beyond)

    def add(self, logits: Tensor) -> int:
        """Choose the next token by `logits` (1, vocabulary) as plain decoding does, and see whether the text ends."""
        raw = logits.to(device=self.ids.device, dtype=torch.float32, copy=True)
        scores = self._processors(self.ids, raw)
        token = scores.argmax(dim=-1)
        self.ids = torch.cat([self.ids, token[:, None]], dim=1)
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (raw,)
        self.finished = bool(self._criteria(self.ids, self._scores).all())
        return int(token)

    def returned(self) -> Any:
        """What `generate` returns: the tokens, or a record of transformers."""
        if not self._config.return_dict_in_generate:
            return self.ids
        from transformers.generation import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(
            sequences=self.ids, scores=self._scores, logits=self._logits, past_key_values=self.cache
        )
