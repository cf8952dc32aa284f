"""Compressed gradients between ranks, as a part of a training loop under DistributedDataParallel or FSDP2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsam.comm.codecs import Codec
from sparsam.comm.ddp import Exchange, exchange_of
from sparsam.comm.link import Decision, bucket_sizes, measured
from sparsam.comm.residual import Residuals
from sparsam.session import Part, Rewire, Session
from sparsam.shards import is_sharded, total_norm

if TYPE_CHECKING:
    from sparsam.comm.fsdp import ShardExchange

__all__ = ["Compression"]

_ALWAYS = "compression is on: when='always'."
_DETACHED = "compression is off: it is not attached."


class Compression(Part):
    """Averages gradients over ranks by a codec, with error feedback: what it leaves out comes in later steps.

        session = Session(DistributedDataParallel(model), optimizer, [Compression(Int8Rows())])

    Residuals change when a step is applied and not before: a step that is skipped leaves them as they were. They are
    kept in the units of gradients that the window was divided for, so that they follow a loss scale that changes. A
    step whose averaged gradients are not finite is skipped, on all ranks alike.

    Gradients of compact layers are just their values: nothing is sent for what is not there. Parameters of one
    dimension go in float32. A window cut short (`step(last=True)`) is averaged by the session, in float32.

    Under FSDP2 (`fully_shard`) the codec is `BF16()` or `Identity()`, for there is no error feedback; see
    `sparsam.comm.fsdp`. The session's state is then the same on all ranks, and loads on any number of them.

    Args:
        codec: how gradients are written, the same on all ranks.
        when: "measured": measures this link with and without the codec when it is attached, and compresses only where
            that is faster; what was decided is in checkpoints. "always": compresses.
        group: process group of the exchange alone, of the ranks that the model has; None makes one.
        ranks_per_node: float32 within nodes of so many ranks each, and the codec between nodes alone; "torchrun" for
            as many as torchrun started on each. The rank that owns a shard keeps what is left out of its node's mean.

    Attributes:
        on: whether gradients are compressed.
        decision: one line that says why.
        residuals: this rank's.

    Raises:
        ValueError: when attached: the model is neither in DistributedDataParallel nor under fully_shard, or it has a
            communication hook, sparse gradients, or parameters of more than 32 bits or off the CPU.

    Source: Karimireddy et al. 2019, arXiv:1901.09847 (error feedback).
    """

    def __init__(
        self,
        codec: Codec,
        when: Literal["measured", "always"] = "measured",
        group: dist.ProcessGroup | None = None,
        ranks_per_node: int | Literal["torchrun"] | None = None,
    ) -> None:
        if not isinstance(codec, Codec):
            raise ValueError(f"codec: expected a codec such as Int8Rows(), got {codec!r}. Give an object of one.")
        if when not in ("measured", "always"):
            raise ValueError(f"when: expected 'measured' or 'always', got {when!r}. Name one of them.")
        self.codec, self.when, self.group, self.ranks_per_node = codec, when, group, ranks_per_node
        self.on, self.decision = False, _DETACHED
        self.residuals = Residuals()
        self._exchange: Exchange | ShardExchange | None = None
        self._sent: tuple[int, int, int] = (0, 0, 0)

    def attach(self, session: Session) -> None:
        model = session.model
        self.session = session
        if is_sharded(model):
            self._attach_shards(model)
            return
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"Compression: expected a model in DistributedDataParallel, got a {type(model).__name__}. Wrap it "
                "before the session is built; a single process sends nothing and needs no Compression."
            )
        self._exchange = exchange_of(model)
        self._exchange.start(self.codec, self.residuals, lambda: session.divisor, self.group, self.ranks_per_node)
        decision = Decision(True, _ALWAYS)
        if self.when == "measured":
            gradients = sum(parameter.numel() for parameter in self._exchange.names)
            buckets = bucket_sizes(gradients, model.bucket_bytes_cap // 4)
            try:
                decision = measured(self.codec, buckets, self._exchange.group, self._exchange.nodes)
            except BaseException:
                self.detach()  # a session that could not be built holds nothing
                raise
        self._follow(decision)

    def _attach_shards(self, model: torch.nn.Module) -> None:
        if self.group is not None or self.ranks_per_node is not None:
            raise ValueError(
                "Compression: expected no group and no ranks_per_node under fully_shard, got one: the exchange is "
                "FSDP2's own, on its mesh. Leave them out."
            )
        from sparsam.comm.fsdp import ShardExchange  # cannot be imported where torch comes without torch.distributed

        self._exchange = ShardExchange(model, self.codec)
        decision = Decision(True, _ALWAYS)
        if self.when == "measured":
            try:
                decision = self._exchange.measured()
            except BaseException:
                self.detach()
                raise
        self._follow(decision)

    def after_loss(self, loss: torch.Tensor) -> None:
        exchange = self._attached
        if not exchange.reduced:
            return
        for parameter, name in exchange.names.items():
            if parameter.grad is not None and bool(parameter.grad.any()):
                raise ValueError(
                    f"{name}: expected no gradients from an earlier exchange, got some: they would be averaged and "
                    "compressed again. Call session.step() after each exchange, or run all but the last backward of a "
                    "window under session.forward() with accumulate=."
                )
        # those gradients were thrown away
        self.residuals.settle(False)
        exchange.settle()

    def accepts_step(self) -> bool:
        # averaged gradients are the same on all ranks, so each answers alike
        gradients = [one.grad for one in self._attached.names if one.grad is not None]
        return bool(total_norm(gradients, math.inf).isfinite())

    def after_step(self, applied: bool) -> None:
        exchange = self._attached
        self._sent = (exchange.nbytes, exchange.plain_nbytes, exchange.inside_nbytes)
        exchange.settle()
        self.residuals.settle(applied)

    def after_rewire(self, event: Rewire) -> None:
        name = self._attached.names.get(event.parameter)
        if name is not None:  # frozen weights have no residuals
            self.residuals.rewired(event, name)

    def metrics(self) -> dict[str, float]:
        """Of the last step: bytes this rank sent, their ratio to a float32 ring's (both modelled), and whether it
        compressed them; with two levels also how many of the bytes stayed within the node."""
        sent, plain, inside = self._sent
        ratio = {"comm.ratio": sent / plain} if plain else {}
        levels = {} if self.ranks_per_node is None else {"comm.bytes_inside": float(inside)}
        return {"comm.bytes": float(sent), **levels, **ratio, "comm.on": float(self.on)}

    def state_dict(self) -> dict[str, Any]:
        """Of this rank: every rank saves its own and loads it again."""
        rank, ranks = self._place
        return {
            "rank": rank,
            "ranks": ranks,
            "on": self.on,
            "decision": self.decision,
            "residuals": self.residuals.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rank, ranks = self._place
        # without residuals it is the same on all
        if state["residuals"]["residuals"] and (state["rank"], state["ranks"]) != (rank, ranks):
            raise ValueError(
                f"Compression: expected the state of rank {rank} of {ranks}, got that of rank {state['rank']} of "
                f"{state['ranks']}. Load each rank's own, or see residuals.load_state_dict."
            )
        self.residuals.load_state_dict(state["residuals"])
        self._follow(Decision(bool(state["on"]), str(state["decision"])))  # a resumed run measures nothing anew

    def detach(self) -> None:
        if self._exchange is not None:
            self._exchange.stop()
        self._exchange = None
        self.residuals = Residuals()
        self._sent = (0, 0, 0)
        self.on, self.decision = False, _DETACHED

    @property
    def _attached(self) -> Exchange | ShardExchange:
        assert self._exchange is not None, "a session calls what is attached"
        return self._exchange

    @property
    def _place(self) -> tuple[int, int]:
        group = self._attached.plain_group
        return dist.get_rank(group), dist.get_world_size(group)

    def _follow(self, decision: Decision) -> None:
        self.on, self.decision = decision.on, decision.text
        self._attached.compresses = decision.on
