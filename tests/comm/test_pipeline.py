"""A chain of layers over ranks computes what one process computes, wherever its layers are and however they move."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsam as sp
from ranks import on_ranks
from sparsam.comm.layer_state import common, merged, of_layer, pack, unpack
from sparsam.comm.pipeline import Pipeline

STEPS, MICRO = 8, 4


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 16)

    def forward(self, x):
        return self.linear(x.to(self.linear.bias.dtype))


class Residual(nn.Module):
    """With buffers, one of them not in the state_dict, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("share", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        return x + self.share * self.down(self.dropout(self.up(self.norm(x)).tanh()))


def adam(stage):
    return torch.optim.AdamW([{"params": list(stage.parameters())}], lr=0.01)


def sgd(stage):
    return torch.optim.SGD([{"params": list(stage.parameters())}], lr=0.05, momentum=0.9)


# name -> pattern, storage, optimiser, parts, clip
CASES = {
    "compact": (
        sp.Block(4, 4),
        "compact",
        adam,
        lambda: [
            sp.LearningRate(sp.cosine(1.0, 0.1, steps=STEPS)),
            sp.SparseTraining(sp.rigl(every=2)),
            sp.MovingAverage(0.5),
        ],
        0.5,
    ),
    "masked": (
        sp.Unstructured(),
        "masked",
        sgd,
        lambda: [sp.SparseTraining(sp.DropGrow(sp.movement, sp.momentum, 2, sp.constant(0.3)), keep_moments=True)],
        None,
    ),
    "hidden": (sp.NM(2, 4), "masked", sgd, lambda: [sp.SparseTraining(sp.sr_ste()), sp.L1(1e-4)], None),
    "bf16": (
        sp.Block(4, 4),
        "compact",
        adam,
        lambda: [sp.SparseTraining(sp.set_(every=3)), sp.BF16Weights()],
        None,
    ),
}


def mse(y, target):
    return nn.functional.mse_loss(y.float(), target)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(Start(), Residual(), Residual(), Residual(), nn.Linear(16, 8))


def pipeline(case, seed=0, **options):
    pattern, storage, optimizer, parts, clip = CASES[case]
    model = layers()
    # every layer has a sparse weight, since L1 wants some on every rank
    sp.sparsify(model, pattern, 0.5, storage=storage, seed=seed)
    if case == "bf16":
        model.bfloat16()
    return Pipeline(model, mse, optimizer, parts(), micro_batches=MICRO, clip=clip, seed=seed, **options)


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(13, 12, generator=draw), torch.randn(13, 8, generator=draw)


def held(made):
    """Weights, buffers, moments and averages of a rank's layers, as plain numbers."""
    state = made.stage.state()
    whole = {name: {what: layer[what] for what in ("model", "optimizer")} for name, layer in state.layers.items()}
    for part in made.parts:
        if isinstance(part, sp.MovingAverage):
            whole["average"] = part.model.state_dict()
    return plain(whole)


def plain(state):
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, torch.Tensor) else state


def alone(case):
    """What one process computes."""
    made = pipeline(case)
    losses = [made.step(*batch(step)) for step in range(STEPS)]
    made.stage.model.eval()
    return {"losses": losses, "held": held(made), "output": made.predict(batch(9)[0]).tolist()}


SCRIPT = """
sys.path[:0] = [{folder!r}, {tests!r}]
import json
from pathlib import Path
from sparsam import checkpoint
from test_pipeline import *

def same(made, expected):
    for name, layer in held(made).items():
        if name == "average":
            assert all(layer[key] == expected["held"]["average"][key] for key in layer)
        else:
            assert layer == expected["held"][name], (name, made.bounds)

for case in CASES:
    expected = json.loads(Path({folder_out!r}, case).read_text())
    made = pipeline(case, bounds=(0, 1, 2, 5))
    losses = []
    for step in range(STEPS):
        if step == 3:
            assert sum(gathered(made.repartition((0, 3, 4, 5)))) > 1000
            assert [name for name in made.stage.layers] == [["0", "1", "2"], ["3"], ["4"]][rank]
            assert made.layers["1"].up.bias.numel() == (24 if rank == 0 else 0)
        if step == 5:
            checkpoint.write(Path({folder_out!r}, f"{{case}}-{{rank}}"), {{"pipeline": made.state_dict()}})
            made.repartition((0, 1, 3, 5))
        losses.append(made.step(*batch(step)))
    assert losses == expected["losses"], (case, losses, expected["losses"])
    same(made, expected)
    made.stage.model.eval()
    output = made.predict(batch(9)[0])
    assert (output is None) == (rank < 2)
    assert output is None or output.tolist() == expected["output"]

    # a resume, in the split of then, of a model with other topologies and another seed
    made = pipeline(case, seed=7)
    saved = checkpoint.read(Path({folder_out!r}, f"{{case}}-{{rank}}"))["pipeline"]
    made.load_state_dict(saved)
    assert made.bounds == (0, 3, 4, 5)
    assert [made.step(*batch(step)) for step in range(5, STEPS)] == expected["losses"][5:], case
    same(made, expected)

# measured, decided on all ranks alike, and the same losses
balance = sp.Balance(every=3, hysteresis=0.0)
made = pipeline("compact", balance=balance)
assert [made.step(*batch(step)) for step in range(STEPS)] == json.loads(
    Path({folder_out!r}, "compact").read_text())["losses"]
a, b, c = gathered((made.decision, made.bounds))
assert a == b == c and "predicted from measured" in made.decision

def refused(kind, message, call):
    try:
        call()
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)

refused(ValueError, "decides for each layer by itself", lambda: Pipeline(sp_model(), mse, adam, [
    sp.SparseTraining(sp.gmp(0.2))], micro_batches=1))
def fails(stage):
    if rank == 1:
        raise ValueError("not this one")
    return adam(stage)
refused(*((ValueError, "not this one") if rank == 1 else (RuntimeError, "another one failed")),
    lambda: Pipeline(layers(), mse, fails, micro_batches=1))
refused(ValueError, "layers of the same names, shapes and types on every rank", lambda: Pipeline(
    nn.Sequential(*layers(), nn.Linear(8, 8 + rank)), mse, adam, micro_batches=1))
refused(ValueError, "at least 3 layers", lambda: Pipeline(layers()[:2], mse, adam, micro_batches=1))
refused(ValueError, "bounds: expected 4 rising numbers from 0 to 5", lambda: made.repartition((0, 2, 2, 5)))
refused(ValueError, "Load each rank's own", lambda: made.load_state_dict(dict(saved, rank=3)))
"""


def sp_model():
    model = layers()
    sp.sparsify(model, sp.Block(4, 4), 0.5)
    return model


@pytest.mark.slow
def test_layers_on_three_ranks_that_move_and_resume(tmp_path):
    for case in CASES:
        (tmp_path / case).write_text(json.dumps(alone(case)))
    folder = Path(__file__).parent
    body = SCRIPT.format(folder=str(folder), tests=str(folder.parent), folder_out=str(tmp_path))
    on_ranks(3, body, tmp_path)


def test_one_process_computes_what_a_plain_loop_computes():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))

    piped, looped = model(), model()
    for one in (piped, looped):
        sp.sparsify(one, sp.Block(4, 4), 0.5)
    made = Pipeline(piped, mse, adam, [sp.SparseTraining(sp.rigl(every=2))], micro_batches=MICRO)
    session = sp.Session(looped, adam(looped), [sp.SparseTraining(sp.rigl(every=2))], accumulate=MICRO)
    for step in range(6):
        x, target = (one[:12] for one in batch(step))
        loss = made.step(x, target)
        losses = []
        for part_x, part_target in zip(x.tensor_split(MICRO), target.tensor_split(MICRO), strict=True):
            with session.forward():
                losses.append(mse(looped(part_x), part_target))
            session.backward(losses[-1])
        session.step()
        assert loss == pytest.approx(float(sum(losses).detach()) / MICRO, rel=1e-6)
    torch.testing.assert_close(piped.state_dict(), looped.state_dict())


def test_micro_batches_of_unequal_size_weigh_by_their_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    x, target = torch.randn(5, 3), torch.randn(5, 2)
    whole = mse(model(x), target)
    whole.backward()
    expected = model[0].weight.detach() - model[0].weight.grad
    model.zero_grad()
    made = Pipeline(model, mse, lambda stage: torch.optim.SGD(stage.parameters(), lr=1.0), micro_batches=3)
    assert made.step(x, target) == pytest.approx(whole.item(), rel=1e-6)
    torch.testing.assert_close(model[0].weight.detach(), expected)


def test_a_gradient_that_is_not_finite_skips_the_step():
    made = pipeline("compact")
    before = plain(made.stage.state().layers["0"]["model"])
    x, target = batch(0)
    made.step(x * torch.inf, target)
    assert plain(made.stage.state().layers["0"]["model"]) == before
    assert made.stage.session.applied_steps == 0


def test_the_generator_of_the_process_is_left_alone():
    made = pipeline("compact")
    before = torch.get_rng_state()
    made.step(*batch(0))
    assert torch.equal(torch.get_rng_state(), before)


class Tied(nn.Sequential):
    def __init__(self) -> None:
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        other.weight = one.weight
        super().__init__(one, other)


class Two(nn.Module):
    def forward(self, x):
        return x, x


def made_of(model, **options):
    loss = options.pop("loss", mse)
    return Pipeline(model, loss, adam, options.pop("parts", ()), **{"micro_batches": 1, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made_of(nn.Linear(2, 2)), "expected an nn.Sequential of layers, got a Linear"),
        (lambda: made_of(Tied()), "1: expected weights of its own, got some that 0 has too"),
        (
            lambda: made_of(nn.Sequential(nn.Linear(2, 2, device="meta"))),
            "expected weights on the CPU, got some on meta",
        ),
        (lambda: made_of(layers(), micro_batches=0), "micro_batches: expected at least 1, got 0"),
        (lambda: made_of(layers(), clip=0.0), "clip: expected a norm > 0 or None, got 0.0"),
        (lambda: made_of(layers(), bounds=(0, 4)), r"bounds: expected 2 rising numbers from 0 to 5"),
        (lambda: made_of(layers(), parts=[sp.LossScaler()]), "parts that leave the loss alone, got LossScaler with"),
        (
            lambda: made_of(layers(), micro_batches=20).step(*batch(0)),
            "expected at least 20 samples, one a micro-batch",
        ),
        (
            lambda: made_of(nn.Sequential(nn.Linear(12, 8), Two())).step(*batch(0)),
            "1: expected one floating tensor from a layer, got a tuple",
        ),
        (
            lambda: made_of(layers(), loss=lambda y, target: y - target).step(*batch(0)),
            r"loss: expected a scalar, got a tensor of \(13, 8\)",
        ),
    ],
    ids=["model", "tied", "device", "micro", "clip", "bounds", "parts", "samples", "layer", "loss"],
)
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_state_that_does_not_fit_leaves_the_pipeline_as_it_was():
    made = made_of(nn.Sequential(nn.Linear(2, 2)), parts=[sp.LearningRate()])
    with pytest.raises(ValueError, match="bounds: expected 2 rising numbers"):
        made.load_state_dict({**made.state_dict(), "bounds": [0, 2]})
    assert made.stage.session.parts


def test_another_number_of_groups_is_refused():
    made = made_of(nn.Sequential(nn.Linear(2, 2)))
    state = made.state_dict()
    with pytest.raises(ValueError, match="expected 2 parameter groups on every stage, got 1"):
        made.load_state_dict({**state, "groups": state["groups"] * 2})


def test_a_state_is_taken_apart_by_layer_and_put_together_again():
    state = {"updates": 3, "kept": {"1.up": {"a": 1}, "1": 2, "10.up": 3, "2.up": 4}, "1.down": 5, "base": [0.1]}
    assert of_layer(state, "1") == {"kept": {"1.up": {"a": 1}, "1": 2}, "1.down": 5}
    rest = common(state, ["1", "2"])
    assert rest == {"updates": 3, "kept": {"10.up": 3}, "base": [0.1]}
    assert merged(merged(rest, of_layer(state, "2")), of_layer(state, "1")) == state


def test_a_message_brings_back_what_was_packed():
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
    state = {str(dtype): torch.tensor([[1.5, 0.0, 3.0]]).to(dtype).T for dtype in dtypes}
    state |= {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "no": None, "list": [1, 0.1, "x", torch.ones(2)]}
    found = unpack(pack({"inner": state}))["inner"]
    assert list(found) == list(state)
    for key in state:
        if isinstance(state[key], torch.Tensor):
            torch.testing.assert_close(found[key], state[key], rtol=0, atol=0)
    assert found["no"] is None
    assert found["list"][:3] == [1, 0.1, "x"]
    assert torch.equal(found["list"][3], torch.ones(2))
