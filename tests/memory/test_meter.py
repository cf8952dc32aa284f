"""What the meter counts, against sums done by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.measure.memory import peak_rss_bytes, resident_bytes
from sparsam.memory.meter import MemoryMeter
from sparsam.memory.recompute import Recompute
from sparsam.session import Part


def stack():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)])


def step(session, rows=5):
    with session.forward():
        loss = session.model(torch.ones(rows, 8)).square().mean()
    session.backward(loss)
    session.step()


def session_of(model, *parts):
    return sp.Session(model, torch.optim.AdamW(model.parameters(), lr=0.1), list(parts))


class Compressor(Part):
    residuals = SimpleNamespace(nbytes=77)


def test_a_step_by_hand():
    model = stack()
    meter = MemoryMeter(own_bytes=1 << 20)
    session = session_of(model, Compressor(), meter)
    assert session.metrics() == {}
    step(session)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    figures = meter.figures()
    # inputs of both layers and the output of tanh, which is the second one's input; then of the square, and no weight
    activations = 3 * (5 * 8 * 4 + 5 * 32 * 4) + 5 * 8 * 4
    assert {name: figure.value for name, figure in figures.items() if not name.startswith("peak")} == {
        "parameters": weights,
        "buffers": 0,
        "gradients": weights,
        "optimizer": 2 * weights + 4 * 12,  # and a step counter for each
        "residuals": 77,
        "activations": activations,
    }
    assert all((figure.unit, figure.kind) == ("B", "measured") for figure in figures.values())
    assert figures["peak"].value + (1 << 20) == figures["peak_with_interpreter"].value <= peak_rss_bytes()
    assert session.metrics()["memory.activations"] == activations
    assert "fragmentation" not in figures
    assert "fragmentation  n/a" in str(meter)
    session.detach()
    assert meter.own_bytes == 1 << 20


def test_recomputed_activations_are_fewer():
    found = {}
    for parts in ([], [Recompute(3)]):
        meter = MemoryMeter()
        session = session_of(stack(), *parts, meter)
        step(session)
        found[len(parts)] = session.metrics()["memory.activations"]
    assert found == {0: 3 * (5 * 8 * 4 + 5 * 32 * 4) + 5 * 8 * 4, 1: 2 * 5 * 8 * 4}


def test_it_looks_at_every_so_many_steps_and_at_the_largest_batch():
    meter = MemoryMeter(every=2)
    session = session_of(stack(), meter)
    step(session, 4)
    small = session.metrics()["memory.activations"]
    step(session, 8)
    assert session.metrics()["memory.activations"] == small
    step(session, 8)
    assert session.metrics()["memory.activations"] == 2 * small
    with torch.no_grad(), session.forward():
        session.model(torch.ones(100, 8))
    assert session.metrics()["memory.activations"] == 2 * small
    step(session, 4)
    step(session, 4)
    assert session.metrics()["memory.activations"] == small


def test_what_the_process_held_before_is_measured_or_given():
    model = stack()
    meter = MemoryMeter()
    session_of(model, meter)
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert 0 < meter.own_bytes <= resident_bytes() - held + (64 << 20)


def test_its_own_errors():
    with pytest.raises(ValueError, match=r"^every: expected a number of steps of at least 1, got 0\.$"):
        MemoryMeter(every=0)
    session = session_of(stack(), MemoryMeter())
    x = torch.ones(5, 8)
    with session.forward():
        loss = session.model(x).sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match=r"^MemoryMeter: expected a \(5, 8\) tensor as the forward saved it"):
        session.backward(loss)
