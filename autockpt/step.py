"""Step: an optimizer step over several micro-batches, with the gradient of the whole batch's mean.

A *window* is the micro-batches between two optimizer steps. Micro-batch i with weight w_i adds
w_i / d times its gradient, so that W / d times the mean is there at last, W the window's weight.
``step`` knows W beforehand and divides by it. ``micro_step`` does not: it divides by what the
window would weigh were all its micro-batches like the first, raises the divisor should more
arrive, and sets the gradients right once, at the window's end. Nothing is ever larger than the
mean itself by more than rounding, so that half precision overflows only where a plain loop does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autockpt import _torch
from autockpt.device import placement
from autockpt.losses import Weight, loss_of, weight_of, weights_of
from autockpt.ranks import Ranks, wrapper_of
from autockpt.split import Batch, Split, batch_size, cut, shares
from autockpt_solvers.errors import InputError, StepError

__all__ = ["AUTO", "Stepper", "check_accumulate"]

AUTO = "auto"


def check_accumulate(accumulate: Any) -> int | str:
    """Return a number of micro-batches or ``"auto"``.

    Raises:
        InputError: it is neither.
    """
    number = isinstance(accumulate, int) and not isinstance(accumulate, bool) and accumulate > 0
    if not number and accumulate != AUTO:
        raise InputError(
            f"accumulate={accumulate!r} must be a number of micro-batches from 1 on, or 'auto'."
        )
    checked: int | str = accumulate
    return checked


def _check_options(scaler: Any, max_grad_norm: Any, through: Any) -> None:
    if isinstance(max_grad_norm, str) or (max_grad_norm is not None and not max_grad_norm > 0):
        raise InputError(f"max_grad_norm={max_grad_norm!r} must be a number above 0.")
    if scaler is not None and not hasattr(scaler, "scale"):
        raise InputError(f"scaler={scaler!r} must be a torch.amp.GradScaler, or have its methods.")
    if through is not None and not callable(through):
        raise InputError(f"through={through!r} is called in the model's place, and cannot be.")


@dataclass
class _Window:
    """The micro-batches since the last optimizer step.

    Attributes:
        parts: how many it takes.
        parameters: the tensors whose gradients are the window's.
        ranks: what the model is called through.
        scaler: scales the loss; None for no scaling.
        max_grad_norm: bound on the norm of the window's gradient; None for none.
        final: what the gradients are to be divided by at its end; None while not known.
        divisor: what the gradients so far are divided by; 0 before the first.
        weight: weights of the micro-batches so far, added up.
        done: number of micro-batches so far.
        loss: weighted mean of their losses.
        synced: whether the last backward averaged the gradients over the ranks.
        broken: whether something failed where it cannot be taken up again.
        before: gradients that were there before the window, set aside.
    """

    parts: int
    parameters: list[Tensor]
    ranks: Ranks
    scaler: Any = None
    max_grad_norm: float | None = None
    final: float | None = None
    divisor: float = 0.0
    weight: float = 0.0
    done: int = 0
    loss: Tensor | None = None
    synced: bool = False
    broken: bool = False
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class Stepper:
    """Takes the steps of one model.

    Args:
        model: the model.
        optimizer: steps at the end of each window.
        loss_fn: see :func:`autockpt.losses.loss_of`.
        accumulate: number of micro-batches of a window, or ``"auto"``.
        running: entered around each micro-batch with whether gradients are to be added in the
            backward graph, and with what is there beside the model's own arguments.
        choose: returns the sizes of the micro-batches for ``"auto"``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        loss_fn: Callable[..., Any] | None,
        accumulate: int | str,
        running: Callable[[bool, Any], AbstractContextManager[None]],
        choose: Callable[[Batch, Split, int], Sequence[int]],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.accumulate = accumulate
        self.running = running
        self.choose = choose
        self.window: _Window | None = None
        self._last_ranks: Ranks | None = None

    # -------------------------------------------------------------- what the user calls

    def step(
        self,
        *args: Any,
        target: Any = None,
        weight: Weight = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        batch_dim: int = 0,
        split: Any = None,
        through: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Take one optimizer step on a whole batch; see :meth:`autockpt.module.Handle.step`."""
        self._check(kwargs)
        if self.window is not None:
            raise StepError(
                f"a window of {self.window.done} micro-steps is open. Finish it with flush() or "
                "drop it with model.autockpt.reset() before step()."
            )
        batch = self._batch(args, kwargs, target)
        how = Split(batch_dim, split)
        parts, sizes = self.parts(batch, how)
        weights = weights_of(weight, parts, sizes, batch_dim)
        window = self._opened(len(parts), scaler, max_grad_norm, through)
        beside = (batch.target, weight if isinstance(weight, Tensor) else None)
        try:
            last = next((i for i in reversed(range(len(parts))) if weights[i] > 0), -1)
            # One agreement for the window: its weight, and whether the last backward can sync.
            window.final, together = window.ranks.agree(
                sum(weights), last == len(parts) - 1, placement(self.model)
            )
            for index, (part, own) in enumerate(zip(parts, weights, strict=True)):
                sync = together and index == len(parts) - 1
                self._micro_batch(window, part, own, sync, beside)
            return self._closed(window)
        except BaseException:
            self.reset()
            raise

    def micro_step(
        self,
        *args: Any,
        target: Any = None,
        weight: Weight = None,
        scaler: Any = None,
        max_grad_norm: float | None = None,
        batch_dim: int = 0,
        split: Any = None,
        through: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Take one loader batch; see :meth:`autockpt.module.Handle.micro_step`."""
        self._check(kwargs)
        if not isinstance(self.accumulate, int):
            raise StepError(
                "accumulate='auto' chooses the micro-batches of step(). Give optimize() the "
                "number of micro-steps in a window: accumulate=4, for instance."
            )
        batch = self._batch(args, kwargs, target)
        how = Split(batch_dim, split)
        samples = 1
        if weight is None and self.accumulate == 1:
            samples = self._size_of_whole(batch, how)
        elif weight is None:
            samples = batch_size(self.model.forward, batch, how)
        own = weight_of(weight, batch, samples)
        first = self.window is None
        window = self.window or self._opened(self.accumulate, scaler, max_grad_norm, through)
        if not first:
            self._check_same(window, scaler, max_grad_norm, through)
        sync = False
        final: float | None = None
        if window.done + 1 >= window.parts:
            total = window.weight + own
            final, sync = window.ranks.agree(total, own > 0, placement(self.model))
        try:
            loss = self._micro_batch(window, batch, own, sync, batch.target, final)
            if window.done >= window.parts:
                self._closed(window)
            return loss
        except BaseException:
            if first and not window.broken:
                self.reset()
            raise

    def flush(self) -> Tensor | None:
        """Finish a window early; see :meth:`autockpt.module.Handle.flush`."""
        window = self.window
        self._check_whole(window)
        if window is None:
            if self._last_ranks is None or not self._last_ranks.several:
                return None
            # Other ranks may have something left over, and need this one to average with.
            window = self._opened(1, None, None, self._last_ranks.call)
        loss = self._closed(window)
        return loss if window.done else None

    def reset(self) -> None:
        """Drop the open window: the gradients are again what they were before it."""
        window, self.window = self.window, None
        if window is not None:
            for parameter in window.parameters:
                parameter.grad = None
            for parameter, gradient in window.before:
                parameter.grad = gradient

    # -------------------------------------------------------------- one micro-batch

    def _micro_batch(
        self,
        window: _Window,
        batch: Batch,
        weight: float,
        sync: bool,
        beside: Any,
        final: float | None = None,
    ) -> Tensor:
        """Run one micro-batch, and return its loss without its graph."""
        context = nullcontext() if sync else window.ranks.without_sync()
        if weight == 0:
            # It counts for nothing, and its mean may be 0 / 0. What its forward does beside
            # computing (statistics, random draws) happens as in a plain loop.
            with context, torch.no_grad():
                window.ranks.call(*batch.args, **batch.kwargs)
            torch.clear_autocast_cache()
            window.done += 1
            window.final = window.final if final is None else final
            return torch.zeros((), device=placement(self.model))
        with (
            context,
            self.running(self._fuses(window), (beside, window.before)),
        ):
            loss = self._loss(window, batch)
            # At least single precision, and memory of its own: a loss may hold on to more.
            wide = torch.promote_types(loss.dtype, torch.float32)
            number = loss.detach().to(wide, copy=True)
            window.broken = True  # until this micro-batch is through
            loss = loss * self._share(window, weight, final)
            if window.scaler is not None:
                loss = window.scaler.scale(loss)
            with torch.autocast(loss.device.type, enabled=False):
                loss.backward()
            window.broken = False
        window.synced = sync
        window.done += 1
        window.weight += weight
        if window.loss is None:
            window.loss = number
        else:
            share = weight / window.weight
            window.loss = window.loss * (1 - share) + number * share
        return number

    def _loss(self, window: _Window, batch: Batch) -> Tensor:
        # The output has no name here, so that it is let go of before the backward.
        loss = loss_of(window.ranks.call(*batch.args, **batch.kwargs), batch.target, self.loss_fn)
        # Casts of weights that autocast remembers are of no use after the optimizer's step, and
        # are memory until then.
        torch.clear_autocast_cache()
        return loss

    def _share(self, window: _Window, weight: float, final: float | None) -> float:
        """What to multiply the loss by, after the gradients so far are put on the same scale."""
        total = window.weight + weight
        divisor = window.final or final
        if not divisor:
            divisor = window.divisor or window.parts * weight
            if total > divisor:
                divisor = total * window.parts / (window.done + 1)
        self._rescale(window, divisor)
        if final:
            window.final = final
        return weight / divisor

    def _rescale(self, window: _Window, divisor: float) -> None:
        factor = window.divisor / divisor
        if window.divisor and factor != 1.0:
            with torch.no_grad():
                for parameter in window.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
        window.divisor = divisor

    # -------------------------------------------------------------- a window

    def _opened(
        self,
        parts: int,
        scaler: Any,
        max_grad_norm: float | None,
        through: Callable[..., Any] | None,
    ) -> _Window:
        _check_options(scaler, max_grad_norm, through)
        if through is None:
            known = self._last_ranks
            through = known.call if known is not None and known.several else wrapper_of(self.model)
        ranks = Ranks(self.model, through)
        self._last_ranks = ranks
        window = _Window(parts, self._parameters(), ranks, scaler, max_grad_norm)
        for parameter in window.parameters:
            if parameter.grad is not None:
                window.before.append((parameter, parameter.grad))
                parameter.grad = None
        self.window = window
        return window

    def _closed(self, window: _Window) -> Tensor:
        """Step on the window's gradients, and return its mean loss."""
        window.broken = True  # until it is through
        if window.final is None:
            window.final, _ = window.ranks.agree(window.weight, False, placement(self.model))
        if window.final == 0:
            # Nothing counted, on any rank: there is no mean, and nothing to step on.
            self.reset()
            return torch.zeros((), device=placement(self.model))
        self._rescale(window, window.final)
        if not window.synced:
            window.ranks.average(window.parameters)
        self._give_back(window)
        optimizer = self._optimizer()
        if window.scaler is not None:
            if window.max_grad_norm is not None:
                window.scaler.unscale_(optimizer)
            self._clip(window)
            window.scaler.step(optimizer)
            window.scaler.update()
        else:
            self._clip(window)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        self.window = None
        return torch.zeros((), device=placement(self.model)) if window.loss is None else window.loss

    def _give_back(self, window: _Window) -> None:
        with torch.no_grad():
            while window.before:
                parameter, gradient = window.before.pop()
                if parameter.grad is not None:
                    gradient = gradient.add_(parameter.grad)
                parameter.grad = gradient

    def _clip(self, window: _Window) -> None:
        if window.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(window.parameters, window.max_grad_norm)

    # -------------------------------------------------------------- what is asked for

    def parts(self, batch: Batch, how: Split) -> tuple[list[Batch], Sequence[int]]:
        """Return the micro-batches of a step, and their sizes, the largest first.

        Raises:
            InputError: the batch cannot be split.
        """
        forward = self.model.forward
        if self.accumulate == 1:
            return [batch], (self._size_of_whole(batch, how),)
        samples = batch_size(forward, batch, how)
        if isinstance(self.accumulate, int):
            sizes: Sequence[int] = shares(samples, self.accumulate)
        else:
            sizes = self.choose(batch, how, samples)
        return list(cut(forward, batch, how, sizes)), sizes

    def _size_of_whole(self, batch: Batch, how: Split) -> int:
        """The size of a batch that is not cut: what other ranks weigh it by, so that any does."""
        try:
            return batch_size(self.model.forward, batch, how)
        except InputError:
            return 1

    def _batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> Batch:
        if target is None or self.loss_fn is not None:
            return Batch(args, kwargs, target)
        parameters = inspect.signature(self.model.forward).parameters
        if "target" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return Batch(args, {**kwargs, "target": target})
        raise InputError(
            f"target= was given, but {type(self.model).__name__}.forward does not take it and "
            "there is no loss_fn to compare it with. Pass loss_fn= to autockpt.optimize."
        )

    def fuses(self, parts: int) -> bool:
        """Return whether backward graphs may add to gradients, where the model itself is called."""
        return parts > 1 and not any(map(_torch.has_gradient_hooks, self._parameters()))

    def _fuses(self, window: _Window) -> bool:
        plain = window.parts > 1 and window.ranks.call is self.model
        return plain and not any(map(_torch.has_gradient_hooks, window.parameters))

    def _check(self, kwargs: Mapping[str, Any]) -> None:
        optimizer = self._optimizer()
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        needs_one = closure is not None and closure.default is inspect.Parameter.empty
        if needs_one or "closure" in kwargs:
            raise StepError(
                f"{type(optimizer).__name__} is asked to step with a closure, which computes the "
                "gradient several times a step; step() computes it once. Use an optimizer that "
                "steps without a closure, or a loop of your own around the model."
            )
        if not torch.is_grad_enabled():
            raise StepError("gradients are switched off here: step outside torch.no_grad().")
        self._check_whole(self.window)

    def _check_whole(self, window: _Window | None) -> None:
        if window is not None and window.broken:
            raise StepError(
                "the open window failed in its backward or in its optimizer step, and cannot be "
                "continued. Drop it with model.autockpt.reset()."
            )

    def _check_same(
        self,
        window: _Window,
        scaler: Any,
        max_grad_norm: float | None,
        through: Callable[..., Any] | None,
    ) -> None:
        for name, given, had in (
            ("scaler", scaler, window.scaler),
            ("max_grad_norm", max_grad_norm, window.max_grad_norm),
            ("through", through, window.ranks.call if through is not None else None),
        ):
            if given is not had and given != had:
                raise StepError(
                    f"{name} changed within a window. Give all its micro-steps the same, or "
                    "finish the window with flush() before."
                )

    def _optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise StepError(
                "there is no optimizer to step with. Pass it to "
                "autockpt.optimize(model, ..., optimizer=optimizer); a copy of a model needs one "
                "of its own."
            )
        return self.optimizer

    def _parameters(self) -> list[Tensor]:
        """The tensors whose gradients are a window's: the model's and the optimizer's."""
        found = list(self.model.parameters())
        if self.optimizer is not None:
            found += [p for group in self.optimizer.param_groups for p in group["params"]]
        return list({id(p): p for p in found}.values())
