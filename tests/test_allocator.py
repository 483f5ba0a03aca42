"""Allocator: the advice follows from the figures; the rest needs a GPU."""

from __future__ import annotations

import pytest
import torch

import autockpt
from autockpt.allocator import (
    AllocatorReport,
    _advice,
    allocator_report,
    limit,
    reserve,
    reset_peaks,
)
from benchmarks.measure import step_function
from tiny_models import mlp

MIB = 1 << 20


def test_fragmentation_is_reserved_over_allocated() -> None:
    assert AllocatorReport(1, 2, 100, 150).fragmentation == 1.5
    assert AllocatorReport(0, 0, 0, 0).fragmentation == 1.0


def test_the_advice_follows_from_the_figures() -> None:
    lost = AllocatorReport(0, 0, 100, 150)
    assert _advice(AllocatorReport(0, 0, 100, 105), {}) == ""
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in _advice(lost, {})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        said = _advice(lost, {name: "max_split_size_mb:64, expandable_segments:True"})
        assert "50 bytes" in said
        assert "expandable" not in said


@pytest.mark.gpu
def test_a_reservation_is_one_segment_and_bounds_hold() -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    reset_peaks(device)
    before = allocator_report(device)
    reserve(device, 64 * MIB)
    after = allocator_report(device)
    assert after.allocated_bytes == before.allocated_bytes
    assert after.reserved_bytes >= before.reserved_bytes + 64 * MIB
    limit(device, after.reserved_bytes + 16 * MIB)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 * MIB, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
def test_a_measured_step_reports_the_allocator(tmp_path) -> None:
    model, x = mlp(layers=3)
    model, x = model.cuda(), x.cuda()
    autockpt.optimize(model, None)
    step = step_function(model, (x,))
    for _ in range(2):
        step()
    found = autockpt.measure(step, model)
    assert found.allocator is not None
    assert found.allocator.peak_reserved_bytes >= found.allocator.peak_allocated_bytes
    assert abs(found.peak_bytes - model.plan.peak_bytes) <= 0.01 * model.plan.peak_bytes
    for point in found.compared:
        assert abs(point.measured_bytes - point.predicted_bytes) <= 0.01 * model.plan.peak_bytes
    found.save_snapshot(tmp_path / "snapshot.pickle")
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0
