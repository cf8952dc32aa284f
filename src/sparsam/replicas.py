"""One model on several ranks: how it is wrapped, by whose timings all decide, and what each rank has for itself.

On one rank everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsam import checkpoint
from sparsam.comm.part import Compression
from sparsam.comm.residual import Residuals, old_ranks
from sparsam.measure.device_profile import DeviceProfile
from sparsam.measure.machine import thread_allowance
from sparsam.ranks import Ranks
from sparsam.recipe import Recipe
from sparsam.run import Run
from sparsam.session import Session

__all__ = [
    "by_timings_of_first",
    "compression_of",
    "load_own",
    "notes",
    "own_state",
    "replicated",
    "session_state",
    "threads_of",
    "without_gone",
]

T = TypeVar("T")


def threads_of(recipe: Recipe, ranks: Ranks) -> int:
    """Threads of this process: of several ranks on one machine each has its share of the cores."""
    if recipe.training.threads is not None:
        return recipe.training.threads
    # torchrun gives each rank one thread, whatever there is
    return thread_allowance(ranks.local) if ranks.size > 1 else min(torch.get_num_threads(), thread_allowance())


def replicated(model: nn.Module, ranks: Ranks) -> nn.Module:
    """The model whose gradients are averaged over ranks; weights are those of rank 0 from here on."""
    return model if ranks.size == 1 else DistributedDataParallel(model)


def by_timings_of_first(profile: DeviceProfile, ranks: Ranks, decide: Callable[[], T]) -> T:
    """What rank 0 decides, and the others after it by its timings: no two measurements are the same.

    Args:
        profile: where timings come from.
        ranks: that must decide alike.
        decide: asks the profile, and sends nothing.
    """
    decided = [decide()] if ranks.first else []
    timings = ranks.of_first(profile.to_json())
    if not ranks.first:
        profile.carry(timings)
        decided = [decide()]
    return decided[0]


def compression_of(recipe: Recipe, ranks: Ranks) -> Compression | None:
    """The part that compresses gradients, where any are sent."""
    return None if recipe.compression is None or ranks.size == 1 else recipe.compression.build()


def session_state(session: Session, compression: Compression | None) -> dict[str, Any]:
    """The state of a session that is the same on every rank: what compression keeps is not, it is the last part."""
    state = session.state_dict()
    return state if compression is None else {**state, "parts": state["parts"][:-1]}


def own_state(compression: Compression | None, ranks: Ranks) -> dict[str, Any] | None:
    """What this rank has for itself: its random numbers, and what compression left out."""
    if ranks.size == 1:
        return None
    left = None if compression is None else compression.state_dict()
    return {"rng": checkpoint.rng_state(), "compression": left}


def load_own(session: Session, compression: Compression | None, state: Mapping[str, Any], run: Run, step: int) -> None:
    """Gives a session its state, and this rank what it had for itself, on as many ranks as then or on another number.

    Args:
        session: with the same parts, and compression last.
        compression: its part, or None.
        state: of the checkpoint, with what `session_state` gave.
        run: its folder, and the ranks of now.
        step: of the checkpoint.
    """
    ranks, then = run.ranks, int(state["run"]["machine"].get("ranks", 1))
    parts = list(state["session"]["parts"])
    if compression is not None:
        parts.append(_carried(partial(run.load_own, step), then, ranks) or compression.state_dict())
    session.load_state_dict({**state["session"], "parts": parts})
    if ranks.size > 1 and ranks.rank < then > 1:
        checkpoint.set_rng_state(run.load_own(step, ranks.rank)["rng"])
    elif ranks.first:  # a rank more than there were goes on with what its seed gives
        checkpoint.set_rng_state(state["rng"])


def without_gone(state: Mapping[str, Any], parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """The state of a compression, without what it left out of weights that are stored in another way now."""
    shapes = {name: parameter.shape for name, parameter in parameters}
    residuals = state["residuals"]
    kept = {name: one for name, one in residuals["residuals"].items() if shapes.get(name) == one.shape}
    return {**state, "residuals": {**residuals, "residuals": kept}}


def notes(records: Iterable[Mapping[str, Any]], recipe: Recipe, ranks: Ranks, decision: str) -> list[str]:
    """What a reader of the report must know of a run over ranks, a line each.

    Args:
        records: the lines of metrics.jsonl.
        recipe: of the run.
        ranks: that trained.
        decision: why gradients are compressed, or are not; nothing without compression.
    """
    if ranks.size == 1:
        return []
    rows = recipe.training.batch // ranks.size
    lines = [
        f"{ranks.size} ranks trained {rows} sequences of each batch each: tokens/s and operations are of all ranks, "
        "bytes of weights, gradients and optimiser those of one, the peak of memory that of the largest"
    ]
    sent = [(one["comm.bytes"], one["comm.bytes"] / one["comm.ratio"]) for one in records if one.get("comm.ratio")]
    if sent:
        own, plain = (sum(column) for column in zip(*sent, strict=True))
        lines.append(
            f"Gradients: {own / len(sent):,.0f} bytes a step from each rank, {100 * own / plain:.3g} % of a float32 "
            f"ring's (modelled); {decision.rstrip('.')}"
        )
    return lines


def _carried(own_of: Callable[[int], Mapping[str, Any]], then: int, ranks: Ranks) -> dict[str, Any] | None:
    """What compression left out, shared so that the sum over ranks of residual / P stays what it was."""
    first = own_of(0)["compression"] if then > 1 else None
    if first is None:
        return None
    states = [own_of(rank)["compression"]["residuals"] for rank in old_ranks(ranks.rank, then, ranks.size)]
    residuals = Residuals()
    residuals.load_state_dict(states, then, ranks.size)
    return {**first, "rank": ranks.rank, "ranks": ranks.size, "residuals": residuals.state_dict()}
