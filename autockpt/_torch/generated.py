"""A graph as the Python function that runs it."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen
from torch.fx.graph_module import _forward_from_src

__all__ = ["boxed"]


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return the graph as a function of one list, which it empties: inputs die at last use."""
    codegen = _BoxedCodeGen()
    codegen._body_transformer = module.graph._codegen._body_transformer  # writes comments
    module.graph.set_codegen(codegen)
    function = types.MethodType(_with_operators_at_hand(module), module)

    def call(args: list[Any]) -> Any:
        return function(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _with_operators_at_hand(module: fx.GraphModule) -> Callable[..., Any]:
    """Return the graph's function with each operator's own binding among its names.

    As generated it finds ``torch.ops.aten.mm.default`` by four look-ups at every call, and that
    is one more call in Python: a quarter of what it takes beyond the operator's own time.
    """
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def at_hand(written: re.Match[str]) -> str:
        namespace, name, overload = written.groups()
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        if type(operator) is not torch._ops.OpOverload:
            return written[0]
        here = f"_operator_{namespace}_{name}_{overload}"
        names[here] = operator._op
        return f"{here}("

    source = re.sub(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)\(", at_hand, code.src)
    return _forward_from_src(source, names)
