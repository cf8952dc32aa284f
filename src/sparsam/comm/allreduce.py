"""The mean of one tensor over the ranks of a process group, written by a codec. Blocks until it is there.

    reduced = mean_over_ranks(gradient, Int8Rows())
    reduced.mean             # bit for bit the same on all ranks
    gradient - reduced.sent  # what this rank keeps for the next step, see residual.py

For every codec the mean over ranks of `sent` is `mean` (up to float32, and to the sums of an additive 16-bit codec):
what is not in `sent` is in nobody's mean, so feeding it back loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sparsam.comm.codecs import Codec, Payload, TopK
from sparsam.comm.groups import Nodes

__all__ = ["Reduced", "mean_over_ranks", "ring_bytes"]


@dataclass(frozen=True, eq=False)
class Reduced:
    """What came of one reduction.

    Attributes:
        mean: float32 (n,), the same on all ranks; non-finite somewhere when a value of any rank was.
        sent: float32 (n,), what this rank effectively told the others.
        nbytes: bytes this rank sends to others, modelled: by formula of what was handed to the process group.
        inside_nbytes: those of them that stay within a node.
    """

    mean: Tensor
    sent: Tensor
    nbytes: int
    inside_nbytes: int = 0


def mean_over_ranks(
    x: Tensor,
    codec: Codec,
    group: dist.ProcessGroup | Nodes | None = None,
    *,
    sizes: Sequence[int] | None = None,
    weights: Tensor | None = None,
) -> Reduced:
    """Averages over ranks.

    Additive codecs go through one all-reduce of x / P in the payload's type. Codecs with a grain take two steps: each
    rank averages one shard in float32 and writes it anew for all. Of values that ranks choose together the mean alone
    is taken. Everything else is gathered by all and averaged.

    Args:
        x: float32 (n,), of equal n on all ranks; n may be 0 or less than the number of ranks. Left as it is.
        codec: the same on all ranks.
        group: None for all ranks; `Nodes` for float32 within a node and the codec between nodes.
        sizes: of tensors that lie one after the other in x. Each is written by itself and all go in one message, so
            that a tensor's mean does not depend on its neighbours. None: x is one tensor.
        weights: (n,), for codecs with `reads_weights`.
    """
    sizes = [n for n in ([x.numel()] if sizes is None else sizes) if n]
    if not sizes:  # on every rank, so nobody waits
        return Reduced(x, x, 0)
    if isinstance(group, Nodes):
        return _over_nodes(x, codec, group, sizes, weights)
    if codec.additive:
        return _summed(x, codec, group, weights)
    if isinstance(codec, TopK) and codec.agreed:
        return _agreed(x, codec, group, sizes, weights)
    if codec.grain is None:
        return _gathered(x, codec, group, sizes, weights)
    return _in_two_steps(x, codec, group, sizes, codec.grain)


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that each rank of a ring all-reduce sends of a tensor of so many bytes."""
    return 2 * (ranks - 1) * nbytes // ranks


def _summed(x: Tensor, codec: Codec, group: dist.ProcessGroup | None, weights: Tensor | None) -> Reduced:
    """One all-reduce of payloads. Sums of 16 bits round at each rank; that alone is nobody's, and is not fed back."""
    ranks = dist.get_world_size(group)
    # divided first: the sum of two 40000 is not a number of fp16
    payload = codec.encode(x / ranks, weights=weights)
    sent = x if codec.lossless else codec.decode(payload, x.numel()) * ranks
    for tensor in payload.tensors:
        dist.all_reduce(tensor, group=group)
    return Reduced(codec.decode(payload, x.numel()), sent, ring_bytes(payload.nbytes, ranks))


def _gathered(
    x: Tensor, codec: Codec, group: dist.ProcessGroup | None, sizes: list[int], weights: Tensor | None
) -> Reduced:
    """Every rank gets every payload and adds them up in the same order."""
    ranks = dist.get_world_size(group)
    payloads = [codec.encode(part, weights=one) for part, one in _with_weights(x, weights, sizes)]
    mean = torch.zeros_like(x)
    for others in _from_all(payloads, group):
        mean.add_(_decoded(codec, others, sizes), alpha=1 / ranks)
    return Reduced(mean, _decoded(codec, payloads, sizes), (ranks - 1) * _nbytes(payloads))


def _agreed(
    x: Tensor, codec: TopK, group: dist.ProcessGroup | None, sizes: list[int], weights: Tensor | None
) -> Reduced:
    """One small all-reduce of scores, after which all choose the same runs, and then the mean of what they hold."""
    ranks = dist.get_world_size(group)
    scores = torch.cat([codec.scores(part, one) for part, one in _with_weights(x, weights, sizes)]) / ranks
    dist.all_reduce(scores, group=group)
    chosen = [codec.choose(one) for one in scores.split([codec.runs(n) for n in sizes])]
    taken = [codec.take(part, places) for part, places in zip(x.split(sizes), chosen, strict=True)]
    lengths = [len(part) for part in taken]
    reduced = mean_over_ranks(torch.cat(taken), codec.values, group, sizes=lengths)

    def whole(values: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for part, places, where in zip(values.split(lengths), chosen, out.split(sizes), strict=True):
            codec.put(part, places, where)
        return out

    nbytes = ring_bytes(scores.nbytes, ranks) + reduced.nbytes
    return Reduced(whole(reduced.mean), whole(reduced.sent), nbytes)


def _over_nodes(x: Tensor, codec: Codec, nodes: Nodes, sizes: list[int], weights: Tensor | None) -> Reduced:
    """Each rank averages one shard over its node, then over nodes by the codec, and gives it to its node: float32 twice
    within the node, and between nodes a shard a rank.

    What the codec leaves out of a node's mean is the shard owner's, times the ranks of a node in its own units.
    """
    local, own = dist.get_world_size(nodes.inside), dist.get_rank(nodes.inside)
    rows, shards = _sharded(x, sizes, local)
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=nodes.inside)
    mean = rows.new_zeros(rows.shape[1])
    for row in received:
        mean.add_(row, alpha=1 / local)
    read = None if weights is None else _sharded(weights, sizes, local)[0][own]
    reduced = mean_over_ranks(mean, codec, nodes.between, sizes=shards, weights=read)
    means = torch.empty_like(rows)
    dist.all_gather_single(means.view(-1), reduced.mean, group=nodes.inside)

    rows[own] -= local * (mean - reduced.sent)
    inside = 2 * (local - 1) * mean.nbytes
    return Reduced(_whole(means, shards, sizes), _whole(rows, shards, sizes), inside + reduced.nbytes, inside)


def _in_two_steps(x: Tensor, codec: Codec, group: dist.ProcessGroup | None, sizes: list[int], grain: int) -> Reduced:
    """All-to-all of shards, float32 mean of what they decode to, all-gather of that mean written anew.

    There are two errors, and both are in `sent`: the worker's, x - decode(encode(x)), and the server's, made once for
    all workers by the owner of a shard and therefore P times as large in the owner's own units.

    Source: Tang et al. 2019, arXiv:1905.05957. Differs: the server's error joins the worker's residual.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, shards = _sharded(x, sizes, ranks)
    wire = _Wire(codec, grain, shards)
    written = wire.write(rows)
    received = torch.empty_like(written)
    dist.all_to_all_single(received, written, group=group)

    mean = torch.zeros_like(rows[0])
    for row in wire.read(received):
        # divided before it is added: finite values stay finite
        mean.add_(row, alpha=1 / ranks)
    answer = wire.write(mean[None])
    dist.all_gather_single(received.view(-1), answer.view(-1), group=group)
    # of one's own shards too the copy that the others get, or replicas drift apart
    means = wire.read(received)

    sent = wire.read(written)
    sent[rank] += ranks * (means[rank] - mean)
    nbytes = 2 * (ranks - 1) * answer.nbytes
    return Reduced(_whole(means, shards, sizes), _whole(sent, shards, sizes), nbytes)


class _Wire:
    """Rows of several tensors, one after the other, as bytes: to the bit what the codec makes of each by itself.

    All are encoded in one call, filled up to whole grains; what fills them does not go on the wire. A call a tensor
    took longer than the wire: half a millisecond each.
    """

    def __init__(self, codec: Codec, grain: int, lengths: list[int]) -> None:
        self.codec, self.lengths = codec, lengths
        self.filled = [-(-n // grain) * grain for n in lengths]

    def write(self, rows: Tensor) -> Tensor:
        """uint8 (rows, bytes) of float32 (rows, values)."""
        count, values = len(rows), sum(self.filled)
        tensors = self.codec.encode(_refit(rows, self.lengths, self.filled).view(-1)).tensors
        self.kinds = [(tensor.dtype, tensor.numel() // count) for tensor in tensors]
        parts = [tensor.view(count, -1) for tensor in tensors]
        parts = [_refit(part, self.filled, self.lengths) if part.shape[1] == values else part for part in parts]
        return torch.cat([part.view(torch.uint8) for part in parts], 1)

    def read(self, written: Tensor) -> Tensor:
        """float32 (rows, values) of what `write` made, here or on another rank."""
        count, values = len(written), sum(self.filled)
        widths = [(sum(self.lengths) if entries == values else entries) for _, entries in self.kinds]
        pieces = written.split([n * kind.itemsize for n, (kind, _) in zip(widths, self.kinds, strict=True)], 1)
        tensors = []
        for piece, (kind, entries) in zip(pieces, self.kinds, strict=True):
            # copied, also where one row is contiguous: a view of wider numbers must begin at a multiple of their size
            part = piece.clone(memory_format=torch.contiguous_format).view(kind)
            part = _refit(part, self.lengths, self.filled) if entries == values else part
            tensors.append(part.reshape(-1))
        decoded = self.codec.decode(Payload(tuple(tensors)), count * values)
        return _refit(decoded.view(count, values), self.filled, self.lengths)


def _refit(rows: Tensor, lengths: list[int], wanted: list[int]) -> Tensor:
    """Each of the tensors in every row cut, or filled up with zeros, to the length that is wanted."""
    if lengths == wanted:
        return rows
    parts = zip(rows.split(lengths, 1), lengths, wanted, strict=True)
    return torch.cat([torch.nn.functional.pad(part, (0, new - old)) for part, old, new in parts], 1)


def _sharded(x: Tensor, sizes: list[int], ranks: int) -> tuple[Tensor, list[int]]:
    """(ranks, sum of shards), a copy: what each rank owns of each tensor, filled up with zeros; and their lengths."""
    shards = [-(-n // ranks) for n in sizes]
    padded = [
        torch.nn.functional.pad(part, (0, ranks * shard - len(part))).view(ranks, shard)
        for part, shard in zip(x.split(sizes), shards, strict=True)
    ]
    return torch.cat(padded, 1), shards


def _whole(rows: Tensor, shards: list[int], sizes: list[int]) -> Tensor:
    """Tensors one after the other, from the shards of all of them by owner."""
    parts = rows.split(shards, 1)
    return torch.cat([part.reshape(-1)[:n] for part, n in zip(parts, sizes, strict=True)])


def _with_weights(x: Tensor, weights: Tensor | None, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Each tensor of x and its weights."""
    read = [None] * len(sizes) if weights is None else weights.split(sizes)
    return zip(x.split(sizes), read, strict=True)


def _decoded(codec: Codec, payloads: list[Payload], sizes: list[int]) -> Tensor:
    return torch.cat([codec.decode(payload, n) for payload, n in zip(payloads, sizes, strict=True)])


def _from_all(payloads: list[Payload], group: dist.ProcessGroup | None) -> Iterator[list[Payload]]:
    """The payloads of each rank, in their order."""
    own = _packed(payloads)
    received = own.new_empty(dist.get_world_size(group) * len(own))
    dist.all_gather_single(received, own, group=group)
    return (_unpacked(row, payloads) for row in received.view(-1, len(own)))


def _packed(payloads: list[Payload]) -> Tensor:
    """uint8 (nbytes,): one message whatever payloads are made of, and no backend knows all types."""
    return torch.cat([tensor.flatten().view(torch.uint8) for payload in payloads for tensor in payload.tensors])


def _unpacked(packed: Tensor, like: list[Payload]) -> list[Payload]:
    """Payloads of the same types and shapes as others of as many values."""
    parts = iter(packed.split([tensor.nbytes for payload in like for tensor in payload.tensors]))
    # cloned: a view of wider numbers must begin at a multiple of their size
    return [
        Payload(tuple(next(parts).clone().view(tensor.dtype).view(tensor.shape) for tensor in payload.tensors))
        for payload in like
    ]


def _nbytes(payloads: list[Payload]) -> int:
    return sum(payload.nbytes for payload in payloads)
