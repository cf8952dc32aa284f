"""The dense twin: the same model, dense, on the same batches, in a process of its own so that its memory is its own.

`TwinProcess` is what the training holds; `main` is what runs in the other process. They talk in lines of JSON:
`{"advance": step}` goes in; step events, notes, and one of `{"done"}`, `{"stopped"}`, `{"error"}` come out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsam.checkpoint import CheckpointError
from sparsam.measure import flush_subnormals
from sparsam.recipe import parse_recipe
from sparsam.run import Run, RunError
from sparsam.train import Interrupted, Progress, Training

__all__ = ["TwinProcess", "main"]

_SAMPLED_STEPS = 3  # of which the first one warms up


class TwinProcess:
    """The twin of a run, as seen from the run's own process.

    Args:
        folder: the run folder; the twin keeps its own in `twin/`.
        show: is called with the twin's steps.
        notify: is told what a person should know.

    Use as a context manager: leaving it lets the twin save and end.
    """

    def __init__(self, folder: Path, show: Callable[[Progress], None], notify: Callable[[str], None]) -> None:
        self._show, self._notify = show, notify
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sparsam.twin", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def advance(self, step: int) -> None:
        """See `sparsam.train.Twin`.

        Raises:
            Interrupted: the twin was asked to stop and has saved.
            RunError: the twin failed, or its process died.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"advance": step}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said before it died is still to be read
        while (event := self._next()) is not None:
            if "done" in event:
                return
            if "stopped" in event:
                raise Interrupted
            if "error" in event:
                raise RunError(f"dense twin: {event['error']}")
            if "note" in event:
                self._notify(f"dense twin: {event['note']}")
            else:
                self._show(Progress(**event))
        raise RunError(
            f"dense twin: its process ended (exit status {self._process.wait()}), perhaps for lack of memory. "
            "Go on with --resume, or train without it: --set twin=none"
        )

    def interrupt(self) -> None:
        """Asks the twin to save and stop."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def __enter__(self) -> TwinProcess:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.stdout.close()
        self._process.wait()

    def _next(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None


@flush_subnormals()
def main(folder: Path) -> int:
    """Trains the twin as far as it is told to on standard input.

    Args:
        folder: the run folder of the sparse training.

    Returns:
        Exit status.
    """
    asked_to_stop = False

    def on_interrupt(number: int, frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGINT, on_interrupt)
    # Only events may go where the other process reads: a stray print of a library would be read as one.
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    def show(progress: Progress) -> None:
        send(**asdict(progress))

    try:
        recipe = parse_recipe((folder / "recipe.yaml").read_text(encoding="utf-8"), name="recipe.yaml")
        home, full = folder / "twin", recipe.twin == "full"
        twin_recipe = recipe.dense()
        with Run.open(home) if (home / "recipe.yaml").is_file() else Run.create(home, twin_recipe.yaml()) as run:
            training = Training(twin_recipe, run, lambda note: send(note=note), resume=full)
            for line in sys.stdin:
                step = json.loads(line)["advance"]
                if full:
                    training.advance(step, show, lambda: asked_to_stop)
                elif not asked_to_stop:
                    training.sample(step, _SAMPLED_STEPS)
                if step >= recipe.training.steps:
                    training.finish()
                if asked_to_stop and step < recipe.training.steps:
                    raise Interrupted
                send(done=step)
            if full:
                training.save()
    except Interrupted:
        if full:
            training.save()
        send(stopped=True)
    except BrokenPipeError:
        os._exit(1)  # nobody listens any more; the last checkpoint stands
    except (ValueError, RunError, CheckpointError, OSError) as error:
        send(error=str(error))
        return 1
    except Exception as error:
        send(error=f"{type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
