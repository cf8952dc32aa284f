"""The loop, to be read top to bottom: `Training` builds what a recipe says, resumes, and takes steps; `train` runs it.

Not for your own loop: that needs only `sparsify` and `Session`, and this file shows how they are used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from sparsam import checkpoint, measure
from sparsam.kernels.ops import backend
from sparsam.precision.part import Precision
from sparsam.rate import LearningRate
from sparsam.recipe import ALL_SLOW, Recipe, all_slow
from sparsam.run import Run, RunError
from sparsam.session import Part, Rewire, Session
from sparsam.sparse.part import SparseTraining
from sparsam.sparse.table import SparsityTable
from sparsam.summary import figures_of
from sparsam.tasks import language

__all__ = ["Interrupted", "Progress", "Training", "Twin", "train"]

# A clipped step whose gradient is not finite is skipped; a run of them will not end by itself.
_MOST_SKIPPED_STEPS = 20
_SAMPLES_OF_TWIN = 8
_WHOLE_PEAK = "the peak of memory counts from the start of the process, this system cannot reset it"


class Interrupted(Exception):
    """The user asked to stop; everything up to the last step is saved."""


@dataclass(frozen=True)
class Progress:
    """What one step looked like, for whoever shows it."""

    step: int
    loss: float
    tokens_per_second: float
    step_seconds: float


class Twin(Protocol):
    """The dense twin, as the loop sees it."""

    def advance(self, step: int) -> None:
        """Trains on, up to and including `step`."""


class Training:
    """One training in one run folder: the model, what trains it, and where it stands.

    Args:
        recipe: what to do.
        run: the folder; when it holds a checkpoint, the training stands where that was taken.
        notify: is told things that a person should know, a line each.
        task: the text, when it was read already.
        resume: False begins anew beside what the folder holds, for the sampled twin, which keeps no state.

    Raises:
        ValueError: data or model are not what the recipe needs.
        RunError: the folder holds another training than the recipe's.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        notify: Callable[[str], None],
        task: language.Task | None = None,
        resume: bool = True,
    ) -> None:
        training = recipe.training
        self.recipe, self.run = recipe, run
        threads = training.threads or min(torch.get_num_threads(), measure.thread_allowance())
        torch.set_num_threads(threads)
        checkpoint.seed_all(training.seed)

        self.task = task or recipe.task()
        self.corpus = self.task.corpus
        model = self.task.build_model()
        self.table: SparsityTable | None = None
        found = run.load(notify) if resume else None
        profile = found and found[1]["run"]["profile"]  # a resumed run decides by the timings of its beginning
        if recipe.sparsity is not None:
            timings = measure.DeviceProfile() if profile is None else measure.DeviceProfile.from_json(profile)
            self.table = recipe.sparsity.apply(model, timings, recipe)
            profile = timings.to_json()
            run.write("profile.json", profile)
            run.write("layers.json", self.table.to_json())
            if all_slow(self.table):
                notify(ALL_SLOW)
        sparse = self.table is not None and any(row.storage != "dense" for row in self.table.rows)
        self.model = model
        self.optimizer = recipe.optimizer.build(model)
        self.rewires = _RewireLog()
        parts: list[Part] = [Precision(recipe.precision), self.rewires]
        factor = 1.0
        if recipe.sparsity is not None and sparse:
            method = recipe.sparsity.build_method(training.steps)
            parts.insert(0, SparseTraining(method, keep_moments=recipe.sparsity.keep_moments))
            factor = recipe.sparsity.lr_factor
        parts.append(LearningRate(recipe.rate(sparse), factor))
        self.session = Session(
            model, self.optimizer, parts, accumulate=training.accumulate, clip=recipe.optimizer.clip, seed=training.seed
        )
        self.batches = language.Batches(self.corpus.train, training.batch, training.context, training.seed)
        self.compiled: nn.Module = torch.compile(model) if training.compile else model  # type: ignore[assignment]
        self.seconds = 0.0
        self._begun = False
        self._skipped = 0
        self._phases: dict[str, list[float]] = {}
        self._facts: dict[str, Any] = {
            "corpus": self.corpus.fingerprint,
            "profile": profile,
            "machine": _decides_bits(threads),
        }

        self._taken = 0
        self._earlier_peak_bytes, self._earlier_peak_is_whole = 0, False
        if found is not None:
            self._resume(*found, notify)
        run.write("environment.json", measure.describe())
        # The peak is that of the training, not of reading the text and timing the layers, where the kernel allows.
        self._peak_is_whole = not measure.reset_peak_rss() or self._earlier_peak_is_whole

    @property
    def step(self) -> int:
        """Applied optimiser steps so far."""
        return self.session.applied_steps

    def advance(self, until: int, show: Callable[[Progress], None], stop: Callable[[], bool]) -> None:
        """Trains up to and including step `until`, evaluating and saving on the way.

        Args:
            until: applied steps at the end.
            show: is called after each step.
            stop: is asked after each step; when it says True, the state is saved and Interrupted raised.

        Raises:
            Interrupted: `stop` said so.
            RunError: the loss is no longer finite, or the disk is full.
        """
        training = self.recipe.training
        if self.step == 0 and not self._begun:
            self._evaluate()
        self._begun = True
        while self.step < min(until, training.steps):
            if self.step == training.steps // 2 and training.steps >= 10:
                progress = self._profiled_step()
            else:
                progress = self._one_step()
                self.run.append(self._record(progress))
            show(progress)
            at_end = self.step >= training.steps
            if at_end or self.step % training.evaluate_every == 0:
                self._evaluate()
            stopped = stop()
            if at_end or stopped or self.step % training.checkpoint_every == 0:
                self.save()
            if stopped and not at_end:
                raise Interrupted

    def sample(self, step: int, count: int) -> None:
        """Takes `count` steps on the batches that follow `step`, for their time; the first one warms up.

        Raises:
            RunError: the disk is full.
        """
        self.batches.load_state_dict({"drawn": step * self.recipe.training.accumulate})
        for place in range(count):
            progress = self._one_step()
            if place:
                self.run.append({**self._record(progress), "step": step + place})

    def finish(self) -> dict[str, Any]:
        """Writes summary.json, every figure with unit and kind; the one that is there stays when no step was taken."""
        known = self.run.read("summary.json")
        if known is not None and not self._taken and known.get("steps") == self.step:
            return dict(known)
        training = self.recipe.training
        batch = torch.zeros(training.batch, training.context, dtype=torch.int64)
        with self.session.forward():  # the paths that training takes, in the format that it computes in
            flops = measure.training_step(self.model, batch).times(training.accumulate)
        figures = figures_of(self.run.records(), self.model, self.optimizer, flops)
        if self.seconds:
            figures["train_seconds"] = measure.measured(self.seconds, "s")
        figures["peak_rss_bytes"] = measure.measured(max(self._earlier_peak_bytes, measure.peak_rss_bytes()), "B")
        if self.table is not None:
            figures["density"] = measure.measured(self.table.density, "share")
            figures["density_all"] = measure.measured(self.table.density_all, "share")
        summary = {
            "steps": self.step,
            "figures": {name: figure.to_json() for name, figure in figures.items()},
            "phases": {
                name: measure.measured(statistics.median(times), "ms").to_json() for name, times in self._phases.items()
            },
            "breakdown": self.run.read("breakdown.json") or {},
            "notes": [_WHOLE_PEAK] if self._peak_is_whole else [],
        }
        self.run.write("summary.json", summary)
        return summary

    def save(self) -> None:
        """Writes a checkpoint of this very step.

        Raises:
            RunError: it cannot be written; the one before is whole.
        """
        state = {
            "model": self.model.state_dict(),
            "optimizer": checkpoint.optimizer_state(self.model, self.optimizer),
            "session": self.session.state_dict(),
            "data": self.batches.state_dict(),
            "rng": checkpoint.rng_state(),
            "run": {
                "step": self.step,
                "seconds": self.seconds,
                "peak_rss_bytes": max(self._earlier_peak_bytes, measure.peak_rss_bytes()),
                "peak_is_whole": self._peak_is_whole,
                **self._facts,
            },
        }
        self.run.save(self.step, state)

    def _resume(self, step: int, state: dict[str, Any], notify: Callable[[str], None]) -> None:
        if state["run"]["corpus"] != self.corpus.fingerprint:
            raise RunError(
                f"{self.run.folder}: expected the text that this run began with ({self.corpus.name}), "
                "it has changed since. Put it back, or start a new run."
            )
        self.model.load_state_dict(state["model"])
        checkpoint.load_optimizer(self.model, self.optimizer, state["optimizer"])
        self.session.load_state_dict(state["session"])
        self.batches.load_state_dict(state["data"])
        self.seconds = state["run"]["seconds"]
        self._earlier_peak_bytes = state["run"]["peak_rss_bytes"]
        self._earlier_peak_is_whole = state["run"]["peak_is_whole"]
        checkpoint.set_rng_state(state["rng"])
        if state["run"]["machine"] != self._facts["machine"]:
            then, now = state["run"]["machine"], self._facts["machine"]
            changed = ", ".join(f"{name} {then[name]} then, {now[name]} now" for name in now if then[name] != now[name])
            notify(f"This goes on from step {step}, but not bit for bit: {changed}.")
        assert self.step == step, f"the checkpoint of step {step} holds the session of step {self.step}"

    def _one_step(self) -> Progress:
        """Micro-batches until a step is taken."""
        began = time.perf_counter()
        losses = []
        applied = False
        while not applied:
            with self._timed("data"):
                batch = self.batches.next()
            with self._timed("forward"), self.session.forward():
                loss = language.loss_of(self.compiled, batch)
            losses.append(self._finite(float(loss.detach())))
            with self._timed("backward"):
                self.session.backward(loss, samples=len(batch.inputs))
            with self._timed("optimiser and rewiring"):
                applied = self.session.step()
            self._count_skipped(applied, len(losses))
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self._taken += 1
        tokens = len(losses) * self.recipe.training.batch * self.recipe.training.context
        return Progress(
            self.step, statistics.fmean(losses[-self.recipe.training.accumulate :]), tokens / seconds, seconds
        )

    def _profiled_step(self) -> Progress:
        """A step like all others, but slowed by the profiler: it trains, and its time stays apart."""
        seconds, phases = self.seconds, self._phases
        self._phases = {}
        taken: list[Progress] = []
        parts = measure.step_breakdown(lambda: taken.append(self._one_step()), steps=1, warmup=0)
        self.seconds, self._phases = seconds, phases
        self.run.write("breakdown.json", {name: figure.to_json() for name, figure in parts.items()})
        [progress] = taken
        record = self._record(progress)
        del record["tokens_per_second"]
        self.run.append({"profiled": True, "profiled_ms": record.pop("step_ms"), **record})
        return progress

    def _record(self, progress: Progress) -> dict[str, Any]:
        record: dict[str, Any] = {
            "step": progress.step,
            "kind": "train",
            "loss": progress.loss,
            "step_ms": progress.step_seconds * 1e3,
            "tokens_per_second": progress.tokens_per_second,
            "seconds": self.seconds,
            "density": 1.0 if self.table is None else self.table.density,
            **self.session.metrics(),  # sparsity, learning rate, gradient norm
        }
        moved = self.rewires.take()
        if moved:
            grown, active = (sum(column) for column in zip(*moved.values(), strict=True))
            counts = {"layers": len(moved), "grown": grown, "active": active}
            self.run.append({"step": progress.step, "kind": "rewire", **counts})
        return record

    @torch.no_grad()
    def _evaluate(self) -> None:
        training = self.recipe.training
        self.model.eval()
        total, tokens = 0.0, 0
        for batch in language.validation_batches(
            self.corpus.validation, training.batch, training.context, training.evaluate_windows
        ):
            with self.session.forward():
                total += float(language.loss_of(self.model, batch)) * batch.targets.numel()
            tokens += batch.targets.numel()
        self.model.train()
        loss = total / tokens
        bits = loss / math.log(2) / self.corpus.bytes_per_token
        self.run.append(
            {"step": self.step, "kind": "eval", "loss": loss, "bits_per_byte": bits, "seconds": self.seconds}
        )

    def _finite(self, loss: float) -> float:
        if not math.isfinite(loss) and self.recipe.optimizer.clip is None:
            raise RunError(f"{self._failure(f'the loss is {loss}')}, or set optimizer.clip, which skips such steps.")
        return loss

    def _count_skipped(self, applied: bool, micro_batches: int) -> None:
        if micro_batches % self.recipe.training.accumulate == 0:
            self._skipped = 0 if applied else self._skipped + 1
        if self._skipped >= _MOST_SKIPPED_STEPS:
            raise RunError(f"{self._failure(f'{self._skipped} steps in a row had gradients that are not finite')}.")

    def _failure(self, what: str) -> str:
        return f"{self.run.folder}: stopped after step {self.step}, {what}. Start anew with a lower optimizer.lr"

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return _Clock(self._phases.setdefault(phase, []))


def train(
    training: Training,
    show: Callable[[Progress], None],
    stop: Callable[[], bool],
    twin: Twin | None = None,
) -> None:
    """Trains to the end, the dense twin in turns with it: what disturbs the machine disturbs both.

    Args:
        training: where it stands decides where it goes on.
        show: is called after each step.
        stop: is asked after each step.
        twin: told to come along; in full it follows to the same step, sampled a few times for a few steps.

    Raises:
        Interrupted: `stop` said so.
        RunError: see `Training.advance`.
    """
    recipe = training.recipe
    turn = recipe.training.evaluate_every
    if recipe.twin == "sampled":
        turn = max(1, recipe.training.steps // _SAMPLES_OF_TWIN)
    try:
        while True:
            if twin is not None:
                _advance(twin, training)
            if training.step >= recipe.training.steps:
                break
            training.advance(training.step - training.step % turn + turn, show, stop)
    except Interrupted:
        training.save()
        raise
    training.finish()


def _advance(twin: Twin, training: Training) -> None:
    try:
        twin.advance(training.step)
    except RunError:
        training.save()  # the twin's failure must not cost what this training has done
        raise


def _decides_bits(threads: int) -> dict[str, Any]:
    """What must be the same for a resumed run to be the uninterrupted one bit for bit."""
    return {"threads": threads, "kernels": backend(), "torch": torch.__version__}


class _RewireLog(Part):
    """Counts the units that grew and those that are active in each rewired layer, since it was last asked."""

    def __init__(self) -> None:
        self._moved: dict[str, tuple[int, int]] = {}

    def after_rewire(self, event: Rewire) -> None:
        self._moved[event.layer] = int(event.grown.sum()), int(event.topology.sum())

    def take(self) -> Mapping[str, tuple[int, int]]:
        moved, self._moved = self._moved, {}
        return moved


class _Clock:
    """Appends the milliseconds spent inside to a list."""

    def __init__(self, times: list[float]) -> None:
        self.times = times

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.times.append((time.perf_counter() - self.began) * 1e3)
