"""The session alone: windows, order of the seams, skipped steps, state, and parts that come and go."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from sparsam import Part, Session, constant, rigl


class Recorder(Part):
    """Writes down every call."""

    def __init__(self, name="a", log=None):
        self.name, self.log, self.count = name, [] if log is None else log, 0

    def attach(self, session):
        self.session = session
        self.log.append(f"{self.name}.attach")

    @contextlib.contextmanager
    def forward(self):
        self.log.append(f"{self.name}.enter")
        yield
        self.log.append(f"{self.name}.exit")

    def before_step(self):
        self.gradient = self.session.model.weight.grad.clone()
        self.log.append(f"{self.name}.before")

    def after_step(self, applied):
        self.count += applied
        self.log.append(f"{self.name}.after({applied})@{self.session.applied_steps}")

    def metrics(self):
        return {f"{self.name}_count": float(self.count)}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def detach(self):
        self.log.append(f"{self.name}.detach")


class Refuses(Part):
    def attach(self, session):
        raise ValueError("not with me")


def training(*parts, **options):
    model = nn.Linear(3, 1, bias=False)
    return model, Session(model, torch.optim.SGD(model.parameters(), lr=0.1), parts, **options)


def test_the_seams_come_in_their_order():
    log = []
    model, session = training(Recorder("a", log), Recorder("b", log))
    with session.forward():
        loss = model(torch.ones(1, 3)).sum()
    session.backward(loss)
    assert session.step()
    assert log == ["a.attach", "b.attach", "a.enter", "b.enter", "b.exit", "a.exit", "a.before", "b.before",
                   "a.after(True)@1", "b.after(True)@1"]  # fmt: skip
    assert model.weight.grad is None
    session.detach()
    assert log[-2:] == ["b.detach", "a.detach"]


def test_a_part_sees_unclipped_gradients_and_the_norm_is_reported():
    part = Recorder()
    model, session = training(part, clip=1.0)
    before = model.weight.detach().clone()
    session.backward(model(torch.full((1, 3), 10.0)).sum())
    session.step()
    assert part.gradient.tolist() == [[10.0] * 3]
    assert session.metrics() == pytest.approx({"a_count": 1.0, "gradient_norm": 300**0.5})
    assert torch.allclose(model.weight.detach(), before - 0.1 * 3**-0.5)


def test_nothing_happens_inside_a_window():
    log = []
    model, session = training(Recorder("a", log), accumulate=3)
    assert not session.step()  # an empty window
    for _ in range(2):
        session.backward(model(torch.ones(1, 3)).sum())
        assert not session.step()
    assert session.applied_steps == 0
    assert log == ["a.attach"]
    session.backward(model(torch.ones(1, 3)).sum())
    assert session.step()
    assert session.applied_steps == 1


@pytest.mark.parametrize("sizes", [(4, 4, 2), (5, 5), (10,), (1, 9), (3, 3, 3, 1)], ids=str)
def test_micro_batches_of_any_size_equal_one_batch(sizes):
    """10 samples as 4 + 4 + 2: the mean of means is not the mean, and a window cut short is stepped all the same."""
    part = Recorder()
    model, session = training(part, accumulate=4)
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    wanted = torch.autograd.grad((model(x) - y).square().mean(), model.weight)[0]
    for a, b in zip(x.split(list(sizes)), y.split(list(sizes)), strict=True):
        session.backward((model(a) - b).square().mean(), samples=len(a))
    assert session.step(last=True)
    torch.testing.assert_close(part.gradient, wanted)


def test_without_samples_every_micro_batch_weighs_the_same():
    part = Recorder()
    model, session = training(part, accumulate=3)
    for scale in (1.0, 2.0):
        session.backward(scale * model(torch.ones(1, 3)).sum())
    session.step(last=True)
    assert part.gradient.tolist() == [[1.5] * 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_skipped(bad):
    """With clipping, such a step changes no weight, counts nowhere, and leaves no gradient to the next one."""
    log = []
    model, session = training(Recorder("a", log), clip=1.0)
    before = model.weight.detach().clone()
    session.backward((model(torch.ones(1, 3)) * bad).sum())
    assert not session.step()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None
    assert session.applied_steps == 0
    assert log[-1] == "a.after(False)@0"
    session.backward(model(torch.ones(1, 3)).sum())
    assert session.step()
    assert torch.isfinite(model.weight).all()


def test_in_a_loop_of_others_before_step_comes_once_and_only_applied_steps_count():
    part = Recorder()
    model, session = training(part)
    model(torch.ones(1, 3)).sum().backward()
    for _ in range(2):
        session.before_step()
    session.optimizer.step()
    session.after_step()
    session.before_step()
    session.after_step(applied=False)
    assert part.log == ["a.attach", "a.before", "a.after(True)@1", "a.before", "a.after(False)@1"]


def test_state_goes_round_and_is_plain(tmp_path):
    model, session = training(Recorder())
    for _ in range(3):
        session.backward(model(torch.ones(1, 3)).sum())
        session.step()
    torch.save(session.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    _, other = training(Recorder())
    other.load_state_dict(state)
    assert other.applied_steps == 3
    assert other.state_dict() == state


def test_a_session_that_could_not_be_built_holds_nothing():
    log = []
    with pytest.raises(ValueError, match="not with me"):
        training(Recorder("a", log), Recorder("b", log), Refuses())
    assert log == ["a.attach", "b.attach", "b.detach", "a.detach"]


def test_a_part_is_a_set_of_seams_that_do_nothing():
    part = Part()
    model, session = training(part)
    with session.forward():
        loss = model(torch.ones(1, 3)).sum()
    session.backward(loss)
    assert session.step()
    assert session.metrics() == {}
    session.load_state_dict(session.state_dict())
    session.rewired(None)
    session.detach()


def full_window():
    model, session = training()
    for _ in range(2):
        session.backward(model(torch.ones(1, 3)).sum())


def mixture():
    model, session = training(accumulate=2)
    session.backward(model(torch.ones(1, 3)).sum(), samples=1)
    session.backward(model(torch.ones(1, 3)).sum())


def save_in_a_window():
    model, session = training(accumulate=2)
    session.backward(model(torch.ones(1, 3)).sum())
    session.state_dict()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: training(accumulate=0), "accumulate: expected at least 1 backward in a window, got 0"),
        (lambda: training(clip=0.0), "clip: expected a norm > 0 or None, got 0.0"),
        (lambda: training(clip=float("nan")), "clip: expected a norm > 0 or None, got nan"),
        (
            lambda: training(rigl()),
            r"parts: expected parts such as SparseTraining\(rigl\(\)\), got a DropGrow. A method goes into SparseTr",
        ),
        (lambda: training(Recorder), "parts: expected parts such as .*, got the class Recorder itself"),
        (
            lambda: training(constant(1.0)),
            "parts: expected parts .*, got a function. .* a schedule .* into LearningRate",
        ),
        (
            lambda: Session(nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), Part()),
            r"parts: expected a list of parts, got a Part. Write \[...\] around it",
        ),
        (
            lambda: Session(nn.Linear(1, 1), [Part()]),
            "optimizer: expected a torch.optim.Optimizer, got a list",
        ),
        (full_window, r"backward: the window of 1 is full. Call step\(\) first"),
        (mixture, "samples: expected for every backward of a window or for none, got a mixture"),
        (
            lambda: training()[1].backward(torch.ones(()), samples=0),
            "samples: expected how many samples the loss is the mean of, > 0, got 0",
        ),
        (save_in_a_window, "state_dict: 1 of 2 backwards of a window are done"),
        (
            lambda: training()[1].load_state_dict({"version": 2, "applied_steps": 0, "parts": []}),
            "session state: expected version 1, got 2",
        ),
        (
            lambda: training()[1].load_state_dict({"version": 1, "applied_steps": 0, "parts": [{}]}),
            "session state: expected 0 parts, got 1. Attach the same parts",
        ),
    ],
)
def test_what_is_refused(act, message):
    with pytest.raises(ValueError, match=message):
        act()


def test_a_resumed_session_goes_on_with_the_seed_it_began_with():
    model = nn.Linear(2, 2)
    first = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=7)
    second = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), seed=0)
    second.load_state_dict(first.state_dict())
    assert second.seed == 7


def test_a_loss_without_a_graph_is_refused_unless_everything_is_frozen():
    model, session = training()
    with pytest.raises(ValueError, match="backward: expected a loss that depends on trained weights, got one without"):
        session.backward(torch.tensor(1.0))
    model.requires_grad_(False)
    session.backward(torch.tensor(1.0))
    assert session.step()
