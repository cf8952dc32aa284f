"""What all benchmarks share: their two options, and the JSON file they write."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsam.measure.machine import describe

__all__ = ["parse", "write"]


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
