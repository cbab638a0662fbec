"""How much host memory this process may still take."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Return the free physical memory, or what the container's limit leaves of it if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = max(free, _meminfo_available())
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _meminfo_available() -> int:
    """Return what Linux could free up besides: the page cache does not count as used."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such limit here, or "max"
        return None
