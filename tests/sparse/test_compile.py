"""A compiled sparse model: one graph without breaks, and a topology that changes without a recompile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import sparsam as sp


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_recompile_over_100_rewires_and_at_most_two_graphs(precision):
    """Update steps carry a probe and may have a graph of their own; nothing else may."""
    torch._dynamo.reset()
    counters.clear()
    graphs = CompileCounterWithBackend("aot_eager")
    model = nn.Sequential(sp.ActivatedLinear(16, 32, activation="gelu"), nn.LayerNorm(32), nn.Linear(32, 8))
    plain = sp.sparsify(model, sp.Block(8, 8), 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = sp.Session(
        model, optimizer, [sp.SparseTraining(sp.rigl(every=2, fraction=0.5)), sp.Precision(precision)], clip=1.0
    )
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    x = torch.randn(12, 16)
    for _ in range(200):
        with session.forward():
            loss = compiled(x).float().square().mean()
        session.backward(loss)
        session.step()
    assert session.metrics()["topology_updates"] == 100
    assert graphs.frame_count <= 2
    assert not counters["graph_break"]
    assert plain.density == 0.5
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_a_wrapped_model_resumes_as_a_plain_one():
    """Names do not depend on torch.compile: the session's state fits, and the same units grow."""
    topologies = []
    for wrap in (lambda model: model, lambda model: torch.compile(model, backend="eager")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
        sp.sparsify(model, sp.Block(4, 4), 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = sp.Session(wrap(model), optimizer, [sp.SparseTraining(sp.set_(every=1))])
        with session.forward():
            loss = model(torch.ones(2, 16)).square().mean()
        session.backward(loss)
        session.step()
        topologies.append(session.state_dict())
    assert str(topologies[0]) == str(topologies[1])
