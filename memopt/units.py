"""Sizes as people read and write them."""

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
_SUFFIXES = {
    "": 1,
    "b": 1,
    **{name: 1 << 10 * n for n, name in enumerate(("kib", "mib", "gib", "tib"), 1)},
    **{name: 1000**n for n, name in enumerate(("kb", "mb", "gb", "tb"), 1)},
}
SIZES = "a size from 1 byte, such as 80GiB, 24GB, 80e9 or 85899345920"


def parse_bytes(text: str) -> int:
    """Return a size that a person wrote: a number, then nothing for bytes, GiB and the like by 1024, GB by 1000.

    Raises ValueError.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\+?\d{1,2})?)\s*([a-z]*)\s*", text.lower())
    if not found or found[2] not in _SUFFIXES or float(found[1]) * _SUFFIXES[found[2]] < 1:
        raise ValueError(f"{text!r} is not {SIZES}")
    return round(float(found[1]) * _SUFFIXES[found[2]])


def format_bytes(num_bytes: int) -> str:
    """Return a size as text in B, KiB, MiB or GiB, e.g. ``49.0 MiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.2f} {name}" if unit == GIB else f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes} B"


def mib_text(num_bytes: int) -> str:
    """Return a size in MiB with two places, so that a column of them lines up."""
    return f"{num_bytes / MIB:,.2f}"


def count_noun(count: int, noun: str) -> str:
    """Return a count and its noun, e.g. ``1 module``, ``48 modules``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_flops(flops: int) -> str:
    """Return a number of floating-point operations as text, e.g. ``740.9 GFLOP``."""
    for power, name in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if flops >= 10**power:
            return f"{flops / 10**power:,.1f} {name}FLOP"
    return f"{flops} FLOP"
