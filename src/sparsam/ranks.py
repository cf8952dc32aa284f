"""The ranks of one run: joining torchrun's process group, leaving it, and what ranks tell each other in between.

    with joined(timeout_seconds=600) as ranks:
        with ranks.together():      # where one rank fails, all do, and the one that failed says why
            ...
        loss = ranks.mean(loss)

Alone, without torchrun, nothing is sent and every value is as given. Not for gradients: DistributedDataParallel
averages those.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

__all__ = ["ALONE", "SILENT", "RankError", "Ranks", "joined", "restarts"]

T = TypeVar("T")

_SPOKEN = "spoken"


class RankError(RuntimeError):
    """The ranks cannot go on together; the message is one line for a person."""


class _Elsewhere(RuntimeError):
    """Another rank has failed, and it is the one that knows why."""


@dataclass(frozen=True)
class Ranks:
    """One rank among the ranks of a run. All of them call the same methods in the same order.

    Attributes:
        rank: of this process, 0 is the one that writes and speaks.
        size: how many there are.
        local: how many of them share this machine.
    """

    rank: int = 0
    size: int = 1
    local: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def summed(self, values: Sequence[float]) -> list[float]:
        """Each value added up over ranks, in float64."""
        return self._reduced(values, dist.ReduceOp.SUM) if self.size > 1 else list(values)

    def mean(self, value: float) -> float:
        """The mean of what ranks have."""
        return self.summed([value])[0] / self.size if self.size > 1 else value

    def largest(self, value: int) -> int:
        """The largest of what ranks have, exact below 2^53."""
        return int(self._reduced([value], dist.ReduceOp.MAX)[0]) if self.size > 1 else value

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.largest(flag))

    def of_first(self, value: T) -> T:
        """What rank 0 has: plain values."""
        if self.size == 1:
            return value
        shared = [value]
        dist.broadcast_object_list(shared)
        return shared[0]

    def all_of(self, value: T) -> list[T]:
        """What each rank has, in their order: plain values."""
        if self.size == 1:
            return [value]
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks leave this block, or none: for what one of them may fail in while others wait. Nothing is sent
        inside it."""
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        elsewhere = self.any(failed is not None)
        if failed is not None:
            raise failed
        if elsewhere:
            raise _Elsewhere("another rank has failed.")

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        reduced = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(reduced, operation)
        return reduced.tolist()


ALONE = Ranks()
SILENT = 3  # exit status of a rank that leaves the word to another one


def restarts() -> int:
    """How often torchrun has started this rank again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


@contextmanager
def joined(timeout_seconds: float) -> Iterator[Ranks]:
    """Joins the ranks that torchrun started, and leaves them; alone where it started one process or none.

    Of an error that ends the run one rank speaks: the first that fails by itself. Ranks that fail because it has gone
    end without a word, where torchrun or `--ranks` says so for them.

    Args:
        timeout_seconds: how long a rank waits for another one.

    Raises:
        RankError: another rank did not come within that time, or its machine has gone.
        SystemExit: another rank has failed and says why.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    timeout = timedelta(seconds=timeout_seconds)
    try:
        # not at the top: some builds of torch come without torch.distributed
        from torch.distributed.rendezvous import rendezvous

        agents, rank, size = next(rendezvous("env://", timeout=timeout))
        # torchrun's store still holds the addresses of ranks that it has started again since
        store = dist.PrefixStore(f"sparsam/{restarts()}", agents)  # type: ignore[attr-defined]
        # the model of a recipe is on the CPU; what is on a GPU goes by NCCL
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"rank {os.environ.get('RANK', '?')}: expected all {os.environ['WORLD_SIZE']} ranks within "
            f"{timeout_seconds:g} s, they did not meet ({_line(error)}). Look at the other ranks, and at MASTER_ADDR."
        ) from error
    ranks = Ranks(rank, size, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    try:
        yield ranks
        ranks.any(False)  # nobody leaves while another one needs it
    except SystemExit:
        raise
    except BaseException as error:
        _fail(error, ranks, store, timeout_seconds)
    dist.destroy_process_group()


def _fail(error: BaseException, ranks: Ranks, store: Any, timeout_seconds: float) -> NoReturn:
    """Lets one rank speak of the error."""
    lost, late = _of_the_wire(error), "timed out" in str(error).lower()
    # torchrun says of its own processes which one it lost; of other machines' it knows nothing
    told = os.environ.get("GROUP_WORLD_SIZE") == "1"
    if isinstance(error, _Elsewhere) or (lost and not late and told) or not _speaks(store):
        raise SystemExit(SILENT) from error
    if late and lost:
        raise RankError(
            f"rank {ranks.rank}: expected the other ranks within {timeout_seconds:g} s (training.timeout_seconds), one "
            "is later or hangs. Look at its machine, or give them more time, and go on from the last checkpoint."
        ) from error
    if lost:
        raise RankError(
            f"rank {ranks.rank}: lost another rank ({_line(error)}). Go on from the last checkpoint."
        ) from error
    raise error


def _speaks(store: Any) -> bool:
    try:
        return int(store.add(_SPOKEN, 1)) == 1
    except RuntimeError:
        return True  # the store was that of a rank that has gone


def _of_the_wire(error: BaseException) -> bool:
    """torch has no type for what gloo raises."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo/" in str(error) or "NCCL" in str(error))
    )


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text.split("] ", 1)[-1].split(". ", 1)[0] if text.startswith("[") else text[:200]
