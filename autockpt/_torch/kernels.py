"""Operators that a trace takes apart in Python although torch has a kernel for them.

What a compiler fuses again costs a plan several times the memory and the time of the one kernel,
and rounds in another order than eager does.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["kernels_stay_whole"]

_TAKEN_APART = re.compile(
    r"_?upsample_\w+|hardshrink|softshrink|multi_margin_loss|multilabel_margin_loss_forward"
)


@contextlib.contextmanager
def kernels_stay_whole() -> Iterator[None]:
    """Let traces in this context meet operators of torch's own kernels as they are in eager."""
    held = [(op, dict(op.py_kernels)) for op in _operators() if op.py_kernels]
    for op, _ in held:
        op.py_kernels.clear()
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in held:
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


def _operators() -> Iterator[Any]:
    names = [name for name in dir(torch.ops.aten) if _TAKEN_APART.fullmatch(name)]
    for name in names:
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            yield getattr(packet, overload)
