"""What all benchmarks share: their two options, the JSON file they write, and processes that end with them."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sparsam.measure.machine import describe

__all__ = ["ended_together", "parse", "stop_cleanly", "write"]


def parse(description: str | None, **extra: Any) -> argparse.Namespace:
    """Command line with --quick and --json; `extra` adds options, name -> arguments of add_argument."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 60 s, without compilation; never used as evidence")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write summary, rows and machine there")
    for name, options in extra.items():
        parser.add_argument("--" + name.replace("_", "-"), **options)
    return parser.parse_args()


def write(
    arguments: argparse.Namespace, summary: Mapping[str, float | None], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Prints the summary and writes the JSON file when asked."""
    for name, value in summary.items():
        print(f"{name:24} {'n/a' if value is None else f'{value:.3f}'}")
    if arguments.json:
        content = {"summary": dict(summary), "rows": list(rows), "machine": describe(), "quick": arguments.quick}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def stop_cleanly() -> None:
    """SIGTERM and Ctrl-C leave all blocks in order, so that what was made outside this process goes, uninterrupted."""

    def stop(number: int, _: object) -> NoReturn:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)


def ended_together(
    commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None, seconds: float = 1800
) -> list[int | None]:
    """Runs processes beside each other until all have ended or one has failed; none is left behind.

    Returns:
        Exit codes; None of those that had not ended by then.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            started.append(subprocess.Popen(command, env=environment))
        codes: list[int | None] = [None] * len(started)
        until = time.monotonic() + seconds
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(0.05)
            codes = [process.poll() for process in started]
        return codes
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
