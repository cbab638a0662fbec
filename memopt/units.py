"""Sizes as people read them."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def format_bytes(num_bytes: int) -> str:
    """Return a size as text in B, KiB, MiB or GiB, e.g. ``49.0 MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.2f} {name}" if unit == GIB else f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes} B"


def count_noun(count: int, noun: str) -> str:
    """Return a count and its noun, e.g. ``1 module``, ``48 modules``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
