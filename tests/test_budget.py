"""Budgets: every accepted form gives its documented bytes, everything else a typed error."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autockpt.budget import format_bytes, parse_budget
from autockpt_solvers.errors import AutockptError, BudgetError


@pytest.mark.parametrize(
    ("budget", "size_bytes"),
    [
        (1, 1),
        (40_000_000_000, 40 * 10**9),
        ("1kB", 1000),
        ("512MB", 512 * 10**6),
        ("40GB", 40 * 10**9),
        ("2TB", 2 * 10**12),
        ("1KiB", 1 << 10),
        ("3MiB", 3 << 20),
        ("40GiB", 40 << 30),
        ("1TiB", 1 << 40),
        ("1.5GB", 1_500_000_000),
        ("0.1GB", 100_000_000),
        ("1.00000000001kB", 1000),
        (" 40 GB ", 40 * 10**9),
        ("40\tgb", 40 * 10**9),
        ("40gib", 40 << 30),
        ("80%", 6_400),
        ("33.3 %", 2_664),
        ("100%", 8_000),
    ],
)
def test_accepted_forms(budget: int | str, size_bytes: int) -> None:
    parsed = parse_budget(budget, total_bytes=8_000)
    assert parsed == size_bytes
    assert type(parsed) is int


def test_none_is_no_limit() -> None:
    assert parse_budget(None, total_bytes=8_000) is None


@pytest.mark.parametrize(
    "budget",
    [
        True,
        False,
        0,
        -1,
        math.nan,
        math.inf,
        4e10,
        b"40GB",
        ("40GB",),
        "",
        " ",
        "x",
        "40",
        "GB",
        "%",
        "nan",
        "inf",
        "nanGB",
        "0GB",
        "-1GB",
        "+1GB",
        "1e3GB",
        "0.0001kB",
        "40 parsecs",
        "40 G B",
        "40GBs",
        "40GB\n40GB",
        "4 0GB",
        "1.GB",
        ".5GB",
        "1,5GB",
        "\u0664\u0660GB",
        "120%",
        "100.0001%",
        "0%",
        "-5%",
        "9" * 10_000 + "GB",
    ],
)
def test_anything_else_names_the_accepted_forms(budget: object) -> None:
    with pytest.raises(BudgetError) as raised:
        parse_budget(budget, total_bytes=8_000)  # type: ignore[arg-type]
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, AutockptError)
    message = str(raised.value)
    for form in ("'40GB'", "'40GiB'", "'80%'", "None", "bytes"):
        assert form in message
    assert len(message) < 600


def test_a_share_needs_a_known_memory() -> None:
    with pytest.raises(BudgetError, match="not known: give bytes"):
        parse_budget("80%", total_bytes=None)


@given(st.text())
def test_text_parses_to_positive_bytes_or_is_refused(text: str) -> None:
    try:
        parsed = parse_budget(text, total_bytes=10**12)
    except BudgetError:
        return
    assert parsed is not None
    assert parsed > 0


@given(
    whole=st.integers(1, 10**6),
    unit=st.sampled_from(["kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]),
)
def test_units_are_powers(whole: int, unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    power = "kmgt".index(unit[0].lower()) + 1
    assert parse_budget(f"{whole}{unit}", total_bytes=None) == whole * base**power


@given(st.integers(0, 10**15))
def test_formatted_bytes_are_within_rounding(size_bytes: int) -> None:
    number, unit = format_bytes(size_bytes).split()
    scale = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[unit]
    assert abs(float(number) * scale - size_bytes) <= 0.051 * scale
    assert unit in ("bytes", "TiB") or 1 <= float(number) < 1024
