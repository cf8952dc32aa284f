"""Faults of low precision that users of public tools reported, by number, each with its whole kind."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.kernels.formats import FP8, Products
from sparsam.precision.scaler import LossScaler
from sparsam.precision.weights import BF16Weights

NOT_FINITE = [math.inf, -math.inf, math.nan]


def step(session, scale=1.0, size=4):
    with session.forward():
        loss = session.model(torch.ones(2, size)).mean() * scale
    session.backward(loss)
    return session.step()


def test_p1_an_optimiser_without_gradients_is_skipped_and_the_scale_moves():
    """Two optimisers over two halves, one of which no loss reaches; then everything is frozen."""
    used, idle = nn.Linear(4, 1), nn.Linear(4, 1)
    scalers = LossScaler(initial=4.0, interval=1), LossScaler(initial=4.0, interval=1)
    model = nn.ModuleList([used, idle])
    sessions = [
        sp.Session(model, torch.optim.AdamW(half.parameters()), [scaler])
        for half, scaler in zip((used, idle), scalers, strict=True)
    ]
    before = [parameter.clone() for parameter in idle.parameters()]
    for session in sessions:
        session.backward(used(torch.ones(2, 4)).mean())
        assert session.step()
    assert [scaler.scale for scaler in scalers] == [8.0, 8.0]
    assert all(torch.equal(a, b) for a, b in zip(before, idle.parameters(), strict=True))
    model.requires_grad_(False)
    sessions[0].backward(used(torch.ones(2, 4)).mean())
    sessions[0].step()
    assert scalers[0].scale == 16.0


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_p2_not_finite_in_every_step_stops_with_a_name_at_the_floor(bad):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    scaler = LossScaler(initial=2.0**16, floor=0.5, stop_after=30)
    session = sp.Session(model, torch.optim.AdamW(model.parameters()), [scaler])
    for _ in range(29):
        assert not step(session, bad)
    with pytest.raises(RuntimeError, match=r"not in 0.weight in 30 steps in a row, down to a scale of 0.5"):
        step(session, bad)
    assert scaler.scale == 0.5
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert session.applied_steps == 0


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_p2_a_transient_recovers(bad):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    scaler = LossScaler(initial=2.0**10, interval=5)
    session = sp.Session(model, torch.optim.AdamW(model.parameters()), [scaler])
    assert not step(session, bad)
    assert scaler.scale == 2.0**9
    for _ in range(5):
        assert step(session)
    assert scaler.scale == 2.0**10


@pytest.mark.parametrize("value", [40000.0, -40000.0])
def test_p3_entries_of_a_sparse_gradient_overflow_where_they_meet(value):
    """Each is finite in fp16, their sum is not."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    scaler = LossScaler(initial=1.0)
    session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [scaler])
    both = torch.full((2, 2), value, dtype=torch.float16)
    model[0].weight.data = model[0].weight.data.half()
    model[0].weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), both, (4, 2), check_invariants=True)
    assert not scaler.accepts_step()
    model[0].weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 2]]), both, (4, 2), check_invariants=True)
    assert scaler.accepts_step()
    assert session.applied_steps == 0


def test_p7_the_scale_and_its_counters_are_resumed_and_a_checkpoint_does_not_grow():
    def made():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        scaler = LossScaler(initial=2.0**8, interval=3)
        return model, sp.Session(model, torch.optim.AdamW(model.parameters()), [scaler, sp.Precision("bf16")])

    def saved(model, session):
        file = io.BytesIO()
        torch.save([model.state_dict(), session.optimizer.state_dict(), session.state_dict()], file)
        return file

    model, session = made()
    for scale in (1.0, math.inf, 1.0, 1.0):
        step(session, scale)
    file = saved(model, session)
    other, resumed = made()
    file.seek(0)
    for owner, state in zip((other, resumed.optimizer, resumed), torch.load(file, weights_only=True), strict=True):
        owner.load_state_dict(state)
    sizes = set()
    for _ in range(50):
        step(session)
        step(resumed)
        assert session.parts[0].state_dict() == resumed.parts[0].state_dict()
        sizes.add(len(saved(model, session).getvalue()))
    assert max(sizes) - min(sizes) <= 64
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_p8_weights_of_half_precision_are_refused_with_advice(dtype):
    model = nn.Sequential(nn.Linear(4, 4).to(dtype), nn.Linear(4, 1))
    with pytest.raises(
        ValueError, match=r"0.weight: expected float32 weights with a loss scaler, got .*Keep the model"
    ):
        sp.Session(model, torch.optim.AdamW(model.parameters()), [LossScaler()])
    model[0].requires_grad_(False)  # what is not trained may be of any type
    sp.Session(model, torch.optim.AdamW(model[1].parameters()), [LossScaler()])


@pytest.mark.parametrize("first", [True, False])
def test_p4_small_updates_of_bf16_weights_are_not_lost_and_masked_zeros_stay(first):
    """1000 updates of -1e-4 take 1.0 to 0.9; rounded to nearest, none of them ever moves it."""

    def ends_at(parts):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 1, bias=False)).bfloat16()
        nn.init.ones_(model[0].weight)
        sp.sparsify(model, sp.Unstructured(), 0.5, storage="masked")
        session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=1e-4), parts)
        for _ in range(1000):
            session.backward(model[0].weight.sum())
            session.step()
        active = model[0].weight_topology
        assert model[0].weight.dtype == torch.bfloat16
        assert not model[0].weight[~active].any()
        return model[0].weight.detach()[active].float()

    sparse = sp.SparseTraining(sp.static())
    assert (ends_at([sparse]) == 1.0).all()
    ends = ends_at([sparse, BF16Weights()] if first else [BF16Weights(), sparse])
    # a step of 2^-8 with a chance of 1e-4 * 2^8, a thousand times; the mean of 288 such weights, 3 sigma
    spread = 2.0**-8 * math.sqrt(1000 * 0.0256 * 0.9744)
    assert abs(float(ends.mean()) - 0.9) < 3 * spread / math.sqrt(len(ends))


@pytest.mark.parametrize("kind", ["dense", "kernel", "scattered"])
def test_p5_fp8_takes_ragged_widths_and_a_last_batch_of_one(kind):
    """No unit of 8-bit floats takes 7 rows of 712; what comes out stays within the format's own error."""
    layer = dense = sp.ActivatedLinear(712, 1000, activation="none")
    if kind != "dense":
        topology = torch.rand(-(-1000 // 16), -(-712 // 16)) < 0.5
        product = "kernel" if kind == "kernel" else "dense"
        layer = sp.SparseLinear.from_dense(dense, topology, sp.Block(16, 16), product=product)
    for batch in (7, 1):
        x, grad = torch.randn(batch, 712, requires_grad=True), torch.randn(batch, 1000)
        seen = []
        for formats in (None, Products(FP8, FP8, FP8)):
            layer.formats, x.grad = formats, None
            layer.zero_grad()
            y = layer(x)
            y.backward(grad)
            seen.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
        for wide, narrow in zip(*seen, strict=True):
            assert narrow.shape == wide.shape
            # E4M3 and E5M2 err by 2.6 % and 5.3 %
            assert (narrow - wide).norm() <= 0.08 * wide.norm()
