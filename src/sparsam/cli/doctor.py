"""`sparsam doctor`: what this machine is fast at, measured."""

from __future__ import annotations

import itertools

from rich.rule import Rule

from sparsam.cli.screen import console, facts
from sparsam.measure.doctor import measure

__all__ = ["doctor"]


def doctor() -> None:
    """Measures what this machine is fast at, in under half a minute."""
    screen = console()
    with screen.status("looking at the machine") as status:
        rows = measure(lambda what: status.update(f"measuring: {what}"))
    for section, members in itertools.groupby(rows, key=lambda row: row.section):
        screen.print(Rule(f"[bold]{section}[/]", align="left", style="dim", characters="─"))
        screen.print(facts((row.name, row.text) for row in members))
        screen.print()
