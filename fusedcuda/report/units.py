"""Numbers for people."""

from __future__ import annotations


def megabytes(count: float) -> str:
    """Decimal units, as bandwidth is quoted: 1 MB = 10**6 bytes."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= size:
            return (
                f"{count / size:.3g} {unit}"
                if abs(count) < 1e3 * size
                else f"{count / size:,.0f} {unit}"
            )
    return f"{count:.0f} B"


def signed(count: int) -> str:
    """Bytes with their sign; none is 0."""
    return "0" if count == 0 else f"{'+' if count > 0 else '-'}{megabytes(abs(count))}"
