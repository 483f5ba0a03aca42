"""Numbers of Python's that a trace reads, and that change from one forward to the next.

Dynamo takes a number for a constant and traces anew where it has changed. Where it changes at every
step (calls that are counted, a temperature that is annealed, a weight of the loss that grows), it
is traced as a number that varies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.pgo import auto_dynamic
from torch._dynamo.variables import builder
from torch._functorch._aot_autograd import graph_compile

__all__ = ["Floats", "Integers", "Number", "is_traced_by_us", "value_of"]

Number = torch.SymFloat | torch.SymInt | torch.SymBool


def value_of(number: Number) -> float:
    """Return a value that a number of a trace may have, without holding the trace to it."""
    known: Any = number.node.hint
    return 1 if known is None else known


class Integers:
    """The whole numbers that one forward may read: its arguments, attributes of its modules.

    One that another trace finds changed (calls that are counted, a step that the loop sets) varies
    from then on, unless it is to stay constant.

    Attributes:
        varying: those that vary, as regular expressions of Dynamo's name for them.
    """

    def __init__(self) -> None:
        self.varying: set[str] = set()
        self._constant = False
        self._found: dict[str, int] = {}

    def look(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A forward is about to be traced."""
        found = _integers_of(model)
        found |= {rf"L\['args'\]\[{i}\]$": v for i, v in enumerate(args) if type(v) is int}
        found |= {rf"L\['kwargs'\]\['{k}'\]$": v for k, v in kwargs.items() if type(v) is int}
        if not self._constant:
            self.varying.update(
                name for name, value in found.items() if self._found.get(name, value) != value
            )
        self._found |= found

    def stay_constant(self) -> None:
        """Take all for constants from now on."""
        self.varying, self._constant = set(), True


def _integers_of(model: nn.Module) -> dict[str, int]:
    """The integers among the attributes of the model's modules.

    Dynamo writes submodules in several ways:
    ``L['model'].__dict__['_modules']['blocks']._modules['0'].calls``.
    """
    found = {}
    for path, module in model.named_modules():
        parts = [
            rf"\W+(__dict__\W+)?(_modules\W+)?{re.escape(part)}" for part in path.split(".") if part
        ]
        for name, value in vars(module).items():
            if type(value) is int:
                found[rf"L\['model'\]{''.join(parts)}\W+{re.escape(name)}$"] = value
    return found


class Floats:
    """The floats that the traces of one forward have read.

    One that another trace finds changed varies from then on, where the operators that read it
    take a number of a trace; elsewhere (the p of a dropout) each value has its trace.

    Attributes:
        found: whether the last trace has taken one for varying.
    """

    def __init__(self) -> None:
        self.found = False
        self._constant = False
        self._read: dict[str, float] = {}
        self._varying: set[str] = set()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Trace in this context."""
        _watch_what_is_read()
        self.found = False
        before = getattr(_TRACED, "floats", None)
        _TRACED.floats = self
        try:
            yield
        finally:
            _TRACED.floats = before

    def stay_constant(self) -> None:
        """Take all for constants from now on."""
        self.found, self._constant = False, True

    def varies(self, name: str, value: float) -> bool:
        """A trace has read this float; return whether it is to be one that varies."""
        if self._read.setdefault(name, value) != value:
            self._varying.add(name)
        varies = name in self._varying and not self._constant
        self.found = self.found or varies
        return varies


_TRACED = threading.local()  # the floats of what this thread traces


def is_traced_by_us() -> bool:
    """Return whether this thread traces one of our models, and not somebody else's."""
    return getattr(_TRACED, "floats", None) is not None


@functools.cache
def _watch_what_is_read() -> None:
    """See the floats that Dynamo reads: it asks there whether a number has changed.

    Its own way of finding out is not to be had for numbers without that for shapes. AOTAutograd
    would make tensors of them and compute with these, where eager computes with numbers, and take
    for constants what it finds no such operator for.
    """
    asked = vars(builder)["process_automatic_dynamic"]

    def process_automatic_dynamic(tx: Any, name: str, entry: Any, **options: Any) -> Any:
        found = asked(tx, name, entry, **options)
        floats: Floats | None = getattr(_TRACED, "floats", None)
        if floats is None or not isinstance(entry.scalar, float):
            return found
        varies = floats.varies(f"{tx.f_code.co_name}: {name}", entry.scalar)
        return dataclasses.replace(found, scalar=auto_dynamic) if varies else found

    vars(builder)[asked.__name__] = process_automatic_dynamic
    made_tensors = vars(graph_compile)["tensorify_python_scalars"]

    def tensorify_python_scalars(*args: Any, **options: Any) -> None:
        if not is_traced_by_us():
            made_tensors(*args, **options)

    vars(graph_compile)[made_tensors.__name__] = tensorify_python_scalars
