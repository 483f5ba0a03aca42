"""What a traced graph and its nodes say: operators, module paths, source lines."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "computes_with_its_integers",
    "fake_mode_of",
    "getitem_index",
    "is_operator",
    "is_random",
    "module_path",
    "source_line",
    "user_frames",
]


# What a schema says of an argument that an operator computes with, be it a number.
_OPERANDS = ("number", "Optional[number]", "Tensor", "Optional[Tensor]")

_HERE = str(Path(__file__).parent).replace("\\", "/") + "/"
_USER_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>\S+)', re.M)


def user_frames(text: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the frames in a traceback that are the user's."""
    return [
        (m["file"], m["line"], m["name"])
        for m in _USER_FRAME.finditer(text)
        if not _is_library(m["file"])
    ]


def _is_library(file: str) -> bool:
    normal = file.replace("\\", "/")
    return normal.startswith(_HERE) or "/torch/" in normal


def fake_mode_of(module: fx.GraphModule) -> FakeTensorMode:
    """Return the mode whose fake tensors a traced graph carries."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise AssertionError("a traced graph without tensors")


def is_random(node: fx.Node) -> bool:
    """Return whether the node draws from a generator."""
    target: Any = node.target
    seeded = torch.Tag.nondeterministic_seeded
    return isinstance(target, torch._ops.OpOverload) and seeded in target.tags


def is_operator(node: fx.Node) -> bool:
    """Return whether the node calls one of torch's own operators.

    Other operators are the user's; what they do beside computing is not known.
    """
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in (
        "aten",
        "prims",
    )


def computes_with_its_integers(node: fx.Node) -> bool:
    """Return whether the whole numbers that vary are operands of the node: no sizes, no places."""
    schema = getattr(node.target, "_schema", None)
    taken = [] if schema is None else schema.arguments
    given = {**dict(zip((a.name for a in taken), node.args, strict=False)), **node.kwargs}
    operands = {a.name for a in taken if str(a.type) in _OPERANDS}
    others = [value for name, value in given.items() if name not in operands]
    read: list[fx.Node] = []
    fx.node.map_arg(others if taken else [node.args, node.kwargs], read.append)
    return not any(isinstance(source.meta.get("val"), torch.SymInt) for source in read)


def getitem_index(node: fx.Node) -> int | None:
    """Return which output of its producer the node picks, or None if it is no pick."""
    if node.op == "call_function" and node.target is operator.getitem:
        return int(node.args[1])  # type: ignore[arg-type]
    return None


def module_path(node: fx.Node) -> str:
    """Return the path of the module the node comes from, ``blocks.3.attn``; empty for the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    path = re.sub(r"^L\['\w+'\]", "", path)
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\['?([^'\]]*)'?\]", r".\1", path)
    return path.strip(".")


def source_line(node: fx.Node) -> str:
    """Return the user's line the node comes from, ``model.py:41``, or an empty string."""
    frames = user_frames(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    file, line, _ = frames[-1]
    return f"{file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"
