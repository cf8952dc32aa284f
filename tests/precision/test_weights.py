"""Weights in bfloat16 alone: what a step does to bits, moments and zeros; resumed, on two ranks, taken off again."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

import sparsam as sp
from ranks import on_two_ranks
from sparsam.precision.weights import BF16Weights

OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01),
}


def made(optimizer="adamw", seed=0, parts=(), **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1)).bfloat16()
    return sp.Session(model, OPTIMIZERS[optimizer](model), [*parts, BF16Weights()], seed=seed, **options)


def step(session, number=0, scale=1.0, dtype=torch.bfloat16):
    """One batch, a function of its number."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
    with session.forward():
        loss = (session.model(x).float() - 1).square().mean() * scale
    session.backward(loss)
    return session.step()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_is_that_of_float32_rounded_to_a_neighbour(optimizer):

    class Clipped(sp.Part):
        def after_step(self, applied):
            for parameter, exact in zip(session.model.parameters(), plain.parameters(), strict=True):
                exact.grad = parameter.grad.float()

    session = made(optimizer, parts=[Clipped()], clip=0.5)
    plain = copy.deepcopy(session.model).float()
    theirs = OPTIMIZERS[optimizer](plain)
    step(session)
    theirs.step()
    for ours, exact in zip(session.model.parameters(), plain.parameters(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert ((ours.float() - exact).abs() <= exact.abs() * 2.0**-7).all()
        for key, value in session.optimizer.state[ours].items():
            expected = theirs.state[exact][key]
            assert not isinstance(value, torch.Tensor) or value.dtype == torch.float32
            torch.testing.assert_close(value, expected)


def test_the_mean_of_many_steps_is_right():
    """1000 weights of 1, one step of 1/1024: a quarter of the quantum below 1, so a quarter of them goes down."""
    weight = nn.Parameter(torch.ones(4000, dtype=torch.bfloat16))
    model = nn.ParameterList([weight])
    session = sp.Session(model, torch.optim.SGD([weight], lr=2.0**-10), [BF16Weights()])
    session.backward(weight.sum())
    session.step()
    assert set(weight.tolist()) == {1.0, 1 - 2.0**-8}
    assert abs(float((weight < 1).float().mean()) - 0.25) < 3 * math.sqrt(0.25 * 0.75 / 4000)


def test_each_weight_step_and_seed_draws_its_own_numbers():
    def drawn(seed, steps=1):
        both = nn.ParameterList([torch.ones(64, dtype=torch.bfloat16) for _ in range(2)])
        session = sp.Session(both, torch.optim.SGD(both.parameters(), lr=2.0**-9), [BF16Weights()], seed=seed)
        found = []
        for _ in range(steps):
            with torch.no_grad():
                for one in both:
                    one.fill_(1.0)
            session.backward(sum(one.sum() for one in both))
            session.step()
            found += [tuple(one.tolist()) for one in both]
        return found

    found = drawn(0, steps=3)
    assert len(set(found)) == 6
    assert drawn(0) == found[:2]
    assert set(drawn(1)).isdisjoint(found)


def test_a_skipped_step_and_a_step_of_no_length_change_no_bit():
    session = made(clip=1.0)
    step(session)
    before, state = weights(session.model), copy.deepcopy(session.optimizer.state_dict())
    assert not step(session, 1, math.nan)
    assert equal(before, weights(session.model))
    after = session.optimizer.state_dict()["state"]
    assert all(equal(state["state"][key].values(), after[key].values()) for key in after)
    session.optimizer.param_groups[0].update(lr=0.0)
    assert step(session, 2)
    assert equal(before, weights(session.model))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_has_the_same_bits(optimizer):
    session = made(optimizer, seed=11)
    for number in range(3):
        step(session, number)
    saved = copy.deepcopy([one.state_dict() for one in (session.model, session.optimizer, session)])
    resumed = made(optimizer, seed=5)  # the seed is part of the state
    for owner, state in zip((resumed.model, resumed.optimizer, resumed), saved, strict=True):
        owner.load_state_dict(state)
    assert moment_types(resumed) == {torch.float32}
    for number in range(3, 8):
        step(session, number)
        step(resumed, number)
    assert equal(weights(session.model), weights(resumed.model))


def moment_types(session):
    states = session.optimizer.state.values()
    return {value.dtype for state in states for value in state.values() if isinstance(value, torch.Tensor)}


def test_moments_that_were_rounded_on_the_way_are_refused():
    session = made()
    step(session)
    state = session.state_dict()
    model = copy.deepcopy(session.model)
    optimizer = OPTIMIZERS["adamw"](model)
    optimizer.load_state_dict(session.optimizer.state_dict())
    late = sp.Session(model, optimizer, [BF16Weights()])
    with pytest.raises(ValueError, match=r"loaded after the session was built, got moments that .* Build the session"):
        late.load_state_dict(state)
    optimizer.load_state_dict(session.optimizer.state_dict())
    late.load_state_dict(state)
    assert torch.equal(
        optimizer.state[model[0].weight]["exp_avg"], session.optimizer.state[session.model[0].weight]["exp_avg"]
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_after_detach_a_plain_loop_goes_on(optimizer):
    session = made(optimizer)
    model, theirs = session.model, session.optimizer
    held = list(theirs.param_groups[0]["params"])
    step(session)
    session.detach()
    assert all(a is b for a, b in zip(held, theirs.param_groups[0]["params"], strict=True))
    assert set(theirs.state) == set(held)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).mean().backward()
    theirs.step()
    fresh = sp.Session(model, theirs, [])  # no hook is left
    assert step(fresh)
    moments = [value for state in theirs.state.values() for key, value in state.items() if key != "step"]
    assert {value.dtype for value in moments if isinstance(value, torch.Tensor)} == {torch.bfloat16}


def test_float32_weights_are_converted_by_glob_and_given_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    session = sp.Session(model, optimizer, [BF16Weights(["0.*", "2.*"]), sp.Precision("bf16")])
    for number in range(3):
        assert step(session, number, dtype=torch.float32)
    low = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.bfloat16}
    assert low == {"0.weight", "0.bias", "2.weight", "2.bias"}
    session.detach()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    assert step(sp.Session(model, optimizer, []), dtype=torch.float32)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_beside_sparse_training_in_any_order(first, storage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).bfloat16()
    sp.sparsify(model, sp.Block(16, 16), 0.5, storage=storage)
    parts = [sp.SparseTraining(sp.rigl(every=2, until=20)), BF16Weights()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = sp.Session(model, optimizer, parts if first else parts[::-1])
    for number in range(6):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number)).bfloat16()
        with session.forward():
            loss = (model(x).float() - 1).square().mean()
        session.backward(loss)
        assert session.step()
        if storage == "masked":
            active = sp.Block(16, 16).expand(model[0].weight_topology, (32, 32))
            assert not model[0].weight[~active].any()
            assert not optimizer.state[model[0].weight]["exp_avg"][~active].any()
    assert session.metrics()["topology_updates"] == 3
    assert moment_types(session) == {torch.float32}


def test_a_step_that_breaks_off_leaves_the_weights_where_they_were():
    session = made("sgd")
    step(session)
    before = weights(session.model)
    session.optimizer.param_groups[0]["lr"] = "a tenth"
    with pytest.raises(TypeError):
        step(session, 1)
    assert equal(before, weights(session.model))
    session.optimizer.param_groups[0]["lr"] = 0.1
    held = list(session.model.parameters())
    session.after_step(False)
    session.optimizer.step()
    assert all(a is b for a, b in zip(held, session.optimizer.param_groups[0]["params"], strict=True))
    session.optimizer.param_groups[0]["lr"] = "a tenth"
    with pytest.raises(TypeError):
        session.optimizer.step()
    theirs = session.optimizer
    session.detach()
    assert all(a is b for a, b in zip(held, theirs.param_groups[0]["params"], strict=True))


def test_ranks_agree_and_ddp_goes_on_averaging(tmp_path):
    on_two_ranks(
        """
from sparsam.precision.weights import BF16Weights
torch.manual_seed(rank)
model = DDP(mlp().bfloat16())
session = sp.Session(model, torch.optim.AdamW(model.parameters(), lr=0.01), [BF16Weights()], seed=rank)
for number in range(4):
    assert step(session, torch.randn(4, 13).bfloat16())
    a, b = gathered(weights(model))
    assert a == b
plain = mlp()
try:
    model = DDP(plain)
    sp.Session(model, torch.optim.AdamW(model.parameters()), [BF16Weights(["*.weight"])])
except ValueError as error:
    assert "not yet in DistributedDataParallel" in str(error), error
else:
    raise AssertionError
""",
        tmp_path,
    )


def test_what_is_refused():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parts, message in (
        ([BF16Weights()], r"expected bfloat16 weights in the optimiser, got none. Call model.bfloat16\(\) first"),
        ([BF16Weights(["0.wieght"])], r"convert: '0.wieght' matches no weight. Did you mean '0.weight'\?"),
        ([BF16Weights(["*"]), BF16Weights(["*"])], "expected one in a session, got several. Join"),
    ):
        with pytest.raises(ValueError, match=message):
            sp.Session(model, optimizer, parts)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match=r"convert: expected a list of globs, got the string '\*'. Write"):
        BF16Weights("*")
    sp.Session(model, optimizer, [BF16Weights(["*"])])
    with pytest.raises(ValueError, match=r"expected optimizer.step\(\) without a closure, got one"):
        optimizer.step(lambda: 1.0)
