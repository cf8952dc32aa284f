"""Saved activations in a file: they come back bit for bit, and nothing is left behind."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsam as sp
from sparsam.memory.offload import Offload
from sparsam.memory.recompute import Recompute


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 32), nn.Linear(32, 12)
        self.conv = nn.Conv1d(4, 4, 3)
        self.register_buffer("scale", torch.ones(32, 32))

    def forward(self, x):
        hidden = F.gelu(self.first(x)) @ self.scale
        wide = self.second(hidden.transpose(0, 1)).transpose(0, 1)  # other strides
        return self.conv(F.dropout(wide, 0.2)[:, :4]) * x.new_ones(1).expand(10)


def step(*parts):
    torch.manual_seed(0)
    model = Model()
    session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), list(parts))
    x = torch.randn(6, 5, 12)
    with session.forward():
        loss = model(x).square().mean()
    session.backward(loss)
    return session, [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_losses_and_gradients_are_bit_equal_and_the_folder_is_empty(tmp_path):
    part = Offload(min_bytes=0, folder=tmp_path)
    _, plain = step()
    session, moved = step(part)
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    assert list(tmp_path.iterdir()) == []
    assert session.metrics()["memory.offloaded"] > 6 * 5 * (12 + 32) * 4
    session.detach()
    with session.forward():
        assert session.metrics() == {}


def test_weights_buffers_and_small_tensors_stay(tmp_path):
    part = Offload(min_bytes=6 * 5 * 32 * 4, folder=tmp_path)
    session, _ = step(part)
    # what gelu and the second layer save, each (6, 5, 32)
    assert part.moved_bytes == 2 * 6 * 5 * 32 * 4
    part.min_bytes = 1 << 20
    with session.forward():
        session.model(torch.randn(6, 5, 12))
    assert part.moved_bytes == 0


def test_the_file_is_closed_with_the_graph_and_stays_for_a_second_backward(tmp_path):
    def open_files():
        return [link for link in os.listdir("/proc/self/fd") if str(tmp_path) in _target(link)]

    def _target(link):
        try:
            return os.readlink(f"/proc/self/fd/{link}")
        except OSError:
            return ""

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files are listed in /proc")
    torch.manual_seed(0)
    model = Model()
    session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [Offload(0, tmp_path)])
    with session.forward():
        loss = model(torch.randn(6, 5, 12)).square().mean()
    assert len(open_files()) == 1
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(2 * a, p.grad) for a, p in zip(first, model.parameters(), strict=True))
    del loss
    assert open_files() == []
    with torch.no_grad(), session.forward():
        model(torch.randn(6, 5, 12))
    assert open_files() == []


def test_beside_a_recomputation_only_what_that_keeps_is_moved(tmp_path):
    def run(*parts):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)]
        model = nn.Sequential(*blocks)
        session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), list(parts))
        with session.forward():
            loss = model(torch.randn(5, 16)).sum()
        session.backward(loss)
        return [loss.detach(), *(p.grad for p in model.parameters())]

    part = Offload(1, tmp_path)
    plain, moved = run(), run(part, Recompute(2))
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
    assert part.moved_bytes == 2 * 5 * 16 * 4


def test_what_it_cannot_do_is_said_in_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^Offload: expected a model on an accelerator, got one on the CPU"):
        step(Offload())
    with pytest.raises(ValueError, match=r"^folder: expected a folder that exists, got .*missing\."):
        Offload(folder=tmp_path / "missing")
    with pytest.raises(ValueError, match=r"^min_bytes: expected 0 or more, got -1\.$"):
        Offload(min_bytes=-1)

    session, x = step(Offload(1 << 20, tmp_path))[0], torch.randn(6, 5, 12)
    with session.forward():
        loss = session.model(x).square().mean()
    x.mul_(2)  # which stayed where it is
    with pytest.raises(RuntimeError, match=r"^Offload: expected a \(.*\) tensor as the forward saved it for the back"):
        loss.backward()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"Offload: cannot write \d+ bytes to .*: No space left on device\. Free some"):
        step(Offload(0, tmp_path))
    assert list(tmp_path.iterdir()) == []
