"""The moving average of a sparse model: it follows the weights where they go, and what is pruned is zero in it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import sparsam as sp
from sparsam.sparse.weights import sparse_weights

STORAGES = [(sp.Block(4, 4), "compact"), (sp.Block(4, 4), "masked"), (sp.Unstructured(), "masked")]
every_storage = pytest.mark.parametrize(("pattern", "storage"), STORAGES, ids=str)


def training(pattern, storage, method=None, decay=0.5, average_first=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 22), nn.Tanh(), nn.Linear(22, 9))
    sp.sparsify(model, pattern, 0.5, storage=storage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    average = sp.MovingAverage(decay)
    parts = [sp.SparseTraining(method or sp.set_(every=2, fraction=0.5)), average]
    return model, average, sp.Session(model, optimizer, parts[::-1] if average_first else parts, clip=1.0)


def run(session, steps, scale=1.0):
    for seed in range(steps):
        x = torch.randn(8, 13, generator=torch.Generator().manual_seed(seed))
        with session.forward():
            loss = (session.model(x) - 1).square().mean() * scale
        session.backward(loss)
        session.step()


def dense(model):
    return {
        name: module.weight.detach().clone() for name, module in model.named_children() if hasattr(module, "weight")
    }


@every_storage
def test_by_hand_without_rewires(pattern, storage):
    model, average, session = training(pattern, storage, sp.static(), decay=0.75)
    wanted = dense(model)
    for _ in range(3):
        run(session, 1)
        wanted = {name: 0.75 * wanted[name] + 0.25 * weight for name, weight in dense(model).items()}
    for name, weight in dense(average.model).items():
        torch.testing.assert_close(weight, wanted[name])
    assert not average.model.training
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


@every_storage
@pytest.mark.parametrize("average_first", [False, True], ids=["after", "before"])
def test_what_is_pruned_is_zero_in_the_average_too_and_kept_weights_are_averaged_as_themselves(
    pattern, storage, average_first
):
    """A slot holds another block after a rewire; an average that does not know would mix the two."""
    model, average, session = training(pattern, storage, average_first=average_first)
    wanted = dense(model)
    for _ in range(6):
        before = {name: weight.topology.clone() for name, weight in sparse_weights(model).items()}
        run(session, 1)
        for name, weight in sparse_weights(model).items():
            now = dense(model)[name]
            active = weight.pattern.expand(weight.topology, weight.dense_shape)
            stayed = weight.pattern.expand(weight.topology & before[name], weight.dense_shape)
            wanted[name] = torch.where(stayed, (wanted[name] + now) / 2, now)
            found = dense(average.model)[name]
            assert torch.equal(sparse_weights(average.model)[name].topology, weight.topology)
            assert not found[~active].any()
            torch.testing.assert_close(found[stayed], wanted[name][stayed])
            wanted[name] = found


@pytest.mark.parametrize("average_first", [False, True], ids=["after", "before"])
def test_weights_that_train_on_behind_zeros_are_zero_in_the_average(average_first):
    """SR-STE lets the optimiser see them, and a part that comes before it sees them too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 8))
    sp.sparsify(model, sp.NM(2, 4), 0.5)
    average, parts = sp.MovingAverage(0.5), [sp.SparseTraining(sp.sr_ste(every=2))]
    parts.insert(0 if average_first else 1, average)
    session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), parts)
    for _ in range(5):
        run(session, 1)
        for layer in average.model[::2]:
            assert not layer.weight[~layer.weight_topology].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_storage
def test_in_half_precision_small_steps_add_up(pattern, storage, dtype, tmp_path):
    """A thousandth of the way is less than half a unit in the last place of a bf16 weight: rounded, nothing moves."""
    model = nn.Sequential(nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 8)).to(dtype)
    sp.sparsify(model, pattern, 0.5, storage=storage)
    with torch.no_grad():
        model[0].bias.zero_()
    sessions = []
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        sessions.append(sp.Session(model, optimizer, [sp.SparseTraining(sp.static()), sp.MovingAverage(0.999)]))
    first, second = sessions
    with torch.no_grad():
        model[0].bias.fill_(1.0)
    for step in range(1000):
        first.before_step()
        first.after_step()
        if step == 499:
            torch.save(first.state_dict(), tmp_path / "state")
            second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        elif step > 499:
            second.after_step()
    for session in sessions:
        bias = session.parts[1].model[0].bias
        assert bias.dtype == dtype
        assert bias.float().mean() == pytest.approx(1 - 0.999**1000, abs=0.01)


def test_a_state_stays_what_it_was():
    _, average, session = training(sp.Unstructured(), "masked")
    run(session, 1)
    state = session.state_dict()
    before = copy.deepcopy(state)
    run(session, 1)
    session.load_state_dict(state | {"parts": [session.state_dict()["parts"][0], state["parts"][1]]})
    for name, tensor in average.model.state_dict().items():
        assert torch.equal(tensor, before["parts"][1]["model"][name])


def test_a_skipped_step_is_no_step():
    _, average, session = training(*STORAGES[0])
    before = dense(average.model)
    run(session, 1, scale=float("nan"))
    assert all(torch.equal(weight, before[name]) for name, weight in dense(average.model).items())


@every_storage
def test_it_resumes_bit_for_bit(pattern, storage, tmp_path):
    model, average, session = training(pattern, storage)
    run(session, 5)
    torch.save([model.state_dict(), session.optimizer.state_dict(), session.state_dict()], tmp_path / "state.pt")
    other, resumed_average, resumed = training(pattern, storage)
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    for owner, state in zip((other, resumed.optimizer, resumed), states, strict=True):
        owner.load_state_dict(state)
    for one in (session, resumed):
        run(one, 4)
    for name, tensor in average.model.state_dict().items():
        assert torch.equal(tensor, resumed_average.model.state_dict()[name])


def test_it_can_be_densified_and_leaves_the_model_alone():
    model, average, session = training(*STORAGES[0])
    run(session, 4)
    weights = dense(average.model)
    twin = copy.deepcopy(average.model)
    sp.densify(twin)
    assert all(torch.equal(weight, weights[name]) for name, weight in dense(twin).items())
    session.detach()
    sp.densify(model)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_outside_its_range_is_refused(decay):
    with pytest.raises(ValueError, match=r"MovingAverage: expected a decay in \[0, 1\), got"):
        sp.MovingAverage(decay)
