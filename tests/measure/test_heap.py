"""The heap that keeps its pages: a freed tensor's memory serves the next one without a page fault."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sparsam.measure.heap import keep_heap

_PROGRAM = """
import resource, sys, torch
from sparsam.measure.heap import keep_heap
if not keep_heap(256 << 20):
    sys.exit(3)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    torch.ones(10_000_000)
before = faults()
for _ in range(5):
    torch.ones(10_000_000)
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux' allocator")
def test_freed_memory_is_used_again() -> None:
    run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    if run.returncode == 3:
        pytest.skip("another allocator than glibc's")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 500  # 40 MB afresh each time are 10,000 small pages, or 520 where huge pages fit


def test_elsewhere_it_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_heap()
