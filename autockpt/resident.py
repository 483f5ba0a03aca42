"""Resident: the memory that is there throughout a training step, and the optimizer's."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autockpt import _torch
from autockpt.device import Device
from autockpt.roofline import Modelled

__all__ = [
    "OptimizerMemory",
    "distinct_bytes",
    "gradient_of",
    "missing_gradient_bytes",
    "optimizer_memory",
    "resident_bytes",
]


def resident_bytes(
    model: nn.Module, inputs: Any, device: Device | Modelled, *, gradients: bool = True
) -> int:
    """Return the bytes of parameters, buffers, existing gradients and the tensors in ``inputs``.

    Each memory counts once, rounded as the device's allocator rounds, and only on this device.
    ``gradients=False`` leaves gradients out.
    """
    found = [*model.parameters(), *model.buffers(), *_torch.tensors_anywhere(inputs)]
    if gradients:
        found += [g for p in model.parameters() if (g := gradient_of(p)) is not None]
    return distinct_bytes(found, device)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's gradient; None where it can have none.

    ``functional_call`` puts tensors in the places of parameters that are no leaves, and torch warns
    of who asks those.
    """
    return parameter.grad if parameter.is_leaf or parameter.retains_grad else None


def missing_gradient_bytes(model: nn.Module, device: Device | Modelled) -> int:
    """Return the bytes of the gradients that a whole backward makes and that are not there yet."""
    found = [p for p in model.parameters() if p.requires_grad and gradient_of(p) is None]
    return distinct_bytes(found, device)


@dataclass(frozen=True)
class OptimizerMemory:
    """What an optimizer allocates.

    Attributes:
        state_bytes: held from one step to the next.
        step_bytes: peak inside a step, beyond the state.
    """

    state_bytes: int = 0
    step_bytes: int = 0


def optimizer_memory(optimizer: Optimizer, device: Device | Modelled) -> OptimizerMemory:
    """Return what the optimizer's steps allocate, found by two steps on fake parameters.

    The optimizer itself is left as it is. One whose step cannot be run so (it wants a closure)
    counts with the state it has now.
    """
    fake = copy.copy(optimizer)
    fake.state = defaultdict(dict)
    # The user's hooks are not to be called for steps that do not happen.
    for hooks in [name for name in vars(fake) if name.endswith("_hooks")]:
        setattr(fake, hooks, OrderedDict())
    tracker = _torch.AllocationTracker(device.round_up)
    try:
        with _torch.FakeTensorMode(allow_non_fake_inputs=True):
            fake.param_groups = [
                {**group, "params": [_fake_parameter(p) for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            with tracker:
                fake.step()
                state = tracker.live_bytes
                tracker.peak_bytes = state
                fake.step()
        return OptimizerMemory(state, tracker.peak_bytes - state)
    except Exception:  # an optimizer is the user's code: anything can happen in it
        held = [t for s in optimizer.state.values() for t in _torch.tensor_leaves(s)]
        return OptimizerMemory(distinct_bytes(held, device), 0)


def _fake_parameter(parameter: torch.Tensor) -> nn.Parameter:
    made = nn.Parameter(
        torch.empty_strided(
            parameter.shape, parameter.stride(), dtype=parameter.dtype, device=parameter.device
        ),
        requires_grad=parameter.requires_grad,
    )
    if parameter.requires_grad:
        made.grad = torch.empty_like(made)
    return made


def distinct_bytes(found: Iterable[torch.Tensor], device: Device | Modelled) -> int:
    """Return the bytes of the memory on ``device`` that tensors live in, each block once."""
    sizes: dict[int, int] = {}
    for tensor in found:
        if tensor.device.type == device.kind.type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[_torch.storage_key(tensor)] = device.round_up(storage.nbytes())
    return sum(sizes.values())
