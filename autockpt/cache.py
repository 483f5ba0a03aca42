"""Cache: what one run found out, in files that the next run may use.

Two kinds of entries: the *costs* of operations as measured (:mod:`autockpt.profile`) and the
*schedules* of problems (:mod:`autockpt.solved_before`). The costs are kept so that the same model
is the same problem in the next run: measured again they would differ a little, and neither the
schedule nor its proved bound would hold for them.

The folder is ``autockpt`` in ``XDG_CACHE_HOME``, or in ``~/.cache``; the environment variable
``AUTOCKPT_CACHE`` names another one, and ``AUTOCKPT_CACHE=0`` turns the cache off. Nothing here
raises: a cache that cannot be read or written is no cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Entry", "clear", "digest", "entries", "folder", "read", "write"]

_FORMAT = "autockpt-cache-1"
_NAME = re.compile(r"(costs|schedule)-[0-9a-f]{32}\.json")
_DRAFT = re.compile(r"\.(costs|schedule)-[0-9a-f]{32}\.[0-9a-f]{8}\.part")
# All entries together; beyond it the ones not used for longest go.
LIMIT_BYTES = 64 << 20
# A draft this old was left behind by a process that died.
STALE_S = 3600.0


@dataclass(frozen=True)
class Entry:
    """One file of the cache.

    Attributes:
        path: where it lies.
        kind: ``costs`` or ``schedule``.
        size_bytes: its size.
        used_s: when it was last written or read, in seconds since 1970.
        about: what it holds, for people.
    """

    path: Path
    kind: str
    size_bytes: int
    used_s: float
    about: Mapping[str, str]


def folder() -> Path | None:
    """Return the folder of the cache, which need not exist; None where it is turned off."""
    word = os.environ.get("AUTOCKPT_CACHE", "")
    if word == "0":
        return None
    if word:
        return Path(word).absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    if Path(home).is_absolute():  # the standard: others are to be ignored
        return Path(home) / "autockpt"
    with contextlib.suppress(RuntimeError):  # there is no home
        return Path.home() / ".cache" / "autockpt"
    return None


def digest(data: Any) -> str:
    """Return a name for data that JSON can hold."""
    text = json.dumps(data, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(kind: str, key: str) -> Any:
    """Return the data of an entry; None where there is none, or a damaged or foreign file."""
    path = _path(kind, key)
    if path is None:
        return None
    data = _load(path)
    if data is None or data.get("check") != digest(data.get("data")):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return data["data"]


def write(kind: str, key: str, data: Any, about: Mapping[str, str]) -> None:
    """Write an entry; a reader sees the old one or the whole new one.

    Args:
        kind: ``costs`` or ``schedule``.
        key: its name, as :func:`digest` returns them.
        data: what JSON can hold.
        about: the same, for people.
    """
    path = _path(kind, key)
    if path is None:
        return
    whole = {"format": _FORMAT, "about": dict(about), "check": digest(data), "data": data}
    draft = path.with_name(f".{path.name.removesuffix('.json')}.{secrets.token_hex(4)}.part")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(json.dumps(whole, separators=(",", ":")), encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    _trim(path.parent)


def entries() -> list[Entry]:
    """Return the entries of the cache, the last used first; damaged ones are not among them."""
    where = folder()
    found = []
    for path, size_bytes, used_s in _files(where) if where is not None else ():
        data = _load(path)
        if data is not None:
            about = {str(k): str(v) for k, v in data["about"].items()}
            found.append(Entry(path, path.name.partition("-")[0], size_bytes, used_s, about))
    return sorted(found, key=lambda entry: -entry.used_s)


def clear() -> int:
    """Delete all files of the cache and return how many; what is not the cache's own stays."""
    where = folder()
    count = 0
    for path, _, _ in _files(where) if where is not None else ():
        with contextlib.suppress(OSError):
            path.unlink()
            count += 1
    return count


# -------------------------------------------------------------------- inside


def _path(kind: str, key: str) -> Path | None:
    where = folder()
    return None if where is None else where / f"{kind}-{key}.json"


def _load(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    sound = isinstance(data, dict) and data.get("format") == _FORMAT
    return data if sound and isinstance(data.get("about"), dict) else None


def _files(where: Path) -> list[tuple[Path, int, float]]:
    """Return the cache's own files, with their size and when they were last used."""
    found = []
    with contextlib.suppress(OSError):
        for item in os.scandir(where):
            if _NAME.fullmatch(item.name):
                with contextlib.suppress(OSError):  # another process deleted it
                    status = item.stat()
                    found.append((Path(item.path), status.st_size, status.st_mtime))
    return found


def _trim(where: Path) -> None:
    """Delete the entries not used for longest, beyond the limit, and drafts left behind."""
    files = sorted(_files(where), key=lambda file: -file[2])
    total = 0
    for path, size_bytes, _ in files:
        total += size_bytes
        if total > LIMIT_BYTES:
            with contextlib.suppress(OSError):
                path.unlink()
    with contextlib.suppress(OSError):
        for item in os.scandir(where):
            if _DRAFT.fullmatch(item.name) and item.stat().st_mtime < time.time() - STALE_S:
                Path(item.path).unlink(missing_ok=True)
