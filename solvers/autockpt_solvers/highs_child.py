"""The child process of :class:`autockpt_solvers.highs.MipProcess`.

Reads a program and then requests from standard input, writes messages ``(status, values,
objective, bound)`` to standard output: status None while the search goes on.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

from autockpt_solvers.highs import run_mip

__all__ = ["main"]


def main() -> None:
    """Serve requests until standard input ends."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of the search.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # HiGHS and its libraries may print; the pipe is for messages alone.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    source = sys.stdin.buffer
    arrays = pickle.load(source)
    while True:
        try:
            request = pickle.load(source)
        except EOFError:
            return
        _send(pipe, run_mip(arrays, request, lambda message: _send(pipe, message)))


def _send(pipe: Any, message: tuple[Any, ...]) -> None:
    pickle.dump(message, pipe)
    pipe.flush()
