"""Pins: the user's word on what to keep and what to recompute, by module path."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autockpt_solvers.errors import PinError

__all__ = ["Pins"]


@dataclass(frozen=True)
class Pins:
    """Patterns of module paths, as the shell's: ``blocks.*.attn``.

    A pattern matches a module and everything inside it.

    Attributes:
        keep: what these modules compute is never computed again.
        recompute: what these modules compute for themselves is not kept for the backward;
            results that leave the module may be, as with ``torch.utils.checkpoint``.
    """

    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.keep or self.recompute)

    def kept(self, path: str) -> str:
        """Return the keep pattern that matches the path, or an empty string."""
        return _match(path, self.keep)[0]

    def recomputed(self, path: str) -> str:
        """Return the path of the module around ``path`` that is to be recomputed, or ''."""
        return _match(path, self.recompute)[1]

    def check(self, paths: Iterable[str]) -> None:
        """Raise where the patterns cannot bind to a model with operations at these paths.

        Raises:
            PinError: a pattern matches no operation, or two patterns contradict on one.
        """
        paths = sorted(set(paths))
        for option, patterns in (("keep", self.keep), ("recompute", self.recompute)):
            for pattern in patterns:
                if not any(_match(path, (pattern,))[0] for path in paths):
                    known = ", ".join(p for p in paths if p) or "none"
                    raise PinError(
                        f"{option}={pattern!r} matches no module that computes anything. "
                        f"Module paths of this model: {known[:2000]}"
                    )
        for path in paths:
            keep, recompute = _match(path, self.keep)[0], _match(path, self.recompute)[0]
            if keep and recompute:
                raise PinError(
                    f"keep={keep!r} and recompute={recompute!r} both match {path!r}. "
                    "Make one of the patterns narrower."
                )


def _match(path: str, patterns: Sequence[str]) -> tuple[str, str]:
    """Return the first pattern that matches the path or a module around it, and that module."""
    parts = path.split(".") if path else []
    for pattern in patterns:
        for length in range(1, len(parts) + 1):
            module = ".".join(parts[:length])
            # Component by component: a star does not reach across a dot.
            wanted = pattern.split(".")
            if len(wanted) == length and all(
                fnmatch.fnmatchcase(part, want)
                for part, want in zip(parts[:length], wanted, strict=True)
            ):
                return pattern, module
    return "", ""
