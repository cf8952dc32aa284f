"""What every method promises, in every storage: exact density, valid patterns, no drift, a resume bit for bit."""

from __future__ import annotations

import io
import math

import pytest
import torch

import sparsam as sp

EVERY_STORAGE = ["compact", "masked blocks", "masked weights", "n:m", "neurons"]
every_storage = pytest.mark.parametrize("storage", EVERY_STORAGE[:3])


class Case:
    """A method and what it starts from.

    Args:
        make: final density -> method.
        start: density of `sparsify` as a multiple of the one that `make` is given; None: all units are active.
        final: density at the end when it is not the one that `make` is given.
        ends_at: step from which nothing changes, or None.
        chance: whether another seed must go another way.
        storages: those that it works in.
    """

    def __init__(self, make, *, start=1.0, final=None, ends_at=None, chance=True, storages=EVERY_STORAGE):
        self.make, self.start, self.final = make, start, final
        self.ends_at, self.chance, self.storages = ends_at, chance, storages

    @property
    def moves_density(self):
        return self.start != 1.0

    def density(self, storage):
        most = {"n:m": 0.5, "neurons": 0.5}.get(storage, 0.3)
        return most / max(self.start or 1.0, 1.0)

    def job(self, job, storage, **options):
        density = self.density(storage)
        start = 1.0 if self.start is None else self.start * density
        return job(self.make(density), storage, density=start, **options)


MASKED = ["masked blocks", "masked weights", "n:m", "neurons"]
UNITS = ["compact", "masked blocks", "masked weights", "neurons"]  # where any number of units may be active
METHODS = {
    "static": Case(lambda density: sp.static(), chance=False),
    "set": Case(lambda density: sp.set_(every=2, fraction=0.4)),
    "set until": Case(lambda density: sp.set_(every=2, fraction=0.5, until=30), ends_at=30),
    "rigl": Case(lambda density: sp.rigl(every=2, fraction=0.4), chance=False),
    "rigl until": Case(lambda density: sp.rigl(every=3, fraction=0.5, until=30), ends_at=30, chance=False),
    "own": Case(
        lambda density: sp.DropGrow(sp.random, sp.gradient, 1, sp.limit_rate(sp.stages([(0, 0.3), (4, 0.9)]), 0.2))
    ),
    "sparse momentum": Case(
        lambda density: sp.DropGrow(sp.magnitude, sp.momentum, 3, sp.constant(0.4)), chance=False, storages=MASKED
    ),
    "gmp": Case(
        lambda density: sp.gmp(density, every=3, until=11, begin=1, initial=2 * density),
        start=2.0,
        ends_at=11,
        chance=False,
    ),
    "gmp from dense": Case(
        lambda density: sp.gmp(density, every=3, until=11, begin=1),
        start=None,
        ends_at=11,
        chance=False,
        storages=UNITS,
    ),
    "gmp by sensitivity": Case(
        lambda density: sp.gmp(density, every=3, until=9, allocation=sp.by_sensitivity(sp.momentum, floor=0.05)),
        start=None,
        ends_at=9,
        chance=False,
        storages=UNITS,
    ),
    "granet": Case(
        lambda density: sp.granet(density, every=2, until=9, initial=2 * density, fraction=0.5),
        start=2.0,
        ends_at=9,
        chance=False,
    ),
    "taylor": Case(
        lambda density: sp.taylor_pruning(density, every=2, worst=0.3, order=1),
        start=None,
        ends_at=20,
        chance=False,
        storages=UNITS,
    ),
    "fisher": Case(
        lambda density: sp.taylor_pruning(density, every=2, worst=0.3, order=2),
        start=None,
        ends_at=20,
        chance=False,
        storages=UNITS,
    ),
    "ac/dc": Case(
        lambda density: sp.ac_dc(density, dense_steps=2, sparse_steps=3, until=9, allocation=sp.uniform),
        start=None,
        ends_at=12,
        chance=False,
    ),
    "ac/dc over all layers": Case(
        lambda density: sp.ac_dc(density, dense_steps=2, sparse_steps=3, until=9),
        start=None,
        ends_at=12,
        chance=False,
    ),
    "sr-ste": Case(lambda density: sp.sr_ste(every=1), chance=False, storages=MASKED),
    "movement": Case(
        lambda density: sp.Resize(sp.movement, sp.cubic(1.0, density, steps=9), 3, 9),
        start=None,
        ends_at=9,
        chance=False,
        storages=UNITS,
    ),
    "80 % then 60 %": Case(
        lambda density: sp.Resize(
            sp.fisher, sp.limit_rate(sp.stages([(0, density / 2), (5, density)]), 0.1), 1, 12, grow=sp.gradient
        ),
        start=0.5,
        ends_at=12,
        chance=False,
        storages=UNITS[1:],
    ),
    "recovery": Case(
        lambda density: sp.recovery(density / 2, fine_tune=3, every=2, until=8, regrow=0.1),
        start=0.5,
        final=1.0,
        ends_at=8,
        chance=False,
        storages=UNITS[1:],
    ),
}
every_pair = pytest.mark.parametrize(
    ("method", "storage"), [(method, storage) for method, case in METHODS.items() for storage in case.storages]
)


@every_pair
@pytest.mark.parametrize("accumulate", [1, 2])
def test_density_is_exact_and_the_pattern_holds_after_every_step(job, method, storage, accumulate):
    case = METHODS[method]
    made = case.job(job, storage, accumulate=accumulate, clip=1.0)
    made.check_pattern()
    for _ in range(12):
        made.run(1).check_pattern(counts=not case.moves_density)


@pytest.mark.parametrize(
    ("method", "storage"),
    [(method, storage) for method, case in METHODS.items() if case.ends_at for storage in case.storages],
)
def test_the_final_density_is_met_and_nothing_changes_after_it(job, method, storage):
    case = METHODS[method]
    made = case.job(job, storage).run(case.ends_at)
    before = made.topologies()
    density = case.density(storage) if case.final is None else case.final
    largest = max(math.prod(weight.shape) / weight.topology.numel() for weight in made.weights.values())
    total = sum(math.prod(weight.shape) for weight in made.weights.values())
    # to the nearest unit of each layer, or of all together
    assert abs(made.density() - density) * total <= largest * len(before) / 2 + 1e-3
    made.run(20)
    assert all(torch.equal(a, b) for a, b in pairs(made.topologies(), before))
    assert not any(made.session.parts[0].method.due(step) for step in range(case.ends_at + 1, 1000))


@every_pair
def test_a_hundred_updates_leave_nothing_behind(job, method, storage):
    """Tensors, hooks and the size of a checkpoint stay what they were, however often topologies change."""

    def size():
        file = io.BytesIO()
        torch.save({**made.state(), "batches": 0}, file)
        return file.tell()

    case = METHODS[method]
    made = case.job(job, storage).run(6)
    tensors = {name: id(tensor) for name, tensor in [*made.model.named_parameters(), *made.model.named_buffers()]}
    first = size()
    made.run(200)
    assert {name: id(t) for name, t in [*made.model.named_parameters(), *made.model.named_buffers()]} == tensors
    assert not any(module._forward_hooks or module._backward_hooks for module in made.model.modules())
    assert abs(size() - first) <= 64  # a longer number here or there
    made.check_pattern(counts=not case.moves_density)


@every_pair
@pytest.mark.parametrize("stop", [1, 5, 6])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(job, method, storage, stop, tmp_path):
    """Stopped just before, at and after an update; through a file that loads with weights_only=True."""

    def fresh():
        rate = sp.LearningRate(sp.warm_up(sp.cosine(1.0, 0.1, steps=20), 4), factor=0.75)
        return METHODS[method].job(job, storage, parts=[rate, sp.Precision("bf16")], clip=1.0, accumulate=2)

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


@pytest.mark.parametrize("method", [method for method, case in METHODS.items() if "compact" in case.storages])
def test_both_storages_take_the_same_way(job, method):
    """Compact and masked blocks are two forms of one thing: same topologies, same weights up to rounding."""
    compact, masked = (METHODS[method].job(job, storage) for storage in ("compact", "masked blocks"))
    for _ in range(8):
        compact.run(1)
        masked.run(1)
        assert all(torch.equal(a, b) for a, b in pairs(compact.topologies(), masked.topologies()))
        for a, b in pairs(compact.dense(), masked.dense()):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def pairs(a, b):
    assert a.keys() == b.keys()
    return [(a[name], b[name]) for name in a]


@every_pair
def test_another_seed_goes_another_way_and_the_same_seed_the_same(job, method, storage):
    ways = [METHODS[method].job(job, storage, seed=seed).run(8).topologies() for seed in (0, 0, 1)]
    assert all(torch.equal(a, b) for a, b in pairs(ways[0], ways[1]))
    if METHODS[method].chance:
        assert not all(torch.equal(a, b) for a, b in pairs(ways[0], ways[2]))


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
