"""Local steps: workers that train apart share one set of weights and one topology, whoever comes and goes."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsam as sp
from ranks import on_ranks, on_two_ranks
from sparsam.comm.codecs import BF16, Identity, Int8Rows
from sparsam.comm.federated import LocalSteps
from sparsam.comm.members import Report, check_alike, most_advanced

IMPORTS = """
from sparsam.comm.codecs import BF16, Identity, Int8Rows, TopK
from sparsam.comm.federated import LocalSteps
def made(parts, seed=0, model=None, optimizer=torch.optim.SGD, **options):
    torch.manual_seed(seed + rank)  # workers begin with other weights: those of rank 0 count
    model = model or mlp()
    return sp.Session(model, optimizer(model.parameters(), lr=0.05), parts, **options)
def batch(number=0):
    return torch.randn(6, 13, generator=torch.Generator().manual_seed(2 * number + rank))
def steps(session, until, draw=batch):
    while session.applied_steps < until:
        step(session, draw(session.applied_steps))
def same(model):
    found = gathered({name: value.tolist() for name, value in model.state_dict().items()})
    assert all(one == found[0] for one in found), [key for key in found[0] if found[0][key] != found[-1][key]]
    return found[0]
def error_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("no error")
"""


def test_a_life_apart(tmp_path):
    on_two_ranks(
        IMPORTS
        + """
# H = 1, plain means of weights and SGD: what DDP does
local = made([LocalSteps(1, outer_lr=1.0, outer_momentum=0.0)])
torch.manual_seed(0)
ddp = DDP(mlp())
plain = sp.Session(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05))
for number in range(4):
    step(local, batch(number)), step(plain, batch(number))
    same(local.model)
for one, other in zip(local.model.parameters(), ddp.parameters(), strict=True):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
metrics = local.metrics()
assert metrics["comm.rounds"] == 4 and metrics["comm.ratio"] == 1 and metrics["comm.workers"] == 2
local.detach()
assert local.apart == 0 and local.group is None

# nothing is lost: what shared weights moved by and what waits add up to all that workers wanted
agreed = TopK(0.3, block=4, values=Int8Rows(16), agreed=True)
for codec in (Identity(), BF16(), Int8Rows(16), TopK(0.3), TopK(0.2, "taylor"), agreed):
    part = LocalSteps(1000, codec, outer_lr=1.0, outer_momentum=0.0)
    session = made([part])
    first, wanted = {n: p.detach().clone() for n, p in session.model.named_parameters()}, {}
    for number in range(4):
        begin = {n: p.detach().clone() for n, p in session.model.named_parameters()}
        steps(session, 3 * number + 3)
        mine = {n: begin[n] - p.detach() for n, p in session.model.named_parameters()}
        a, b = gathered(mine)
        wanted = {n: wanted.get(n, 0) + (a[n] + b[n]) / 2 for n in mine}
        part.synchronise()
        same(session.model)
    a, b = gathered(part.residuals.state_dict()["residuals"])
    for name, parameter in session.model.named_parameters():
        late = (a.get(name, 0 * parameter) + b.get(name, 0 * parameter)) / 2
        tolerance = 2e-3 if codec == BF16() else 1e-5
        arrived = first[name] - parameter + late
        torch.testing.assert_close(arrived, wanted[name], rtol=tolerance, atol=tolerance, msg=name)
    assert (not a) == (codec == Identity()) and part.metrics()["comm.ratio"] < (0.4 if codec == Identity() else 0.3)

# a resumed worker goes on as the one that did not stop, in the middle of a window
part = LocalSteps(4, Int8Rows(16))
session = made([part], optimizer=torch.optim.AdamW)
steps(session, 6)
import copy
kept = copy.deepcopy((session.model.state_dict(), session.optimizer.state_dict(), session.state_dict()))
steps(session, 12)
resumed = made([LocalSteps(4, Int8Rows(16))], seed=5, optimizer=torch.optim.AdamW)
resumed.model.load_state_dict(kept[0]), resumed.optimizer.load_state_dict(kept[1]), resumed.load_state_dict(kept[2])
steps(resumed, 12)
assert same(resumed.model) == same(session.model)
left, there = ({k: v for k, v in one.metrics().items() if k != "comm.wait_ms"} for one in (session, resumed))
assert left == there and left["comm.rounds"] == 3 and left["comm.drift"] > 0, (left, there)

# samples: three on rank 0 for each of rank 1
part = LocalSteps(1000, outer_lr=1.0, outer_momentum=0.0, weight=3.0 if rank == 0 else 1.0)
session = made([part])
steps(session, 3)
a, b = gathered(dict(session.model.named_parameters()))
part.synchronise()
for name, parameter in session.model.named_parameters():
    torch.testing.assert_close(parameter, (3 * a[name] + b[name]) / 4, rtol=1e-5, atol=1e-6)
part.weight = 0
assert "weight: expected a number > 0" in error_of(part.synchronise)

# batch norms: means of what was seen; counters the largest. One worker's weights break: all go on
model = nn.Sequential(nn.Linear(13, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
session = made([LocalSteps(3)], model=model, optimizer=torch.optim.AdamW)
steps(session, 2)
if rank == 1:
    with session.forward():
        session.model(batch(7))  # a batch more, without a step
    seen = model[1].num_batches_tracked.item()
    assert seen == 3, seen
before = gathered(model[1].running_mean.clone())
steps(session, 3)
same(model)
assert model[1].num_batches_tracked == 4
steps(session, 5)
if rank == 1:
    model[0].weight.data.fill_(float("nan"))
steps(session, 6)
assert all(bool(one.isfinite().all()) for one in model.state_dict().values())
same(model)
assert session.metrics()["comm.refused"] == rank
assert bool(session.optimizer.state) == (rank == 0)
steps(session, 9)
same(model)
for one in model.parameters():
    one.data.fill_(float("nan"))
assert "expected finite weights from one worker at least" in error_of(session.parts[0].synchronise)

# what workers must have in common is asked first
other = lambda: made([LocalSteps(2 + rank)])
assert "every=3" in error_of(other) and "on rank 1" in error_of(other)
assert "other names or shapes on rank 1" in error_of(lambda: made([LocalSteps(2)], model=nn.Linear(2, 2 + rank)))
session = made([LocalSteps(100)])
steps(session, 1 + rank)
assert "got 0 and 1, 0 and 2" in error_of(session.parts[0].synchronise)
group = dist.new_group()
session = made([LocalSteps(2, group=group)])
assert session.group is group
steps(session, 2)
same(session.model)
session.detach()
assert session.group is None
assert "expected the session's group" in error_of(lambda: made([LocalSteps(2, group=group)], group=dist.group.WORLD))
""",
        tmp_path,
    )


def test_sparse_layers_have_one_topology(tmp_path):
    """Data, moments and skipped steps differ between workers; topologies, and what is kept per weight, do not."""
    on_two_ranks(
        IMPORTS
        + """
class Moved(sp.Part):
    events = ()
    def after_rewire(self, event):
        self.events = (*self.events, event)
mest = sp.DropGrow(sp.mest, sp.gradient, every=4, fraction=sp.constant(0.5))
for method, storage, codec, options in (
    (sp.rigl(every=4, fraction=0.5), "compact", Int8Rows(16), {}),
    (sp.rigl(every=4, fraction=0.5), "masked", TopK(0.3), {"clip": 0.5}),
    (sp.set_(every=4), "masked", Identity(), {}),
    (mest, "compact", TopK(0.3, block=4, values=Int8Rows(16), agreed=True), {"accumulate": 2}),
    (sp.rigl(every=4, fraction=0.5), "compact", BF16(), {"clip": 0.5, "scaler": True}),
    (sp.gmp(0.25, begin=1, until=8, every=4), "masked", Int8Rows(16), {}),
):
    model = mlp()
    sp.sparsify(model, sp.Block(4, 4), 1.0 if isinstance(method, sp.Resize) else 0.4, storage=storage, seed=rank)
    part, moved = LocalSteps(2, codec), Moved()
    scaler = [sp.LossScaler()] if options.pop("scaler", False) else []
    parts = [part, sp.SparseTraining(method), moved, *scaler]
    session = made(parts, model=model, optimizer=torch.optim.AdamW, **options)
    names = {parameter: name for name, parameter in model.named_parameters()}
    attempts = 0
    while session.applied_steps < 8:
        moved.events = ()
        x = batch(attempts)
        broken = rank == 1 and attempts in (1, 4, 5) and "clip" in options
        attempts += 1
        step(session, x * float("inf") if broken else x)
        for event in moved.events:
            name = names[event.parameter]
            new = event.new_entries.expand_as(event.parameter)
            outer = part.state_dict()["outer"]
            assert torch.equal(outer["shared"][name], event.parameter)
            assert not outer["momentum"][name][new].any() and outer["momentum"][name].any()
            left = part.residuals.state_dict()["residuals"].get(name)
            assert left is None or not left[new].any()
    assert session.parts[1].updates == 2 and moved.events
    assert attempts == (11 if rank == 1 and "clip" in options else 16 if "accumulate" in options else 8), attempts
    a, b = gathered(hashes(model))
    assert a == b
    same(model)
    for weight in sparse_weights(model).values():
        assert not weight.parameter[~weight.active.expand_as(weight.parameter)].any()
""",
        tmp_path,
    )


def test_data_that_differ_between_workers(tmp_path):
    """Each sees two of four classes only. The shared weights learn all four, nearly as well as one who sees all."""
    on_two_ranks(
        IMPORTS
        + """
draw = torch.Generator().manual_seed(1)
centres = 2 * torch.randn(4, 13, generator=draw)
def samples(classes, count, seed):
    draw = torch.Generator().manual_seed(seed)
    labels = classes[torch.randint(len(classes), (count,), generator=draw)]
    return centres[labels] + 2 * torch.randn(count, 13, generator=draw), labels
def trained(session, classes, until):
    while session.applied_steps < until:
        x, labels = samples(classes, 32, 2 * session.applied_steps + rank)
        with session.forward():
            loss = nn.functional.cross_entropy(session.model(x), labels)
        session.backward(loss)
        session.step()
    x, labels = samples(torch.arange(4), 2000, 99)
    with torch.no_grad():
        out = session.model(x)
    return float(nn.functional.cross_entropy(out, labels)), float((out.argmax(1) == labels).float().mean())
adam = lambda parameters, lr: torch.optim.AdamW(parameters, lr=0.003)
alone = made([], optimizer=adam)
central = trained(alone, torch.arange(4), 300)
half = trained(made([], optimizer=adam), torch.arange(2) + 2 * rank, 300)
session = made([LocalSteps(10, Int8Rows(64))], optimizer=adam)
found = trained(session, torch.arange(2) + 2 * rank, 300)
same(session.model)
assert half[1] < 0.6
assert found[1] > central[1] - 0.05 and found[0] < 1.5 * central[0] + 0.05, (central, found)
assert session.metrics()["comm.ratio"] < 0.035
""",
        tmp_path,
    )


def test_workers_leave_and_join(tmp_path):
    """One of three leaves after the second synchronisation, and a new one joins at the fourth."""
    on_ranks(
        3,
        IMPORTS
        + f"""
def meet(place, workers, name):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="file://{tmp_path}/" + name, rank=place, world_size=workers)
def sparse(seed):
    torch.manual_seed(seed)
    model = mlp()
    sp.sparsify(model, sp.Block(4, 4), 0.4, seed=seed)
    parts = [LocalSteps(2, Int8Rows(16)), sp.SparseTraining(sp.rigl(every=2, fraction=0.5)), sp.LearningRate()]
    return sp.Session(model, torch.optim.AdamW(model.parameters(), lr=0.01), parts, seed=seed)
session = sparse(rank)
part = session.parts[0]
steps(session, 3)
if rank == 2:
    part.leave()
steps(session, 4)
same(session.model)
assert part.gone == (2,) and part.rounds == 2 and part.residuals.norm() == 0
assert "Make a group of those that train on" in error_of(part.synchronise)
if rank == 2:
    dist.destroy_process_group()
    session = sparse(7)  # a new worker, that knows nothing
    part = session.parts[0]
else:
    meet(rank, 2, "two")
    part.join()
    steps(session, 8)
    same(session.model)
    assert part.rounds == 4 and part.metrics()["comm.lost"] == 0
    waits = sum(gathered(part.residuals.norm()))
    assert waits > 0
meet(rank, 3, "three")
before = part.residuals.state_dict()["residuals"]
part.join()
# what is conserved is the sum of residual / P; moments of those that were there stay
for name, left in before.items():
    assert torch.allclose(part.residuals.state_dict()["residuals"][name], 1.5 * left)
assert bool(session.optimizer.state) == (rank != 2)
same(session.model)
assert session.applied_steps == 8 and session.seed == 0 and session.parts[1].updates == 4 and part.rounds == 4
steps(session, 12)
same(session.model)
momentum, workers = part.state_dict()["outer"]["momentum"], part.metrics()["comm.workers"]
a, b, c = gathered((hashes(session.model), momentum, part.rounds, workers))
assert a[0] == b[0] == c[0] and a[2:] == b[2:] == c[2:] == (6, 3.0)
assert all(torch.equal(one, b[1][name]) and torch.equal(one, c[1][name]) for name, one in a[1].items())
# checkpoints of three, taken in the middle of a window, resumed by two
steps(session, 13)
kept = session.model.state_dict(), session.optimizer.state_dict(), session.state_dict()
delta = {{n: part.state_dict()["outer"]["shared"][n] - p.detach() for n, p in session.model.named_parameters()}}
left, shared = part.residuals.state_dict()["residuals"], part.state_dict()["outer"]["shared"]
dist.barrier()
dist.destroy_process_group()
if rank < 2:
    session = sparse(11)
    part = session.parts[0]
    session.model.load_state_dict(kept[0]), session.optimizer.load_state_dict(kept[1]), session.load_state_dict(kept[2])
    meet(rank, 2, "four")
    assert "expected a group of the workers that train on, got 2" in error_of(part.synchronise)
    part.join()
    same(session.model)
    assert all(torch.equal(one, shared[name]) for name, one in session.model.named_parameters())
    for name, late in part.residuals.state_dict()["residuals"].items():
        torch.testing.assert_close(late, delta[name] + left.get(name, 0) * 2 / 3)
    assert bool(session.optimizer.state) and part.metrics()["comm.lost"] > 0
    steps(session, 16)
    same(session.model)
    assert part.rounds == 8
else:
    dist.init_process_group("gloo", init_method="file://{tmp_path}/alone", rank=0, world_size=1)
""",
        tmp_path,
    )


def test_a_worker_that_dies(tmp_path):
    """The others get one clear error, lose nothing of their own, and go on in a group of two, without the third."""
    on_ranks(
        3,
        IMPORTS
        + f"""
part = LocalSteps(3, Int8Rows(16), outer_lr=1.0, outer_momentum=0.0)
session = made([part], clip=1.0)
steps(session, 8)
if rank == 2:
    import os
    os._exit(0)
waiting = part.residuals.norm()
assert waiting > 0
message = error_of(lambda: steps(session, 9))
assert "expected all workers at synchronisation 3, but not all can be reached" in message, message
assert part.residuals.norm() == waiting and part.rounds == 2 and session.applied_steps == 9
mine = {{n: part.state_dict()["outer"]["shared"][n] - p.detach() for n, p in session.model.named_parameters()}}
shared, left = part.state_dict()["outer"]["shared"], part.residuals.state_dict()["residuals"]
session.state_dict()
dist.destroy_process_group()
dist.init_process_group("gloo", init_method="file://{tmp_path}/two", rank=rank, world_size=2)
assert "Make a group" in error_of(part.synchronise)
part.join()
same(session.model)
assert all(torch.equal(one, shared[name]) for name, one in session.model.named_parameters())
# the window that was broken off goes with the next one
for name, late in part.residuals.state_dict()["residuals"].items():
    torch.testing.assert_close(late, mine[name] + left.get(name, 0) * 2 / 3)
assert part.metrics()["comm.lost"] > 0 and gathered(part.metrics()["comm.lost"])[0] == part.metrics()["comm.lost"]
part.leave()
part.synchronise()  # in float32: all of it arrives
a, b = gathered({{name: mine[name] + left.get(name, 0) * 2 / 3 for name in mine}})
for name, one in session.model.named_parameters():
    torch.testing.assert_close(one, shared[name] - (a[name] + b[name]) / 2)
same(session.model)
assert part.residuals.norm() == 0 and part.gone == (0, 1)
""",
        tmp_path,
    )


def _session(*parts, model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), list(parts), **options)


def _step(session):
    session.backward(session.model(torch.ones(2, 8)).square().mean())
    assert session.step()


def _sparse():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    sp.sparsify(model, sp.Block(4, 4), 0.5, storage="masked")
    return model


def test_one_worker_alone_has_an_outer_optimiser():
    plain, alone = _session(), _session(LocalSteps(2, Int8Rows(4), outer_lr=0.5, outer_momentum=0.0))
    first = plain.model[0].weight.detach().clone()
    for _ in range(2):
        _step(plain), _step(alone)
    torch.testing.assert_close(alone.model[0].weight, (first + plain.model[0].weight) / 2)
    assert alone.metrics()["comm.bytes"] == 0
    assert "comm.ratio" not in alone.metrics()
    # between two synchronisations the weights are its own, and stay that when it is detached
    _step(alone)
    kept = alone.model[0].weight.detach().clone()
    alone.detach()
    assert torch.equal(alone.model[0].weight, kept)
    assert alone.apart == 0


def test_nesterov_momentum_by_hand():
    part = LocalSteps(1000, outer_lr=0.7, outer_momentum=0.9)
    session = _session(part)
    weight = session.model[0].weight
    shared, velocity = weight.detach().clone(), torch.zeros(8, 8)
    for _ in range(3):
        _step(session), _step(session)
        delta = shared - weight.detach()
        velocity = 0.9 * velocity + delta
        shared = shared - 0.7 * (delta + 0.9 * velocity)
        part.synchronise()
        torch.testing.assert_close(weight.detach(), shared)
    assert part.rounds == 3


def test_bf16_weights_have_float32_behind_them():
    model = nn.Linear(8, 4, dtype=torch.bfloat16)
    part = LocalSteps(1, outer_lr=1e-3, outer_momentum=0.0)
    session = _session(part, model=model)
    for _ in range(3):
        session.backward(model(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean())
        session.step()
    shared = part.state_dict()["outer"]["shared"]["weight"]
    assert shared.dtype == torch.float32
    assert torch.equal(shared.bfloat16(), model.weight)
    assert not torch.equal(shared, model.weight.float())


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            sp.rigl(every=25),
            "updates at multiples of 10, where LocalSteps(every=10) makes weights equal, got one at step 25",
        ),
        (sp.gmp(0.5, begin=0, until=95, every=10), "got one at step 95"),
        (sp.DropGrow(sp.movement, sp.random, 10, sp.constant(0.1)), "got one that keeps movement. Use static"),
        (sp.sr_ste(), "got one that keeps weights behind zeros. Use static"),
    ],
    ids=["every", "until", "accumulator", "hidden"],
)
def test_methods_that_workers_cannot_agree_on(method, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        _session(LocalSteps(10), sp.SparseTraining(method), model=_sparse())


def test_a_method_that_is_due_late_between_two_synchronisations():
    class Late(sp.Method):
        def due(self, step):
            return step == 10_003

        def update(self, views, step):
            raise AssertionError

    session = _session(LocalSteps(4), sp.SparseTraining(Late()), model=_sparse())
    session.applied_steps = 10_002
    with pytest.raises(ValueError, match=r"multiples of 4, where .* got one at step 10003"):
        _step(session)
    session.state_dict()  # the window is over all the same


def test_a_rewire_by_somebody_else():
    session = _session(LocalSteps(4), model=_sparse())
    _step(session)
    weight = session.model[0]
    event = sp.Rewire("0", weight, weight.weight, *[torch.ones(2, 2, dtype=torch.bool)] * 3, torch.ones(8, 8) > 0)
    with pytest.raises(ValueError, match="0: expected a rewire right after a synchronisation, every 4 applied steps"):
        session.rewired(event)


def test_a_policy_is_refused():
    with pytest.raises(ValueError, match=r"expected one format under LocalSteps\(every=4\), got a policy"):
        _session(LocalSteps(4), sp.Precision(sp.Adaptive()))
    _session(LocalSteps(4), sp.Precision("bf16"))


def test_the_part_is_the_first():
    with pytest.raises(ValueError, match=r"LocalSteps: expected to be the first part, got place 2. Put it first"):
        _session(sp.LearningRate(), LocalSteps(4))


def test_weights_that_are_frozen_later_are_named():
    session = _session(LocalSteps(1))
    session.model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"2.bias: expected the trained weights that were there when LocalSteps was"):
        _step(session)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "every: expected at least 1 step between synchronisations, got 0"),
        ((2, Int8Rows), "codec: expected a codec such as Int8Rows"),
        ((2, BF16(), 0.0), "outer_lr: expected a rate > 0, got 0.0"),
        ((2, BF16(), 0.7, 1.0), "outer_momentum: expected a share in"),
    ],
    ids=["every", "codec", "rate", "momentum"],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LocalSteps(*arguments)


def test_models_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="weight: expected float32, bfloat16 or float16 on the CPU, whole on every"):
        _session(LocalSteps(2), model=nn.Linear(2, 2, dtype=torch.float64))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="LocalSteps: expected a plain model, got DistributedDataParallel"):
            _session(LocalSteps(2), model=DistributedDataParallel(nn.Linear(2, 2)))
        # a group of workers is no pipeline: each has all layers, and methods may look at all of them
        group = dist.new_group([0])
        gradual = sp.SparseTraining(sp.gmp(0.5, every=2, until=8))
        session = _session(LocalSteps(2, group=group), gradual, model=_sparse())
        assert session.group is group
    finally:
        dist.destroy_process_group()


def test_a_worker_that_joins_with_weights_that_are_not_finite_begins_its_moments_anew():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    part = LocalSteps(4)
    session = sp.Session(model, torch.optim.Adam(model.parameters(), lr=0.1), [part])
    first = model[0].weight.detach().clone()
    _step(session)
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    part.join()
    assert torch.equal(model[0].weight, first)
    assert not session.optimizer.state
    assert session.metrics()["comm.refused"] == 1


def test_states_that_are_refused():
    state = _session(LocalSteps(2)).parts[0].state_dict()
    part = _session(LocalSteps(2, outer_momentum=0.0)).parts[0]
    with pytest.raises(ValueError, match="LocalSteps: expected a state of the weights and outer momentum that are tr"):
        part.load_state_dict(state)
    with pytest.raises(ValueError, match=r"LocalSteps: expected version 1, got 2. Use the sparsam that wrote it."):
        part.load_state_dict({**state, "version": 2})


def test_the_most_advanced_worker_leads():
    def report(rounds, applied, settings="every=2"):
        return Report("", settings, "", rounds, applied, 1.0, 0.0, 0.0, False, ())

    assert most_advanced([report(3, 9), report(4, 8), report(4, 9), report(4, 9)]) == 2
    with pytest.raises(ValueError, match=r"\(every=2\), got every=3 on rank 1. Give all workers the same"):
        check_alike([report(0, 0), report(0, 0, "every=3")])


def test_a_lossless_codec_keeps_nothing():
    part = LocalSteps(1, Identity())
    session = _session(part)
    _step(session)
    assert part.residuals.nbytes == 0
