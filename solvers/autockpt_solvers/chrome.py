"""Live bytes over time in the format that chrome://tracing and Perfetto read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Point", "write_chrome_trace"]

# Time in seconds, live bytes from then on, and what runs there.
Point = tuple[float, int, str]


def write_chrome_trace(
    path: str | os.PathLike[str], timelines: Mapping[str, Sequence[Point]]
) -> None:
    """Write timelines as a Chrome trace: one track of live bytes each, and what runs below it.

    Args:
        path: the file, JSON.
        timelines: name -> points, in the order of time.

    Raises:
        OSError: where the file cannot be written.
    """
    events: list[dict[str, Any]] = []
    for process, (name, points) in enumerate(timelines.items()):
        own: dict[str, Any] = {"pid": process, "tid": 0}
        events.append({**own, "ph": "M", "name": "process_name", "args": {"name": name}})
        for point, after in zip(points, [*points[1:], points[-1]], strict=True):
            time_s, live_bytes, operation = point
            start = {**own, "ts": time_s * 1e6}
            events.append({**start, "ph": "C", "name": "live bytes", "args": {"bytes": live_bytes}})
            if operation:
                length = {"dur": (after[0] - time_s) * 1e6, "args": {"bytes": live_bytes}}
                events.append({**start, "ph": "X", "name": operation, **length})
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
