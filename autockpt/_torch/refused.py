"""Refused: what Dynamo takes in and gets wrong. In our traces it ends a graph instead.

A generator of Python's own that is not the global one would draw the same numbers at each forward,
a queue of bounded length would grow beyond it, and what a forward first looks for in an object's
``__dict__`` and then writes there would never be found.
"""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Callable
from typing import Any

from torch._dynamo.exc import Unsupported
from torch._dynamo.variables import builder, dicts, misc

from autockpt._torch.numbers import is_traced_by_us

__all__ = ["refuse_what_is_traced_wrongly"]


@functools.cache
def refuse_what_is_traced_wrongly() -> None:
    """Have Dynamo end a graph, in traces of ours, where it meets one of these."""
    wrapped: Callable[..., Any] = vars(builder.VariableBuilder)["_wrap"]

    def _wrap(self: Any, value: Any) -> Any:
        if is_traced_by_us():
            if isinstance(value, random.Random):
                raise Unsupported("it draws from a generator of Python's other than the global one")
            if isinstance(value, collections.deque) and value.maxlen is not None:
                raise Unsupported("it uses a collections.deque with a maxlen")
        return wrapped(self, value)

    builder.VariableBuilder._wrap = _wrap  # type: ignore[method-assign]
    of_objects: Any = vars(dicts).get("DunderDictVariable")  # of torch 2.13 and later
    if of_objects is not None:
        _refuse_what_is_absent(of_objects)
    else:
        _refuse_to_look_for_what_is_absent()


def _refuse_what_is_absent(of_objects: Any) -> None:
    """Do so where a trace writes to an object's ``__dict__`` what it has asked for in vain."""
    guarded, called = of_objects.install_dict_contains_guard, of_objects.call_method

    def asked_in_vain(there: Any, keys: list[Any]) -> set[Any]:
        asked: set[Any] = vars(there).setdefault("autockpt_asked", set())
        asked.update(
            key.as_python_constant()
            for key in keys[:1]
            if key.is_python_constant() and not there.contains(key.as_python_constant())
        )
        return asked

    def install_dict_contains_guard(self: Any, tx: Any, args: list[Any]) -> Any:
        if is_traced_by_us():
            asked_in_vain(self, args)
        return guarded(self, tx, args)

    def check_write(there: Any, key: Any) -> None:
        if key.is_python_constant() and key.as_python_constant() in asked_in_vain(there, []):
            raise Unsupported("it writes to an object's __dict__ what was not in it")

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        if is_traced_by_us():
            if name in ("get", "setdefault"):
                asked_in_vain(self, args)
            if name in ("__setitem__", "setdefault"):
                check_write(self, args[0])
        return called(self, tx, name, args, kwargs)

    of_objects.install_dict_contains_guard = install_dict_contains_guard
    of_objects.call_method = call_method
    written: Any = getattr(of_objects, "mp_ass_subscript_impl", None)  # of torch 2.14 and later
    if written is None:
        return

    def mp_ass_subscript_impl(self: Any, tx: Any, key: Any, value: Any) -> Any:
        if is_traced_by_us():
            check_write(self, key)
        return written(self, tx, key, value)

    of_objects.mp_ass_subscript_impl = mp_ass_subscript_impl


def _refuse_to_look_for_what_is_absent() -> None:
    """Do so before torch 2.13, where a trace asks in vain: no guard watches for it to come."""
    called: Callable[..., Any] = vars(misc.GetAttrVariable)["call_method"]

    def call_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        asks = self.name == "__dict__" and name in ("__contains__", "get", "setdefault")
        if asks and is_traced_by_us() and args and args[0].is_python_constant():
            has = getattr(self.obj, "has_key_in_generic_dict", None)
            if has is not None and not has(tx, args[0].as_python_constant()):
                raise Unsupported("it looks in an object's __dict__ for what is not in it")
        return called(self, tx, name, args, kwargs)

    misc.GetAttrVariable.call_method = call_method  # type: ignore[method-assign]
