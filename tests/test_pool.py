"""A pool of a model's own: what enters it, what is reserved. CUDA's own part is in tests/gpu."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import autockpt
from autockpt import module, pool


class Recorder:
    """Stands for CUDA's pools."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[Any] = []
        self.room = 1 << 40
        monkeypatch.setattr(torch.cuda, "MemPool", self.made)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self.used)
        monkeypatch.setattr(pool, "reserve", self.reserved)

    def made(self) -> str:
        self.said.append("made")
        return "the pool"

    @contextlib.contextmanager
    def used(self, which: str, device: torch.device) -> Any:
        self.said.append(f"in {which}")
        try:
            yield
        finally:
            self.said.append("out")

    def reserved(self, device: torch.device, size_bytes: int) -> None:
        if size_bytes > self.room:
            raise torch.OutOfMemoryError("there is no such piece")
        self.said.append(size_bytes)


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


def pooled_model(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A model that runs here, in an arena, and is taken for one on CUDA where a pool is asked."""
    own = module.Handle._pooled

    def pooled(handle: module.Handle, watch: Any, plan: Any) -> Any:
        with monkeypatch.context() as there:
            there.setattr(module, "placement", lambda model: torch.device("cuda"))
            return own(handle, watch, plan)

    monkeypatch.setattr(module.Handle, "_pooled", pooled)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return autockpt.optimize(model, None, arena=True)


def test_forward_and_backward_run_in_a_pool_that_is_reserved_once(
    pools: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pooled_model(monkeypatch)
    plans = []
    for _ in range(2):
        loss = model(torch.ones(4, 8)).sum()
        plans.append(model.plan)
        pools.said.append("between")
        loss.backward()
    size = plans[0].peak_bytes - plans[0].problem.resident_bytes
    assert size > 0
    first = ["made", "in the pool", size, "out", "between", "in the pool", "out"]
    assert pools.said == [*first, "in the pool", "out", "between", "in the pool", "out"]


def test_without_room_for_the_reserve_the_step_runs(
    pools: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools.room = 0
    model = pooled_model(monkeypatch)
    model(torch.ones(4, 8)).sum().backward()
    assert pools.said == ["made", "in the pool", "out", "in the pool", "out"]


def test_a_failing_step_leaves_the_pool(pools: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = pool.InPool(autockpt._torch.Watch(), pool.Pool(torch.device("cuda")), 1)

    def fails(args: list[Any]) -> None:
        raise RuntimeError("no")

    for run in (watch.run_forward, watch.run_backward):
        with pytest.raises(RuntimeError, match="no"):
            run(fails, [])
        assert pools.said[-1] == "out"


def test_a_pool_that_was_let_go_is_made_anew(
    pools: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pooled_model(monkeypatch)
    model(torch.ones(4, 8)).sum().backward()
    autockpt.restore(model)
    autockpt.optimize(model, None, arena=True)
    model(torch.ones(4, 8)).sum().backward()
    assert pools.said.count("made") == 2


def test_other_devices_and_plans_without_an_arena_have_none(pools: Recorder) -> None:
    for arena in (True, False):
        model = autockpt.optimize(nn.Linear(4, 4), None, arena=arena)
        model(torch.ones(2, 4)).sum().backward()
    assert pools.said == []
