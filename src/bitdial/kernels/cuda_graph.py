"""One CUDA graph for a whole step: all widths, forward, backward and updates, launched at once.

A step of a small network is hundreds of kernels of a few microseconds; launched one by one, the GPU waits for Python.
The first steps run eagerly (they are ordinary steps: optimizers make their state, libraries choose their kernels), then
one is recorded and from there on replayed. Every input shape has a graph of its own, so the last, smaller batch has one
too. While this thread records, others may go on to ask the device: a loader that pins memory, the watchdog of a process
group.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitdial.errors import TrainingError

EAGER_STEPS = 3

Step = Callable[..., object]


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: tuple[Tensor, ...]
    result: object


class StepGraphs:
    """Runs a step eagerly at first, then from recorded graphs; the result's tensors are overwritten by the next run.

    A step that draws random numbers from a generator of its own names that, so that each replay draws others.
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self._generator = generator
        self._seen: dict[tuple[object, ...], int] = {}
        self._recorded: dict[tuple[object, ...], _Recorded] = {}

    def clear(self) -> None:
        """Forget all graphs: the tensors they refer to have been replaced."""
        self._seen.clear()
        self._recorded.clear()

    def run(self, step: Step, *inputs: Tensor) -> object:
        """`step(*inputs)`, by a graph as soon as there is one for these shapes."""
        key = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in inputs)
        if key in self._recorded:
            return self._replay(self._recorded[key], inputs)
        seen = self._seen.get(key, 0)
        if seen < EAGER_STEPS:
            self._seen[key] = seen + 1
            return on_side_stream(step, inputs)
        recorded = self._recorded[key] = self._record(step, inputs)
        return self._replay(recorded, inputs)

    def _record(self, step: Step, inputs: tuple[Tensor, ...]) -> _Recorded:
        graph, mine = torch.cuda.CUDAGraph(), tuple(tensor.clone() for tensor in inputs)
        if self._generator is not None:
            graph.register_generator_state(self._generator)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = step(*mine)
        except RuntimeError as problem:
            raise TrainingError(
                f"the step could not be recorded as a CUDA graph ({problem}); the model or the loss waits for the GPU, "
                "or moves data to it. Train with TrainConfig(cuda_graph=False, fused=False)"
            ) from problem
        return _Recorded(graph, mine, result)

    def _replay(self, recorded: _Recorded, inputs: tuple[Tensor, ...]) -> object:
        for mine, given in zip(recorded.inputs, inputs, strict=True):
            mine.copy_(given)
        recorded.graph.replay()
        return recorded.result


def on_side_stream(step: Step, inputs: tuple[Tensor, ...]) -> object:
    """Recording wants the steps before it to have run on a stream other than the default."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    return result
