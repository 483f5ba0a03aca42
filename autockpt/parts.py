"""Parts: the modules of a model that are captured on their own, where the whole cannot be.

A part tries to be captured whole. Where that fails it runs as several graphs with plain Python
between, its children being parts in turn; where even that gives nothing it runs plainly and only
its children are captured. A sequence of modules is halved until its pieces capture.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import nn

from autockpt import _torch
from autockpt.backwards import refuse_double_backward
from autockpt.capture import traced
from autockpt_solvers.errors import CaptureError, InputError

__all__ = ["Mode", "Part", "own_children"]

# Calls of one part in a forward that get graphs of their own; further ones run plainly.
_CALLS = 8


class Mode(Enum):
    """How a part runs."""

    WHOLE = "as one graph"
    PIECES = "as several graphs"
    HALVES = "as two parts"
    PLAIN = "plainly"


class Part:
    """A module of the model behind whose call a compiled forward stands.

    Attributes:
        module: the module; for a half of a sequence one made of its children.
        path: its path in the model.
        mode: how it runs.
        reason: why it does not run as one graph.
        called: whether it has run in a training forward.
        passed_by: whether it has not where it could have: its children may be called past it.
        owner: knows whether the model is in a training forward, plans the graphs, and has the
            parts of other modules.
    """

    def __init__(self, owner: Any, module: nn.Module, path: str, reason: str = "") -> None:
        self.owner = owner
        self.module = module
        self.path = path
        self.reason = reason
        self.calls = 0
        self.called = self.passed_by = False
        self.compiled: list[Callable[..., Any]] = []
        self.floats: list[_torch.Floats] = []  # of each of its calls in a step
        self._again = False  # whether they are to be made again
        self.ran: set[int] = set()
        self.numbers = True  # whether numbers that are read from tensors are traced
        self.given_up: set[str] = set()  # frames behind a break that run plainly
        self.halves: tuple[Part, ...] = ()
        self.mode = Mode.WHOLE
        if _runs_plainly(module):
            self.mode = Mode.PLAIN
        elif reason:
            self._divide(reason)

    @property
    def is_to_change(self) -> bool:
        """Whether its graphs are to be made in another way at its next call."""
        return self._again

    def attach(self) -> None:
        """Set this part behind the module's call."""
        call = _torch.opaque(self) if isinstance(self.module, nn.RNNBase) else self
        self.module.__dict__["_compiled_call_impl"] = call

    def detach(self) -> None:
        """Take it off again."""
        self.module.__dict__.pop("_compiled_call_impl", None)
        self.forget()

    def forget(self) -> None:
        """Drop the compiled graphs; they are made again at the next call."""
        self._again = False
        self.compiled = []
        self.ran = set()
        for half in self.halves:
            half.forget()

    # -------------------------------------------------------------- calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module, under its graphs where the model trains."""
        plain = _torch.is_traced() or not self.owner.inside or not torch.is_grad_enabled()
        # A checkpoint of the user's runs it again in the backward, where it is plain.
        if plain or _torch.in_checkpoint():
            return self.module._call_impl(*args, **kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it in a training forward."""
        self.called = True
        number, self.calls = self.calls, self.calls + 1
        if self.compiled and self._again:
            self.forget()
        while self.mode in (Mode.WHOLE, Mode.PIECES) and number < _CALLS:
            while len(self.compiled) <= number:
                self.compiled.append(self._compile(len(self.compiled)))
            try:
                output = traced(self.module, self.compiled[number], args, kwargs)
            except CaptureError as error:
                if self.floats[number].found:
                    self.floats[number].stay_constant()
                    self.compiled[number] = self._compile(number)
                    continue
                if number in self.ran:
                    break  # these inputs only
                self._divide(str(error))
                continue
            except InputError as error:
                output = self.module._call_impl(*args, **kwargs)  # eager's own words
                if number not in self.ran:
                    self._divide(str(error))  # it catches them
                return output
            self.ran.add(number)
            for node in _torch.compiled_nodes(output):
                refuse_double_backward(node)  # the forward itself may take gradients
            return output
        if self.mode is Mode.HALVES and len(args) == 1 and not kwargs:
            (value,) = args
            for half in self.halves:
                value = half.run((value,), {})
            return value
        return self.module._call_impl(*args, **kwargs)

    def _compile(self, number: int) -> Callable[..., Any]:
        def partition(joint: _torch.JointGraph) -> Any:
            return self.owner.partition(self, number, joint)

        while len(self.floats) <= number:
            self.floats.append(_torch.Floats())
        floats = self.floats[number]
        if self.mode is Mode.WHOLE:
            return _torch.compile_forward(self.module, partition, floats)
        return _torch.compile_pieces(
            self.module, partition, self.given_up, self._skipped, floats, numbers=self.numbers
        )

    # -------------------------------------------------------------- dividing

    def _divide(self, reason: str) -> None:
        """Go on in smaller steps, and remember why."""
        self.reason = self.reason or reason
        self.forget()
        hooked = _has_hooks(self.module)
        if isinstance(self.module, nn.Sequential) and len(self.module) > 1 and not hooked:
            self.mode = Mode.HALVES
            children = list(self.module._modules.items())
            middle = len(children) // 2
            self.halves = tuple(self._half(half) for half in (children[:middle], children[middle:]))
            return
        self.mode = Mode.PIECES if self.mode is Mode.WHOLE and not hooked else Mode.PLAIN
        self.owner.adopt(self)

    def _half(self, children: list[tuple[str, nn.Module]]) -> Part:
        if len(children) == 1:
            name, module = children[0]
            part: Part = self.owner.part(module, ".".join(p for p in (self.path, name) if p))
            return part
        half = nn.Sequential(OrderedDict(children))
        half.training = self.module.training
        return Part(self.owner, half, self.path)

    def _skipped(self, behind: bool) -> None:
        """Dynamo gave a frame up: from the next call on it is traced without the numbers in it.

        Where they are not, it runs plainly from then on, its children as parts; a frame behind a
        break leaves what is before the break as it is.
        """
        if self.mode is not Mode.PIECES:
            return
        if self.numbers:
            self.numbers, self._again = False, True
            self.given_up.clear()
        elif not self.ran and not behind:
            self.mode = Mode.PLAIN


def own_children(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that a module calls, with their paths; lists of modules call nothing."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        own = f"{path}.{name}" if path else name
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += own_children(child, own)
        else:
            found.append((own, child))
    return found


def _runs_plainly(module: nn.Module) -> bool:
    """One operation of torch's own: nothing in it can be recomputed for the better."""
    alone = not any(True for _ in module.children())
    return isinstance(module, nn.RNNBase) or (
        alone and type(module).__module__.startswith("torch.nn.modules")
    )


def _has_hooks(module: nn.Module) -> bool:
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )
