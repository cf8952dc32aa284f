"""What every method promises, in every storage: exact density, valid patterns, no drift, a resume bit for bit."""

from __future__ import annotations

import io

import pytest
import torch

import sparsam as sp

METHODS = {
    "static": lambda: sp.static(),
    "set": lambda: sp.set_(every=2, fraction=0.4),
    "set until": lambda: sp.set_(every=2, fraction=0.5, until=30),
    "rigl": lambda: sp.rigl(every=2, fraction=0.4),
    "rigl until": lambda: sp.rigl(every=3, fraction=0.5, until=30),
    "own": lambda: sp.DropGrow(sp.random, sp.gradient, 1, sp.limit_rate(sp.stages([(0, 0.3), (4, 0.9)]), 0.2)),
}
every_method = pytest.mark.parametrize("method", METHODS)
every_storage = pytest.mark.parametrize("storage", ["compact", "masked blocks", "masked weights"])


@every_method
@every_storage
@pytest.mark.parametrize("accumulate", [1, 2])
def test_density_is_exact_and_the_pattern_holds_after_every_step(job, method, storage, accumulate):
    made = job(METHODS[method](), storage, accumulate=accumulate, clip=1.0)
    made.check_pattern()
    for _ in range(12):
        made.run(1).check_pattern()


@every_method
@every_storage
def test_a_hundred_updates_leave_nothing_behind(job, method, storage):
    """Tensors, hooks and the size of a checkpoint stay what they were, however often topologies change."""

    def size():
        file = io.BytesIO()
        torch.save({**made.state(), "batches": 0}, file)
        return file.tell()

    made = job(METHODS[method](), storage).run(6)
    tensors = {name: id(tensor) for name, tensor in [*made.model.named_parameters(), *made.model.named_buffers()]}
    first = size()
    made.run(200)
    assert {name: id(t) for name, t in [*made.model.named_parameters(), *made.model.named_buffers()]} == tensors
    assert not any(module._forward_hooks or module._backward_hooks for module in made.model.modules())
    assert abs(size() - first) <= 64  # a longer number here or there
    made.check_pattern()


@every_method
@every_storage
@pytest.mark.parametrize("stop", [1, 5, 6])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(job, method, storage, stop, tmp_path):
    """Stopped just before, at and after an update; through a file that loads with weights_only=True."""

    def fresh():
        rate = sp.LearningRate(sp.warm_up(sp.cosine(1.0, 0.1, steps=20), 4), factor=0.75)
        return job(METHODS[method](), storage, parts=[rate, sp.Precision("bf16")], clip=1.0, accumulate=2)

    whole = fresh().run(stop)
    torch.save(whole.state(), tmp_path / "state.pt")
    whole.run(10)
    resumed = fresh()
    torch.manual_seed(99)  # the program's generator plays no part
    resumed.load(torch.load(tmp_path / "state.pt", weights_only=True)).run(10)
    same(whole.state(), resumed.state())


def same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            same(left, right)
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    else:
        assert a == b


@every_method
def test_both_storages_take_the_same_way(job, method):
    """Compact and masked blocks are two forms of one thing: same topologies, same weights up to rounding."""
    compact, masked = job(METHODS[method](), "compact"), job(METHODS[method](), "masked blocks")
    for _ in range(8):
        compact.run(1)
        masked.run(1)
        assert all(torch.equal(a, b) for a, b in pairs(compact.topologies(), masked.topologies()))
        for a, b in pairs(compact.dense(), masked.dense()):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def pairs(a, b):
    assert a.keys() == b.keys()
    return [(a[name], b[name]) for name in a]


@every_method
@every_storage
def test_another_seed_goes_another_way_and_the_same_seed_the_same(job, method, storage):
    ways = [job(METHODS[method](), storage, seed=seed).run(8).topologies() for seed in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in pairs(ways[0], ways[1]))
    if method not in ("static", "rigl", "rigl until"):  # which have no chance in them, but for ties
        assert not all(torch.equal(a, b) for a, b in pairs(ways[0], ways[2]))


@pytest.mark.parametrize("method", ["set until", "rigl until"])
@every_storage
def test_nothing_changes_after_the_last_update(job, method, storage):
    made = job(METHODS[method](), storage).run(30)
    before = made.topologies()
    made.run(20)
    assert all(torch.equal(a, b) for a, b in pairs(made.topologies(), before))


@every_storage
def test_the_loss_falls(job, storage):
    """Grown units learn: a model that has to move its connections fits what a static one cannot."""
    made = job(sp.rigl(every=5, fraction=0.3), storage, density=0.3)
    x = torch.randn(64, 13)
    y = torch.tanh(x[:, :9] * 2)
    losses = []
    for _ in range(150):
        with made.session.forward():
            loss = (made.model(x) - y).square().mean()
        made.session.backward(loss)
        made.session.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
