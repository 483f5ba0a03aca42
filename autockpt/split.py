"""Split: an effective batch cut into micro-batches.

The rule: the first tensor among the arguments that has a dimension ``batch_dim`` says how large
the batch is, and every tensor of that size along that dimension is cut; everything else goes to
each micro-batch as it is. ``split=`` says otherwise for single arguments. What looks like samples
in another form (a list with one item for each) is refused rather than guessed at.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from autockpt_solvers.errors import InputError

__all__ = ["ITEMS", "Batch", "Split", "batch_size", "cut", "shares"]

ITEMS = "items"

# Along what an argument is cut: a dimension, its items where it is a list, or not at all.
_Along = int | str | None
_RULE = object()  # nothing was said: the rule decides


@dataclass(frozen=True)
class Batch:
    """What one forward and its loss take.

    Attributes:
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.
        target: second argument of the loss; None where there is none.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any = None


@dataclass(frozen=True)
class Split:
    """Which arguments are cut, and along what.

    Attributes:
        batch_dim: the dimension of the batch.
        said: what the user says of single arguments, by name or position: the dimension to cut
            along, ``"items"`` for a list with one item per sample, None to pass it on whole.
            A sequence of names cuts these and passes the other arguments on whole; the target
            follows the rule. None: the rule for everything.
    """

    batch_dim: int = 0
    said: Mapping[str | int, _Along] | Sequence[str | int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.batch_dim, int) or isinstance(self.batch_dim, bool):
            raise InputError(f"batch_dim={self.batch_dim!r} must be the number of a dimension.")
        if isinstance(self.said, str) or not isinstance(self.said, (Mapping, Sequence, type(None))):
            raise InputError(
                f"split={self.said!r} must name arguments: split=['x'] to cut only these, or "
                "split={'x': 0, 'boxes': 'items', 'mask': None} to say along what."
            )
        if isinstance(self.said, Mapping):
            for name, along in self.said.items():
                if along is not None and along != ITEMS and type(along) is not int:
                    raise InputError(
                        f"split: {name!r} is cut along {along!r}; a dimension, 'items' or None "
                        "are possible."
                    )

    def along(self, names: tuple[str | int, ...]) -> Any:
        """Return what was said of an argument that goes by these names."""
        if self.said is None:
            return _RULE
        said = next((n for n in names if n in self.said), None)
        if isinstance(self.said, Mapping):
            return _RULE if said is None else self.said[said]
        if names == ("target",):
            return _RULE
        return None if said is None else self.batch_dim


# ------------------------------------------------------------------ cutting


def batch_size(forward: Callable[..., Any], batch: Batch, split: Split) -> int:
    """Return the number of samples in a batch.

    Raises:
        InputError: nothing in it says so, or parts of it contradict each other.
    """
    return _read(forward, batch, split)[1]


def shares(samples: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of at most ``parts`` parts of a batch, as equal as they can be.

    >>> shares(32, 3), shares(2, 8)
    ((11, 11, 10), (1, 1))
    """
    parts = min(parts, samples)
    return tuple(samples // parts + (i < samples % parts) for i in range(parts))


def cut(
    forward: Callable[..., Any], batch: Batch, split: Split, sizes: Sequence[int]
) -> Iterator[Batch]:
    """Yield micro-batches of these sizes, in order; their tensors are views of the batch's.

    Raises:
        InputError: see :func:`batch_size`.
    """
    arguments, samples = _read(forward, batch, split)
    assert sum(sizes) == samples
    start = 0
    for size in sizes:
        taken = [
            _taken(name, value, split.batch_dim if along is _RULE else along, samples, start, size)
            for name, value, along in arguments
        ]
        start += size
        count = len(batch.args)
        kwargs = dict(zip(batch.kwargs, taken[count:], strict=False))
        target = None if batch.target is None else taken[-1]
        yield Batch(tuple(taken[:count]), kwargs, target)


def _read(
    forward: Callable[..., Any], batch: Batch, split: Split
) -> tuple[list[tuple[str | int, Any, Any]], int]:
    """Each argument with its name and along what it is cut, and the number of samples."""
    arguments = [(names[0], value, split.along(names)) for names, value in _named(forward, batch)]
    _check_names(forward, batch, split)
    samples = _samples(arguments, split)
    cut_any = False
    for name, value, along in arguments:
        found = list(_sizes(value, split.batch_dim if along is _RULE else along))
        if along is _RULE:
            cut_any |= samples in found
            _refuse_unknown(name, value, split.batch_dim, samples)
            if name == "target" and samples not in found and _dims(value):
                raise InputError(
                    f"the target has {found[0] if found else 'no'} entries along dimension "
                    f"{split.batch_dim}, the batch has {samples}. Give it one per sample, or say "
                    "how it is cut: split={'target': 0} along dimension 0, "
                    "split={'target': None} passes it on whole."
                )
        elif along is not None:
            wrong = next((size for size in found if size != samples), None)
            if wrong is not None or not found:
                raise InputError(
                    f"{_called(name)} is to be cut along {along!r} into the batch's {samples} "
                    f"samples, but has {'no tensor there' if not found else f'{wrong} entries'}."
                )
            cut_any = True
    if not cut_any:
        raise InputError(_NOTHING.format(split.batch_dim))
    return arguments, samples


_NOTHING = (
    "no argument is a tensor with a dimension {}, so the batch cannot be split. Pass tensors, or "
    "say what is batched: batch_dim= for all, split={{'name': dimension}} for single arguments; "
    "micro_step may be given the batch's weight= instead."
)


def _named(
    forward: Callable[..., Any], batch: Batch
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    names: list[str] = []
    try:
        for p in inspect.signature(forward).parameters.values():
            if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
                break
            names.append(p.name)
    except (TypeError, ValueError):  # a forward without a signature: positions are its names
        pass
    for position, value in enumerate(batch.args):
        name = names[position : position + 1]
        yield (*name, position), value
    for key, value in batch.kwargs.items():
        yield (key,), value
    if batch.target is not None:
        yield ("target",), batch.target


def _check_names(forward: Callable[..., Any], batch: Batch, split: Split) -> None:
    known = {name for names, _ in _named(forward, batch) for name in names}
    for name in split.said or ():
        if name not in known:
            raise InputError(
                f"split names {name!r}, which is no argument of this step: "
                f"{', '.join(map(repr, sorted(known, key=str)))}."
            )


def _samples(arguments: list[tuple[str | int, Any, Any]], split: Split) -> int:
    for _, value, along in arguments:
        where = split.batch_dim if along is _RULE else along
        size = next(iter(_sizes(value, where)), None) if where is not None else None
        if size is not None:
            if size == 0:
                raise InputError("the batch is empty.")
            return size
    raise InputError(_NOTHING.format(split.batch_dim))


# ------------------------------------------------------------------ nested values


def _sizes(value: Any, along: _Along) -> Iterator[int]:
    """Yield the sizes along ``along`` of the tensors in a value that have that dimension."""
    if along == ITEMS:
        if isinstance(value, (list, tuple)):
            yield len(value)
    elif isinstance(value, Tensor):
        # The other dimensions of a nested tensor have no one size.
        rank = 1 if value.is_nested else value.dim()
        if isinstance(along, int) and -rank <= along < rank:
            yield int(value.size(along))
    else:
        for item in _items(value):
            yield from _sizes(item, along)


def _dims(value: Any) -> int:
    """The most dimensions of a tensor in a value."""
    if isinstance(value, Tensor):
        return value.dim()
    return max(map(_dims, _items(value)), default=0)


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    return []


def _taken(name: str | int, value: Any, along: _Along, samples: int, start: int, size: int) -> Any:
    if along is None:
        return value
    if along == ITEMS:
        return value[start : start + size]
    where = int(along)

    def narrowed(tensor: Tensor) -> Tensor:
        if samples not in _sizes(tensor, where):
            return tensor
        if tensor.is_nested or tensor.layout is not torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise InputError(
                f"{_called(name)} has a {kind} tensor with {samples} entries, as many as the "
                "batch, and only dense tensors are cut. Pass it dense or padded, say "
                f"split={{{name!r}: None}} to give it whole to every micro-batch, or take the "
                "micro-batches one by one with micro_step."
            )
        return tensor.narrow(where, start, size)

    return _mapped(narrowed, value)


def _mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with a function applied to its tensors; the very value where none changes."""
    if isinstance(value, Tensor):
        return function(value)
    old = _items(value)
    new = [_mapped(function, item) for item in old]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return value
    if isinstance(value, Mapping):
        made: Any = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, item in zip(value, new, strict=True):
            made[key] = item
        return made
    if isinstance(value, tuple):
        return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
    if isinstance(value, list):
        return new
    made = copy.copy(value)
    for field, item in zip(dataclasses.fields(value), new, strict=True):
        object.__setattr__(made, field.name, item)
    return made


def _called(name: str | int) -> str:
    return f"argument {name}" if isinstance(name, int) else name


def _refuse_samples(name: str | int, value: list[Any], dim: int, samples: int) -> None:
    """Raise where a list seems to have an item for each sample."""
    own = {size for item in value if isinstance(item, Tensor) for size in _sizes(item, dim)}
    ragged = samples in own and len(own) > 1
    cut = any(samples in _sizes(item, dim) for item in value)
    if ragged or (len(value) == samples and not cut and any(_dims(item) for item in value)):
        raise InputError(
            f"{_called(name)} has a list of {len(value)} items, which may be one for each "
            f"sample. Say split={{{name!r}: 'items'}} to cut the list, split={{{name!r}: {dim}}} "
            "to cut the tensors in it, or None in their place to give it whole to every "
            "micro-batch."
        )


def _refuse_unknown(name: str | int, value: Any, dim: int, samples: int) -> None:
    """Raise where a value seems to hold a part of the batch that the rule would not cut right."""
    if isinstance(value, PackedSequence):
        raise InputError(
            f"{_called(name)} is a PackedSequence, which cannot be cut. Pass the padded tensor "
            "and pack it in the model, or take the micro-batches one by one with "
            "micro_step(weight=...)."
        )
    if isinstance(value, list):
        _refuse_samples(name, value, dim, samples)
    if not isinstance(value, Tensor) and samples in getattr(value, "shape", ())[dim : dim + 1]:
        raise InputError(
            f"{_called(name)} holds a {type(value).__name__} with {samples} entries, as many as "
            "the batch, and only tensors are split. Pass a tensor (torch.from_numpy), or say "
            f"split={{{name!r}: None}} to give it whole to every micro-batch."
        )
    if isinstance(value, Tensor) or _items(value):
        for item in () if isinstance(value, Tensor) else _items(value):
            _refuse_unknown(name, item, dim, samples)
        return
    if isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__"):
        return
    for key, item in vars(value).items():
        if isinstance(item, Tensor) and samples in _sizes(item, dim):
            raise InputError(
                f"{_called(name)} holds a {type(value).__name__} whose {key} looks batched, and "
                "such an object is not split. Pass its tensors in a tuple, dict or dataclass, or "
                f"say split={{{name!r}: None}} to give it whole to every micro-batch."
            )
