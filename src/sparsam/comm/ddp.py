"""The communication hook of DistributedDataParallel: each bucket of gradients is averaged by a codec.

DDP calls a hook once a bucket, inside the backward, and waits for all buckets at its end. A collective that blocks
inside a Future's callback stops gloo from two buckets on, so buckets are reduced one after the other on a thread, in
the order in which DDP hands them out, through a process group of their own.

Each gradient is written by itself and the residual is kept by the name of its parameter: DDP makes new buckets after
the first step, in a resumed run too, and nothing may depend on them. Parameters of one dimension (biases, norms) go in
float32, in a message of their own in each bucket: they are a thousandth of the bytes.
"""

import threading
import traceback
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparsam.comm.allreduce import mean_over_ranks, ring_bytes
from sparsam.comm.codecs import Codec, Identity
from sparsam.comm.groups import Nodes, can_close, group_like, nodes_of
from sparsam.comm.residual import Residuals

__all__ = ["Exchange", "exchange_of"]

if TYPE_CHECKING:
    _Bucket = Any  # torch has no types for it
else:
    _Bucket = getattr(dist, "GradBucket", object)  # some builds of torch come without

_AT_MOST_32_BITS = (torch.float32, torch.bfloat16, torch.float16)


def exchange_of(model: DistributedDataParallel) -> "Exchange":
    """Registers the hook, or finds the one that an earlier `Compression` left idle: DDP takes one, and keeps it.

    Raises:
        ValueError: names a parameter whose gradient cannot be compressed, or says what else has the hook.
    """
    for _, state in model._comm_hooks:
        if isinstance(state, Exchange) and not state.running:
            return state
        other = "another Compression" if isinstance(state, Exchange) else "a communication hook of its own"
        raise ValueError(
            f"Compression: expected a model in DistributedDataParallel without a hook, got one with {other}. Keep one."
        )
    exchange = Exchange(model)
    model.register_comm_hook(exchange, _hook)
    return exchange


class Exchange:
    """Averages the buckets of one model. Idle until `start` and after `stop`: buckets then get DDP's plain mean.

    Attributes:
        compresses: False gives buckets the plain mean while it runs, too.
        names: of the trained parameters, as the plain model has them.
        reduced: names whose gradients were exchanged since the last `settle`.
        nbytes: bytes this rank sent since the last `settle`, modelled.
        inside_nbytes: those of them that stayed within a node.
        plain_nbytes: what a float32 ring would have sent.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        _refuse_sparse_gradients(model.module)
        self.names: dict[Tensor, str] = {
            parameter: name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        for parameter, name in self.names.items():
            if parameter.dtype not in _AT_MOST_32_BITS or parameter.device.type != "cpu":
                raise ValueError(
                    f"{name}: expected float32, bfloat16 or float16 on the CPU under Compression, got "
                    f"{parameter.dtype} on {parameter.device}. Leave Compression out for this model."
                )
        assert model.process_group is not None
        self.plain_group: dist.ProcessGroup = model.process_group
        self.ranks = dist.get_world_size(self.plain_group)
        self.reduced: set[str] = set()
        self.nbytes = self.inside_nbytes = self.plain_nbytes = 0
        self.compresses = True
        self._worker: _Worker | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The exchange's own."""
        assert self._worker is not None
        assert self._worker.group is not None
        return self._worker.group

    @property
    def nodes(self) -> Nodes | None:
        """Its two levels, where it has them."""
        assert self._worker is not None
        return self._worker.nodes

    @property
    def running(self) -> bool:
        return self._worker is not None

    def start(
        self,
        codec: Codec,
        residuals: Residuals,
        divisor: Callable[[], float],
        group: dist.ProcessGroup | None = None,
        ranks_per_node: int | Literal["torchrun"] | None = None,
    ) -> None:
        """Compresses from here on.

        Args:
            codec: how gradients are written.
            residuals: of this rank.
            divisor: what this window's gradients will be divided by, asked in the backward. Residuals are kept in
                units of gradients that are so divided, so that they follow a loss scale that changes. Each rank has
                its own; where their ratio changes from window to window, so does what a residual counts for.
            group: of the exchange alone; None makes one. One that is given is never closed: when a rank fails the
                others wait for its timeout.
            ranks_per_node: see `nodes_of`; None for one level.
        """
        nodes = None if ranks_per_node is None else nodes_of(self.plain_group, ranks_per_node)
        self._worker = _Worker(self, codec, residuals, group, nodes)
        self._divisor = divisor

    def stop(self) -> None:
        """Back to DDP's plain mean; the thread ends and its process group goes."""
        if self._worker is not None:
            self._worker.end()
        self._worker = None
        self.settle()

    def settle(self) -> None:
        """Ends a step."""
        self.reduced.clear()
        self.nbytes = self.inside_nbytes = self.plain_nbytes = 0

    def reduce(self, bucket: _Bucket) -> Future[Tensor]:
        """What DDP waits for: the mean of a bucket."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        plain = ring_bytes(4 * buffer.numel(), self.ranks)
        self.plain_nbytes += plain
        if self._worker is None or not self.compresses:
            self.nbytes += ring_bytes(buffer.nbytes, self.ranks)
            buffer.div_(self.ranks)
            mean: Future[list[Tensor]] = dist.all_reduce(buffer, group=self.plain_group, async_op=True).get_future()
            return mean.then(_first)
        names = [self.names[parameter] for parameter in parameters]
        if not self.reduced.isdisjoint(names):
            raise ValueError(
                f"{names[0]}: expected one backward that talks to other ranks in a window, got another. Call "
                "session.step() between them, or run all but the last under session.forward() with accumulate=."
            )
        self.reduced.update(names)
        divisor = self._divisor()
        worker = self._worker
        return worker.submit(lambda: worker.reduce(buffer, parameters, divisor))


def _hook(state: Exchange, bucket: _Bucket) -> Future[Tensor]:
    # DDP finds the second argument by its name, and wants its type, not a string: no deferred annotations in this file
    return state.reduce(bucket)


class _Worker:
    """One thread, first in first out, and its process groups."""

    def __init__(
        self,
        exchange: Exchange,
        codec: Codec,
        residuals: Residuals,
        group: dist.ProcessGroup | None,
        nodes: Nodes | None,
    ) -> None:
        self.exchange, self.codec, self.residuals = exchange, codec, residuals
        self._own_group = group is None
        self.group: dist.ProcessGroup | None = group or group_like(exchange.plain_group)
        self.nodes = nodes
        self._failed: Exception | None = None
        self._jobs: SimpleQueue[tuple[Future[Tensor], Callable[[], Tensor]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="sparsam-exchange", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Tensor]) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        # DDP reads values without Python's exceptions; a callback that raises one turns it into an error it raises
        answer = future.then(_value)
        self._jobs.put((future, job))
        return answer

    def end(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        if can_close(self.exchange.plain_group):
            self._leave()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            try:
                if self._failed is not None:
                    raise self._failed
                answer = work()
            except Exception as error:
                self._failed = error
                # ranks that wait for this one learn of it now, not at their timeout: once nothing holds the group
                self._leave()
                traceback.clear_frames(error.__traceback__)
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(answer)

    def _leave(self) -> None:
        made = [self.group] if self._own_group and self.group is not None else []
        made += [] if self.nodes is None else [self.nodes.inside, self.nodes.between]
        for group in made if dist.is_initialized() else ():
            dist.destroy_process_group(group)
        self.group = self.nodes = None

    @torch.no_grad()
    def reduce(self, buffer: Tensor, parameters: Sequence[Tensor], divisor: float) -> Tensor:
        """Puts the mean over ranks into a bucket."""
        flat = buffer.float()  # the bucket itself when it is float32
        gradients = list(zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True))
        if self.codec.lossless:
            self._average(gradients, None)
        else:
            self._average([pair for pair in gradients if pair[0].dim() > 1], divisor)
            self._average([pair for pair in gradients if pair[0].dim() <= 1], None)
        return buffer if flat is buffer else buffer.copy_(flat)

    def _average(self, gradients: list[tuple[Tensor, Tensor]], divisor: float | None) -> None:
        """Overwrites gradients by their means; with error feedback, unless there is no divisor.

        Args:
            gradients: parameters and their float32 (n,).
            divisor: see `Exchange.start`; None where nothing is left out.
        """
        if not gradients:
            return
        x = torch.cat([gradient for _, gradient in gradients])
        sizes = [gradient.numel() for _, gradient in gradients]
        group = self.nodes or self.group
        if divisor is None:
            reduced = mean_over_ranks(x, self.codec if self.codec.lossless else Identity(), group)
        else:
            x.div_(divisor)
            wanted = []
            for (parameter, _), part in zip(gradients, x.split(sizes), strict=True):
                # without a gradient the residual waits: DDP drops the mean of what no rank has used
                part = part if bool(part.any()) else torch.zeros_like(part)
                part = part.view(parameter.shape)
                self.residuals.add(self.exchange.names[parameter], part)
                wanted.append(part)
            weights = torch.cat([p.flatten() for p, _ in gradients]).float() if self.codec.reads_weights else None
            reduced = mean_over_ranks(x, self.codec, group, sizes=sizes, weights=weights)
            for (parameter, _), part, sent in zip(gradients, wanted, reduced.sent.split(sizes), strict=True):
                self.residuals.keep(self.exchange.names[parameter], part, sent.view(parameter.shape))
        self.exchange.nbytes += reduced.nbytes
        self.exchange.inside_nbytes += reduced.inside_nbytes
        for (_, gradient), part in zip(gradients, reduced.mean.split(sizes), strict=True):
            torch.mul(part, divisor or 1.0, out=gradient)


def _first(done: Future[list[Tensor]]) -> Tensor:
    return done.value()[0]


def _value(done: Future[Tensor]) -> Tensor:
    return done.wait()


def _refuse_sparse_gradients(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ValueError(
                f"{name}: expected dense gradients under Compression, got an embedding with sparse=True. "
                "Build it with sparse=False, or leave Compression out."
            )
