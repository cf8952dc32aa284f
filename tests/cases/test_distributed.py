"""Two gloo processes: one topology, one gradient, whatever the ranks' seeds, data and numbers of samples."""

from __future__ import annotations

import pytest

from ranks import on_two_ranks


def test_d1_ranks_with_other_seeds_weights_and_data_hold_one_topology(tmp_path):
    """Tied scores, other seeds, other first weights, every storage and growth: equal topologies and weights after every
    update, and DDP does not do it for us by copying buffers."""
    on_two_ranks(
        """
for pattern, storage in ((sp.Block(4, 4), "compact"), (sp.Block(4, 4), "masked"), (sp.Unstructured(), "masked")):
    for growth in ("auto", "sum_of_norms"):
        torch.manual_seed(rank)
        model = mlp()
        sp.sparsify(model, pattern, 0.4, storage=storage, seed=rank)
        wrapped = DDP(model)
        buffers = {f"{name}" for name, _ in model.named_buffers()}
        assert buffers <= wrapped.parameters_to_ignore, buffers
        session = session_of(wrapped, sp.rigl(every=1, fraction=0.5), growth=growth, seed=rank)
        names = list(hashes(wrapped))
        assert names == ["0", "2"], names
        first = hashes(wrapped)
        for update in range(4):
            # on rank 0 a batch of zeros: ties everywhere in the first layer
            step(session, torch.randn(6, 13) * (rank or update))
            a, b = gathered(hashes(wrapped))
            assert a == b, (storage, growth, update)
            a, b = gathered(weights(wrapped))
            assert a == b, (storage, growth, update)
        assert hashes(wrapped) != first
session = session_of(wrapped, sp.set_(every=1), seed=rank)
with torch.no_grad():
    if rank:
        model[2].weight_topology.copy_(~model[2].weight_topology)
try:
    step(session, torch.randn(6, 13))
    raise AssertionError("a divergence was not noticed")
except RuntimeError as error:
    assert "2: expected the same topology on every rank after step 1, but ranks [1] differ" in str(error), error
""",
        tmp_path,
    )


def test_t4_windows_cut_short_and_unequal_samples_give_every_rank_the_gradient_of_all(tmp_path):
    """7 samples on rank 0 and 5 on rank 1, in windows of 3 that are not filled: one step equals one batch of 12."""
    on_two_ranks(
        """
x = torch.randn(12, 13, generator=torch.Generator().manual_seed(5))
mine = x[:7] if rank == 0 else x[7:]
for pattern, storage in ((sp.Block(4, 4), "compact"), (sp.Unstructured(), "masked")):
    for parts, accumulate in ((2, 3), (2, 2), (3, 3), (1, 3)):
        torch.manual_seed(1)
        model, alone = mlp(), mlp()
        alone.load_state_dict(model.state_dict())
        for one in (model, alone):
            sp.sparsify(one, pattern, 0.4, storage=storage)
        wrapped = DDP(model)
        session = session_of(wrapped, sp.rigl(every=1, fraction=0.3), accumulate=accumulate)
        chunks = mine.chunk(parts)
        for number, chunk in enumerate(chunks, 1):
            applied = step(session, chunk, samples=len(chunk), last=number == len(chunks))
        assert applied
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
        reference = sp.Session(alone, optimizer, [sp.SparseTraining(sp.rigl(every=1, fraction=0.3), "dense")])
        world, dist.get_world_size = dist.get_world_size, lambda *_: 1
        step(reference, x)
        dist.get_world_size = world
        assert hashes(wrapped) == hashes(alone), (storage, parts)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
        a, b = gathered(weights(wrapped))
        assert a == b
""",
        tmp_path,
    )


@pytest.mark.parametrize("verb", ["sparsify", "inspect", "densify", "compact"])
def test_d5_a_model_wrapped_in_ddp_is_refused(verb, tmp_path):
    """One process is enough: DDP has taken the parameters, so exchanging them would train nothing."""
    import torch.distributed as dist
    from torch import nn

    import sparsam as sp

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 16)))
        arguments = (sp.Block(4, 4), 0.5) if verb in ("sparsify", "inspect") else ()
        with pytest.raises(ValueError, match=f"{verb}: expected the plain model, got it wrapped in Distributed"):
            getattr(sp, verb)(wrapped, *arguments)
    finally:
        dist.destroy_process_group()


def test_d2_d6_d8_compressed_steps_that_are_skipped_unused_or_zero(tmp_path):
    """An inf on rank 1 only skips the step on both. A head that is not used, a branch that is fully masked and an empty
    tensor neither hang nor become NaN: no gradient stays none, zero stays zero. D3 is in
    comm/test_allreduce.py, D7 in comm/test_ddp.py."""
    on_two_ranks(
        """
from sparsam.comm.codecs import BF16, Int8Rows, TopK
from sparsam.comm.part import Compression
from sparsam.precision.scaler import LossScaler

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.unused, self.masked = nn.Linear(13, 40), nn.Linear(40, 9), nn.Linear(40, 9, bias=False)
        self.head, self.norm = nn.Linear(40, 9), nn.LayerNorm(40)
        self.empty = nn.Parameter(torch.zeros(5, 0))
    def forward(self, x):
        hidden = self.norm(torch.tanh(self.body(x)))
        return self.head(hidden) + self.masked(hidden * 0.0) + self.empty.sum()

for codec in (BF16(), Int8Rows(), TopK(0.05)):
    torch.manual_seed(rank)
    # a bucket or more for each layer, some of them all zero
    model = DDP(Heads(), bucket_cap_mb=0.0005, find_unused_parameters=True)
    compression, scaler = Compression(codec, "always"), LossScaler(initial=64.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    session = sp.Session(model, optimizer, [scaler, compression], clip=1.0)
    residuals = lambda: {k: v.tolist() for k, v in compression.residuals.state_dict()["residuals"].items()}
    start = weights(model.module)
    for number in range(5):
        x, broken = torch.randn(6, 13), number == 3
        if broken and rank == 1:
            x[2, 5] = float("inf")
        before, scale = (weights(model), residuals()), scaler.scale
        assert step(session, x) != broken
        assert scaler.scale == scale / (2 if broken else 1)
        assert not broken or (weights(model), residuals()) == before, codec
        a, b = gathered((weights(model), scaler.scale))
        assert a == b
        assert all(value.isfinite().all() for value in model.state_dict().values())
    for name in ("unused.weight", "unused.bias", "masked.weight"):
        assert weights(model.module)[name] == start[name], (codec, name)
    assert weights(model.module)["body.weight"] != start["body.weight"]
    assert model.module.unused.weight not in optimizer.state and model.module.masked.weight in optimizer.state
""",
        tmp_path,
    )


def test_d9_an_embedding_with_sparse_gradients_is_refused_by_name(tmp_path):
    import torch
    import torch.distributed as dist
    from torch import nn

    import sparsam as sp
    from sparsam.comm.codecs import Int8Rows
    from sparsam.comm.part import Compression

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.ModuleDict({"words": nn.Embedding(9, 4, sparse=True)}))
        with pytest.raises(ValueError, match="words: expected dense gradients under Compression, got an embedding"):
            sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [Compression(Int8Rows())])
    finally:
        dist.destroy_process_group()
