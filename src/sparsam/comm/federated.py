"""Local steps: workers train apart, and every so many steps the mean of what they have learnt moves the weights that
they share. For links too slow for gradients at every step, and for data that stays where it is.

    session = Session(model, optimizer, [LocalSteps(every=100, codec=Int8Rows()), ...])   # a plain model, each worker

Deltas go over the wire, never weights: they are small where training is nearly done, and errors of a codec with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsam.comm.allreduce import Reduced, mean_over_ranks, ring_bytes
from sparsam.comm.codecs import Codec, Identity
from sparsam.comm.members import (
    Report,
    check_alike,
    largest_counters,
    most_advanced,
    reports_of_all,
    share_of,
    workers_in,
)
from sparsam.comm.outer import Outer
from sparsam.comm.residual import Residuals
from sparsam.session import Part, Rewire, Session
from sparsam.window import averages

__all__ = ["LocalSteps"]

_FLOAT32 = Identity()
_ALL = torch.ones((), dtype=torch.bool)


class LocalSteps(Part):
    """Synchronises workers at every H-th applied step: the mean of their deltas, written by a codec with error
    feedback, is the gradient of an outer optimiser (SGD with Nesterov momentum) that moves the shared weights.

    Applied steps count, not batches: a worker that skips a step comes one batch later, and the others wait for it. So
    schedules and topologies agree, and each delta is one of H steps. Let loops run until `session.applied_steps` is
    reached, not for so many batches. It is the first part of a session; sparse layers are rewired right after a
    synchronisation, from scores that all workers agree on. Clipping is each worker's own.

    Parameters of one dimension go in float32; so do floating-point buffers (batch norm), of which the mean is taken.
    Counters become the largest. A worker whose weights are not finite counts for nothing in that synchronisation: it
    takes the shared weights and begins its optimiser's moments anew. Memory: 12 bytes a weight (shared weights, outer
    momentum, residuals), less for a lossless codec or without momentum. CPU.

    A worker that comes or goes: `leave` and `join`.

    Args:
        every: H, applied steps between synchronisations, the same on all workers.
        codec: how deltas of matrices are written, the same on all workers.
        outer_lr: of the outer optimiser. 1 without momentum is the plain mean of weights.
        outer_momentum: of the outer optimiser, in [0, 1).
        group: the workers; None for the session's, or all.
        weight: what this worker's deltas count for beside others', for example its number of samples. May be set anew
            at any time.

    Attributes:
        rounds: synchronisations so far.
        gone: ranks that left at the last one.
        residuals: this worker's.

    Raises:
        ValueError: an argument is out of its range; or when attached: the model is wrapped or has weights that cannot
            be averaged, the part is not the first, or workers differ in settings.

    Source: Douillard et al. 2023, arXiv:2311.08105 (DiLoCo); McMahan et al. 2017, arXiv:1602.05629 (weights by
        samples); Karimireddy et al. 2019, arXiv:1901.09847 (error feedback). Differs: deltas are compressed; moments
        of the inner optimiser stay, and are the worker's own.
    """

    def __init__(
        self,
        every: int,
        codec: Codec = _FLOAT32,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        group: dist.ProcessGroup | None = None,
        weight: float = 1.0,
    ) -> None:
        if every < 1:
            raise ValueError(f"every: expected at least 1 step between synchronisations, got {every}.")
        if not isinstance(codec, Codec):
            raise ValueError(f"codec: expected a codec such as Int8Rows(), got {codec!r}. Give an object of one.")
        if not 0 < outer_lr < math.inf:
            raise ValueError(f"outer_lr: expected a rate > 0, got {outer_lr}. 0.7 is a good choice.")
        if not 0 <= outer_momentum < 1:
            raise ValueError(f"outer_momentum: expected a share in [0, 1), got {outer_momentum}. 0.9 is a good choice.")
        self.every, self.codec, self.group, self.weight = every, codec, group, weight
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self._begin()

    def _begin(self) -> None:
        self.rounds, self.residuals = 0, Residuals()
        self.gone: tuple[int, ...] = ()
        self._worker = os.urandom(8).hex()
        self._outer: Outer | None = None
        self._workers, self._synced_at, self._leaving = 1, 0, False
        self._waiting: dict[str, float] = {}  # residual norms by worker, as they were last told
        self._last: dict[str, float] = {}
        self._lost, self._refused = 0.0, 0

    def attach(self, session: Session) -> None:
        if session.parts[0] is not self:
            raise ValueError(
                f"LocalSteps: expected to be the first part, got place {session.parts.index(self) + 1}. Put it first: "
                "other parts go on from the weights that it has made equal."
            )
        if averages(session.model):  # under torch.compile too
            raise ValueError(
                "LocalSteps: expected a plain model, got DistributedDataParallel or fully_shard, which average "
                "gradients at every step. Leave out one of the two."
            )
        if self.group is not None and session.group not in (None, self.group):
            raise ValueError("group: expected the session's group or none, got another. Give it to the session alone.")
        self.session, self._had_group = session, session.group
        self._outer = Outer(session.model, self.outer_lr, self.outer_momentum)
        group = session.group or self.group
        reports = reports_of_all(self._report({}), group)
        check_alike(reports)
        if len(reports) > 1:
            state = [session.model.state_dict()]
            dist.broadcast_object_list(state, group=group, group_src=0)
            session.model.load_state_dict(state[0])
            self._outer = Outer(session.model, self.outer_lr, self.outer_momentum)
        self._workers, self._synced_at = len(reports), session.applied_steps
        session.group, session.apart = group, self.every  # last: nothing can fail any more

    def after_step(self, applied: bool) -> None:
        if applied and self.session.applied_steps % self.every == 0:
            self.synchronise()

    @torch.no_grad()
    def synchronise(self) -> None:
        """Makes weights equal, on all workers at once. Called at every H-th applied step; call it at the end of a
        training that ends between two.

        Raises:
            ValueError: workers came or went without `join`, took other numbers of steps, or no weights are finite.
            RuntimeError: a worker cannot be reached. Weights, residuals and moments are as they were.
        """
        session, outer = self.session, self._attached
        size = workers_in(session.group)
        if self.gone or size != self._workers:
            raise ValueError(
                f"LocalSteps: expected a group of the workers that train on, got {size} of which ranks "
                f"{list(self.gone)} have left, where {self._workers} synchronised before. Make a group of those that "
                "train on, and call join() on all of them."
            )
        deltas, began = outer.deltas(), time.perf_counter()
        own = self._report(deltas)
        with self._reaching_all(f"synchronisation {self.rounds + 1}"):
            reports = reports_of_all(own, session.group)
            self._check(reports)
            waited = time.perf_counter() - began
            # what leaves nothing behind needs no one to take over its residual
            codec = _FLOAT32 if any(report.leaving for report in reports) else self.codec
            wanted = self._wanted(deltas, share_of(own, reports))
            answers = [self._mean(names, wanted, one) for names, one in self._messages(wanted, codec)]
        mean = {}
        for (names, one), reduced in zip(self._messages(wanted, codec), answers, strict=True):
            sizes = [wanted[name].numel() for name in names]
            for name, arrived, sent in zip(names, reduced.mean.split(sizes), reduced.sent.split(sizes), strict=True):
                mean[name] = arrived.view(wanted[name].shape)
                if one.lossless:
                    self.residuals.clear(name, _ALL)
                else:
                    self.residuals.keep(name, wanted[name], sent.view(wanted[name].shape))
        self.residuals.settle(True)
        outer.move(mean)
        outer.write(largest_counters(reports))
        if not math.isfinite(own.square):
            self._refuse()
        self._note(reports, mean, sum(reduced.nbytes for reduced in answers), waited)

    def leave(self) -> None:
        """Makes the next synchronisation this worker's last. It goes in float32 for all, so that nothing of anybody
        waits in a residual. Afterwards `gone` says on every worker who left; those that train on make a new group and
        call `join`."""
        self._leaving = True

    @torch.no_grad()
    def join(self, group: dist.ProcessGroup | None = None) -> None:
        """Goes on in another group, between two steps: after a worker left or died, and with new ones. All of the group
        call it. A new worker builds model and session before it is in any process group, and comes with these settings.

        Shared weights, outer momentum and the states of all parts come from the worker that is most advanced. Workers
        that have the same shared weights keep their residuals and moments, and what they have learnt since the last
        synchronisation joins their residuals, so that it goes with the next; others begin theirs anew. What is lost
        with workers that died is in the metric `comm.lost`.

        Args:
            group: the workers from here on; None for all processes.

        Raises:
            ValueError: workers differ in settings or in the weights they train.
            RuntimeError: a worker cannot be reached. Nothing has changed.
        """
        session, outer = self.session, self._attached
        deltas = outer.deltas()
        own = dataclasses.replace(self._report(deltas), state=outer.digest())
        with self._reaching_all("join"):
            reports = reports_of_all(own, group)
        check_alike(reports)
        rank = most_advanced(reports)
        leader = reports[rank]
        others = [report for report in reports if report.state != leader.state]
        if others:
            state: list[Any] = [None]
            if own.worker == leader.worker:
                state = [(session.model.state_dict(), session.state_dict())]
                state[0][1]["parts"][0]["residuals"] = Residuals().state_dict()  # those are its own
            with self._reaching_all("join"):
                dist.broadcast_object_list(state, group=group, group_src=rank)
        if own in others:
            refused = self._refused
            session.model.load_state_dict(state[0][0])
            session.load_state_dict(state[0][1])
            session.optimizer.state.clear()  # moments of other weights, perhaps in another topology
            self._worker, self._refused = own.worker, refused
        else:
            if not math.isfinite(own.square):
                self._refuse()
            self.residuals.scale(len(reports) / self._workers)  # what is conserved is the sum of residual / P
            self._put_back(deltas, share_of(own, reports))
        outer.write(largest_counters(reports))
        present = {report.worker for report in reports}
        self._lost += sum(norm for worker, norm in self._waiting.items() if worker not in present)
        self._lost += sum(report.waiting for report in others)
        self._waiting = {report.worker: report.waiting for report in reports}
        self._workers, self.rounds, self.gone, self._leaving = len(reports), leader.rounds, (), False
        session.group, session.applied_steps, self._synced_at = group, leader.applied, leader.applied

    def after_rewire(self, event: Rewire) -> None:
        if self._synced_at != self.session.applied_steps:
            raise ValueError(
                f"{event.layer}: expected a rewire right after a synchronisation, every {self.every} applied steps, "
                f"got one after step {self.session.applied_steps}. Rewire at multiples of {self.every}."
            )
        name, changed = self._attached.rewired(event)
        self.residuals.clear(name, changed)

    def metrics(self) -> dict[str, float]:
        """Of the last synchronisation: bytes this worker sent (modelled), their ratio to what float32 gradients of the
        same steps would have been, L2 norm of the mean delta, drift (root of the mean squared distance of deltas from
        it), wait for the slowest; of all: rounds, lost (L2 norms of residuals that died with workers, added up), and
        how often this worker was refused."""
        own = {"rounds": self.rounds, "workers": self._workers, "lost": self._lost, "refused": self._refused}
        return {f"comm.{name}": float(value) for name, value in (own | self._last).items()}

    def state_dict(self) -> dict[str, Any]:
        """Of this worker: each saves its own and loads it again. With other workers than then: load before there is a
        process group, and call `join`."""
        return {
            "version": 1,
            "worker": self._worker,
            "workers": self._workers,
            "rounds": self.rounds,
            "synced_at": self._synced_at,
            "gone": list(self.gone),
            "outer": self._attached.state_dict(),
            "residuals": self.residuals.state_dict(),
            "waiting": dict(self._waiting),
            "lost": self._lost,
            "refused": self._refused,
            "last": dict(self._last),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["version"] != 1:
            raise ValueError(f"LocalSteps: expected version 1, got {state['version']}. Use the sparsam that wrote it.")
        self._attached.load_state_dict(state["outer"])
        self.residuals.load_state_dict(state["residuals"])
        self._worker, self._workers, self.rounds = state["worker"], int(state["workers"]), int(state["rounds"])
        self._synced_at, self.gone = int(state["synced_at"]), tuple(state["gone"])
        self._waiting, self._last = dict(state["waiting"]), dict(state["last"])
        self._lost, self._refused = float(state["lost"]), int(state["refused"])

    def detach(self) -> None:
        """Leaves each worker the weights that it has; `synchronise` first, for equal ones."""
        self.session.apart, self.session.group = 0, self._had_group
        self._begin()

    @property
    def _attached(self) -> Outer:
        assert self._outer is not None, "a session calls what is attached"
        return self._outer

    def _report(self, deltas: Mapping[str, Tensor]) -> Report:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight: expected a number > 0 such as samples of this worker, got {self.weight}.")
        outer = self._attached
        codec = repr(self.codec) if dataclasses.is_dataclass(self.codec) else type(self.codec).__name__
        return Report(
            worker=self._worker,
            settings=f"every={self.every}, codec={codec}, outer_lr={self.outer_lr}, momentum={self.outer_momentum}",
            layout=outer.layout(),
            rounds=self.rounds,
            applied=self.session.applied_steps,
            weight=float(self.weight),
            square=outer.square(deltas),
            waiting=self.residuals.norm(),
            leaving=self._leaving,
            counters=tuple(int(one) for one in outer.counters()),
        )

    @contextlib.contextmanager
    def _reaching_all(self, where: str) -> Iterator[None]:
        """Nothing of this worker may change inside."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"LocalSteps: expected all workers at {where}, but not all can be reached "
                f"({str(error).splitlines()[0]}). Weights here are as they were: make a group of those that are left "
                "and call join(), or resume from a checkpoint."
            ) from error

    def _check(self, reports: list[Report]) -> None:
        check_alike(reports)
        if len({(report.rounds, report.applied) for report in reports}) > 1:
            places = ", ".join(f"{one.rounds} and {one.applied}" for one in reports)
            raise ValueError(
                f"LocalSteps: expected all workers after the same synchronisations and applied steps, got {places}. "
                "Call join() on all workers when one comes or goes."
            )
        if not any(math.isfinite(report.square) for report in reports):
            raise ValueError(
                f"LocalSteps: expected finite weights from one worker at least, got none after step "
                f"{self.session.applied_steps}. Go back to a checkpoint, with a lower learning rate or clip=."
            )

    def _wanted(self, deltas: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        """What this worker has to say: its deltas times what they count for, and what was left out before."""
        wanted = {name: share * one if share else torch.zeros_like(one) for name, one in deltas.items()}
        for name, one in wanted.items():
            self.residuals.add(name, one)
        return wanted

    def _messages(self, wanted: Mapping[str, Tensor], codec: Codec) -> list[tuple[list[str], Codec]]:
        trained = self._attached.names
        written = [name for name, one in wanted.items() if name in trained and one.dim() > 1 and not codec.lossless]
        plain = [name for name in wanted if name not in set(written)]
        return [(names, one) for names, one in ((written, codec), (plain, _FLOAT32)) if names]

    def _mean(self, names: list[str], wanted: Mapping[str, Tensor], codec: Codec) -> Reduced:
        x = torch.cat([wanted[name].flatten() for name in names])
        if self._workers == 1:
            return Reduced(x, x, 0)
        shared = self._attached.shared
        weights = torch.cat([shared[name].flatten() for name in names]) if codec.reads_weights else None
        sizes = [wanted[name].numel() for name in names]
        return mean_over_ranks(x, codec, self.session.group, sizes=sizes, weights=weights)

    def _put_back(self, deltas: Mapping[str, Tensor], share: float) -> None:
        """What was learnt in a window that was broken off goes with the next."""
        for name in self._attached.names if share else ():
            if bool(deltas[name].any()):
                late = share * deltas[name]
                self.residuals.add(name, late)
                self.residuals.keep(name, late, torch.zeros_like(late))
        self.residuals.settle(True)

    def _refuse(self) -> None:
        """What this worker has learnt is not finite, and so perhaps are its moments."""
        self.session.optimizer.state.clear()
        self._refused += 1

    def _note(self, reports: list[Report], mean: Mapping[str, Tensor], nbytes: int, waited: float) -> None:
        """Counts a synchronisation, and keeps what is said of it."""
        self.rounds += 1
        steps, self._synced_at = self.session.applied_steps - self._synced_at, self.session.applied_steps
        self.gone = tuple(rank for rank, report in enumerate(reports) if report.leaving)
        # of those that left nothing waits
        self._waiting = {report.worker: report.waiting for report in reports if not report.leaving}
        names, shared = self._attached.names, self._attached.shared
        square = sum(float(mean[name].double().square().sum()) for name in names)
        shares = [share_of(report, reports) / len(reports) for report in reports]
        total = sum(share * one.square for share, one in zip(shares, reports, strict=True) if share)
        plain = steps * ring_bytes(4 * sum(shared[name].numel() for name in names), self._workers)
        self._last = {"bytes": float(nbytes), "wait_ms": 1000 * waited, "delta": math.sqrt(square)}
        self._last |= {"drift": math.sqrt(max(0.0, total - square))} | ({"ratio": nbytes / plain} if plain else {})
