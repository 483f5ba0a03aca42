"""Allocator: what CUDA's caching allocator reserves beyond what is allocated, and how to curb it.

A budget bounds the bytes allocated. The allocator reserves memory in segments and keeps what is
freed, so that the process takes more: the difference is fragmentation.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

__all__ = ["AllocatorReport", "allocator_report", "limit", "reserve", "reset_peaks"]

# Reserved over allocated at the peak from which on something can be gained.
_WORTH = 1.1
_SEGMENTS = "expandable_segments:True"


@dataclass(frozen=True, slots=True)
class AllocatorReport:
    """What the allocator of one CUDA device holds.

    Attributes:
        allocated_bytes: in tensors, now.
        reserved_bytes: taken from the device, now.
        peak_allocated_bytes: in tensors, at most since the peaks were reset.
        peak_reserved_bytes: taken from the device, at most since then.
        advice: what would lower the difference; empty where little can be gained.
    """

    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    advice: str = ""

    @property
    def fragmentation(self) -> float:
        """Reserved over allocated at their peaks: 1.0 where nothing is lost."""
        allocated = self.peak_allocated_bytes
        return self.peak_reserved_bytes / allocated if allocated else 1.0

    def advised(self) -> AllocatorReport:
        """Return the same with the advice that follows from it."""
        return replace(self, advice=_advice(self, os.environ))


def allocator_report(device: torch.device) -> AllocatorReport:
    """Return what the allocator of a CUDA device holds, now and at most."""
    return AllocatorReport(
        torch.cuda.memory_allocated(device),
        torch.cuda.memory_reserved(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
    ).advised()


def _advice(report: AllocatorReport, environment: Mapping[str, str]) -> str:
    if report.fragmentation < _WORTH:
        return ""
    settings = ",".join(
        environment.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    )
    lost = report.peak_reserved_bytes - report.peak_allocated_bytes
    if _SEGMENTS in settings.replace(" ", ""):
        return f"{lost:,} bytes are reserved and not used; reserve the peak before the first step."
    return (
        f"{lost:,} bytes are reserved and not used; start the process with "
        f"PYTORCH_ALLOC_CONF={_SEGMENTS}, which lets the allocator join them."
    )


def reset_peaks(device: torch.device) -> None:
    """Let the peaks of :func:`allocator_report` count from here."""
    torch.cuda.reset_peak_memory_stats(device)


def reserve(device: torch.device, size_bytes: int) -> None:
    """Let the allocator take one segment of this size now, before small ones cut up the memory.

    Raises:
        torch.OutOfMemoryError: there is not so much.
    """
    block = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    del block  # freed, it stays reserved, in one piece


def limit(device: torch.device, size_bytes: int) -> None:
    """Let an allocation fail that would take the reserved bytes above a number.

    Raises:
        ValueError: the number is not between 0 and the device's memory.
    """
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(size_bytes / total, device)
