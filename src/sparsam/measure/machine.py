"""Says what machine this is and how much of it this process may use. Not for timing it (doctor.py does)."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["allowed_cpus", "describe", "fingerprint", "thread_allowance", "thread_warning"]

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def describe() -> dict[str, Any]:
    """The machine and the software, as plain data for reports and benchmarks.

    Returns:
        ``cpu`` name, ``cores`` (logical), ``allowed_cpus`` (affinity and cgroup quota together, may be fractional),
        ``affinity_cpus``, ``isa`` (instruction set of Sparsam's kernels), ``threads`` (torch), ``memory_bytes``,
        ``memory_limit_bytes`` (cgroup, or None), ``load_average`` (1, 5, 15 minutes), ``accelerators``, ``torch``,
        ``python``, ``sparsam``, ``system``, ``transparent_huge_pages`` (the allocator setting
        ``THP_MEM_ALLOC_ENABLE``) and ``warning`` (one line about the threads, or None).
    """
    threads = torch.get_num_threads()
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "affinity_cpus": _affinity(),
        "allowed_cpus": allowed_cpus(),
        "isa": _isa(),
        "threads": threads,
        "memory_bytes": _memory_bytes(),
        "memory_limit_bytes": _memory_limit(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "sparsam": _version(),
        "system": f"{platform.system()} {platform.machine()}",
        "transparent_huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE", "0") == "1",
        "warning": thread_warning(threads),
    }


def fingerprint() -> str:
    """One line that is the same whenever timings of this machine may be reused: cpu, allowance, isa, versions."""
    parts = (_cpu_name(), f"{allowed_cpus():g} cpus", _isa(), f"torch {torch.__version__}", f"sparsam {_version()}")
    return "; ".join(parts)


def allowed_cpus(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> float:
    """CPUs that this process may use: the smaller of its affinity and its cgroup quotas (v1 and v2).

    Args:
        proc, cgroups: where the kernel shows them; other places are for tests.

    Returns:
        CPUs, at least 0.01; fractional under a quota of, say, 150 % of one.
    """
    quotas = _quotas(proc, cgroups)
    return max(0.01, min([float(_affinity()), *quotas]))


def thread_allowance(workers: int = 1) -> int:
    """Threads that each of ``workers`` processes on this machine may run without exceeding the allowance; at least 1.

    Raises:
        ValueError: fewer than one worker.
    """
    if workers < 1:
        raise ValueError(
            f"thread_allowance: expected at least 1 worker, got {workers}. Pass the processes per machine."
        )
    return max(1, int(allowed_cpus() / workers))


def thread_warning(threads: int, workers: int = 1) -> str | None:
    """One line when ``workers`` processes of ``threads`` threads exceed the allowance, else None."""
    allowed = allowed_cpus()
    if threads * workers <= max(1.0, allowed):
        return None
    return (
        f"threads: expected at most {allowed:g} in all (CPU affinity and cgroup quota), got {workers} x {threads}."
        f" Set OMP_NUM_THREADS={thread_allowance(workers)}."
    )


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(proc: Path, cgroups: Path) -> list[float]:
    """CPU quotas of this process's groups and all groups above them."""
    found = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            for mount in (cgroups, cgroups / "unified"):
                found += [_quota_v2(folder) for folder in _upwards(mount, group)]
        elif "cpu" in controllers.split(","):
            for mount in (cgroups / "cpu", cgroups / controllers):
                found += [_quota_v1(folder) for folder in _upwards(mount, group)]
    return [quota for quota in found if quota is not None]


def _upwards(mount: Path, group: str) -> list[Path]:
    folder = mount / group.strip("/")
    # Inside a container the group's path is often one that only the host sees: the mount itself is then ours.
    return [folder, *[above for above in folder.parents if above == mount or mount in above.parents]]


def _quota_v2(folder: Path) -> float | None:
    fields = _read(folder / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(folder: Path) -> float | None:
    quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _memory_bytes() -> int:
    for line in _read(_PROC / "meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _memory_limit(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    limits = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            places = [f / "memory.max" for mount in (cgroups, cgroups / "unified") for f in _upwards(mount, group)]
        elif "memory" in controllers.split(","):
            places = [f / "memory.limit_in_bytes" for f in _upwards(cgroups / "memory", group)]
        else:
            continue
        limits += [int(text) for text in (_read(place).strip() for place in places) if text.isdigit()]
    total = _memory_bytes()
    # v1 writes "no limit" as a number near 2^63.
    real = [limit for limit in limits if limit < total] if total else []
    return min(real) if real else None


def _cpu_name() -> str:
    for line in _read(_PROC / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()


def _isa() -> str:
    try:
        from sparsam.kernels import ops
    except ImportError:
        return "unknown"
    return str(ops.backend())


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("sparsam")
    except metadata.PackageNotFoundError:
        module = sys.modules.get("sparsam")
        return str(getattr(module, "__version__", "unknown"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
