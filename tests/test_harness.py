"""What benchmarks start and make is gone when they end, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STOPPED = """
import sys, time
sys.path.insert(0, {folder!r})
from harness import ended_together, stop_cleanly
stop_cleanly()
try:
    ended_together([[sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]])
finally:
    print("undone", flush=True)
"""


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import harness

    yield harness
    sys.modules.pop("harness")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_undoes_what_was_made(number):
    code = STOPPED.format(folder=str(BENCHMARKS))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as stopped:
        child = int(stopped.stdout.readline())
        stopped.send_signal(number)
        out, err = stopped.communicate()
    assert out == b"undone\n"
    assert err == b""
    assert stopped.returncode == 128 + number
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_one_that_fails_ends_the_others(harness):
    def sleeps(code, seconds):
        return [sys.executable, "-c", f"import time; time.sleep({seconds}); raise SystemExit({code})"]

    assert harness.ended_together([sleeps(0, 600), sleeps(3, 0)]) == [None, 3]
    assert harness.ended_together([sleeps(0, 0), sleeps(0, 0.2)]) == [0, 0]
    assert harness.ended_together([sleeps(0, 600)], seconds=0.1) == [None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wire", "balance"])
def test_what_is_not_permitted_is_said_in_one_line(name, tmp_path):
    """Without programs to shape a link with, or where there are no control groups."""
    code = (
        f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); sys.argv = ['x', '--quick']\n"
        f"import {name}, pathlib; {name}.CGROUPS = pathlib.Path({str(tmp_path / 'none')!r}); {name}.main()"
    )
    environment = {**os.environ, "PATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{name}: expected ")
    assert ended.stderr.count("\n") == 1
