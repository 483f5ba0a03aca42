"""Losses: the loss in a model's output, and the weight of each micro-batch in the mean.

The gradient of a full batch's mean is the mean of the micro-batches' gradients, weighted as their
losses are means: by samples, or by tokens where the loss is a mean over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from autockpt.split import Batch
from autockpt_solvers.errors import InputError

__all__ = ["Weight", "loss_of", "weight_of", "weights_of"]

# A tensor (of one weight per sample, or per token), a count, a count per micro-batch, or a
# function of a micro-batch that returns one of the first two.
Weight = Tensor | float | Sequence[float] | Callable[..., Any] | None


# ------------------------------------------------------------------ the loss


def loss_of(output: Any, target: Any, loss_fn: Callable[..., Any] | None) -> Tensor:
    """Return the loss of a forward's output, a single number that requires a gradient.

    Args:
        output: what the model returned.
        target: what was passed as ``target=``; None where nothing was.
        loss_fn: called with output and target, or with the output alone; None: the output is the
            loss, or has it as ``.loss`` or ``["loss"]``.

    Raises:
        InputError: there is no such loss.
    """
    if loss_fn is not None:
        loss = loss_fn(output) if target is None else loss_fn(output, target)
        source = "loss_fn returned"
    else:
        loss, source = _own(output), "the model returned"
    if not isinstance(loss, Tensor) and loss_fn is not None:
        raise InputError(
            f"{source} {type(loss).__name__}; it must return the loss alone, as a tensor of one "
            "number."
        )
    if not isinstance(loss, Tensor):
        raise InputError(
            f"{source} {type(loss).__name__}, in which there is no loss. Return the loss as a "
            "tensor of one number, as .loss or as ['loss'], or pass "
            "loss_fn= to autockpt.optimize."
        )
    if loss.numel() != 1 or not loss.is_floating_point():
        raise InputError(
            f"{source} a {loss.dtype} tensor of shape {tuple(loss.shape)} as the loss; it must be "
            "a single floating-point number. Pass loss_fn= to autockpt.optimize (for a loss per "
            "sample: its mean, and weight= where samples count differently)."
        )
    if not loss.requires_grad:
        raise InputError(
            f"{source} a loss that does not depend on anything that requires a gradient: "
            "it may have been detached, or computed under torch.no_grad()."
        )
    return loss.reshape(())


def _own(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    found = getattr(output, "loss", None)
    return output if found is None else found


# ------------------------------------------------------------------ the weights


def weights_of(
    weight: Weight, parts: Sequence[Batch], sizes: Sequence[int], batch_dim: int = 0
) -> list[float]:
    """Return the weight of each micro-batch of one effective batch.

    Args:
        weight: None: the number of samples. A tensor of one weight per sample (or of several:
            per token) is split as the batch is and summed. A sequence has one number per
            micro-batch. A function is called with a micro-batch as ``step`` was called
            (``target=`` included where there is one) and returns a number or a tensor to sum.
        parts: the micro-batches.
        sizes: their numbers of samples.
        batch_dim: dimension of the samples in a weight tensor.

    Raises:
        InputError: a weight is negative or not finite, or does not fit the batch.
    """
    listed = isinstance(weight, Sequence) and not isinstance(weight, str)
    of_each = weight is None or (callable(weight) and not isinstance(weight, Tensor))
    if of_each or (len(parts) == 1 and not listed):
        return [weight_of(weight, part, size) for part, size in zip(parts, sizes, strict=True)]
    if isinstance(weight, Tensor) and weight.dim() > 0:
        samples = sum(sizes)
        inside = -weight.dim() <= batch_dim < weight.dim()
        if not inside or weight.shape[batch_dim] != samples:
            raise InputError(
                f"weight has shape {tuple(weight.shape)}, but the batch has {samples} samples "
                f"along dimension {batch_dim}: one weight per sample (or per token of each) "
                "is needed."
            )
        pieces = weight.detach().split(list(sizes), dim=batch_dim)
        return [_checked(value) for value in _numbers(pieces)]
    if isinstance(weight, Sequence) and not isinstance(weight, str):
        if len(weight) != len(parts):
            raise InputError(
                f"weight has {len(weight)} entries for {len(parts)} micro-batches; give one for "
                "each, a tensor with one for each sample, or a function of a micro-batch."
            )
        return [_checked(w) for w in weight]
    raise InputError(
        f"weight={weight!r} does not say how much each of the {len(parts)} micro-batches counts. "
        "Give a tensor with one weight per sample or token, or a function of a micro-batch; "
        "a single count is for micro_step."
    )


def weight_of(weight: Weight, batch: Batch, samples: int) -> float:
    """Return the weight of one micro-batch; see :func:`weights_of`.

    Raises:
        InputError: it is negative or not finite, or no number.
    """
    if weight is None:
        return float(samples)
    if callable(weight) and not isinstance(weight, Tensor):
        target = {} if batch.target is None else {"target": batch.target}
        weight = weight(*batch.args, **batch.kwargs, **target)
    return _checked(weight)


def _numbers(pieces: Sequence[Tensor]) -> list[float]:
    # One transfer from the device for all of them.
    values: list[float] = torch.stack([p.sum(dtype=torch.float64) for p in pieces]).tolist()
    return values


def _checked(weight: Any) -> float:
    if isinstance(weight, Tensor):
        weight = weight.detach().sum(dtype=torch.float64).item()
    if not isinstance(weight, Real) or not math.isfinite(float(weight)) or float(weight) < 0:
        raise InputError(
            f"a micro-batch has the weight {weight!r}; weights are finite numbers from 0 on."
        )
    return float(weight)
