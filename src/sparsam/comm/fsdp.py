"""The reduce-scatter of FSDP2 by a codec: each rank gets the mean of its own part of the gradients, and no more.

What is written in 16 bits goes to the rank that owns it (all-to-all) and is averaged there in float32: nothing is
summed in 16 bits. There is no error feedback. It would keep what a rank left out of the gradients of the whole model,
4 bytes a weight, where FSDP2 keeps 4 / P of them: so codecs that need it are refused. Biases and norms are in the same
buffers as everything else, and go in the same format.

The all-gathers of weights are FSDP2's own, and are not counted (`MixedPrecisionPolicy` makes them 16 bits).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from sparsam.comm.codecs import BF16, Codec, Identity
from sparsam.comm.link import Decision, compared

__all__ = ["ShardExchange"]


class ShardExchange:
    """Averages the gradients of one model under `fully_shard`, from when it is made until `stop`.

    Args:
        model: under `fully_shard`.
        codec: `BF16()` or `Identity()`.

    Attributes:
        compresses: False leaves the exchange to what was there before.
        names: of the trained parameters.
        plain_group: of the ranks that hold parts of each weight.
        nbytes: bytes this rank sent since the last `settle`, modelled: (P - 1) times its own part.
        plain_nbytes: what a float32 reduce-scatter would have sent.

    Raises:
        ValueError: another codec; parts on more than one mesh; another exchange.
    """

    def __init__(self, model: nn.Module, codec: Codec) -> None:
        if not isinstance(codec, Identity | BF16):
            raise ValueError(
                f"codec: expected BF16() or Identity() under fully_shard, got {codec}: what it leaves out would take 4 "
                "bytes for each weight of the whole model on each rank. Use DistributedDataParallel for it."
            )
        self.names: dict[Tensor, str] = {one: name for name, one in model.named_parameters() if one.requires_grad}
        meshes = {one.device_mesh for one in self.names if isinstance(one, DTensor)}
        if len(meshes) != 1 or (mesh := meshes.pop()).ndim != 1:
            raise ValueError(
                "Compression: expected fully_shard on one mesh of one dimension, got another. Leave Compression out."
            )
        self.codec, self.compresses = codec, True
        self.plain_group: dist.ProcessGroup = mesh.get_group()
        self.reduced: frozenset[str] = frozenset()  # nothing of an exchange is kept, so one more does no harm
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._before = [_comm_of(module) for module in self._modules]
        if any(isinstance(comm, _Coded) for comm in self._before):
            raise ValueError("Compression: expected a model without another Compression, got one with it. Keep one.")
        for module, comm in zip(self._modules, self._before, strict=True):
            if comm is not None:
                module.set_custom_reduce_scatter(_Coded(self, comm))
        self.settle()

    def stop(self) -> None:
        """Gives back what was there before."""
        for module, comm in zip(self._modules, self._before, strict=True):
            if comm is not None:
                module.set_custom_reduce_scatter(comm)

    def settle(self) -> None:
        """Ends a step."""
        self.nbytes = self.inside_nbytes = self.plain_nbytes = 0

    def measured(self) -> Decision:
        """Whether the codec pays on this link, measured on all ranks at once."""
        ranks = dist.get_world_size(self.plain_group)

        def both(n: int) -> tuple[Tensor, Tensor]:
            part = -(-n // ranks)
            return torch.empty(part), torch.linspace(-1.0, 1.0, ranks * part)

        def plain(n: int) -> Callable[[], object]:
            part, x = both(n)
            return lambda: dist.reduce_scatter_single(part, x, dist.ReduceOp.AVG, self.plain_group)

        def coded(n: int) -> Callable[[], object]:
            part, x = both(n)
            return lambda: scatter_mean(part, x, self.codec, self.plain_group)

        return compared(plain, coded, self._buckets(), self.plain_group)

    def _buckets(self) -> Sequence[int]:
        """Gradients that go together: of each module under fully_shard, without those inside that are themselves."""
        buckets: list[int] = []
        seen: set[int] = set()
        for module in reversed(self._modules):
            together = {
                id(one): one.numel() for one in module.parameters() if one.requires_grad and id(one) not in seen
            }
            seen.update(together)
            buckets.append(sum(together.values()))
        return [n for n in buckets if n]


class _Coded(ReduceScatter):
    """What FSDP2 calls, of one module."""

    def __init__(self, exchange: ShardExchange, before: ReduceScatter) -> None:
        self.exchange, self.before = exchange, before

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.before.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        exchange, others = self.exchange, dist.get_world_size(group) - 1
        n = output_tensor.numel()
        exchange.plain_nbytes += others * 4 * n
        if exchange.codec.lossless or not exchange.compresses:
            exchange.nbytes += others * output_tensor.nbytes
            return self.before(output_tensor, input_tensor, group, op, async_op)
        if op != dist.ReduceOp.AVG:
            raise ValueError(
                f"Compression: expected the mean over ranks from fully_shard, got {op}. Leave "
                "set_gradient_divide_factor and reductions in float16 out, or Compression."
            )
        exchange.nbytes += others * exchange.codec.bytes_of(n)
        scatter_mean(output_tensor, input_tensor, exchange.codec, group)
        return None


@torch.no_grad()
def scatter_mean(part: Tensor, x: Tensor, codec: Codec, group: dist.ProcessGroup) -> None:
    """part = the mean over ranks of this rank's part of x, each written by a codec of one number after the other.

    Args:
        part: (n,), written.
        x: (P n,), the parts of all ranks in their order.
        codec: whose payload is one tensor with an element for each value.
        group: of P ranks.
    """
    ranks = dist.get_world_size(group)
    # divided before it is added: finite values stay finite
    (written,) = codec.encode(x.float() / ranks).tensors
    received = torch.empty_like(written)
    dist.all_to_all_single(received.view(torch.uint8), written.view(torch.uint8), group=group)
    part.copy_(received.view(ranks, -1).float().sum(0))


def _comm_of(module: FSDPModule) -> ReduceScatter | None:
    """The reduce-scatter that a module has; none where all its parameters are in modules inside."""
    groups = module._get_fsdp_state()._fsdp_param_groups  # torch sets it, but does not tell it
    return groups[0]._reduce_scatter_comm if groups else None
