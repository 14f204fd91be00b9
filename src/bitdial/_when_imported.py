"""Do something as soon as another package is imported, and not before: registering with it costs nobody an import."""

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(module: str, call: Callable[[], object]) -> None:
    """Call `call` once `module` has been imported: now, if it is there already. A failure of `call` is a warning."""
    if module in sys.modules:
        _try(call)
    else:
        sys.meta_path.insert(0, _Finder(module, call))


class _Finder(MetaPathFinder):
    """Finds one module as Python does without it, and has `call` called behind it."""

    def __init__(self, module: str, call: Callable[[], object]):
        self.module, self.call = module, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        others = [f for f in sys.meta_path if f is not self and hasattr(f, "find_spec")]
        spec = next((s for f in others if (s := f.find_spec(fullname, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


class _Loader(Loader):
    """The module's own loader, and what comes behind it."""

    def __init__(self, own: Any, finder: _Finder):
        self.own, self.finder = own, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self.own.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.own
        if module.__spec__ is not None:
            module.__spec__.loader = self.own
        self.own.exec_module(module)
        if self.finder in sys.meta_path:  # else another thread was here before
            sys.meta_path.remove(self.finder)
            _try(self.finder.call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)


def _try(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as problem:
        warnings.warn(f"bitdial could not register itself: {problem!r}", RuntimeWarning, stacklevel=3)
