"""The breakdown of a step: parts by operator, the optimiser by its frame, a quiet terminal."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from sparsam.kernels.index import build_index
from sparsam.kernels.norm import add_layer_norm
from sparsam.kernels.ops import block_linear
from sparsam.measure.breakdown import PARTS, step_breakdown


def _step(fused=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    x, y = torch.randn(64, 16), torch.arange(64) % 8

    def step():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("fused", [False, True])
def test_parts_of_a_small_step(fused):
    parts = step_breakdown(_step(fused))
    assert {"dense products", "activation", "norms", "loss", "optimiser"} <= set(parts) <= set(PARTS)
    assert all(figure.unit == "ms" and figure.kind == "measured" and figure.value > 0 for figure in parts.values())
    assert list(parts) == sorted(parts, key=lambda name: -parts[name].value)


def test_block_sparse_products_are_no_interpreter_s_time():
    """The forward of an own operator is not booked under the operator's name: without a rule it would vanish."""
    index = build_index(torch.arange(4, dtype=torch.int32), torch.arange(4, dtype=torch.int32), 4, 4)
    values = torch.randn(4, 32, 32, requires_grad=True)
    x = torch.randn(4096, 128)
    forward = step_breakdown(lambda: block_linear(x, values, index, 128), steps=5)
    assert next(iter(forward)) == "block-sparse products"
    parts = step_breakdown(lambda: block_linear(x, values, index, 128).sum().backward(), steps=5)
    assert "block-sparse products" in parts


def test_fused_norms_are_norms():
    x, branch = torch.randn(512, 512, requires_grad=True), torch.randn(512, 512, requires_grad=True)
    first = step_breakdown(lambda: add_layer_norm(x, None)[1].sum().backward(), steps=5)
    later = step_breakdown(lambda: add_layer_norm(x, branch)[1].sum().backward(), steps=5)
    assert "norms" in first
    assert "norms" in later
    assert "norms" in step_breakdown(lambda: add_layer_norm(x, branch), steps=5)


def test_steps_are_counted():
    calls = []
    step_breakdown(lambda: calls.append(torch.ones(3).sum()), steps=3, warmup=2)
    assert len(calls) == 5


def test_the_profiler_stays_quiet_but_nothing_of_others_is_lost(capfd):
    step_breakdown(lambda: os.write(2, b"from the step\n"), steps=1, warmup=0)
    assert capfd.readouterr().err == "from the step\n"


def test_an_error_in_the_step_comes_through():
    def fails():
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        step_breakdown(fails, warmup=0)
    assert step_breakdown(_step(), steps=1)


def test_message():
    with pytest.raises(ValueError, match="step_breakdown: expected at least 1 step, got 0"):
        step_breakdown(lambda: None, steps=0)
