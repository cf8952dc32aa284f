"""Random numbers without a generator: the same for the same (seed, step, name), others for others."""

from __future__ import annotations

import itertools

import torch

from sparsam.sparse.views import stateless_uniform


def test_the_same_key_gives_the_same_numbers_whatever_was_drawn_before():
    first = stateless_uniform((3, 4), 0, 100, "fc1")
    torch.manual_seed(7)
    torch.rand(5)
    state = torch.random.get_rng_state()
    assert torch.equal(first, stateless_uniform((3, 4), 0, 100, "fc1"))
    assert torch.equal(state, torch.random.get_rng_state())  # and the program's generator is left alone
    assert first.dtype == torch.float32
    assert ((first >= 0) & (first < 1)).all()


def test_every_part_of_the_key_counts():
    keys = [(0, 100, "fc1"), (1, 100, "fc1"), (0, 200, "fc1"), (0, 100, "fc2"), (0, 10, "0/fc1")]
    drawn = [stateless_uniform((64,), *key) for key in keys]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_numbers_of_neighbouring_steps_are_uniform_and_unrelated():
    """3 sigma bounds for the mean and for the correlation of neighbours."""
    drawn = torch.stack([stateless_uniform((1000,), 0, step, "fc1") for step in range(20)])
    assert abs(float(drawn.mean()) - 0.5) < 3 * (1 / 12 / drawn.numel()) ** 0.5
    correlation = torch.corrcoef(drawn).triu(1).abs().max()
    assert correlation < 4.5 / 1000**0.5  # the largest of 190
