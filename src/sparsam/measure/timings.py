"""Timings that are taken once and remembered: on disk per machine, and in checkpoints. Not for taking them."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["VERSION", "Timings", "default_path", "read_file"]

VERSION = 1
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)

Timing = TypeVar("Timing", bound=tuple[Any, ...])


class Timings(Generic[Timing]):
    """Timings of one sort, key -> timing, in one section of a file that holds several.

    Carried ones answer first, then those of this machine.

    Args:
        path: the file; written whenever a timing was taken, or done without where that fails, which is reported.
        section: machine and library version. Sections of others stay as they are.
        read: makes a timing of what JSON gives back for one.
        content: section -> timings, as `read_file` found them. A section that is damaged is reported and taken anew.
    """

    def __init__(
        self, path: Path, section: str, read: Callable[[Any], Timing], content: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self.section, self._read = path, section, read
        self._carried: dict[str, Timing] = {}
        self._known: dict[str, Timing] = {}
        self._used: dict[str, Timing] = {}
        try:
            self._known = self._entries((content or {}).get(section, {}))
        except _DAMAGE as problem:
            _report_damage(path, problem)

    def get(self, key: str, take: Callable[[], Timing]) -> Timing:
        """The timing of this key, from memory or taken now."""
        timing = self._carried.get(key) or self._known.get(key)
        if timing is None:
            timing = take()
            self._known[key] = timing
            self._save()
        self._used[key] = timing
        return timing

    def carry(self, data: Mapping[str, Any]) -> None:
        """Answers from now on with the timings of a checkpoint: what `to_json` gave.

        Raises:
            ValueError: it gave something else.
        """
        try:
            self._carried = self._entries(data)
        except _DAMAGE as problem:
            raise ValueError(
                "device profile: expected the content of DeviceProfile.to_json(), got something else"
                f" ({type(problem).__name__})."
            ) from None

    def to_json(self) -> dict[str, list[Any]]:
        """What was asked for so far and what was carried, for a checkpoint."""
        return {key: _plain(timing) for key, timing in (self._carried | self._used).items()}

    def _entries(self, data: Mapping[str, Any]) -> dict[str, Timing]:
        return {str(key): self._read(value) for key, value in data.items()}

    def _save(self) -> None:
        # Read again first: another process may have timed other shapes meanwhile.
        try:
            machines = dict(json.loads(self.path.read_text(encoding="utf-8"))["machines"])
        except _DAMAGE:
            machines = {}
        mine = machines.get(self.section)
        merged = dict(mine) if isinstance(mine, dict) else {}
        merged |= {key: _plain(timing) for key, timing in self._known.items()}
        machines[self.section] = merged
        try:
            _write_atomically(self.path, json.dumps({"version": VERSION, "machines": machines}, indent=1))
        except OSError as problem:
            warnings.warn(
                f"device profile: expected to write {self.path}, got {problem.strerror}."
                " Timings are kept for this run only.",
                stacklevel=5,
            )


def read_file(path: Path) -> dict[str, Any]:
    """The sections of a file, empty where there is none. One that is damaged is reported."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["machines"])
    except FileNotFoundError:
        pass
    except _DAMAGE as problem:
        _report_damage(path, problem)
    return {}


def default_path() -> Path:
    """Where timings are kept between runs: the user's cache folder (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "sparsam" / "device_profile.json"


def _plain(timing: tuple[Any, ...]) -> list[Any]:
    """Tuples as lists, as JSON gives them back."""
    return [_plain(one) if isinstance(one, tuple) else one for one in timing]


def _report_damage(path: Path, problem: Exception) -> None:
    warnings.warn(
        f"device profile: expected timings in {path}, got a damaged file ({type(problem).__name__}). Timing anew.",
        stacklevel=4,
    )


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
