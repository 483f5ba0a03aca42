"""What a training step did: every result a user can see, and the comparison of two of them.

Peak bytes and resident bytes come from ``benchmarks.measure`` (the torch profiler's allocation
events), which knows nothing of plans or simulators; they are offered here under the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.measure import Peak, loss_of, measure_peak, resident_bytes, whole_step_peak

__all__ = [
    "Peak",
    "StepResult",
    "assert_same",
    "assert_state_unchanged",
    "loss_of",
    "measure_peak",
    "model_state",
    "resident_bytes",
    "run_step",
    "run_steps",
    "whole_step_peak",
]


@dataclass(frozen=True)
class StepResult:
    """Everything one forward and backward leaves behind, copied.

    ``gradients`` holds None where a parameter has no gradient; ``input_gradients`` names the
    inputs that require one. ``rng_state`` is the default CPU generator's state at the end.
    """

    loss: Tensor
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    input_gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    inputs: dict[str, Tensor]
    rng_state: Tensor


def run_step(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    seed: int = 1234,
    loss_fn: Callable[[Any], Tensor] = loss_of,
    forward: Callable[..., Any] | None = None,
    optimizer: Optimizer | None = None,
) -> StepResult:
    """One step from ``seed``: gradients to None, forward, backward, and the optimizer if given.

    ``forward`` stands in for ``model`` (a compiled wrapper of it). The gradients are removed
    before returning, so that a measured step can follow.
    """
    kwargs = dict(kwargs or {})
    inputs = dict(_tensors("inputs", [*args, kwargs]))
    for holder in [*model.parameters(), *inputs.values()]:
        holder.grad = None
    torch.manual_seed(seed)
    output = (model if forward is None else forward)(*args, **kwargs)
    loss = loss_fn(output)
    outputs = {name: tensor.detach().clone() for name, tensor in _tensors("output", output)}
    loss.backward()
    result = StepResult(
        loss=loss.detach().clone(),
        outputs=outputs,
        gradients={n: _copy(p.grad) for n, p in model.named_parameters()},
        input_gradients={n: _copy(t.grad) for n, t in inputs.items() if t.requires_grad},
        buffers={n: b.detach().clone() for n, b in model.named_buffers()},
        inputs={n: t.detach().clone() for n, t in inputs.items()},
        rng_state=torch.get_rng_state(),
    )
    if optimizer is not None:
        optimizer.step()
    for holder in [*model.parameters(), *inputs.values()]:
        holder.grad = None
    return result


def run_steps(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    *,
    seed: int = 1234,
    loss_fn: Callable[[Any], Tensor] = loss_of,
) -> list[float]:
    """The loss of each step of a plain training loop over ``batches``, seeded once at its start."""
    torch.manual_seed(seed)
    losses = []
    for args, kwargs in batches:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(*args, **kwargs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.zero_grad(set_to_none=True)
    return losses


def assert_same(
    actual: StepResult, expected: StepResult, *, bitwise: bool = True, rtol: float = 1e-5
) -> None:
    """Raise AssertionError naming every tensor in which the two steps differ.

    Which gradients are None, shapes, dtypes, integer values and the random generator's end must
    agree exactly in either mode. ``bitwise`` compares the bits (NaN payloads and signed zeros
    too); otherwise a tensor may differ by ``rtol`` times its largest expected magnitude, or,
    where that is larger, by ``rtol`` of the largest gradient (for gradients whose true value is
    zero, such as the bias before a normalisation, and which are rounding noise in both).
    """
    problems: list[str] = []
    groups: list[tuple[str, Mapping[str, Tensor | None], Mapping[str, Tensor | None]]] = [
        ("", {"loss": actual.loss}, {"loss": expected.loss}),
        ("", actual.outputs, expected.outputs),
        ("gradient of ", actual.gradients, expected.gradients),
        ("gradient of ", actual.input_gradients, expected.input_gradients),
        ("buffer ", actual.buffers, expected.buffers),
        ("input ", actual.inputs, expected.inputs),
    ]
    for kind, got, want in groups:
        if list(got) != list(want):
            difference = sorted(set(got) ^ set(want)) or "their order"
            problems.append(f"{kind}names differ: {difference}")
            continue
        floor = rtol * _largest(want.values()) if kind == "gradient of " else 0.0
        for name, tensor in want.items():
            problem = _difference(got[name], tensor, bitwise=bitwise, rtol=rtol, floor=floor)
            if problem:
                problems.append(f"{kind}{name}: {problem}")
    if not torch.equal(actual.rng_state, expected.rng_state):
        problems.append("random generator: its state at the end differs")
    if problems:
        mode = "bitwise" if bitwise else f"to rtol {rtol:g}"
        shown = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise AssertionError(f"steps differ ({mode}):\n  {shown}{more}")


def _difference(
    got: Tensor | None, want: Tensor | None, *, bitwise: bool, rtol: float, floor: float
) -> str | None:
    """What differs, in words; None when the two are the same."""
    if got is None or want is None:
        if got is want:
            return None
        return f"is {'None' if got is None else 'a tensor'}, expected {_kind(want)}"
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"is {_kind(got)}, expected {_kind(want)}"
    if _bits_equal(got, want):
        return None
    if not want.dtype.is_floating_point and not want.dtype.is_complex:
        return f"{int((got != want).sum())} of {want.numel()} values differ"
    wide_got, wide_want = _wide(got), _wide(want)
    finite = wide_want.isfinite()
    if not torch.equal(finite, wide_got.isfinite()):
        return "finite and non-finite values are in different places"
    if not torch.allclose(wide_got[~finite], wide_want[~finite], equal_nan=True):
        return "infinities and NaNs are in different places"
    error = (wide_got - wide_want)[finite].abs()
    largest_error = float(error.max()) if error.numel() else 0.0
    largest = _largest([want])
    if not bitwise and largest_error <= max(rtol * largest, floor):
        return None
    differing = int((error > 0).sum())
    return (
        f"{differing} of {want.numel()} values differ, by at most {largest_error:.3g} "
        f"(largest expected magnitude {largest:.3g})"
    )


def _bits_equal(a: Tensor, b: Tensor) -> bool:
    if not a.numel():
        return True
    return torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def _largest(tensors: Any) -> float:
    """The largest finite magnitude in ``tensors``; 0 without one."""
    highest = 0.0
    for tensor in tensors:
        if tensor is None or not tensor.numel():
            continue
        finite = _wide(tensor)
        finite = finite[finite.isfinite()]
        if finite.numel():
            highest = max(highest, float(finite.abs().max()))
    return highest


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def _kind(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a nest of tuples, lists and mappings, with its path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(f"{name}[{key!r}]", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{name}[{index}]", item)


# ---------------------------------------------------------------------------------------------
# A model that must come out of a failure as it went in
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelState:
    """What identifies a model to its user: class, forward, tensor objects, their bits, hooks."""

    cls: type
    training: tuple[bool, ...]
    attributes: tuple[tuple[str, ...], ...]
    compiled: object
    identities: tuple[tuple[str, int], ...]
    bits: dict[str, Tensor]
    hooks: int
    rng_state: Tensor


def model_state(model: nn.Module) -> ModelState:
    """The state of ``model`` now, for ``assert_state_unchanged`` after a call that failed."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return ModelState(
        cls=type(model),
        training=tuple(m.training for m in model.modules()),
        attributes=tuple(tuple(sorted(m.__dict__)) for m in model.modules()),
        compiled=model._compiled_call_impl,
        identities=tuple((name, id(tensor)) for name, tensor in tensors),
        bits={name: tensor.detach().clone() for name, tensor in tensors},
        hooks=sum(
            len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
            for m in model.modules()
        ),
        rng_state=torch.get_rng_state(),
    )


def assert_state_unchanged(model: nn.Module, before: ModelState, *, rng: bool = True) -> None:
    """Raise AssertionError naming what changed in ``model`` since ``before``."""
    after = model_state(model)
    changed = [
        field
        for field in ("cls", "training", "attributes", "compiled", "identities", "hooks")
        if getattr(after, field) != getattr(before, field)
    ]
    changed += [
        f"the values of {name}"
        for name, bits in before.bits.items()
        if name in after.bits and not _bits_equal(after.bits[name], bits)
    ]
    if rng and not torch.equal(after.rng_state, before.rng_state):
        changed.append("the random generator's state")
    assert not changed, f"the model changed: {', '.join(changed)}"
