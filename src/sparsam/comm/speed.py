"""How fast this rank computes when it is never idle, and how fast the link to the next one is. Measured in 0.3 s."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Speed", "bandwidth", "speed"]

# the period after which Linux refills the CPU time of a control group: shorter samples see a burst, or a pause
_PERIOD_S = 0.1
_PERIODS = 2
_SIZE = 160
_LINK_BYTES = 1 << 20


@dataclass(frozen=True)
class Speed:
    """Products of a fixed size, in a second on the clock and in a second of CPU time; in either they say the same of
    work, but only the first knows of a share of a CPU, or of others on it."""

    per_second: float
    per_cpu_second: float


def speed() -> Speed:
    """Computes without a pause: one period until what was left of the last is used up, then whole periods."""
    a = torch.linspace(-1.0, 1.0, _SIZE * _SIZE).view(_SIZE, _SIZE)
    _products_until(a, time.perf_counter() + _PERIOD_S)
    cpu, begin = time.process_time(), time.perf_counter()
    done = _products_until(a, begin + _PERIODS * _PERIOD_S)
    seconds = time.perf_counter() - begin
    cpu_seconds = time.process_time() - cpu
    # the last product may have waited for the next period, and that wait is none of these periods
    return Speed(max(done - 1, 1) / min(seconds, _PERIODS * _PERIOD_S), done / cpu_seconds)


def bandwidth() -> float:
    """Bytes a second from each rank to the next, all at once; every rank calls it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    message, came = torch.zeros(_LINK_BYTES, dtype=torch.uint8), torch.zeros(_LINK_BYTES, dtype=torch.uint8)
    seconds = 0.0
    for _ in range(2):  # the first one makes the connection
        begin = time.perf_counter()
        work = dist.isend(message, (rank + 1) % ranks)
        dist.recv(came, (rank - 1) % ranks)
        assert work is not None, "every process is in the default group"
        work.wait()
        seconds = time.perf_counter() - begin
    return _LINK_BYTES / seconds


def _products_until(a: torch.Tensor, until: float) -> int:
    """How many products were begun before a time."""
    done = 0
    while time.perf_counter() < until:
        torch.mm(a, a)
        done += 1
    return done
