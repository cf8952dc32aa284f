"""What moves between ranks and how long it takes: links, the shape of a cluster, and each collective on it.

Times are alpha + beta * bytes for each message (Hockney 1994), with full-duplex links and ranks that act in step.
n values, P ranks in N nodes of m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparsam.comm.allreduce import ring_bytes
from sparsam.comm.codecs import Codec, Identity, TopK
from sparsam.comm.link import Cost

__all__ = ["Link", "Moved", "Network", "collective", "gather_shards", "ring", "scatter_shards"]


@dataclass(frozen=True)
class Link:
    """One direction of a link.

    Attributes:
        alpha: seconds that a message takes whatever its size.
        beta: seconds a byte.
    """

    alpha: float
    beta: float

    @classmethod
    def of(cls, alpha_seconds: float, bits_per_second: float) -> Link:
        return cls(alpha_seconds, 8 / bits_per_second)

    @classmethod
    def fitted(cls, ranks: int, nbytes: Sequence[int], seconds: Sequence[float]) -> Link:
        """From measured ring all-reduces.

        Args:
            ranks: how many took part, each on a link of its own.
            nbytes: sizes of the reduced tensors; at least 4.
            seconds: what each took.

        Raises:
            ValueError: fewer than 2 ranks or 4 sizes, or lists of different lengths.
        """
        if ranks < 2 or len(nbytes) < 4 or len(nbytes) != len(seconds):
            raise ValueError(
                f"expected times of at least 4 sizes from at least 2 ranks, got {len(nbytes)} sizes and "
                f"{len(seconds)} times from {ranks} ranks"
            )
        cost = Cost.fitted(nbytes, seconds)
        steps = 2 * (ranks - 1)
        return cls(cost.alpha / steps, cost.beta * ranks / steps)

    def seconds(self, nbytes: float) -> float:
        return self.alpha + self.beta * nbytes

    def shared(self, by: int) -> Link:
        """What one of several gets who use it at once."""
        return replace(self, beta=self.beta * by)


@dataclass(frozen=True)
class Network:
    """Equal nodes of equal ranks.

    Attributes:
        nodes: N.
        ranks_per_node: m.
        inside: the link of a rank to another one of its node.
        between: the link of a node to another one; all its ranks share it.
        trees: a message reaches P ranks after log2 P hops and not after P - 1, as NCCL does it and gloo does not.
    """

    nodes: int
    ranks_per_node: int
    inside: Link
    between: Link
    trees: bool = False

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    def resized(self, ranks: int) -> Network:
        """As many ranks of the same kind: nodes are filled first.

        Raises:
            ValueError: the last node would not be full.
        """
        inner = min(ranks, self.ranks_per_node)
        if ranks % inner:
            raise ValueError(f"expected full nodes of {inner} ranks, got {ranks} ranks. Ask for a multiple.")
        return replace(self, nodes=ranks // inner, ranks_per_node=inner)


@dataclass(frozen=True)
class Moved:
    """One exchange, or several one after the other.

    Attributes:
        seconds: until the last rank has its result.
        nbytes: that a rank sends.
        between: that leave a node.
    """

    seconds: float = 0.0
    nbytes: float = 0.0
    between: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.seconds + other.seconds, self.nbytes + other.nbytes, self.between + other.between)

    def __mul__(self, times: float) -> Moved:
        return Moved(times * self.seconds, times * self.nbytes, times * self.between)


def collective(codec: Codec, n: int, network: Network, two_level: bool = False) -> Moved:
    """The mean of n values over all ranks by a codec, as `comm.allreduce` goes about it.

    Args:
        codec: how values are written.
        n: values.
        network: whom between.
        two_level: float32 inside a node, the codec between nodes, each rank for its share of the values.
    """
    ranks = network.ranks
    if ranks == 1 or n == 0:
        return Moved()
    if two_level and network.nodes > 1 and network.ranks_per_node > 1:
        return _in_two_levels(codec, n, network)
    if codec.additive:
        return ring(codec.bytes_of(n), network)
    if isinstance(codec, TopK) and codec.agreed:
        runs = codec.runs(n)
        chosen = math.ceil(codec.share * runs) * codec.block
        return ring(4 * runs, network) + collective(codec.values, chosen, network)
    if codec.grain is None:
        return _passed_on(codec.bytes_of(n), network)
    shard = codec.bytes_of(-(-n // ranks))
    return _all_to_all(shard, network) + _passed_on(shard, network)


def ring(nbytes: int, network: Network) -> Moved:
    """An all-reduce around a ring that enters and leaves each node once."""
    ranks = network.ranks
    if ranks == 1:
        return Moved()
    sent = ring_bytes(nbytes, ranks)
    return Moved(_around(2, nbytes / ranks, network), sent, sent if network.nodes > 1 else 0.0)


def gather_shards(nbytes: int, network: Network) -> Moved:
    """What all ranks hold shards of, given to all: a rank sends nearly as much as the whole."""
    return _passed_on(nbytes / network.ranks, network)


def scatter_shards(codec: Codec, n: int, network: Network) -> Moved:
    """Sums of n values, a shard for each rank: the first half of a ring."""
    return _passed_on(codec.bytes_of(n) / network.ranks, network)


def _around(times: int, nbytes: float, network: Network) -> float:
    """All ranks send to their neighbour on a ring at once, P - 1 times a round; the slowest link holds up all."""
    links = [network.inside] * (network.ranks_per_node > 1) + [network.between] * (network.nodes > 1)
    steps = network.ranks - 1
    latencies = math.ceil(math.log2(network.ranks)) if network.trees else steps
    return times * max((latencies * link.alpha + steps * nbytes * link.beta for link in links), default=0.0)


def _passed_on(nbytes: float, network: Network) -> Moved:
    """Each rank's bytes go once around the ring."""
    sent = (network.ranks - 1) * nbytes
    return Moved(_around(1, nbytes, network), sent, sent if network.nodes > 1 else 0.0)


def _all_to_all(shard: float, network: Network) -> Moved:
    """Each rank sends each other one a shard; those to other nodes share the node's link."""
    near, far = network.ranks_per_node - 1, network.ranks - network.ranks_per_node
    ways = ((near, network.inside), (far, network.between.shared(network.ranks_per_node)))
    seconds = max((min(n, 1) if network.trees else n) * link.alpha + n * shard * link.beta for n, link in ways)
    return Moved(seconds, (near + far) * shard, network.ranks_per_node * far * shard)


def _in_two_levels(codec: Codec, n: int, network: Network) -> Moved:
    """Reduce-scatter inside, exchange of each rank's share with its likes in other nodes, all-gather inside."""
    inner = network.ranks_per_node
    node = replace(network, nodes=1)
    peers = replace(network, ranks_per_node=1, between=network.between.shared(inner))
    share = -(-n // inner)
    across = collective(codec, share, peers)
    within = _passed_on(Identity().bytes_of(share), node) * 2
    return Moved(across.seconds + within.seconds, across.nbytes + within.nbytes, inner * across.between)
