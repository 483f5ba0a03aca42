"""Eager's errors: a forward that fails without autockpt fails with it in the same way.

A trace that ends early says so in words of the tracer's. Whether the model itself is at fault is
found out by running it plainly, as the user would.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autockpt import _torch
from autockpt_solvers.errors import InputError

__all__ = ["raise_as_eager"]


def raise_as_eager(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception
) -> None:
    """Raise what the plain model raises for these inputs; return where it runs.

    It is run only where ``error``, or what caused it, may be the model's own. Where it runs, the
    generators, the parameters and the buffers are put back.
    """
    if not (isinstance(error, InputError) or _torch.may_be_eagers(error)):
        return
    kept = [(t, t.detach().clone()) for t in (*model.parameters(), *model.buffers())]
    generators = torch.get_rng_state(), _cuda_states()
    try:
        model._call_impl(*args, **kwargs)
    except Exception as own:
        # What the trace said about it would only be read as a second failure.
        raise own from None
    with torch.no_grad():
        for tensor, value in kept:
            tensor.copy_(value)
    torch.set_rng_state(generators[0])
    if generators[1]:
        torch.cuda.set_rng_state_all(generators[1])


def _cuda_states() -> list[torch.Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
