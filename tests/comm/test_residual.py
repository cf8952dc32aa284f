"""Error feedback: what was sent and what is kept add up to what was wanted, through rewires, skips and other ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.comm.codecs import Int8Rows
from sparsam.comm.residual import Residuals, old_ranks
from sparsam.sparse.weights import sparse_weights


def residuals_of(**values):
    made = Residuals()
    for name, value in values.items():
        wanted = torch.as_tensor(value)
        made.keep(name, wanted, torch.zeros_like(wanted))
    made.settle(True)
    return made


def kept(residuals):
    return residuals.state_dict()["residuals"]


def test_sent_and_residual_are_gradient_and_old_residual():
    old = torch.tensor([[0.5, -0.25]])
    residuals = residuals_of(weight=old)
    gradient = torch.tensor([[1.0, 2.0]])
    residuals.add("weight", gradient)
    assert gradient.tolist() == [[1.5, 1.75]]
    sent = torch.tensor([[1.0, 2.0]])
    residuals.keep("weight", gradient, sent)
    assert kept(residuals)["weight"].tolist() == [[0.5, -0.25]]
    unknown = torch.ones(3)
    residuals.add("other", unknown)
    assert unknown.tolist() == [1.0, 1.0, 1.0]


def test_half_gradients_have_float32_residuals():
    residuals = Residuals()
    wanted = torch.full((2,), 1.0, dtype=torch.bfloat16)
    residuals.keep("weight", wanted, torch.full((2,), 0.999))
    assert kept(residuals)["weight"].dtype == torch.float32
    residuals.add("weight", wanted)
    assert wanted.dtype == torch.bfloat16


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_a_step_that_is_not_finite_leaves_the_residual(value):
    residuals = residuals_of(weight=[1.0, 2.0])
    broken = torch.tensor([0.0, value])
    for wanted, sent in ((broken, torch.zeros(2)), (torch.zeros(2), broken), (broken, broken)):
        residuals.keep("weight", wanted, sent)
        residuals.keep("new", wanted, sent)
    assert kept(residuals)["weight"].tolist() == [1.0, 2.0]
    assert "new" not in kept(residuals)


def test_a_skipped_step_takes_everything_back():
    """The inf may have been another rank's, or in another bucket: then these values were finite and were kept."""
    residuals = residuals_of(a=[1.0], b=[2.0])
    for value in (5.0, 6.0):
        residuals.keep("a", torch.tensor([value]), torch.zeros(1))
    residuals.keep("new", torch.tensor([7.0]), torch.zeros(1))
    residuals.settle(False)
    assert {name: one.tolist() for name, one in kept(residuals).items()} == {"a": [1.0], "b": [2.0]}
    residuals.keep("a", torch.tensor([8.0]), torch.zeros(1))
    residuals.settle(True)
    residuals.settle(False)
    assert kept(residuals)["a"].tolist() == [8.0]


def test_clearing_is_by_entry_and_broadcasts():
    residuals = residuals_of(values=torch.ones(3, 2, 2))
    residuals.clear("values", torch.tensor([False, True, False])[:, None, None])
    assert kept(residuals)["values"].sum((1, 2)).tolist() == [4.0, 0.0, 4.0]
    residuals.clear("never sent", torch.ones(1, dtype=torch.bool))


@pytest.mark.parametrize("storage", ["compact", "masked"])
def test_a_rewire_forgets_units_that_went_and_came(storage):
    model = nn.Sequential(nn.Linear(8, 8))
    sp.sparsify(model, sp.Block(4, 4), 0.5, storage=storage)
    (weight,) = sparse_weights(model).values()
    (name,) = (name for name, parameter in model.named_parameters() if parameter is weight.parameter)
    residuals = residuals_of(**{name: torch.ones_like(weight.parameter)})
    topology = weight.topology.clone()
    went, came = topology.nonzero()[0], (~topology).nonzero()[0]
    topology[tuple(went)], topology[tuple(came)] = False, True
    event = weight.apply(topology)
    residuals.rewired(event)
    residual = kept(residuals)[name]
    assert torch.equal(residual == 0, event.new_entries.expand_as(residual))
    assert residual.sum() == residual.numel() - (16 if storage == "compact" else 32)


def test_a_rewire_finds_every_kind_of_name():
    model = nn.Module()
    model.values = nn.Linear(8, 8)  # called as the parameter of a compact layer is
    model.attention, model.rows, model.fc = nn.MultiheadAttention(4, 1), nn.LSTM(4, 4), nn.Linear(4, 4)
    sp.sparsify(model, sp.Block(4, 4), 0.5, include=["values"], storage="compact")
    sp.sparsify(model, sp.Unstructured(), 0.5, exclude=["values"])
    parameters = dict(model.named_parameters())
    residuals = residuals_of(**{name: torch.ones_like(parameter) for name, parameter in parameters.items()})
    weights = sparse_weights(model)
    assert {"values", "attention.in_proj_weight", "rows.weight_hh_l0", "fc"} <= set(weights)
    for weight in weights.values():
        residuals.rewired(weight.apply(~weight.topology))
    sparse = {id(weight.parameter) for weight in weights.values()}
    cleared = {name for name, residual in kept(residuals).items() if not residual.any()}
    assert cleared == {name for name, parameter in parameters.items() if id(parameter) in sparse}


def test_a_rewire_of_a_parameter_that_is_elsewhere_takes_its_name():
    module = nn.Linear(2, 2)
    entries = torch.ones(2, 2, dtype=torch.bool)
    event = sp.Rewire("fc", module, nn.Parameter(torch.ones(2, 2)), entries, entries, entries, entries)
    residuals = residuals_of(**{"tied.weight": torch.ones(2, 2)})
    with pytest.raises(ValueError, match=r"fc: expected the rewired parameter in its module, found another"):
        residuals.rewired(event)
    residuals.rewired(event, "tied.weight")
    assert residuals.norm() == 0.0


def test_bytes_and_norm():
    residuals = residuals_of(a=torch.full((2, 2), 2.0), b=torch.full((9,), 1.0))
    assert residuals.nbytes == 4 * 13
    assert residuals.norm() == pytest.approx(5.0)
    assert Residuals().norm() == Residuals().nbytes == 0


def test_state_is_taken_back_bit_by_bit_and_shares_no_memory():
    residuals = residuals_of(weight=torch.randn(5))
    state = residuals.state_dict()
    loaded = Residuals()
    loaded.load_state_dict(state, 3, 3)
    loaded.clear("weight", torch.ones(5, dtype=torch.bool))
    assert torch.equal(state["residuals"]["weight"], kept(residuals)["weight"])
    loaded.load_state_dict(state)
    assert torch.equal(kept(loaded)["weight"], kept(residuals)["weight"])


@pytest.mark.parametrize("then", [1, 2, 3, 4])
@pytest.mark.parametrize("now", [1, 2, 3, 5])
def test_another_number_of_ranks_keeps_the_mean(then, now):
    states = [residuals_of(weight=torch.randn(6)).state_dict() for _ in range(then)]
    mean = sum(state["residuals"]["weight"] for state in states) / then
    total, taken = torch.zeros(6), []
    for rank in range(now):
        mine = old_ranks(rank, then, now)
        taken += mine
        residuals = Residuals()
        residuals.load_state_dict([states[old] for old in mine], then, now)
        total += kept(residuals).get("weight", torch.zeros(6))
    assert sorted(taken) == list(range(then))
    torch.testing.assert_close(total / now, mean)


def test_states_that_do_not_fit_are_refused():
    state = residuals_of(weight=[1.0]).state_dict()
    with pytest.raises(ValueError, match=r"expected 2 of the states of 4 ranks for each of 2, got 1\. Give those"):
        Residuals().load_state_dict(state, 4, 2)
    with pytest.raises(ValueError, match=r"expected 0 or 1 of the states of 2 ranks for each of 3, got 2"):
        Residuals().load_state_dict([state, state], 2, 3)
    with pytest.raises(ValueError, match="expected version 1, got 2"):
        Residuals().load_state_dict({**state, "version": 2})
    with pytest.raises(ValueError, match=r"weight: expected a gradient of \(1,\) as its residual has, got \(2,\)"):
        residuals_of(weight=[1.0]).add("weight", torch.ones(2))


def test_a_small_gradient_gets_through_in_the_end():
    """Beside a large one it is rounded to zero every single time; the residual grows until it is not."""
    codec, residuals, sent = Int8Rows(), Residuals(), torch.zeros(2)
    for _ in range(100):
        gradient = torch.tensor([127.0, 0.1])
        residuals.add("weight", gradient)
        decoded = codec.decode(codec.encode(gradient), 2)
        residuals.keep("weight", gradient, decoded)
        sent += decoded
    assert codec.decode(codec.encode(torch.tensor([127.0, 0.1])), 2)[1] == 0
    assert sent[1] == pytest.approx(10.0, abs=0.6)
