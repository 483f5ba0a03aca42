"""The budget: what a user may write, in bytes."""

from __future__ import annotations

import re
from fractions import Fraction
from numbers import Integral

from autockpt_solvers.errors import BudgetError
from autockpt_solvers.units import format_bytes

__all__ = ["format_bytes", "parse_budget"]

_FORMS = (
    "A budget is a whole number of bytes above 0 (40_000_000_000), a size such as '40GB' or "
    "'1.5GB' (kB, MB, GB, TB: powers of 1000), '40GiB' (KiB, MiB, GiB, TiB: powers of 1024), "
    "a share of the device's memory such as '80%' (at most '100%'), or None for no limit."
)
_DECIMAL = {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_BINARY = {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS = _DECIMAL | _BINARY
# Twenty digits hold any memory there is, and keep the conversion of hostile input short.
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(%|[a-z]+)", re.ASCII | re.IGNORECASE)


def parse_budget(budget: int | str | None, *, total_bytes: int | None) -> int | None:
    """Return the budget in bytes, or None for no limit.

    Units may be written in any case and after spaces; parts of a byte are dropped.

    Args:
        budget: what the user wrote.
        total_bytes: the device's memory, which ``'80%'`` is a share of; None where unknown.

    Raises:
        BudgetError: where the budget is of no accepted form, or not above 0 bytes.

    >>> parse_budget("40GB", total_bytes=None), parse_budget("1.5 gib", total_bytes=None)
    (40000000000, 1610612736)
    >>> parse_budget("80%", total_bytes=1000), parse_budget(7, total_bytes=None)
    (800, 7)
    >>> parse_budget(None, total_bytes=1000) is None
    True
    """
    if budget is None:
        return None
    if isinstance(budget, Integral) and not isinstance(budget, bool):
        return _positive(int(budget), budget)
    match = _SIZE.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if match is None:
        raise _error(budget, "is not a budget")
    number, unit = Fraction(match[1]), match[2].lower()
    if unit == "%":
        if number > 100:
            raise _error(budget, "is more than the device's memory")
        if total_bytes is None:
            raise _error(budget, "is a share of a memory whose size is not known: give bytes")
        return _positive(int(number * total_bytes / 100), budget)
    if unit not in _UNITS:
        raise _error(budget, f"has the unknown unit {match[2]!r}")
    return _positive(int(number * _UNITS[unit]), budget)


def _positive(size_bytes: int, budget: object) -> int:
    if size_bytes <= 0:
        raise _error(budget, "is not above 0 bytes")
    return size_bytes


def _error(budget: object, problem: str) -> BudgetError:
    shown = repr(budget)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return BudgetError(f"budget {shown} {problem}. {_FORMS}")
