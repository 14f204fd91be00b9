"""Decoding by CUDA graphs, one for each width, through transformers' own `generate`.

    graphs = decode_graphs(live, batch_size=1, max_length=2048)
    live.generate(**inputs, past_key_values=graphs.cache())
    set_bits(live, 4)                                  # the next token goes by another graph, nothing is compiled

A step from token to token always computes the same on the same memory: a static cache has its length in a tensor, masks
and positions have one shape. So it is recorded once a width, and a token is a copy of the step's small inputs and one
launch. Where the cache is static `generate` asks a model for its compiled call, and is given these graphs. A prompt
goes through the model as it is, and so does whatever does not fit: another cache, another batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bitdial.dial.dial import at_bits, dialled_layers, unwrap
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.kernels.cuda_graph import on_side_stream
from bitdial.live.kv_cache import check_full_attention

TOKENS = 4  # that `record` decodes at a width: from the prompt, by a first step, and by the graph

Step = Callable[[], Any]


class Recorder(Protocol):
    """Records steps; tests have one without a GPU."""

    def first(self, step: Step) -> Any:
        """Run `step`, which is going to be recorded at its next run."""
        ...

    def record(self, step: Step) -> tuple[Callable[[], object], Any]:
        """(what runs `step` again, the result that it writes), without running it."""
        ...


class CudaRecorder:
    """CUDA graphs that share their memory: one runs at a time, and what it gives is copied."""

    def __init__(self) -> None:
        self._pool: Any = None

    def first(self, step: Step) -> Any:
        """Run `step` on a stream of its own, as recording wants it."""
        return on_side_stream(step, ())

    def record(self, step: Step) -> tuple[Callable[[], object], Any]:
        """A CUDA graph of `step`."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = step()
        except RuntimeError as problem:
            raise ConfigError(
                f"decoding could not be recorded as a CUDA graph ({problem}): the model waits for the GPU, or moves "
                "data to it; leave decode_graphs out"
            ) from problem
        return graph.replay, result


class _Recorded(NamedTuple):
    inputs: dict[str, Tensor]
    replay: Callable[[], object]
    result: Any


class DecodeGraphs:
    """The graphs of one live model on one static cache: what `generate` calls from token to token."""

    def __init__(self, model: Any, cache: Any, recorder: Recorder, call: Callable[..., Any]):
        self.model, self.recorder = model, recorder
        self._cache, self._call = cache, call
        self._layers: list[Any] = list(dialled_layers(model).values())
        self._seen: set[Any] = set()
        self._recorded: dict[Any, _Recorded] = {}

    def cache(self) -> Any:
        """The static cache, empty: pass it as `past_key_values`. There is one, so one `generate` runs at a time."""
        self._cache.reset()
        return self._cache

    def record(self, *settings: LayerBits | BitPlan | str, **arguments: Any) -> None:
        """Record the graphs of `settings` now, by decoding a few tokens; `arguments` are further ones of `generate`."""
        prompt = torch.ones((self._cache.layers[0].batch_size, 1), dtype=torch.int64, device=self.model.device)
        given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "min_new_tokens": TOKENS, **arguments}
        for bits in settings:
            with at_bits(self.model, bits):
                self.model.generate(input_ids=prompt, past_key_values=self.cache(), max_new_tokens=TOKENS, **given)

    def clear(self) -> None:
        """Forget all graphs: the model has other modules, hooks or tensors than when they were recorded."""
        self._seen.clear()
        self._recorded.clear()

    def __call__(self, **inputs: Any) -> Any:
        """The model's output for these `inputs`, by the graph of the widths that it is set to, if they fit one."""
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in inputs.items() if name not in tensors and name != "past_key_values"}
        cache, tokens = inputs.get("past_key_values"), inputs.get("input_ids")
        plain = all(value is None or isinstance(value, bool | int | float | str) for value in others.values())
        if cache is not self._cache or not plain or tokens is None or tokens.shape[1] != 1:
            return self.model(**inputs)
        shapes = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        key = self._setting(), shapes, tuple(others.items())
        if key not in self._seen:
            self._seen.add(key)
            return self.recorder.first(lambda: self._call(**inputs))
        if key not in self._recorded:
            mine = {name: value.clone() for name, value in tensors.items()}
            step = self.recorder.record(lambda: self._call(**{**inputs, **mine}))
            self._recorded[key] = _Recorded(mine, *step)
        found = self._recorded[key]
        for name, value in tensors.items():
            found.inputs[name].copy_(value)
        found.replay()
        copied = {k: v.clone() if isinstance(v, Tensor) else v for k, v in found.result.items()}
        return type(found.result)(**copied)

    def _setting(self) -> tuple[Any, ...]:
        """The widths of all layers, and where the model lies: a graph is of both."""
        first = self._layers[0].codes.scale.data_ptr(), next(self.model.parameters()).data_ptr()
        return first, tuple([layer.weight_bits for layer in self._layers])


def decode_graphs(
    live: nn.Module, *, batch_size: int, max_length: int, compiled: bool = False, recorder: Recorder | None = None
) -> DecodeGraphs:
    """CUDA graphs for `generate` of `live`, a decoder of transformers on a GPU, in place: one for each width.

    They are recorded at the second token of a width, or by `record`, and kept, on a static cache for `batch_size` texts
    of up to `max_length` tokens. `compiled`: torch.compile fuses what lies between the products first, which takes its
    time once a width. Graphs do not see modules and hooks that are put in later: `clear()` forgets them.
    """
    try:
        from transformers import StaticCache
    except ImportError as problem:
        raise MissingDependencyError.missing("hf", "transformers") from problem
    model: Any = unwrap(live)
    check_full_attention(model, "decode_graphs are for decoders of transformers", "leave decode_graphs out")
    if recorder is None and model.device.type != "cuda":
        raise ConfigError(f"the model is on {model.device}, and CUDA graphs are for GPUs; leave decode_graphs out")
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=max_length)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(
        batch_size=batch_size, num_heads=heads, head_dim=size, dtype=model.dtype, device=model.device
    )
    call = torch.compile(model.__call__, dynamic=False) if compiled else model.__call__
    graphs = DecodeGraphs(model, cache, recorder or CudaRecorder(), call)
    model.get_compiled_call = lambda config: graphs
    return graphs
