"""How bytes and times read in reports, reasons and errors."""

from __future__ import annotations

__all__ = ["format_bytes", "format_seconds"]

_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB")


def format_bytes(size_bytes: int) -> str:
    """Return a size in the binary unit that leaves one to four digits before the point.

    >>> format_bytes(0), format_bytes(1000), format_bytes(8 << 20), format_bytes(40 * 10**9)
    ('0 bytes', '1000 bytes', '8.0 MiB', '37.3 GiB')
    >>> format_bytes(-3 << 20)
    '-3.0 MiB'
    """
    size = float(size_bytes)
    unit = 0
    # 1023.95 would print as "1024.0": it belongs to the next unit already.
    while abs(size) >= (1024 if unit == 0 else 1023.95) and unit < len(_BINARY) - 1:
        size /= 1024
        unit += 1
    return f"{size_bytes} bytes" if unit == 0 else f"{size:.1f} {_BINARY[unit]}"


def format_seconds(time_s: float) -> str:
    """Return a time with three significant digits in s, ms or us.

    >>> format_seconds(0.0), format_seconds(12.345), format_seconds(0.0012), format_seconds(4.2e-7)
    ('0 s', '12.3 s', '1.20 ms', '0.420 us')
    >>> format_seconds(0.9999), format_seconds(1234.5)
    ('1.00 s', '1234 s')
    """
    if time_s == 0:
        return "0 s"
    # 999.5 of one unit would print as "1000": it belongs to the next one already.
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        value = time_s * factor
        if abs(value) >= 0.9995 or unit == "us":
            break
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{3 if abs(value) < 0.9995 else digits}f} {unit}"
