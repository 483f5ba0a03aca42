"""Profile: what each operation costs, in time and in memory, on the device it runs on.

Every distinct operation (operator, shapes, strides, dtypes, other arguments) is run on stand-ins
for its inputs, one operation's tensors at a time, so that profiling needs no more memory than
the largest operation of the step.

Three figures come from real runs, because shapes alone get them wrong: the time, the workspace
(allocated and freed inside), and the bytes an output really holds on to (``aten.mse_loss``
returns a scalar that keeps a whole element-wise buffer).

Time depends on what lies in the cache. An operation in the step finds the result of the operation
before it there, and little else; run back to back it finds everything, which made plans
1.5 times too optimistic. So before each timed run the cache is flushed, and then those inputs are
touched whose last use in the step lies less than a cache size of traffic back.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import fx

from autockpt import _torch, cache
from autockpt.capture import Capture
from autockpt.device import Device
from autockpt.roofline import Modelled
from autockpt.tangents import tensors

__all__ = ["Measured", "Profile", "profile", "unmeasured"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Measured:
    """One operation's figures.

    Attributes:
        cost_ns: median time of a run, in nanoseconds.
        workspace_bytes: peak allocated inside the run beyond its outputs.
        output_bytes: for each tensor it returns, the bytes of the memory it lives in.
        alone: whether it could be run by itself; if not, cost and workspace are not known.
        shares: whether it returned memory of an input, which no view is that is measured.
    """

    cost_ns: int
    workspace_bytes: int
    output_bytes: tuple[int, ...]
    alone: bool = True
    shares: bool = False


@dataclass(frozen=True)
class Profile:
    """Figures of every operation of a capture, in the capture's order.

    Attributes:
        measured: one entry per operation.
        device: where it was measured, for people.
        distinct: number of distinct operations that were run.
    """

    measured: tuple[Measured, ...]
    device: str
    distinct: int


# Figures by device state and signature: a plan made again measures nothing again, nor does one of a
# later run, which finds them in the cache.
_known: dict[tuple[Any, ...], Measured] = {}
_sized: dict[tuple[Any, ...], Measured] = {}  # without their time


def profile(
    capture: Capture,
    device: Device | Modelled,
    *,
    timed: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Profile:
    """Return the figures of every operation, measured on ``device`` or modelled for it.

    Where not ``timed``, what has not been measured before costs no time.
    """
    if isinstance(device, Modelled):
        return _modelled(capture, device)
    warm = _warm_inputs(capture, device.cache_bytes)
    state = device.state()
    keys = [
        (state, _signature(node), warm_flags)
        for node, warm_flags in zip(capture.operations, warm, strict=True)
    ]
    distinct = OrderedDict.fromkeys(keys)
    if any(key not in _known for key in distinct):
        _known.update(_recalled(state, [key for key in distinct if key not in _known]))
    known = _known if timed else {**_sized, **_known}
    missing = [key for key in distinct if key not in known]
    example = {key: index for index, key in reversed(list(enumerate(keys)))}
    with _torch.outside_tracing():
        for count, key in enumerate(missing):
            index = example[key]
            # What runs in the backward is chosen with the size of the micro-batch alone.
            repeats = (5 if index < capture.barrier else 3) if timed else 0
            found = _measure(capture.operations[index], key[2], device, repeats)
            (_known if timed else _sized)[key] = known[key] = found
            if progress is not None and (count + 1) % 10 == 0:
                progress(f"measured {count + 1} of {len(missing)} distinct operations")
    if missing and timed:
        _remember(state, missing)
    return Profile(tuple(known[key] for key in keys), device.name, len(distinct))


def _modelled(capture: Capture, device: Modelled) -> Profile:
    return Profile(
        tuple(
            Measured(
                device.cost_ns(node),
                0,
                tuple(device.round_up(int(t.untyped_storage().nbytes())) for t in tensors(node)),
            )
            for node in capture.operations
        ),
        device.name,
        0,
    )


def unmeasured(capture: Capture) -> Profile:
    """Return a profile without measurements: no time, no workspace, sizes by shape."""
    return Profile(
        tuple(
            Measured(0, 0, tuple(int(t.untyped_storage().nbytes()) for t in tensors(node)))
            for node in capture.operations
        ),
        "",
        0,
    )


# ------------------------------------------------------------------ earlier runs


def _place(state: tuple[Any, ...]) -> str:
    """Return the name of the cache's entry for measurements on a device in a state."""
    return cache.digest([*state, torch.__version__, torch.version.cuda])


def _stored(state: tuple[Any, ...]) -> dict[str, Any]:
    stored = cache.read("costs", _place(state))
    return stored if isinstance(stored, dict) else {}


def _recalled(
    state: tuple[Any, ...], keys: Sequence[tuple[Any, ...]]
) -> dict[tuple[Any, ...], Measured]:
    """Return the figures that earlier runs measured."""
    stored = _stored(state)
    found = {}
    for key in keys:
        figures: Any = stored.get(cache.digest(repr(key)))
        with contextlib.suppress(TypeError, ValueError):
            cost_ns, workspace_bytes, output_bytes, *flags = figures
            numbers = (cost_ns, workspace_bytes, *output_bytes)
            if all(isinstance(n, int) and n >= 0 for n in numbers):
                alone, shares = map(bool, flags)
                found[key] = Measured(cost_ns, workspace_bytes, tuple(output_bytes), alone, shares)
    return found


def _remember(state: tuple[Any, ...], keys: Sequence[tuple[Any, ...]]) -> None:
    """Keep new figures for later runs, beside those that are there."""
    stored = _stored(state)
    for key in keys:
        text = repr(key)
        if " at 0x" not in text:  # an address is another one in the next run
            stored[cache.digest(text)] = astuple(_known[key])
    about = {"name": str(state[0]), "what": f"{len(stored)} operations, torch {torch.__version__}"}
    cache.write("costs", _place(state), stored, about)


# ------------------------------------------------------------------ one operation


def _measure(node: fx.Node, warm: tuple[bool, ...], device: Device, repeats: int) -> Measured:
    if not callable(node.target):
        raise TypeError(f"{node.name} is no operation")
    stand_ins = _StandIns(node)
    run = stand_ins.call
    try:
        device.warm_up(run)
    except Exception:  # the operator wants values that stand-ins do not have
        sizes = (device.round_up(int(t.untyped_storage().nbytes())) for t in tensors(node))
        return Measured(0, 0, tuple(sizes), alone=False)
    memory = device.peak_of(run)
    result = run()
    output_bytes = tuple(
        device.round_up(int(t.untyped_storage().nbytes())) for t in _flat_tensors(result)
    )
    fresh = {
        t.untyped_storage().data_ptr(): int(t.untyped_storage().nbytes())
        for t in _flat_tensors(result)
    }
    own = sum(
        device.round_up(size)
        for pointer, size in fresh.items()
        if pointer not in stand_ins.pointers
    )
    del result
    touched = [t for t, is_warm in zip(stand_ins.inputs, warm, strict=True) if is_warm]
    flush = stand_ins.size_bytes > device.small_bytes
    times = [] if repeats else [0]
    spent = time.perf_counter()
    for _ in range(repeats):
        if flush:
            device.flush_cache()
            for tensor in touched:
                device.touch(tensor)
        times.append(device.time_ns(run))
        if time.perf_counter() - spent > 2.0 and len(times) >= 2:
            break
    shares = not (stand_ins.pointers - {0}).isdisjoint(fresh)
    cost_ns = int(statistics.median(times))
    return Measured(cost_ns, max(0, memory - own), output_bytes, shares=shares)


class _StandIns:
    """Real tensors in the place of a node's inputs, with values the operator accepts."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.inputs: list[torch.Tensor] = []
        self.pointers: set[int] = set()
        self.size_bytes = sum(t.untyped_storage().nbytes() for t in tensors(node))
        made: dict[int, torch.Tensor] = {}
        values = {arg: self._value(arg, made) for arg in node.all_input_nodes}
        self.args = fx.node.map_arg(node.args, values.__getitem__)
        self.kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
        for tensor in self.inputs:
            self.pointers.add(tensor.untyped_storage().data_ptr())

    def call(self) -> Any:
        return self.node.target(*self.args, **self.kwargs)  # type: ignore[operator]

    def _value(self, arg: fx.Node, made: dict[int, torch.Tensor]) -> Any:
        if arg.op == "get_attr":
            owner: Any = arg.graph.owning_module
            for name in str(arg.target).split("."):
                owner = getattr(owner, name)
            value = owner
        else:
            value = arg.meta.get("val")

        return self._real(value, made)

    def _real(self, item: Any, made: dict[int, torch.Tensor]) -> Any:
        if isinstance(item, torch.Tensor):
            tensor = self._tensor(item, made)
            self.inputs.append(tensor)
            return tensor
        if isinstance(item, (list, tuple)):
            return type(item)(self._real(i, made) for i in item)
        return _torch.value_of(item) if isinstance(item, _torch.Number) else item

    def _tensor(self, fake: torch.Tensor, made: dict[int, torch.Tensor]) -> torch.Tensor:
        key = _torch.storage_key(fake)
        if key not in made:
            size = max(int(fake.untyped_storage().nbytes()) // fake.element_size(), 1)
            made[key] = self._filled(fake, size)
            self.size_bytes += made[key].numel() * made[key].element_size()
        base = made[key]
        if base.dtype != fake.dtype:
            base = base.view(torch.uint8).view(fake.dtype)
        return base.as_strided(fake.shape, fake.stride(), fake.storage_offset())

    def _filled(self, fake: torch.Tensor, size: int) -> torch.Tensor:
        flat = torch.empty(size, dtype=fake.dtype, device=fake.device)
        if fake.is_floating_point() or fake.is_complex():
            return flat.uniform_(0.1, 1.0) if fake.is_floating_point() else flat.fill_(0.5)
        if fake.dtype is torch.bool:
            return flat.fill_(True)
        return flat.random_(0, _index_bound(self.node))


def _index_bound(node: fx.Node) -> int:
    """Return an exclusive bound on integer inputs that keeps every read in range.

    Zero is in range of any index; look-ups whose range is known get the whole range,
    because the time of a gather depends on how far its reads lie apart.
    """
    target, args = node.target, node.args
    if target is aten.embedding.default:
        return _size(args[0], 0)
    if target is aten.embedding_dense_backward.default:
        return max(int(args[2]), 1)  # type: ignore[arg-type]
    if target is aten.nll_loss_forward.default:
        return _size(args[0], -1)
    if target is aten.nll_loss_backward.default:
        return _size(args[1], -1)
    return 1


def _size(node: Any, dim: int) -> int:
    return max(int(node.meta["val"].shape[dim]), 1)


def _flat_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


# ------------------------------------------------------------------ what makes two operations equal


def _signature(node: fx.Node) -> tuple[Any, ...]:
    seen: dict[int, int] = {}

    def describe(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return ("node", *(describe(t) for t in _node_values(item)))
        if isinstance(item, torch.Tensor):
            alias = seen.setdefault(_torch.storage_key(item), len(seen))
            return (
                str(item.dtype),
                tuple(item.shape),
                tuple(item.stride()),
                int(item.storage_offset()),
                str(item.device),
                alias,
            )
        if isinstance(item, (list, tuple)):
            return tuple(describe(i) for i in item)
        if isinstance(item, dict):
            return tuple((k, describe(v)) for k, v in sorted(item.items()))
        return item if isinstance(item, (int, float, bool, str, type(None))) else str(item)

    return (str(node.target), describe(node.args), describe(dict(node.kwargs)))


def _node_values(node: fx.Node) -> Sequence[Any]:
    found = tensors(node)
    return found if found else [str(node.target) if node.op == "get_attr" else node.meta.get("val")]


def _warm_inputs(capture: Capture, cache_bytes: int) -> list[tuple[bool, ...]]:
    """For each operation and each of its input tensors, whether it is still in the cache.

    Least-recently-used replacement over whole storages: a storage is warm when the
    storages touched since its last use, itself included, fit into the cache.
    """
    recency: OrderedDict[int, int] = OrderedDict()  # storage key -> bytes, oldest first
    result = []
    for node in capture.operations:
        flags = []
        touched: list[torch.Tensor] = []
        for arg in node.all_input_nodes:
            for tensor in tensors(arg):
                flags.append(_is_warm(recency, tensor, cache_bytes))
                touched.append(tensor)
        result.append(tuple(flags))
        for tensor in (*touched, *tensors(node)):
            key = _torch.storage_key(tensor)
            recency.pop(key, None)
            recency[key] = int(tensor.untyped_storage().nbytes())
    return result


def _is_warm(recency: OrderedDict[int, int], tensor: torch.Tensor, cache_bytes: int) -> bool:
    key = _torch.storage_key(tensor)
    if key not in recency:
        return False
    traffic = 0
    for other in reversed(recency):
        traffic += recency[other]
        if traffic > cache_bytes:
            return False
        if other == key:
            return True
    return False
