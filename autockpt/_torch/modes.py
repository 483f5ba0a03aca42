"""Dispatch modes that look on while operators run."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import eval_frame
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from autockpt._torch.engine import in_backward
from autockpt._torch.values import strided_parts

__all__ = [
    "AllocationTracker",
    "OperatorMode",
    "is_traced",
    "leave_what_is_left_behind",
    "outside_tracing",
    "runs_elsewhere",
]


@contextlib.contextmanager
def outside_tracing() -> Iterator[None]:
    """Run real operations although a trace is in progress; the generators are put back."""
    with (
        _disable_current_modes(),
        unset_fake_temporarily(),
        torch.no_grad(),
        torch.random.fork_rng(devices=range(torch.cuda.device_count())),
    ):
        yield


def runs_elsewhere() -> bool:
    """Return whether a call must run plainly: under the user's own mode, under functorch, or where
    gradients go forward.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or any(not mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())
    )


def is_traced() -> bool:
    """Return whether a call is being traced: by Dynamo, or under a mode of this thread's.

    Torch's own flag also says so while another thread compiles.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and any(
        not isinstance(mode, _Onlooker) for mode in _get_current_dispatch_mode_stack()
    )


class _Onlooker(TorchDispatchMode):
    """A dispatch mode that sees operators and changes nothing that they do."""

    thread = 0  # that entered it
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiling under it is safe."""
        return True

    def leave(self) -> bool:
        """Leave it wherever on this thread's stack it is; return whether that was possible.

        Modes that the user has entered since stay. Inside a backward nothing can be left for good:
        autograd puts the stack back when it returns. Dynamo puts back whether there are modes at
        all when code that it has made returns, so that torch would look for one and find none.
        """
        stack = _get_current_dispatch_mode_stack()
        if in_backward() or _in_compiled_code() or not any(mode is self for mode in stack):
            return False
        above = stack[[mode is self for mode in stack].index(True) + 1 :]
        # Of the base class: the user's own enter and exit are not to run.
        for mode in (*reversed(above), self):
            TorchDispatchMode.__exit__(mode, None, None, None)
        for mode in above:
            TorchDispatchMode.__enter__(mode)
        return True

    def enter_for(self, owner: object) -> None:
        """Enter it. Where ``owner``, which it must not hold, goes without having left it,
        :func:`leave_what_is_left_behind` does.
        """
        self.thread = threading.get_ident()
        self.__enter__()
        weakref.finalize(owner, _LEFT_BEHIND.append, self).atexit = False


def _in_compiled_code() -> bool:
    """Return whether the call comes from code that Dynamo has made, or from its compiler."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == eval_frame.__file__:
            return True
        frame = frame.f_back
    return False


# Modes whose owners are gone. The garbage collector runs at any moment, in the middle of an
# operator's dispatch too, where the stack of modes must stay as it is.
_LEFT_BEHIND: list[_Onlooker] = []


def leave_what_is_left_behind() -> None:
    """Leave the modes whose owners are gone: between operators, in the thread that entered them."""
    if not _LEFT_BEHIND or in_backward() or _in_compiled_code():
        return
    for _ in range(len(_LEFT_BEHIND)):
        mode = _LEFT_BEHIND.pop(0)
        if not mode.leave() and mode.thread != threading.get_ident():
            _LEFT_BEHIND.append(mode)


class AllocationTracker(_Onlooker):
    """While entered, counts the bytes that operators allocate and have not freed.

    Workspace inside an operator is not seen. Works on real and on fake tensors.

    Attributes:
        live_bytes: allocated since the start and still alive.
        peak_bytes: the largest number of them so far.
        active: turned off, it lets everything through uncounted.
    """

    def __init__(self, round_up: Callable[[int], int]) -> None:
        super().__init__()
        self.round_up = round_up
        self.active = True
        self.live_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._outside: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.active:
            self._count((args, kwargs), result)
        return result

    def _count(self, inputs: Any, result: Any) -> None:
        self._collect()
        for tensor in strided_parts(inputs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive:
                self._outside[storage._cdata] = StorageWeakRef(storage)
        for tensor in strided_parts(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._alive and storage._cdata not in self._outside:
                size = self.round_up(storage.nbytes())
                self._alive[storage._cdata] = (StorageWeakRef(storage), size)
                self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def include(self, ref: StorageWeakRef, size_bytes: int) -> None:
        """Count memory that is there already, as long as it is."""
        if ref.cdata not in self._alive:
            self._alive[ref.cdata] = (ref, size_bytes)
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def count_now(self) -> None:
        """Take what has been freed since the last operator off the count."""
        self._collect()

    def _collect(self) -> None:
        for key in [k for k, (ref, _) in self._alive.items() if ref.expired()]:
            self.live_bytes -= self._alive.pop(key)[1]
        for key in [k for k, ref in self._outside.items() if ref.expired()]:
            del self._outside[key]


class OperatorMode(_Onlooker):
    """While entered, hands every operator to a method that runs it: ``see(name, run, inputs)``.

    Not views, which read nothing and of which no backward needs a value. The method's owner is
    held weakly.
    """

    def __init__(self, see: Callable[[str, Callable[[], Any], list[torch.Tensor]], Any]) -> None:
        super().__init__()
        self.see = weakref.WeakMethod(see)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def run() -> Any:
            return func(*args, **(kwargs or {}))

        see = self.see()
        if see is None or getattr(func, "is_view", False):  # operators of a higher order are none
            return run()
        return see(str(func), run, strided_parts((args, kwargs)))
