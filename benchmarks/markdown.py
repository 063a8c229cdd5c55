"""Tables for pages."""

from __future__ import annotations


def markdown(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A header and its rows."""
    lines = [" | ".join(header), " | ".join("---" for _ in header), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)
