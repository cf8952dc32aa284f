"""The loop, to be read top to bottom: `Training` builds what a recipe says, resumes, and takes steps; `train` runs it.

Not for your own loop: that needs only `sparsify` and `Session`, and this file shows how they are used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn

from sparsam import checkpoint, measure, replicas
from sparsam.precision.part import Precision
from sparsam.recipe import Recipe
from sparsam.recipe.parts import parts_of, settled_state
from sparsam.record import (
    Clock,
    Operations,
    Peak,
    Progress,
    TopologyLog,
    changed_bits,
    decides_bits,
    format_records,
    step_record,
)
from sparsam.run import Run, RunError
from sparsam.session import Session
from sparsam.sparse.table import SparsityTable
from sparsam.stored_model import StoredModel
from sparsam.summary import figures_of
from sparsam.tasks import language
from sparsam.teacher import counted_step, distillation_of, loss_of

__all__ = ["Interrupted", "Progress", "Training", "Twin", "train"]

# A clipped step whose gradient is not finite is skipped; a run of them will not end by itself.
_MOST_SKIPPED_STEPS = 20
_SAMPLES_OF_TWIN = 8
_OTHER_TEXT = (
    "{}: expected the text that this run began with ({}), it has changed since. Put it back, or start a new run."
)
_NOTHING_SENT = "compression: nothing is sent on one rank, it does nothing here"


class Interrupted(Exception):
    """The user asked to stop; everything up to the last step is saved."""


class Twin(Protocol):
    """The dense twin, as the loop sees it."""

    def advance(self, step: int) -> None:
        """Trains on, up to and including `step`."""


class Training:
    """One training in one run folder: the model, what trains it, and where it stands.

    Over several ranks, each has its own share of every batch, and all of them call the same methods.

    Args:
        recipe: what to do.
        run: the folder, and the ranks; when it holds a checkpoint, the training stands where that was taken.
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
        training, ranks = recipe.training, run.ranks
        self.recipe, self.run, self.ranks = recipe, run, ranks
        self._share = recipe.over(ranks.size)
        threads = replicas.threads_of(recipe, ranks)
        torch.set_num_threads(threads)
        checkpoint.seed_all(training.seed)

        self.task = task or recipe.task()
        self.corpus = self.task.corpus
        self.model = self.task.build_model()
        self.distillation = distillation_of(recipe)
        found = run.load(notify) if resume else None
        state = found and found[1]
        if state and state["run"]["corpus"] != self.corpus.fingerprint:
            raise RunError(_OTHER_TEXT.format(run.folder, self.corpus.name))
        self.stored = StoredModel(self.model, recipe, ranks, state, notify)
        if ranks.rank:
            checkpoint.seed_all(training.seed + ranks.rank)  # the same weights, but dropout of its own
        self.optimizer = recipe.optimizer.build(self.model)
        self._compact_at = recipe.sparsity and self.stored.table and recipe.sparsity.compact_at(training.steps)
        self.topologies = TopologyLog()
        self.session = self._new_session()
        place = (ranks.rank, ranks.size)
        self.batches = language.Batches(self.corpus.train, training.batch, training.context, training.seed, place)
        self.compiled: nn.Module = self._compiled()
        self.seconds = 0.0
        self._begun = False
        self._skipped = 0
        self._phases: dict[str, list[float]] = {}
        self._machine = decides_bits(threads, ranks.size)
        self._taken = 0
        self._peak = Peak()
        if found is not None:
            self._resume(*found, notify)
        self.operations = Operations(self._counted(), self.model, self.topologies)
        if state:
            self.operations.load_state_dict(state["run"].get("operations"))
        self._write_table()
        run.write("environment.json", measure.describe())
        if recipe.compression is not None:
            notify(_NOTHING_SENT if self.compression is None else self.compression.decision)
        self._peak.begin()  # that of the training, not of reading the text and timing the layers

    @property
    def table(self) -> SparsityTable | None:
        """What was done with each layer; None for a dense recipe."""
        return self.stored.table

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
            if self.step == self._compact_at and self.stored.compact is None:
                self._make_compact()
            at_end = self.step >= training.steps
            if at_end or self.step % training.evaluate_every == 0:
                self._evaluate()
            stopped = self.ranks.any(stop())  # all stop at the same step
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
        peak_bytes = self._peak.nbytes(self.ranks)
        if not self.ranks.first:
            return {}
        known = self.run.read("summary.json")
        if known is not None and not self._taken and known.get("steps") == self.step:
            return dict(known)
        training = self.recipe.training
        self._write_table()
        simulated = self.precision.table().simulated
        figure = measure.simulated if simulated else measure.measured
        figures = figures_of(
            self.run.records(),
            self.model,
            self.optimizer,
            self._counted().times(training.accumulate),
            # a sampled twin has taken some of the steps only
            self.operations if self.step == training.steps else None,
            self.table,
            simulated,
        )
        if self.seconds:
            figures["train_seconds"] = figure(self.seconds, "s")
        figures["peak_rss_bytes"] = figure(peak_bytes, "B")
        decision = "" if self.compression is None else self.compression.decision
        summary = {
            "steps": self.step,
            "figures": {name: figure.to_json() for name, figure in figures.items()},
            "phases": {
                name: measure.measured(statistics.median(times), "ms").to_json() for name, times in self._phases.items()
            },
            "breakdown": self.run.read("breakdown.json") or {},
            "notes": self._peak.notes + replicas.notes(self.run.records(), self.recipe, self.ranks, decision),
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
            "session": replicas.session_state(self.session, self.compression),
            "data": self.batches.state_dict(),
            "rng": checkpoint.rng_state(),
            "run": {
                "step": self.step,
                "seconds": self.seconds,
                **self._peak.state_dict(self.ranks),
                "operations": self.operations.state_dict(),
                **self.stored.state_dict(),
                "corpus": self.corpus.fingerprint,
                "machine": self._machine,
            },
        }
        self._write_table()
        self.run.save(self.step, state, replicas.own_state(self.compression, self.ranks))

    def _new_session(self) -> Session:
        """The parts that the recipe names, around the model as it is stored now."""
        training = self._share.training
        probe = language.fixed_losses(self.model, self.corpus, training.batch, training.context)
        ended = self.stored.compact is not None
        parts = parts_of(self.recipe, self.table, self.topologies, ended, self.stored.profile, probe)
        [self.precision] = [part for part in parts if isinstance(part, Precision)]
        self.compression = replicas.compression_of(self.recipe, self.ranks)
        parts += [one for one in (self.distillation, self.compression) if one is not None]
        accumulate, clip, seed = training.accumulate, self.recipe.optimizer.clip, training.seed
        model = replicas.replicated(self.model, self.ranks)
        return Session(model, self.optimizer, parts, accumulate=accumulate, clip=clip, seed=seed)

    def _make_compact(self) -> None:
        """The method has ended: blocks become compact where that is faster, and everything goes on as it was."""
        state = self.session.state_dict()
        state["parts"][0] = settled_state(state["parts"][0])
        self.session.detach()
        counts = self.stored.make_compact(self.optimizer)
        if self.compression is not None:
            state["parts"][-1] = replicas.without_gone(state["parts"][-1], self.model.named_parameters())
        self.topologies = TopologyLog()
        self.session = self._new_session()
        self.session.load_state_dict(state)
        self.compiled = self._compiled()
        self.operations.recount(self._counted(), self.model, self.topologies)
        self.run.append({"step": self.step, "kind": "compact", **counts})

    def _compiled(self) -> nn.Module:
        if not self.recipe.training.compile:
            return self.session.model
        torch.compiler.reset()  # what was compiled goes on with the layers that it has seen
        return torch.compile(self.model)  # type: ignore[return-value]

    def _counted(self) -> measure.StepFlops:
        """Operations of one micro-batch, on the paths that training takes, in the format that it computes in."""
        batch = torch.zeros(self._share.training.batch, self._share.training.context, dtype=torch.int64)
        with self.session.forward():
            return counted_step(self.model, batch, self.distillation).times(self.ranks.size)

    def _write_table(self) -> None:
        self.run.write("formats.json", self.precision.table().to_json())
        self.stored.write(self.run)

    def _resume(self, step: int, state: dict[str, Any], notify: Callable[[str], None]) -> None:
        checkpoint.load_optimizer(self.model, self.optimizer, state["optimizer"])
        replicas.load_own(self.session, self.compression, state, self.run, step)
        self.batches.load_state_dict(state["data"])
        self.seconds = state["run"]["seconds"]
        self._peak.load_state_dict(state["run"])
        if changed := changed_bits(state["run"]["machine"], self._machine):
            notify(f"This goes on from step {step}, but not bit for bit: {changed}.")
        assert self.step == step, f"the checkpoint of step {step} holds the session of step {self.step}"

    def _one_step(self) -> Progress:
        """Micro-batches until a step is taken."""
        began = time.perf_counter()
        losses = []
        applied = False
        while not applied:
            with self._clock("data"):
                batch = self.batches.next()
            with self._clock("forward"), self.session.forward():
                found = loss_of(self.compiled, batch, self.distillation)
            losses.append(self._finite(float(found.detach())))
            with self._clock("backward"):
                self.session.backward(found, samples=len(batch.inputs))
            self.operations.add(1)
            with self._clock("optimiser and rewiring"):
                applied = self.session.step()
            self._count_skipped(applied, len(losses))
        loss = self.ranks.mean(statistics.fmean(losses[-self.recipe.training.accumulate :]))
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self._taken += 1
        tokens = len(losses) * self.recipe.training.batch * self.recipe.training.context
        return Progress(self.step, loss, tokens / seconds, seconds)

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
        record = step_record(progress, self.seconds, self.topologies.density, self.session)
        if moved := self.topologies.take():
            self.run.append({"step": progress.step, "kind": "rewire", **moved})
        for line in format_records(self.precision):
            self.run.append(line)
        return record

    def _evaluate(self) -> None:
        training, ranks = self._share.training, self.ranks
        windows = language.validation_batches(
            self.corpus.validation, training.batch, training.context, training.evaluate_windows
        )
        own = islice(windows, ranks.rank, None, ranks.size)
        loss, accuracy = language.evaluate(self.model, own, self.session.forward, ranks.summed)
        bits = loss / math.log(2) / self.corpus.bytes_per_token
        found = {"loss": loss, "bits_per_byte": bits, "accuracy": accuracy, "seconds": self.seconds}
        self.run.append({"step": self.step, "kind": "eval", **found})

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

    def _clock(self, phase: str) -> AbstractContextManager[None]:
        return Clock(self._phases.setdefault(phase, []))


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
