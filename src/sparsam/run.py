"""A run is a folder: recipe, environment, metrics, checkpoints, report. This file is the folder, not the training.

```
RUN/recipe.yaml  environment.json  layers.json  metrics.jsonl  summary.json  report.html  report.json
RUN/checkpoints/step-00000200/{model,optimizer,...}.safetensors  state.json  manifest.json     (the newest two)
                             /rank-00000.{json,safetensors} ...     of several ranks: what each has for itself
RUN/twin/                      the dense twin: a run of its own
```
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from sparsam import checkpoint
from sparsam.ranks import ALONE, Ranks

__all__ = ["Run", "RunError"]

KEEP = 2


class RunError(RuntimeError):
    """Something about a run folder that its user must know or put right; the message is one line."""


class Run:
    """One run folder, held by one process at a time, or by the ranks of one training: then rank 0 alone writes.

    Args:
        folder: the folder; `create` makes it, `open` expects it.
        ranks: that train in it. All of them see the same folder, and call the same methods in the same order.

    Use as a context manager: leaving it closes the metrics and frees the folder for the next process.
    """

    def __init__(self, folder: Path, ranks: Ranks = ALONE) -> None:
        self.folder, self.ranks = folder, ranks
        self.checkpoints = folder / "checkpoints"
        self._metrics: IO[bytes] | None = None
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, folder: Path, recipe: str, ranks: Ranks = ALONE) -> Run:
        """Makes a new run folder and writes its recipe.

        Args:
            folder: must not exist, or be empty.
            recipe: YAML text.
            ranks: that train in it.

        Raises:
            RunError: the folder holds something already, or cannot be made.
        """
        run = cls(folder, ranks)
        with ranks.together():
            if ranks.first:
                run._make(recipe)
        run._check_shared()
        return run

    @classmethod
    def open(cls, folder: Path, ranks: Ranks = ALONE) -> Run:
        """Takes hold of a run folder that is there.

        Raises:
            RunError: it is not a run folder, or another process is training in it.
        """
        run = cls(folder, ranks)
        with ranks.together():
            _ = run.recipe
            if ranks.first:
                run.checkpoints.mkdir(exist_ok=True)
                run._take()
        return run

    @property
    def recipe(self) -> str:
        """The recipe's YAML text.

        Raises:
            RunError: it is not a run folder.
        """
        path = self.folder / "recipe.yaml"
        if not path.is_file():
            raise RunError(
                f"{self.folder}: expected a run folder (with recipe.yaml in it), found none. `sparsam train` makes one."
            )
        return path.read_text(encoding="utf-8")

    def write(self, name: str, value: Any) -> None:
        """Writes `name` as JSON, whole or not at all.

        Raises:
            RunError: the disk is full or not writable.
        """
        if not self.ranks.first:
            return
        with self._explained(f"{name} is not written"):
            checkpoint.write_json(self.folder / name, value)

    def read(self, name: str) -> Any:
        """The JSON of `name`, or None where there is no such file yet.

        Raises:
            RunError: the file is damaged.
        """
        path = self.folder / name
        try:
            return json.loads(path.read_bytes()) if path.is_file() else None
        except ValueError:
            raise RunError(
                f"{path}: expected JSON, the file is damaged. Remove it, then go on with: {self.resume_command}"
            ) from None

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds one line to metrics.jsonl; it survives the death of the process as soon as this returns.

        Raises:
            RunError: the disk is full or not writable.
        """
        if not self.ranks.first:
            return
        with self._explained("metrics.jsonl cannot grow"):
            if self._metrics is None:
                self._metrics = (self.folder / "metrics.jsonl").open("ab", buffering=0)
            self._metrics.write(json.dumps(record).encode() + b"\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that a kill cut short is left out."""
        path = self.folder / "metrics.jsonl"
        if path.is_file():
            for line in path.read_bytes().split(b"\n")[:-1]:
                yield json.loads(line)

    def save(self, step: int, state: Mapping[str, Any], own: Any = None) -> Path:
        """Writes the checkpoint of `step` and removes all but the newest two.

        Args:
            step: applied optimiser steps.
            state: group name -> state, as `checkpoint.write` takes it.
            own: what this rank has for itself, where there are several.

        Raises:
            RunError: the disk is full or not writable. The checkpoints before this one are untouched.
        """
        folder = self._folder(step)
        whole = self._folders()
        before = f"The checkpoint of step {_step(whole[-1])} is whole" if whole else "There is no earlier checkpoint"
        with self._explained(
            f"the checkpoint of step {step} is not written", f"{before}; then go on with: {self.resume_command}"
        ):
            with self.ranks.together():
                if self._metrics is not None:
                    os.fsync(self._metrics.fileno())  # a checkpoint never knows of steps that the metrics do not
            # the state of a step is one state: saved again, it would be the same bytes
            if self.ranks.of_first(folder not in whole):
                checkpoint.write(folder, state, own, self.ranks)
        for old in self._folders()[:-KEEP] if self.ranks.first else ():
            shutil.rmtree(old, ignore_errors=True)
        return folder

    def load(self, notify: Callable[[str], None]) -> tuple[int, dict[str, Any]] | None:
        """The newest whole checkpoint, after cutting metrics.jsonl back to its step.

        Args:
            notify: is told, in one line, when the newest checkpoint is damaged and an older one is used.

        Returns:
            (step, state), or None when no checkpoint was ever written.

        Raises:
            RunError: checkpoints are there, and none is whole.
        """
        found = None
        with self.ranks.together():
            if self.ranks.first:
                found = self._newest_whole(notify)
        step = self.ranks.of_first(None if found is None else found[0])
        if step is not None and not self.ranks.first:
            found = step, checkpoint.read(self._folder(step), check_ranks=False)
        return found

    def load_own(self, step: int, rank: int) -> Any:
        """What a rank had for itself in the checkpoint of `step`."""
        return checkpoint.read_own(self._folder(step), rank)

    @property
    def holds_training(self) -> bool:
        """Whether a step was ever taken here, or saved: then nobody but its owner may remove the folder."""
        return (self.folder / "metrics.jsonl").exists() or any(self.checkpoints.iterdir())

    @property
    def resume_command(self) -> str:
        """What to type to go on with this run."""
        command = f"sparsam train --resume {self.folder}"
        if self.ranks.size == self.ranks.local:
            return command if self.ranks.size == 1 else f"{command} --ranks {self.ranks.size}"
        return f"torchrun ... -m {command}"

    def close(self) -> None:
        """Lets go of the folder."""
        for handle in (self._metrics, self._lock):
            if handle is not None:
                handle.close()
        self._metrics = self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> None:
        # A lock of the kernel's, not a file that says "locked": it goes with the process, however that dies.
        self._lock = (self.folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise RunError(
                f"{self.folder}: another process is training in this run folder. Wait for it, or stop it first."
            ) from None

    def _make(self, recipe: str) -> None:
        folder = self.folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(
                f"{folder}: expected a new or empty folder for the run, it holds something. "
                f"Choose another --out, or go on with --resume {folder}."
            )
        with self._explained("the run folder is not made"):
            self.checkpoints.mkdir(parents=True)
            self._take()
            (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")

    def _check_shared(self) -> None:
        """Ranks on other machines see the folder that rank 0 has made."""
        with self.ranks.together():
            if not (self.folder / "recipe.yaml").is_file():
                raise RunError(
                    f"{self.folder}: expected a folder that all ranks see, rank {self.ranks.rank} finds none. "
                    "Put --out on a file system that all machines share."
                )

    def _newest_whole(self, notify: Callable[[str], None]) -> tuple[int, dict[str, Any]] | None:
        for stray in self.checkpoints.glob(".partial-*"):
            shutil.rmtree(stray, ignore_errors=True)
        folders = self._folders()
        damage: list[str] = []
        for folder in reversed(folders):
            try:
                state = checkpoint.read(folder)
            except checkpoint.CheckpointError as error:
                damage.append(str(error))
                folder.rename(folder.with_name(f"damaged-{folder.name}"))  # its step will be reached, and saved, again
                continue
            if damage:
                notify(f"{' '.join(damage)} Going on from the checkpoint of step {_step(folder)} instead.")
            self._cut_metrics(_step(folder))
            return _step(folder), state
        if damage:
            raise RunError(
                f"No whole checkpoint is left. {' '.join(damage)} "
                f"Start anew with: sparsam train {self.folder / 'recipe.yaml'}"
            )
        self._cut_metrics(0)
        return None

    def _folder(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def _folders(self) -> list[Path]:
        return sorted(self.checkpoints.glob("step-*"))

    def _cut_metrics(self, step: int) -> None:
        path = self.folder / "metrics.jsonl"
        if not path.is_file():
            return
        kept = [record for record in self.records() if step and record["step"] <= step]
        with self._explained("metrics.jsonl cannot be cut back to the checkpoint"):
            if self._metrics is not None:
                self._metrics.close()
                self._metrics = None
            partial = path.with_name(".metrics.jsonl.partial")
            partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            partial.replace(path)

    def _explained(self, what: str, then: str = "") -> _Explained:
        return _Explained(self.folder, what, then)


class _Explained:
    """Turns an OSError inside the block into one line: what is lost, why, what to do."""

    def __init__(self, folder: Path, what: str, then: str) -> None:
        self.folder, self.what, self.then = folder, what, then

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError):
            return
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        reason = "no space is left on its disk" if full else (error.strerror or str(error))
        advice = "Free some space" if full else "Put that right"
        if full and self.folder.exists():
            reason += f" ({shutil.disk_usage(self.folder).free / 1e6:.0f} MB free)"
        then = f"{self.then}." if self.then else ""
        raise RunError(f"{self.folder}: {self.what}: {reason}. {advice}. {then}".rstrip()) from error


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
