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
