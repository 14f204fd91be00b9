"""The weights of a model: which module owns which, known to bitdial or not.

A weight is a parameter of two or more dimensions. What has fewer (biases, the vectors of norms) is never quantised.
"""

from dataclasses import dataclass, field

from torch import nn


@dataclass
class Weights:
    """Which modules own the weights of a model.

    `owners`: by the identity of a parameter, the names of all modules that own it (tied weights have several).
    `modules` has these by name, and `sizes` how many weights each owns; a tied weight counts for its first owner.
    """

    owners: dict[int, list[str]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """How many weights the model has."""
        return sum(self.sizes.values())


def find_weights(model: nn.Module) -> Weights:
    """The weights of `model`. What is behind a parametrization belongs to the module that has it."""
    found, modules = Weights(), dict(model.named_modules())
    for place, module in modules.items():
        name = place.split(".parametrizations")[0] if ".parametrizations" in place else place
        for parameter in module._parameters.values():
            if parameter is None or parameter.dim() < 2:
                continue
            names = found.owners.setdefault(id(parameter), [])
            found.modules[name] = modules[name]
            found.sizes[name] = found.sizes.get(name, 0) + (0 if names else parameter.numel())
            names.append(name)
    return found
