"""A model as a chain of layers, each on one rank; batches go through it in micro-batches. Layers can change their rank.

    pipeline = Pipeline(model, loss, lambda stage: AdamW(stage.parameters()), parts, micro_batches=4, balance=Balance())
    for x, target in batches:
        loss = pipeline.step(x, target)

Where a layer is does not change what it computes: the losses are those of one process, bit for bit.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparsam.comm.balance import Balance, Load, owners, partition
from sparsam.comm.layer_state import Sent, copied, fill, receive, receive_tensor, release, send, send_tensor, tensors
from sparsam.comm.speed import Speed, bandwidth, speed
from sparsam.comm.stage import Stage, StageState, Trail
from sparsam.session import Part, Session

__all__ = ["Pipeline"]

_T = TypeVar("_T")
_SPEEDS = 3  # of a rank, whose median counts: something else ran beside one of them


class Pipeline:
    """Trains a chain of layers over all ranks of the default process group, or in one process without any. CPU (gloo).

    Each rank has a contiguous piece of the chain, its stage, with an optimiser and a session of its own; names of
    layers are those of the whole model. Forwards and backwards of micro-batches alternate (1F1B), so that a rank holds
    activations of at most as many micro-batches as there are ranks from it to the end. Random numbers in a layer
    (dropout) depend on (seed, step, micro-batch, layer): on no generator, and so on no rank.

    A move is a resume that never touches the disk: parts are detached, everything that belongs to a layer goes to its
    new rank, and sessions are built and loaded there. Optimisers are built anew too: a scheduler that holds one must be
    a part (`LearningRate`).

    Args:
        model: layers that take one tensor and give one, none of them working in place on its input; the same on every
            rank. What other ranks have is emptied.
        loss: (output of the last layer, target) -> scalar, the mean over a micro-batch.
        optimizer: stage -> its optimiser. Elementwise, so that it does not matter what else is in the stage.
        parts: of each stage's session. Those that read or scale the loss, or can refuse a step, are refused: only the
            last rank knows the loss.
        micro_batches: pieces of a batch along its first dimension.
        balance: moves layers between ranks by measured load; None: they stay.
        bounds: the first split; rank r has layers bounds[r] to bounds[r + 1]. Default: as many layers on each rank.
        clip: largest L2 norm of the gradients of the whole model, or None.
        seed: of every random choice; rank 0's counts.

    Attributes:
        bounds: the present split.
        stage: this rank's layers, optimiser and session; another one after a move.
        steps: calls of `step`.
        decision: one line on the last decision about the split.

    Raises:
        ValueError: model, split, parts or numbers that do not fit.

    Source: Huang et al. 2019, arXiv:1811.06965 (micro-batches); Narayanan et al. 2019, arXiv:1806.03377 (1F1B).
        Differs: one version of the weights, updated when the pipe is empty.
    """

    def __init__(
        self,
        model: nn.Sequential,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        parts: Sequence[Part] = (),
        *,
        micro_batches: int,
        balance: Balance | None = None,
        bounds: Sequence[int] | None = None,
        clip: float | None = None,
        seed: int = 0,
    ) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self.layers = _checked(model, self.ranks)
        if micro_batches < 1:
            raise ValueError(f"micro_batches: expected at least 1, got {micro_batches}.")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip: expected a norm > 0 or None, got {clip}.")
        for part in parts:
            own = [seam for seam in ("loss_scale", "after_loss", "accepts_step") if _has_own(part, seam)]
            if own:
                raise ValueError(
                    f"parts: expected parts that leave the loss alone, got {type(part).__name__} with "
                    f"{', '.join(own)}: only the last rank of a pipeline knows the loss. Leave it out."
                )
        self.loss, self.optimizer, self.parts, self.micro_batches = loss, optimizer, list(parts), micro_batches
        self.balance, self.clip, self.seed = balance, clip, seed
        self.steps, self.decision = 0, "layers stay: no decision yet."
        if self.ranks > 1:  # sessions ask the ranks that train the same weights, here each itself
            shared = [seed]
            dist.broadcast_object_list(shared)
            self.seed = shared[0]
        # each stage's weights are on its rank alone
        self._alone = dist.new_subgroups(1)[0] if self.ranks > 1 else None
        if self.ranks > 1:
            self._compare_models()
        self._bandwidth = bandwidth() if self.ranks > 1 and balance is not None else math.inf
        self._speeds: deque[Speed] = deque(maxlen=_SPEEDS)
        self._live: dict[int, tuple[Trail, list[Sent]]] = {}
        self._sent: list[Sent] = []
        even = partition([1.0] * len(self.layers), [1.0] * self.ranks)
        self._settle(self._checked_bounds(even if bounds is None else bounds))

    def step(self, x: Tensor, target: Tensor) -> float:
        """One training step; every rank calls it.

        Args:
            x: the batch; read on the first rank.
            target: its targets; read on the last rank, along the same first dimension.

        Returns:
            The mean loss over the batch, on every rank.
        """
        if (samples := min(len(x), len(target))) < self.micro_batches:
            raise ValueError(f"step: expected at least {self.micro_batches} samples, one a micro-batch, got {samples}.")
        pieces, targets = x.tensor_split(self.micro_batches), target.tensor_split(self.micro_batches)
        ahead = min(self.micro_batches, self.ranks - self.rank)
        loss = torch.zeros((), dtype=torch.float64)
        with torch.random.fork_rng(devices=[]):
            for number in range(self.micro_batches + ahead - 1):
                if number < self.micro_batches:
                    loss += self._forward(number, pieces[number], targets[number], len(target))
                if number >= ahead - 1:
                    self._backward(number - ahead + 1)
        self.stage.update(None if self.clip is None else self._norm, self.clip)
        for sent in self._sent:
            sent.wait()
        self._sent.clear()
        self.steps += 1
        if self.ranks > 1:
            dist.broadcast(loss, self.ranks - 1)
            if self.balance is not None and self.steps % self.balance.every == 0:
                self._rebalance(self.balance)
        return float(loss)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor | None:
        """The model's output, on the last rank; None on the others. Every rank calls it; put the model in eval mode."""
        if self.rank > 0:
            x = receive_tensor(self.rank - 1)
        x = self.stage.model(x)
        if self.rank == self.ranks - 1:
            return x
        for sent in send_tensor(x, self.rank + 1):
            sent.wait()
        return None

    def repartition(self, bounds: Sequence[int]) -> int:
        """Moves layers to where `bounds` has them; every rank calls it, between steps.

        Returns:
            Bytes that this rank sent.
        """
        bounds = self._checked_bounds(bounds)
        begin = time.perf_counter()
        state = self.stage.taken_apart()
        sent: list[Sent] = []
        for name, old, new in zip(self.layers, owners(self.bounds), owners(bounds), strict=True):
            if old != new and self.rank == old:
                sent += send(state.layers.pop(name), new)
            elif old != new and self.rank == new:
                state.layers[name] = receive(old)
        for one in sent:
            one.wait()
        self._settle(bounds, state)
        nbytes = sum(one.tensor.nbytes for one in sent)
        if nbytes:
            self._bandwidth = nbytes / (time.perf_counter() - begin)
        return nbytes

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: every rank saves its own and loads it again."""
        state = self.stage.state()
        return {
            "version": 1,
            "rank": self.rank,
            "ranks": self.ranks,
            "bounds": list(self.bounds),
            "steps": self.steps,
            "layers": copied(state.layers),
            "rest": state.rest,
            "groups": state.groups,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave, the split of then included; every rank calls it."""
        if state["version"] != 1 or (state["rank"], state["ranks"]) != (self.rank, self.ranks):
            raise ValueError(
                f"Pipeline: expected a state of version 1 of rank {self.rank} of {self.ranks}, got one of version "
                f"{state['version']} of rank {state['rank']} of {state['ranks']}. Load each rank's own."
            )
        bounds = self._checked_bounds(state["bounds"])
        self.stage.taken_apart()
        self.steps = int(state["steps"])
        layers = StageState(copied(state["layers"]), copied(state["rest"]), list(state["groups"]))
        self._settle(bounds, layers)

    def _forward(self, number: int, x: Tensor, target: Tensor, samples: int) -> float:
        """One micro-batch through the stage, and on to the next rank; on the last its share of the loss."""
        draw = f"{self.seed}/{self.steps}/{number}"
        if self.rank > 0:
            x = receive_tensor(self.rank - 1)
        y, trail = self.stage.forward(x, draw)
        last = self.rank == self.ranks - 1
        self._live[number] = trail, [] if last else send_tensor(y, self.rank + 1)
        return self.stage.lose(self.loss, trail, target, len(target) / samples, draw) if last else 0.0

    def _backward(self, number: int) -> None:
        """The gradient of one micro-batch through the stage, and on to the rank before."""
        trail, sent = self._live.pop(number)
        gradient = receive_tensor(self.rank + 1) if self.rank < self.ranks - 1 else None
        for one in sent:
            one.wait()
        gradient = self.stage.backward(trail, gradient)
        if self.rank > 0:
            self._sent += send_tensor(gradient, self.rank - 1)

    def _norm(self) -> float:
        """Of all stages' gradients, added up in the model's order wherever layers are."""
        squares = torch.tensor(
            [self.stage.squares(name) if name in self.stage.layers else 0.0 for name in self.layers],
            dtype=torch.float64,
        )
        if self.ranks > 1:
            dist.all_reduce(squares)
        return math.sqrt(sum(squares.tolist()))

    def _rebalance(self, balance: Balance) -> None:
        decision = balance.decide(self.bounds, self._load())
        self.decision = decision.text
        if decision.bounds != self.bounds:
            self.repartition(decision.bounds)
        self.stage.forget_times()

    def _load(self) -> Load:
        """What this rank has measured since the last decision, and what the others have."""
        self._speeds.append(speed())
        per_second = median(one.per_second for one in self._speeds)
        per_cpu_second = median(one.per_cpu_second for one in self._speeds)
        known = torch.zeros(2, len(self.layers) + self.ranks, dtype=torch.float64)
        work, nbytes = known[:, : len(self.layers)]
        speeds, bandwidths = known[:, len(self.layers) :]
        for position, name in enumerate(self.layers):
            if name in self.stage.layers:
                work[position] = median(self.stage.spent[name]) * per_cpu_second
                nbytes[position] = self.stage.nbytes(name)
        speeds[self.rank] = per_second
        bandwidths[self.rank] = self._bandwidth
        dist.all_reduce(known)  # one rank knows each entry, so that sums are exact, and the same everywhere
        return Load(
            tuple(work.tolist()), tuple(speeds.tolist()), tuple(map(int, nbytes.tolist())), float(bandwidths.min())
        )

    def _settle(self, bounds: tuple[int, ...], state: StageState | None = None) -> None:
        """Builds this rank's stage; with the state of its layers it goes on where they were."""
        self.bounds = bounds
        model = nn.Sequential()
        for position, (name, layer) in enumerate(self.layers.items()):
            if not bounds[self.rank] <= position < bounds[self.rank + 1]:
                release(layer)
                continue
            if state is not None:
                fill(layer, state.layers[name]["model"])
            model.add_module(name, layer)
        optimizer = self._agreed(lambda: self.optimizer(model))
        session = self._agreed(
            lambda: Session(
                model, optimizer, self.parts, accumulate=self.micro_batches, seed=self.seed, group=self._alone
            )
        )
        self.stage = Stage(model, optimizer, session, first=self.rank == 0)
        if state is not None:
            self.stage.load(state)
        self.seed = session.seed  # or that of the run that goes on

    def _agreed(self, build: Callable[[], _T]) -> _T:
        """Builds on all ranks, or on none: one that fails would leave the others waiting."""
        error: Exception | None = None
        try:
            built = build()
        except Exception as caught:
            error = caught
        failed = torch.tensor(float(error is not None))
        if self.ranks > 1:
            dist.all_reduce(failed)
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("Pipeline: expected every rank to build its stage, another one failed: see its error.")
        return built

    def _compare_models(self) -> None:
        """A layer can only move to where its like is."""
        forms = [
            (name, inner, tensor.dtype, tensor.shape)
            for name, layer in self.layers.items()
            for inner, tensor in tensors(layer).items()
        ]
        form = zlib.crc32(repr(forms).encode())
        both = torch.tensor([form, -form])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        if both[0] != -both[1]:
            raise ValueError(
                "model: expected layers of the same names, shapes and types on every rank, got others. "
                "Build and sparsify it alike everywhere."
            )

    def _checked_bounds(self, bounds: Sequence[int]) -> tuple[int, ...]:
        bounds, layers = tuple(bounds), len(self.layers)
        rising = all(start < end for start, end in pairwise(bounds))
        if len(bounds) != self.ranks + 1 or (bounds[0], bounds[-1]) != (0, layers) or not rising:
            raise ValueError(
                f"bounds: expected {self.ranks + 1} rising numbers from 0 to {layers}, a layer or more for each rank, "
                f"got {bounds}."
            )
        return bounds


def _checked(model: nn.Module, ranks: int) -> dict[str, nn.Module]:
    """The layers by name."""
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"model: expected an nn.Sequential of layers, got a {type(model).__name__}. Put its layers into one."
        )
    layers = dict(model.named_children())
    if len(layers) < ranks:
        raise ValueError(f"model: expected at least {ranks} layers, one for each rank, got {len(layers)}.")
    found: dict[Tensor, str] = {}
    for name, layer in layers.items():
        for tensor in tensors(layer).values():
            if found.setdefault(tensor, name) != name:
                raise ValueError(
                    f"{name}: expected weights of its own, got some that {found[tensor]} has too. "
                    "Untie them, or put both layers into one."
                )
            if tensor.device.type != "cpu":
                raise ValueError(f"{name}: expected weights on the CPU, got some on {tensor.device}.")
    return layers


def _has_own(part: Part, seam: str) -> bool:
    return getattr(type(part), seam) is not getattr(Part, seam)
