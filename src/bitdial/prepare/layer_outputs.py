"""What some layers of a model put out: numbers to compare where the model's own output has none.

A detector returns the boxes that it keeps, more at one setting than at another. What its predictors put out before that
has the same shape at every setting.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from bitdial.dial.dial import unwrap
from bitdial.errors import ConfigError
from bitdial.prepare.model_call import Batch, call
from bitdial.prepare.model_output import Output, selected


class LayerOutputs:
    """As `output=LayerOutputs("head.classes", "head.offsets")`: what these modules put out, call by call, in a list.

    `measured_search` compares that instead of what the model returns, for example by `distance=relative_error`.
    """

    def __init__(self, *names: str):
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"LayerOutputs{names}: give the names of modules, such as 'head.classes'")
        self.names = names

    def __call__(self, returned: Any) -> Any:
        """It is asked for the model, not for what it returned."""
        raise ConfigError(f"{self} runs the model itself, which measured_search does; elsewhere output selects a part")

    def run(self, model: nn.Module, batch: Batch) -> list[Tensor]:
        """The outputs of the modules when `model` runs on `batch`, in the order of the calls."""
        inner, found = unwrap(model), list[Tensor]()
        with ExitStack() as stack:
            for name in self.names:
                try:
                    module = inner.get_submodule(name)
                except AttributeError as problem:
                    raise ConfigError(f"{self}: the model has no module {name!r}") from problem
                hook = module.register_forward_hook(lambda m, args, out: found.extend(_tensors(out)))
                stack.callback(hook.remove)
            call(model, batch)
        if not found:
            raise ConfigError(f"{self}: none of them was called; a model on integer kernels calls others: kernels='float'")
        return found

    def __repr__(self) -> str:
        return f"LayerOutputs({', '.join(map(repr, self.names))})"


def _tensors(out: Any) -> Iterator[Tensor]:
    """The tensors in what a module put out."""
    parts = out.values() if isinstance(out, dict) else out if isinstance(out, list | tuple) else (out,)
    yield from (part.clone() for part in parts if isinstance(part, Tensor))


def compared(model: nn.Module, batch: Batch, output: Output) -> Any:
    """What of `model` on `batch` is compared: the part of its output that is meant, or what layers put out."""
    if isinstance(output, LayerOutputs):
        return output.run(model, batch)
    found = selected(call(model, batch), output)
    if isinstance(found, list) and found and isinstance(found[0], Mapping):
        raise ConfigError(
            "the model returns a dict for each image, as detectors do, of as many boxes as it keeps: compare what its "
            "predictors put out, output=LayerOutputs('head.classes', ...) with distance=relative_error"
        )
    return found
