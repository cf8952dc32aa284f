"""Means over two ranks: the same bits on both, nothing lost between what was wanted and what was sent."""

from __future__ import annotations

from ranks import on_two_ranks


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
        loose = 2**-7 if codec == BF16() else 1e-6
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
for codec in (Int8Rows(64), TopK(0.1)):
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

assert ring_bytes(8, 4) == 12
alone = dist.new_group([rank], use_local_synchronization=True)
for codec, *_ in CODECS:
    reduced = mean_over_ranks(torch.arange(5.0), codec, alone, weights=torch.ones(5))
    torch.testing.assert_close(reduced.mean, reduced.sent)
    assert reduced.nbytes == 0
""",
        tmp_path,
    )
