"""What an error of a trace or of generated code means."""

from __future__ import annotations

import linecache
import re
import traceback
import types
from collections.abc import Collection

import torch
import torch._dynamo.convert_frame
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    ObservedException,
    TorchDynamoException,
    TorchRuntimeError,
    Unsupported,
)

from autockpt._torch.nodes import user_frames
from autockpt._torch.tracing import SIGNATURES

__all__ = [
    "autograd_refusal",
    "capture_failure",
    "failed_run",
    "forget_context",
    "is_operator_error",
    "is_out_of_memory",
    "may_be_eagers",
    "raised_in_trace",
    "user_error",
]


# Lines of Dynamo's messages that speak to its developers, or of settings of torch.compile.
_FOR_OTHERS = (
    "Developer debug context",
    "For more details about this graph break",
    "report an issue",
    "torch._dynamo",
    "torch.compile",
)

# A line of generated code: addmm_3_again_1 = torch.ops.aten.addmm.default(...)
_MADE = re.compile(r"\s*(\w+?)(?:_again_(\d+))?(?:\s*:[^=]*)?\s=\s")


def forget_context(error: BaseException, ambient: BaseException | None) -> None:
    """Cut off of an error what was being handled already where its call began.

    Python hangs it on as context; it has nothing to do with why the call failed.
    """
    seen: BaseException | None = error
    while seen is not None and ambient is not None:
        if seen.__context__ is ambient:
            seen.__context__ = None
        seen = seen.__cause__ or seen.__context__


def user_error(error: BaseException) -> BaseException | None:
    """Return the error that our own code raised inside a trace, or None."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, BackendCompilerFailed):
            seen = seen.inner_exception
            continue
        if type(seen).__module__.split(".")[0] in ("autockpt", "autockpt_solvers"):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def capture_failure(error: BaseException) -> str | None:
    """Return why Dynamo could not trace, with the user's line, or None for another error."""
    if isinstance(error, FailOnRecompileLimitHit):
        return f"it has been captured for {SIGNATURES} kinds of input, which is the limit"
    if not isinstance(error, TorchDynamoException):
        return None
    text = str(error)
    reason = getattr(error, "msg", None) if isinstance(error, Unsupported) else None
    inner: BaseException | None = None
    if isinstance(error, BackendCompilerFailed):
        inner = error.inner_exception
    elif isinstance(error, TorchRuntimeError):
        inner = _operators_own(error)
    if inner is not None:
        reason = f"{type(inner).__name__}: {inner}"
    lines = [line for line in (reason or text).splitlines() if line.strip()]
    lines = [line for line in lines if not any(word in line for word in _FOR_OTHERS)]
    head = "\n".join(lines[:6]) if lines else type(error).__name__
    frames = user_frames(text) or user_frames(str(getattr(error, "real_stack", "") or ""))
    where = f"{frames[-1][0]}, line {frames[-1][1]}, in {frames[-1][2]}" if frames else ""
    return f"{where}: {head}" if where else head


def _operators_own(error: TorchRuntimeError) -> BaseException | None:
    """What an operator raised where Dynamo tried it out, without what Dynamo says of it."""
    seen: BaseException | None = error
    while isinstance(seen, TorchDynamoException):
        seen = seen.__cause__ or seen.__context__
    return seen


def autograd_refusal(error: BaseException) -> RuntimeError | None:
    """Return autograd's own refusal of a model that overwrites what its backward needs, or None.

    Differentiating meets it while it traces; eager meets it in its backward.
    """
    seen: BaseException | None = error
    while seen is not None:
        inner = seen.inner_exception if isinstance(seen, BackendCompilerFailed) else seen
        if type(inner) is RuntimeError and "modified by an inplace operation" in str(inner):
            return inner
        seen = inner.__cause__ or inner.__context__
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device's allocator could not serve a request."""
    refused = type(error) is RuntimeError and "DefaultCPUAllocator: " in str(error)
    return refused or isinstance(error, torch.OutOfMemoryError)


def failed_run(error: BaseException, names: Collection[str]) -> tuple[str, int] | None:
    """Return which run of an operation failed in generated code, or the last before it that is
    known: its name, and how often it had run before. None where the error comes from elsewhere.
    """
    found: tuple[types.FrameType, int] | None = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.startswith("<eval_with_key>"):
            found = frame, line
    if found is None:
        return None
    frame, line = found
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    for text in reversed(lines[:line]):
        made = _MADE.match(text)
        if made is None:
            continue
        name, again = made.groups()
        if name in names:
            return name, int(again or 0)
    return None


def may_be_eagers(error: BaseException) -> bool:
    """Return whether a trace ended by something that may end a plain run as well.

    An operator refused its inputs, or the user's code raised.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (TorchRuntimeError, ObservedException)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def raised_in_trace(error: BaseException) -> bool:
    """Return whether an error came out of Dynamo's tracing, not out of running what it traced."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == torch._dynamo.convert_frame.__file__:
            return True
        trace = trace.tb_next
    return False


def is_operator_error(error: BaseException) -> bool:
    """Return whether a trace ended because an operator refused its inputs."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, TorchRuntimeError):
        seen = seen.__cause__ or seen.__context__
    return seen is not None
