"""Replay: draw the same random numbers again.

Generated code calls these two functions: the forward saves the generator's state before a random
operation, a further run sets it, draws, and puts the generator back as it found it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["generator_state", "replay", "state_bytes"]


def generator_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator, a uint8 tensor on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def replay(
    state: torch.Tensor,
    device: torch.device,
    operator: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return what ``operator(*args, **kwargs)`` returns from a generator in ``state``."""
    now = generator_state(device)
    _set(device, state)
    try:
        return operator(*args, **kwargs)
    finally:
        _set(device, now)


def state_bytes(device: torch.device) -> int:
    """Return the bytes one saved state takes on ``device``: CUDA's states lie on the CPU."""
    return 0 if device.type == "cuda" else int(torch.get_rng_state().numel())


def _set(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
