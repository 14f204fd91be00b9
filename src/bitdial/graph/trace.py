"""torch.fx's tracer for programs in which other threads run models meanwhile.

While it traces, fx replaces `nn.Module.__call__` and `__getattr__` for the whole process. Here calls of other threads
go on to what was there before, and one trace waits for another: two at once would leave a tracer behind in `nn.Module`.
"""

import threading
from collections.abc import Callable
from typing import Any

from torch import fx, nn

_ONE_AT_A_TIME = threading.RLock()


class ThreadTracer(fx.Tracer):
    """Traces what its own thread calls."""

    _thread: int

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        with _ONE_AT_A_TIME:
            self._thread = threading.get_ident()
            return super().trace(root, concrete_args)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)
