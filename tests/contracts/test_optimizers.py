"""What every element-wise optimiser keeps to under sparse training: zeros, fresh moments, one way in both storages."""

from __future__ import annotations

import functools

import pytest
import torch

import sparsam as sp
from sparsam.sparse.moments import moments

OPTIMISERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, weight_decay=0.1),
    "SGD momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
    "SGD nesterov fused": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=0.1),
    "Adam amsgrad": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW foreach": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5, foreach=True),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.5, fused=True),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.01, weight_decay=0.1),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.01, weight_decay=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.003, momentum=0.5, weight_decay=0.1),
    "RMSprop centered": functools.partial(torch.optim.RMSprop, lr=0.003, centered=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.05, weight_decay=0.1),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=1.0, weight_decay=0.1),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.01, weight_decay=0.1),
    "Rprop": functools.partial(torch.optim.Rprop, lr=0.001, step_sizes=(1e-6, 0.01)),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.05, weight_decay=0.1),
}
every_optimiser = pytest.mark.parametrize("kind", OPTIMISERS)
every_storage = pytest.mark.parametrize("storage", ["compact", "masked blocks", "masked weights"])


@every_optimiser
@every_storage
def test_zeros_are_exact_and_every_live_weight_moves(job, kind, storage):
    """Weight decay and momentum bring pruned weights back unless somebody keeps them zero, after every step."""
    made = job(sp.set_(every=3, fraction=0.5), storage, optimizer=OPTIMISERS[kind])
    for _ in range(12):
        before = {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}
        made.run(1).check_pattern()
        for name, parameter in made.model.named_parameters():
            assert (parameter != before[name]).any(), name


@every_optimiser
@every_storage
def test_a_grown_unit_has_no_past(job, kind, storage):
    """Straight after a rewire: no first moment at new entries, sizes of a step like their neighbours', nothing at dead
    ones. Their next step is no leap: zero second moments under a large step count would make one of several rates."""
    made = job(sp.set_(every=40, fraction=0.5), storage, optimizer=OPTIMISERS[kind]).run(39)
    before = made.topologies()
    made.run(1)
    values, fresh = {}, {}
    for name, weight in made.weights.items():
        grown = weight.topology & ~before[name]
        assert grown.any()
        fresh[name] = entries_of(weight, grown) & weight.active
        values[name] = weight.parameter.detach().clone()
        for key, moment in moments(made.optimizer, weight.parameter).items():
            at_new, others = moment[fresh[name]], moment[weight.active & ~fresh[name]]
            assert not at_new.any() or at_new.min() == at_new.max() <= others.max(), key
            assert torch.isfinite(moment).all()
            if storage != "compact":
                assert not moment[entries_of(weight, before[name] & ~weight.topology)].any(), key
    made.run(1)
    for name, weight in made.weights.items():
        step = (weight.parameter.detach() - values[name]).abs()
        assert step[fresh[name]].any()
        # Rprop's neighbours may all have shrunk their steps by now; its own rate is no leap either
        rate = made.optimizer.param_groups[0]["lr"] if kind == "Rprop" else 0.0
        assert step[fresh[name]].max() <= max(3.5 * step[weight.active & ~fresh[name]].max(), rate)


def entries_of(weight, units):
    """bool of the parameter's shape: entries of these units."""
    whole = weight.pattern.expand(units, weight.dense_shape)
    if not hasattr(weight.module, "gather"):
        return whole
    return weight.module.gather(whole.float()).bool()


@every_optimiser
def test_both_storages_take_the_same_way(job, kind):
    """The update of a weight depends on that weight alone: stored in blocks or as a matrix, it is the same."""
    made = [
        job(sp.set_(every=4, fraction=0.5), storage, optimizer=OPTIMISERS[kind])
        for storage in ("compact", "masked blocks")
    ]
    for _ in range(10):
        a, b = (one.run(1).dense() for one in made)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=2e-4)


@every_optimiser
@every_storage
def test_state_goes_through_a_file_and_on(job, kind, storage, tmp_path):
    whole = job(sp.rigl(every=2), storage, optimizer=OPTIMISERS[kind]).run(5)
    torch.save(whole.state(), tmp_path / "state.pt")
    resumed = job(sp.rigl(every=2), storage, optimizer=OPTIMISERS[kind])
    resumed.load(torch.load(tmp_path / "state.pt", weights_only=True))
    a, b = whole.run(5).dense(), resumed.run(5).dense()
    assert all(torch.equal(a[name], b[name]) for name in a)


@every_optimiser
def test_dense_to_sparse_to_dense_with_a_running_optimiser(job, kind):
    """Moments go along both ways, and what comes back without a unit begins like its neighbours."""
    made = job(sp.set_(every=2), "compact", optimizer=OPTIMISERS[kind]).run(6)
    before = made.dense()
    made.session.detach()
    sp.densify(made.model, made.optimizer)
    assert all(torch.equal(before[name], made.dense()[name]) for name in before)
    held = {id(parameter) for group in made.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in made.model.parameters()}
    made.session = sp.Session(made.model, made.optimizer)
    made.run(3)
    assert all(weight.isfinite().all() and (weight != 0).all() for weight in made.dense().values())
    sp.sparsify(made.model, sp.Block(4, 4), 0.3, optimizer=made.optimizer)
    made.session = sp.Session(made.model, made.optimizer, [sp.SparseTraining(sp.set_(every=2))])
    made.run(6).check_pattern()
