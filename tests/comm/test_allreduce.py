"""Means over ranks: the same bits on all, nothing lost between what was wanted and what was sent."""

from __future__ import annotations

from ranks import on_ranks, on_two_ranks


def test_every_codec_and_size_on_two_ranks(tmp_path):
    on_two_ranks(
        """
import math
from sparsam.comm.allreduce import mean_over_ranks, ring_bytes
from sparsam.comm.codecs import BF16, Identity, Int8Rows, TopK
from sparsam.comm.residual import Residuals

# a codec, the error of its mean, and by hand what a rank sends of 5000 values
CODECS = (
    (Identity(), 1e-7, 4 * 5000),
    (BF16(), 2**-7, 2 * 5000),
    (Int8Rows(), 0.02, 2 * (2500 + 4 * 5)),
    (Int8Rows(8), 0.02, 2 * (2500 + 4 * 313)),
    (TopK(0.1), 1.0, 500 * (4 + 4)),
    (TopK(0.2, "taylor", block=4), 1.0, 250 * (4 + 4 * 4)),
    (TopK(0.1, values=Int8Rows()), 1.0, 500 * 4 + 500 + 4),
    # chosen together: 313 scores in a ring, and then 126 runs in two steps or in a ring
    (TopK(0.4, block=16, values=Int8Rows(), agreed=True), 1.0, 4 * 313 + 2 * (1008 + 4 * 2)),
    (TopK(0.4, "taylor", block=16, values=BF16(), agreed=True), 1.0, 4 * 313 + 2 * 126 * 16),
)
for codec, error, nbytes in CODECS:
    for n in (0, 1, 2, 3, 513, 5000):
        weights = torch.randn(n, generator=torch.Generator().manual_seed(n))
        x = torch.randn(n, generator=torch.Generator().manual_seed(9 + rank)) * (1 + rank)
        before = x.clone()
        reduced = mean_over_ranks(x, codec, weights=weights)
        assert torch.equal(x, before), codec
        a, b = gathered((x, reduced.mean, reduced.sent))
        assert torch.equal(a[1], b[1]), (codec, n)
        true = (a[0] + b[0]) / 2
        assert (reduced.mean - true).norm() <= error * true.norm(), (codec, n)
        # the mean of what ranks sent is the mean they got; only 16-bit sums round on their way
        loose = 2**-7 if BF16() in (codec, getattr(codec, "values", None)) else 1e-6
        torch.testing.assert_close((a[2] + b[2]) / 2, reduced.mean, rtol=loose, atol=loose)
        assert n != 5000 or reduced.nbytes == nbytes, (codec, reduced.nbytes)
        if n:
            assert not mean_over_ranks(torch.zeros(n), codec, weights=weights).mean.any(), codec
            for bad in (math.inf, math.nan):
                x = torch.ones(n)
                x[-1] = bad if rank else 1.0
                reduced = mean_over_ranks(x, codec, weights=torch.zeros(n))
                assert not reduced.mean.isfinite().all(), (codec, n, bad)

# several tensors in one message: to the bit what each is by itself
sizes = [40, 0, 1, 513, 77]
x = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(rank))
weights = torch.linspace(-1, 2, len(x))
for codec, *_ in CODECS:
    together = mean_over_ranks(x, codec, sizes=sizes, weights=weights)
    for part, w, mean, sent in zip(*(one.split(sizes) for one in (x, weights, together.mean, together.sent))):
        single = mean_over_ranks(part, codec, weights=w)
        assert torch.equal(single.mean, mean) and torch.equal(single.sent, sent), codec

# D3, and what would wrap as a sum of int8
for value in (40000.0, 3e38, -127.0):
    for codec in (BF16(), Int8Rows()):
        mean = mean_over_ranks(torch.full((600,), value), codec).mean
        torch.testing.assert_close(mean, torch.full((600,), value), rtol=2**-8, atol=0.0)

# a constant gradient: after 40 steps all of it has arrived but the residuals
gradient = torch.randn(700, generator=torch.Generator().manual_seed(rank))
for codec in (Int8Rows(64), TopK(0.1), TopK(0.2, block=4, values=Int8Rows(), agreed=True)):
    residuals, arrived = Residuals(), torch.zeros(700)
    for _ in range(40):
        wanted = gradient.clone()
        residuals.add("w", wanted)
        reduced = mean_over_ranks(wanted, codec)
        residuals.keep("w", wanted, reduced.sent)
        residuals.settle(True)
        arrived += reduced.mean
    a, b = gathered((gradient, residuals.state_dict()["residuals"]["w"]))
    torch.testing.assert_close(arrived + (a[1] + b[1]) / 2, 40 * (a[0] + b[0]) / 2, rtol=1e-5, atol=1e-3)
    # what still waits is what a few steps bring, not forty
    late = ((a[1] + b[1]) / 2).norm() / ((a[0] + b[0]) / 2).norm()
    assert late < (0.1 if codec == Int8Rows(64) else 12), late

# both choose what is largest on average, and of equal ones the first
x = [torch.tensor([4.0, 0, 0, 3, 2, 0]), torch.tensor([-1.0, 0, 0, 3, 3, 0])][rank]
reduced = mean_over_ranks(x, TopK(1 / 3, agreed=True))
assert reduced.mean.tolist() == [1.5, 0, 0, 3, 0, 0], reduced.mean
assert reduced.sent.tolist() == [x[0], 0, 0, 3, 0, 0]
# by |w g| the weights decide
weights = torch.tensor([0.0, 1, 1, 1, 2, 1])
assert mean_over_ranks(x, TopK(1 / 3, "taylor", agreed=True), weights=weights).mean.tolist() == [0, 0, 0, 3, 2.5, 0]

assert ring_bytes(8, 4) == 12
alone = dist.new_group([rank], use_local_synchronization=True)
for codec, *_ in CODECS:
    reduced = mean_over_ranks(torch.arange(5.0), codec, alone, weights=torch.ones(5))
    torch.testing.assert_close(reduced.mean, reduced.sent)
    assert reduced.nbytes == 0
""",
        tmp_path,
    )


def test_two_nodes_of_two_ranks(tmp_path):
    """Float32 within a node, the codec between nodes: the same invariants, and fewer bytes between nodes."""
    on_ranks(
        4,
        """
import math, os
from sparsam.comm.allreduce import mean_over_ranks
from sparsam.comm.codecs import BF16, Identity, Int8Rows, TopK
from sparsam.comm.groups import nodes_of
from sparsam.comm.link import measured
from sparsam.comm.part import Compression
from sparsam.comm.residual import Residuals

def error_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")

world = dist.group.WORLD
for wrong, got in ((3, "3"), (0, "0"), ("torchrun", "0"), (2 if rank else 4, "[4, 2, 2, 2]")):
    assert f"expected one divisor of 4 ranks on all of them, got {got}." in error_of(lambda: nodes_of(world, wrong))
os.environ["LOCAL_WORLD_SIZE"] = "2"
nodes = nodes_of(world, "torchrun")
assert dist.get_process_group_ranks(nodes.inside) == [[0, 1], [2, 3]][rank // 2]
assert dist.get_process_group_ranks(nodes.between) == [[0, 2], [1, 3]][rank % 2]

# a codec, the error of its mean, and by hand what a rank sends to the other node of 5000 values: it owns 2500
AGREED = TopK(0.4, block=16, values=Int8Rows(), agreed=True)
CODECS = (
    (Identity(), 1e-6, 4 * 2500),
    (BF16(), 2**-7, 2 * 2500),
    (Int8Rows(), 0.02, 2 * (1250 + 4 * 3)),
    (TopK(0.2, "taylor"), 1.0, 500 * 8),
    (AGREED, 1.0, 4 * 157 + 2 * (504 + 4)),
)
for codec, error, between in CODECS:
    for n in (1, 5, 5000):
        weights = torch.randn(n, generator=torch.Generator().manual_seed(n))
        x = torch.randn(n, generator=torch.Generator().manual_seed(rank))
        before = x.clone()
        reduced = mean_over_ranks(x, codec, nodes, weights=weights)
        assert torch.equal(x, before), codec
        found = gathered((x, reduced.mean, reduced.sent))
        assert all(torch.equal(mean, reduced.mean) for _, mean, _ in found), codec
        true = sum(one for one, *_ in found) / 4
        assert (reduced.mean - true).norm() <= error * true.norm(), (codec, n)
        loose = 2**-7 if codec == BF16() else 1e-6
        torch.testing.assert_close(sum(sent for *_, sent in found) / 4, reduced.mean, rtol=loose, atol=loose)
        assert n != 5000 or reduced.inside_nbytes == 2 * 4 * 2500, reduced.inside_nbytes
        assert n != 5000 or reduced.nbytes - reduced.inside_nbytes == between, (codec, reduced.nbytes)
        x[-1] = math.nan if rank == 3 else 1.0
        assert not mean_over_ranks(x, codec, nodes, weights=weights).mean.isfinite().all(), codec
    # several tensors: to the bit what each is by itself
    sizes = [40, 1, 513]
    x, weights = torch.randn(554, generator=torch.Generator().manual_seed(rank)), torch.linspace(-1, 2, 554)
    together = mean_over_ranks(x, codec, nodes, sizes=sizes, weights=weights)
    for part, w, mean, sent in zip(*(one.split(sizes) for one in (x, weights, together.mean, together.sent))):
        single = mean_over_ranks(part, codec, nodes, weights=w)
        assert torch.equal(single.mean, mean) and torch.equal(single.sent, sent), codec

# what waits is the owner's alone, and all of it arrives
gradient = torch.randn(700, generator=torch.Generator().manual_seed(rank))
residuals, arrived = Residuals(), torch.zeros(700)
for _ in range(40):
    wanted = gradient.clone()
    residuals.add("w", wanted)
    reduced = mean_over_ranks(wanted, AGREED, nodes)
    residuals.keep("w", wanted, reduced.sent)
    residuals.settle(True)
    arrived += reduced.mean
left = residuals.state_dict()["residuals"]["w"]
assert left.view(2, -1)[rank % 2].any() and left.view(2, -1)[1 - rank % 2].abs().max() < 1e-4
found = gathered((gradient, left))
late, true = sum(left for _, left in found) / 4, sum(one for one, _ in found) / 4
torch.testing.assert_close(arrived + late, 40 * true, rtol=1e-5, atol=1e-3)
assert late.norm() < 4 * true.norm()

assert measured(Int8Rows(), [1000], world, nodes).text.startswith("compression is o")

# attached, stepped, resumed, detached
def made(codec=AGREED, **options):
    torch.manual_seed(0)
    model = DDP(mlp(), bucket_cap_mb=0.001)
    compression = Compression(codec, "always", **options)
    return sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [compression])
assert "expected one divisor of 4 ranks" in error_of(lambda: made(ranks_per_node=3))
groups = len(dist.distributed_c10d._world.pg_map)
session, x = made(ranks_per_node=2), torch.randn(6, 13, generator=torch.Generator().manual_seed(rank))
assert step(session, x) and step(session, x)
metrics = session.metrics()
assert 0 < metrics["comm.bytes_inside"] < metrics["comm.bytes"], metrics
resumed = made(ranks_per_node="torchrun")
resumed.model.load_state_dict(session.model.state_dict())
resumed.load_state_dict(session.state_dict())
assert step(session, x) and step(resumed, x)
found = gathered([{n: p.tolist() for n, p in one.model.named_parameters()} for one in (session, resumed)])
assert all(one == found[0][0] for pair in found for one in pair)
session.detach(), resumed.detach()
assert len(dist.distributed_c10d._world.pg_map) == groups

# a rank that fails tells its node and the other, at once
class Fails(Int8Rows):
    def encode(self, x, *, weights=None):
        if rank == 3:
            raise ArithmeticError("cannot write this")
        return super().encode(x, weights=weights)
session = made(Fails(), ranks_per_node=2)
try:
    step(session, x)
    raise AssertionError("went on")
except RuntimeError as error:
    assert rank != 3 or "cannot write this" in str(error), error
session.detach()
""",
        tmp_path,
    )
