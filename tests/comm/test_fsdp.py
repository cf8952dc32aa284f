"""Sparse training under FSDP2: the same weights and topologies as in one process, in shards."""

from __future__ import annotations

import pytest

from ranks import on_ranks

SHARDS = """
import pathlib
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from sparsam.comm.codecs import BF16, Identity, Int8Rows
from sparsam.shards import own, total_norm, whole
P = dist.get_world_size()
COMPACT = dict(pattern=sp.Block(4, 4), density=0.5, headroom=0.2)
MASKED = dict(pattern=sp.Unstructured(), density=0.3)

def made(seed=0, **how):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 22), nn.Tanh(), nn.Linear(22, 21), nn.Tanh(), nn.Linear(21, 9))
    sp.sparsify(model, **how)
    return model
def shard(model, **options):
    for layer in (0, 2):
        fully_shard(model[layer], **options)
    return fully_shard(model, **options)
def session_on(model, parts, optimizer=None, **options):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    return sp.Session(model, optimizer, parts, **options)
def batches(window, number, sizes):
    draw = torch.Generator().manual_seed(1000 * window + number)
    return torch.randn(sum(sizes), 13, generator=draw).split(sizes)
def train(session, windows, here=True, cut=(), weighed=False):
    # one window after the other; here: this rank's samples, else those of all ranks
    for window in windows:
        count = 1 if window in cut else session.accumulate
        for number in range(count):
            sizes = [3 + 2 * one + number if weighed else 4 for one in range(P)]
            x = batches(window, number, sizes)
            x = x[rank] if here else torch.cat(x)
            with session.forward():
                loss = (session.model(x) - 1).square().mean()
            session.backward(loss, float(len(x)) if weighed else None)
            applied = session.step(last=number + 1 == count)
        assert applied
def compared(session, other, tolerance=1e-5):
    for (name, one), two in zip(session.model.named_parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(whole(one), whole(two), rtol=tolerance, atol=tolerance, msg=name)
        for key, moment in session.optimizer.state.get(one, {}).items():
            wanted = whole(other.optimizer.state[two][key])
            torch.testing.assert_close(whole(moment), wanted, rtol=tolerance, atol=tolerance, msg=f"{name} {key}")
    assert hashes(session.model) == hashes(other.model)
def error_of(call):
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    raise AssertionError("no error")
"""


def test_shards_train_as_one_process_does(tmp_path):
    on_ranks(
        4,
        SHARDS
        + """
from torch.distributed.device_mesh import init_device_mesh
copies = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
for how, weighed, accumulate, mesh in (
    (COMPACT, False, 1, None), (COMPACT, True, 2, None), (MASKED, True, 2, None), (COMPACT, True, 2, copies)
):
    def begun(model):
        return session_on(model, [sp.SparseTraining(sp.rigl(every=2, fraction=0.4))], accumulate=accumulate, clip=0.3)
    sharded, alone = begun(shard(made(**how), mesh=mesh)), begun(made(**how))
    before = hashes(sharded.model)
    cut = (3,) if accumulate == 2 else ()
    for windows in (range(1), range(1, 9)):
        train(sharded, windows, cut=cut, weighed=weighed)
        train(alone, windows, here=False, cut=cut, weighed=weighed)
        compared(sharded, alone)
    assert hashes(sharded.model) != before
    assert sharded.metrics()["topology_updates"] == 4 and sharded.metrics()["moved_share"] > 0
    a = sharded.metrics()["gradient_norm"]
    assert abs(a - alone.metrics()["gradient_norm"]) < 1e-4 * a
    assert len(set(map(str, gathered(hashes(sharded.model))))) == 1
    for parameter in sharded.model.parameters():
        assert isinstance(parameter, DTensor)
        for moment in sharded.optimizer.state[parameter].values():
            assert moment.dim() == 0 or own(moment).shape == own(parameter).shape
            assert moment.dim() == 0 or own(moment).shape[0] <= -(-parameter.shape[0] // (P if mesh is None else 2))
""",
        tmp_path,
    )


def test_parts_in_shards(tmp_path):
    on_ranks(
        2,
        SHARDS
        + """
# other parts, and a model that an evaluation has left whole
def begun(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    with torch.no_grad():
        model(torch.zeros(1, 13))
    training = sp.SparseTraining(sp.set_(every=2))
    parts = [sp.LossScaler(2.0**10), sp.L1(1e-3, groups=True), training, sp.Precision("fp32")]
    return session_on(model, parts, optimizer, accumulate=2)
for how in (COMPACT, dict(pattern=sp.Block(4, 4), density=0.5, storage="masked")):
    sharded, alone = begun(shard(made(**how))), begun(made(**how))
    train(sharded, range(5), cut=(2,))
    train(alone, range(5), here=False, cut=(2,))
    compared(sharded, alone)

# inf on one rank, and NaN in one part: no rank takes the step
scaler = sharded.parts[0]
before = [own(one).clone() for one in sharded.model.parameters()]
for number in range(2):
    x = torch.full((3, 13), float("inf") if rank else 1.0)
    with sharded.forward():
        loss = sharded.model(x).square().mean()
    sharded.backward(loss)
    applied = sharded.step()
assert not applied and scaler.skipped == 1 and set(gathered(scaler.scale)) == {2.0**9}
assert all(torch.equal(one, own(two)) for one, two in zip(before, sharded.model.parameters()))
parameter = next(sharded.model.parameters())
parameter.grad = torch.ones_like(parameter)
if rank:
    own(parameter.grad)[0, 0] = float("nan")
for order in (2.0, float("inf")):
    assert total_norm([parameter.grad], order).isnan()
own(parameter.grad).fill_(2.0)
assert total_norm([parameter.grad], float("inf")) == 2
torch.testing.assert_close(total_norm([parameter.grad]), 2 * torch.tensor(float(parameter.numel())).sqrt())
assert total_norm([]) == 0
clipped = session_on(shard(made(**COMPACT)), [], clip=1.0)
with clipped.forward():
    loss = clipped.model(x).square().mean()
clipped.backward(loss)
assert not clipped.step()

# weights of 16 bits in the forward: ranks agree
policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
narrow = session_on(shard(made(**COMPACT), mp_policy=policy), [sp.SparseTraining(sp.rigl(every=2))], accumulate=2)
train(narrow, range(5), cut=(3,))
assert len(set(map(str, gathered(hashes(narrow.model))))) == 1
assert narrow.metrics()["topology_updates"] == 2
""",
        tmp_path,
    )


def test_compression_of_shards(tmp_path):
    on_ranks(
        2,
        SHARDS
        + """
def begun(*parts):
    return session_on(shard(made(**COMPACT)), [sp.SparseTraining(sp.rigl(every=2)), *parts], accumulate=2)
plain, off = begun(), begun(sp.Compression(BF16()))
same, narrow = (begun(sp.Compression(codec, "always")) for codec in (Identity(), BF16()))
for session in (plain, same, narrow, off):
    train(session, range(3), cut=(1,))
assert all(torch.equal(own(one), own(two)) for one, two in zip(plain.model.parameters(), same.model.parameters()))
rounded = zip(plain.model.parameters(), narrow.model.parameters())
assert not all(torch.equal(own(one), own(two)) for one, two in rounded)
# what this rank sends of each weight: the part of the other one, filled up to equal parts
values = sum(-(-one.shape[0] // 2) * one[0].numel() for one in map(whole, plain.model.parameters()))
assert same.metrics()["comm.bytes"] == 4 * values and same.metrics()["comm.ratio"] == 1
assert narrow.metrics()["comm.bytes"] == 2 * values and narrow.metrics()["comm.ratio"] == 0.5
assert narrow.metrics()["comm.on"] == 1
part = off.parts[1]
assert part.decision.startswith("compression is o") and len(set(gathered(part.decision))) == 1
assert off.metrics()["comm.on"] == float(part.on)
# the same on all ranks, and loaded by any
state = gathered(part.state_dict())
again = begun(sp.Compression(BF16()))
again.parts[1].load_state_dict(state[0])
assert again.parts[1].decision == part.decision

# the mean, rounded once; large values stay finite, an inf skips the step on both ranks
class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 3))
    def forward(self, given):
        return (self.weight * given).sum()
model = fully_shard(One())
session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=1.0), [sp.Compression(BF16(), "always")])
def step_by(given):
    with session.forward():
        loss = model(given)
    session.backward(loss)
    return session.step()
draw = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
assert step_by(draw[rank])
torch.testing.assert_close(-whole(model.weight), draw.mean(0), rtol=2**-8, atol=2**-8)
before = whole(model.weight).clone()
assert step_by(torch.full((5, 3), 40000.0))
torch.testing.assert_close(before - whole(model.weight), torch.full((5, 3), 40000.0), rtol=2**-8, atol=0)
before = whole(model.weight).clone()
assert not step_by(torch.full((5, 3), float("inf") if rank else 1.0))
assert torch.equal(before, whole(model.weight))
assert "got one with it" in error_of(lambda: session_on(model, [sp.Compression(BF16(), "always")]))
session.detach()
assert session_on(model, [sp.Compression(Identity(), "always")])

def refused(*parts, model=None):
    return error_of(lambda: session_on(model or shard(made(**COMPACT)), list(parts)))
assert "expected BF16() or Identity() under fully_shard, got Int8Rows" in refused(sp.Compression(Int8Rows()))
assert "no group and no ranks_per_node" in refused(sp.Compression(BF16(), group=dist.group.WORLD))
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "parts"))
assert "on one mesh of one dimension" in refused(sp.Compression(BF16()), model=shard(made(**COMPACT), mesh=mesh))
scaled = shard(made(**COMPACT))
scaled.set_gradient_divide_factor(3.0)
session = session_on(scaled, [sp.Compression(BF16(), "always")])
assert "expected the mean over ranks from fully_shard" in error_of(lambda: step(session, torch.ones(2, 13)))
""",
        tmp_path,
    )


def test_what_does_not_work_in_shards_is_refused(tmp_path):
    on_ranks(
        2,
        SHARDS
        + """
def refused(*parts, how=COMPACT, seed=0):
    return error_of(lambda: session_on(shard(made(seed, **how)), list(parts)))
keeps = "expected a method that keeps nothing per weight under fully_shard, got "
masked = dict(pattern=sp.NM(2, 4), density=0.5)
assert keeps + "weights behind zeros" in refused(sp.SparseTraining(sp.sr_ste()), how=masked)
assert keeps + "keep_moments" in refused(sp.SparseTraining(sp.set_(), keep_moments=True), how=masked)
moves = sp.DropGrow(sp.movement, sp.random, 2, sp.constant(0.3))
assert keeps + "gathered movement" in refused(sp.SparseTraining(moves))
sharded = "expected a model that is whole on every rank, got one under fully_shard."
assert "MovingAverage: " + sharded in refused(sp.MovingAverage())
assert "precision: " + sharded in refused(sp.Precision(sp.Progressive()))
assert "BF16Weights: " + sharded in refused(sp.BF16Weights(convert=["*"]))
assert "freeze: " + sharded in error_of(lambda: sp.freeze(shard(made(**COMPACT))))
assert "expected the plain model, got it wrapped in FSDP" in error_of(lambda: sp.densify(shard(made(**COMPACT))))
assert "0: expected the same topology on every rank" in refused(sp.SparseTraining(sp.set_()), seed=rank)
part = made(**COMPACT)
fully_shard(part[0])
assert "2.values: expected every trained parameter under fully_shard" in error_of(lambda: session_on(part, []))
ignored = made(**COMPACT)
fully_shard(ignored, ignored_params={ignored[4].bias})
assert "4.bias: expected every trained parameter under fully_shard" in error_of(lambda: session_on(ignored, []))
other = made(**(COMPACT | {"density": 0.9})).state_dict()
model = shard(made(**COMPACT))
late = "Load another density before the optimiser exists, and before fully_shard"
assert late in error_of(lambda: model.load_state_dict(other))
early = torch.optim.SGD((whole_one := made(**COMPACT)).parameters())
assert "optimizer: expected parameters of a model under fully_shard" in error_of(
    lambda: session_on(shard(whole_one), [], early)
)

# checkpoints
folder = pathlib.Path(sys.argv[0]).parent / "shards"
new = session_on(shard(made(**COMPACT)), [sp.SparseTraining(sp.set_())])
assert "expected a session that has taken a step" in error_of(lambda: sp.save_shards(folder, new))
assert "expected a checkpoint of save_shards, got none that is whole" in error_of(lambda: sp.load_shards(folder, new))
plain = session_on(made(**COMPACT), [])
train(plain, range(1))
assert "shards: expected a model under fully_shard" in error_of(lambda: sp.save_shards(folder, plain))
assert "match_slots: " + sharded in error_of(lambda: sp.match_slots(model, folder))
train(new, range(1))
sp.save_shards(folder, new)
assert "expected a folder without a checkpoint" in error_of(lambda: sp.save_shards(folder, new))
fewer = session_on(shard(made(pattern=sp.Block(4, 4), density=0.5)), [sp.SparseTraining(sp.set_())])
assert "Call match_slots(model, folder) before fully_shard" in error_of(lambda: sp.load_shards(folder, fewer))
""",
        tmp_path,
    )


KEPT = """
def begun(model):
    rate = sp.LearningRate(sp.cosine(1.0, 0.1, steps=20))
    parts = [sp.SparseTraining(sp.rigl(every=2)), sp.Compression(BF16(), "always"), rate]
    return session_on(shard(model), parts, accumulate=2, clip=0.5)
def loaded(name):
    # built with fewer slots, from other first weights
    model = made(7, pattern=sp.Block(4, 4), density=0.5)
    sp.match_slots(model, folder / name)
    session = begun(model)
    sp.load_shards(folder / name, session)
    return session
def state_of(session):
    moments = [
        {key: whole(value).clone() for key, value in session.optimizer.state[one].items()}
        for one in session.model.parameters()
    ]
    values = [whole(one).clone() for one in session.model.parameters()]
    return values, moments, hashes(session.model), session.applied_steps
def same(a, b):
    assert a[2:] == b[2:]
    assert all(torch.equal(one, two) for one, two in zip(a[0], b[0], strict=True))
    for one, two in zip(a[1], b[1], strict=True):
        assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
folder = pathlib.Path(sys.argv[0]).parent
"""


@pytest.mark.slow
def test_checkpoints_on_as_many_ranks_and_on_others(tmp_path):
    on_ranks(
        2,
        SHARDS
        + KEPT
        + """
session = begun(made(**COMPACT))
train(session, range(5))
sp.save_shards(folder / "two", session)
then = state_of(session)
if rank == 0:
    torch.save(then, folder / "two.pt")
train(session, range(5, 9), cut=(6,))
again = loaded("two")
same(state_of(again), then)
train(again, range(5, 9), cut=(6,))
same(state_of(again), state_of(session))
assert again.optimizer.param_groups[0]["lr"] == session.optimizer.param_groups[0]["lr"]

# the whole of it, into a plain model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
state = get_model_state_dict(again.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
wanted = [whole(one) for one in again.model.parameters()]
if rank == 0:
    plain = made(7, pattern=sp.Block(4, 4), density=0.5)
    plain.load_state_dict(state)
    assert all(torch.equal(one, two) for one, two in zip(plain.parameters(), wanted, strict=True))
    assert hashes(plain) == hashes(again.model)
    sp.densify(plain)
""",
        tmp_path,
    )
    on_ranks(
        4,
        SHARDS
        + KEPT
        + """
session = loaded("two")
same(state_of(session), torch.load(folder / "two.pt"))
train(session, range(5, 8))
sp.save_shards(folder / "four", session)
then = state_of(session)
if rank == 0:
    torch.save(then, folder / "four.pt")

# residuals under DistributedDataParallel, of four ranks and then of two: the sum of residual / P is what it was
from sparsam.comm.residual import old_ranks
def compressed(group=None):
    model = DDP(made(**COMPACT), process_group=group)
    return session_on(model, [sp.Compression(Int8Rows(16), "always")])
four = compressed()
train(four, range(2))
states = gathered(four.parts[0].state_dict()["residuals"])
pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
two = compressed(pairs[rank // 2])
two.parts[0].residuals.load_state_dict([states[old] for old in old_ranks(rank % 2, 4, 2)], 4, 2)
now = gathered(two.parts[0].state_dict()["residuals"])[:2]
assert "module.0.values" not in states[0]["residuals"] and len(states[0]["residuals"]) == 3
for name in states[0]["residuals"]:
    before = sum(one["residuals"][name] for one in states) / 4
    after = sum(one["residuals"][name] for one in now) / 2
    assert before.any()
    torch.testing.assert_close(before, after)
train(two, range(2, 3))
""",
        tmp_path,
    )
    on_ranks(
        2,
        SHARDS
        + KEPT
        + """
session = loaded("four")
same(state_of(session), torch.load(folder / "four.pt"))
train(session, range(8, 10))
assert session.metrics()["topology_updates"] == 5
""",
        tmp_path,
    )
