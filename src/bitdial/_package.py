"""A package that imports what it offers when it is asked for it: `import bitdial` and `bitdial --help` take no time.

PEP 562 has a function `__getattr__` in a module for this. It does not suffice here: `bitdial.train` is a function and a
folder, and whoever imports the folder would put it in the function's place.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


class Package(ModuleType):
    """A module with names that are imported from `_homes` ({name: module}) when they are asked for."""

    _homes: Mapping[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(import_module(self._homes[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in self._homes and isinstance(value, ModuleType)):  # a folder of that name was imported
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self), *self._homes})


def load_when_asked(name: str, names: Mapping[str, str]) -> None:
    """Put a Package in the place of the module `name`, whose import ends here; `names` is {module: "a b c"}."""
    module = sys.modules[name]
    package = Package(name, module.__doc__)
    homes = {public: home for home, found in names.items() for public in found.split()}
    vars(package).update(vars(module), _homes=homes)
    sys.modules[name] = package
