"""A policy in a training loop: formats change between steps, what is sampled, tried, kept, restored and given back."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparsam as sp
from ranks import on_two_ranks
from sparsam.kernels.formats import BF16, FP8, FP32, INT8, PRODUCTS, product_format
from sparsam.precision.policies import Policy, UnitState


class Scripted(Policy):
    """Formats by step: {step: {unit glob ending: format}}; keeps what evidence it was shown."""

    candidates = (BF16, INT8)
    trial_steps = 10

    def __init__(self, script: Mapping[int, Mapping[str, str]], start="fp32", every=0, raises=()) -> None:
        self.script, self.first, self.sample_every, self.raises = script, start, every, raises
        self.seen = []

    @property
    def lowest(self):
        names = {self.first, *(name for changes in self.script.values() for name in changes.values())}
        return tuple(product_format(name) for name in sorted(names))

    def start(self, units):
        return {unit: UnitState(self.first) for unit in units}

    def decide(self, state, evidence, step):
        self.seen.append((step, evidence))
        changes = self.script.get(step, {})
        raised = int(step in self.raises)
        return {
            unit: next(
                (
                    replace(one, format=name, backoffs=one.backoffs + raised)
                    for ending, name in changes.items()
                    if unit.endswith(ending)
                ),
                one,
            )
            for unit, one in state.items()
        }


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def data(step):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def train(session, first, last, data=data):
    losses = []
    for step in range(first, last):
        with session.forward():
            loss = (session.model(data(step)) - 1).square().mean()
        session.backward(loss)
        session.step()
        losses.append(loss.item())
    return losses


def session_of(model, precision, **options):
    return sp.Session(model, torch.optim.AdamW(model.parameters(), 1e-2), [precision], **options)


def test_each_product_has_the_format_that_the_policy_says_and_the_layer_stays_itself():
    model = mlp()
    layer, weight, keys = model[0], model[0].weight, list(model.state_dict())
    precision = sp.Precision(Scripted({2: {"0/forward": "bf16"}, 3: {"": "bf16"}}))
    session = session_of(model, precision)
    assert model[0] is layer
    assert layer.weight is weight
    assert list(model.state_dict()) == keys
    with session.forward():
        assert model(data(0)).dtype == torch.float32
    train(session, 0, 2)
    assert [one.name for one in layer.formats] == ["bf16", "fp32", "fp32"]
    assert model[2].formats is not None  # autocast is on and would make it bf16
    with session.forward():
        assert layer(data(0)).dtype == torch.bfloat16
        assert model[2](torch.ones(1, 48)).dtype == torch.float32
    train(session, 2, 3)
    assert layer.formats is None  # autocast does it all
    assert precision.switches == 6
    taken = [(one.step, one.layer, one.product, one.before, one.after) for one in precision.take()]
    assert taken[0] == (2, "0", "forward", "fp32", "bf16")
    assert len(taken) == 6
    assert precision.take() == []
    assert precision.metrics()["precision.bf16"] == 1
    session.detach()
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert not hasattr(model[0], "formats")
    assert model(data(0)).dtype == torch.float32


def test_all_bf16_is_autocast_bit_for_bit_and_all_fp32_is_torch():
    for name in ("bf16", "fp32"):
        plain, ours = mlp(), mlp()
        expected = train(session_of(plain, sp.Precision(name)), 0, 5)
        assert train(session_of(ours, sp.Precision(Scripted({}, start=name))), 0, 5) == expected
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


def test_samples_come_once_in_so_many_steps_and_never_from_an_evaluation():
    policy = Scripted({}, start="bf16", every=4)
    session = session_of(mlp(), sp.Precision(policy), accumulate=2)
    for step in range(8):
        if step == 3:  # the next step is sampled
            with torch.no_grad(), session.forward():
                session.model(data(99))
        for _ in range(2):
            with session.forward():
                loss = session.model(data(step)).square().mean()
            session.backward(loss)
        session.step()
    sampled = [step for step, evidence in policy.seen if evidence.samples]
    assert sampled == [4, 8]
    samples = policy.seen[3][1].samples
    assert set(samples) == {f"{layer}/{product}" for layer in ("0", "2") for product in PRODUCTS}
    assert set(samples["0/forward"]) == {"bf16", "int8"}
    assert samples["0/forward"]["bf16"].cosine > 0.999


def test_the_probe_compares_on_the_same_weights_and_leaves_no_trace():
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 1))
    modes = []

    def probe():
        modes.append((model[1].training, model[0].formats))
        torch.rand(3)
        return torch.stack([model(data(step)).square().mean() for step in range(4)])

    precision = sp.Precision(Scripted({}), probe=probe)
    session_of(model, precision)
    model[2].eval()
    before, drawn = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    gap = precision._gap({"0/forward": INT8, "3/forward": INT8})
    assert 0 < abs(gap) < 0.1
    assert precision._gap({"0/forward": FP32}) == 0
    assert [mode for mode, _ in modes] == [False] * 4
    assert modes[1][1].forward is INT8
    assert model[0].formats is None
    assert model[1].training
    assert not model[2].training
    assert torch.equal(drawn, torch.random.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_probe_that_is_not_finite_allows_nothing():
    losses = iter([torch.ones(2), torch.tensor([1.0, math.nan])])
    precision = sp.Precision(Scripted({}), probe=lambda: next(losses))
    session_of(mlp(), precision)
    assert precision._gap({"0/forward": INT8}) == math.inf


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_not_finite_is_not_taken_and_the_policy_hears_of_it(bad):
    policy = Scripted({}, start="bf16")
    session = session_of(mlp(), sp.Precision(policy))
    before = [parameter.clone() for parameter in session.model.parameters()]
    with session.forward():
        loss = session.model(data(0)).mean() * bad
    session.backward(loss)
    assert not session.step()
    assert not policy.seen[-1][1].finite
    assert all(torch.equal(a, b) for a, b in zip(before, session.model.parameters(), strict=True))


def test_a_trip_after_a_conversion_brings_back_the_weights_and_moments_of_before():
    policy = Scripted({3: {"forward": "int8"}, 5: {"forward": "fp32"}}, raises=(5,), every=100)
    precision = sp.Precision(policy)
    session = session_of(mlp(), precision)
    train(session, 0, 3)
    kept = copy.deepcopy((session.model.state_dict(), session.optimizer.state_dict()))
    assert precision.metrics()["precision.snapshot_bytes"] > 0
    train(session, 3, 4)
    train(session, 4, 5, lambda step: torch.full((16, 32), math.nan))
    assert session.applied_steps == 4
    assert policy.seen[-1][0] == 4
    policy.script, policy.raises = {4: {"forward": "fp32"}}, (4,)
    train(session, 5, 6, lambda step: torch.full((16, 32), math.nan))
    now = session.model.state_dict(), session.optimizer.state_dict()
    assert all(torch.equal(kept[0][name], now[0][name]) for name in kept[0])
    for old, new in zip(kept[1]["state"].values(), now[1]["state"].values(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert "precision.snapshot_bytes" not in precision.metrics()
    assert session.applied_steps == 4
    assert math.isfinite(train(session, 6, 8)[-1])


def test_a_snapshot_is_given_up_after_the_trial_and_when_weights_have_moved():
    policy = Scripted({1: {"forward": "int8"}}, every=100)
    precision = sp.Precision(policy)
    session = session_of(mlp(), precision)
    train(session, 0, 2)
    assert "precision.snapshot_bytes" in precision.metrics()
    train(session, 2, 13)
    assert "precision.snapshot_bytes" not in precision.metrics()

    model = mlp()
    sp.sparsify(model, sp.Block(8, 8), 0.5, exclude=["2"])
    precision = sp.Precision(Scripted({1: {"2/forward": "int8"}}, every=100))
    parts = [sp.SparseTraining(sp.set_(every=2)), precision]
    session = sp.Session(model, torch.optim.AdamW(model.parameters()), parts)
    train(session, 0, 1)
    assert "precision.snapshot_bytes" in precision.metrics()
    train(session, 1, 2)
    assert "precision.snapshot_bytes" not in precision.metrics()


def adaptive(model, probed=True):
    def probe():
        return torch.stack([(model(data(-step - 1)) - 1).square().mean() for step in range(3)])

    policy = sp.Adaptive(sample_every=2, clean_samples=2, max_gap=0.05)
    return sp.Precision(policy, probe=probe if probed else None, profile=Always())


class Always:
    """A profile in which lower is always faster."""

    def __init__(self, gain=2.0) -> None:
        self.products, self.value = self, gain

    def gain(self, *shape):
        return self.value


def test_adaptive_finds_bf16_by_itself():
    model = mlp()
    precision = adaptive(model, probed=False)
    session = session_of(model, precision)
    train(session, 0, 12)
    assert precision.metrics()["precision.bf16"] == 1
    assert model[0].formats is None
    assert "needs a probe" in str(precision.table())


def test_what_does_not_pay_stays_and_the_table_says_why():
    model = mlp()
    precision = sp.Precision(sp.Adaptive(sample_every=2, clean_samples=1), profile=Always(0.62))
    train(session_of(model, precision), 0, 6)
    assert precision.metrics()["precision.fp32"] == 1
    assert "bf16: 0.62x of fp32's speed, casts included" in str(precision.table())


def test_a_resumed_run_goes_on_bit_for_bit():
    model = mlp()
    session = session_of(model, adaptive(model))
    train(session, 0, 9)
    states = copy.deepcopy((model.state_dict(), session.optimizer.state_dict(), session.state_dict()))
    expected = train(session, 9, 20)
    other = mlp(seed=1)
    resumed = session_of(other, adaptive(other))
    other.load_state_dict(states[0])
    resumed.optimizer.load_state_dict(states[1])
    resumed.load_state_dict(states[2])
    assert train(resumed, 9, 20) == expected
    assert resumed.parts[0].state == session.parts[0].state
    assert resumed.parts[0].switches == session.parts[0].switches > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_recomputation_uses_the_formats_of_its_forward():
    """Formats change in step(), never between a forward pass and the backward that recomputes it."""

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    script = {1: {"forward": "int8"}, 2: {"": "bf16"}, 3: {"weight_gradient": "int8"}}
    expected = train(session_of(mlp(), sp.Precision(Scripted(script))), 0, 5)
    assert train(session_of(Recomputed(), sp.Precision(Scripted(script))), 0, 5) == expected


def test_sparse_layers_have_formats_too_and_eight_bits_are_simulated_there():
    model = mlp()
    sp.sparsify(model, sp.Block(8, 8), 0.5, exclude=["2"])
    script = {1: {"0/forward": "int8", "2/forward": "int8"}}
    with pytest.raises(ValueError, match=r"int8: .*Use bf16, or say simulate: true"):
        train(session_of(model, sp.Precision(Scripted(script))), 0, 2)
    precision = sp.Precision(Scripted(script), simulate=True)
    train(session_of(model, precision), 0, 3)
    rows = {row.name: row for row in precision.table().rows}
    assert (rows["0"].forward, rows["0"].arithmetic) == ("int8", "simulated")
    assert (rows["2"].forward, rows["2"].arithmetic) == ("int8", "real")
    assert precision.table().simulated


def test_a_layer_that_computes_in_its_own_way_follows_autocast():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.Sequential(Own(32, 32), nn.Linear(32, 32))
    precision = sp.Precision(Scripted({}, start="bf16"))
    session = session_of(model, precision)
    assert {unit.split("/")[0] for unit in precision.state} == {"1"}
    assert type(model[0]) is Own
    with session.forward():
        assert model[0](data(0)).dtype == torch.bfloat16


def test_embeddings_give_sixteen_bits_as_soon_as_autocast_is_on_and_tables_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.head = nn.Embedding(8, 16), nn.Linear(16, 4)

        def forward(self, x):
            self.seen = self.tokens(x).dtype
            return self.head(self.tokens(x))

    model = Model()
    precision = sp.Precision(Scripted({1: {"": "bf16"}}))
    session = session_of(model, precision)
    for expected in (torch.float32, torch.bfloat16):
        with session.forward():
            loss = model(torch.arange(4)).square().mean()
        assert model.seen == expected
        session.backward(loss)
        session.step()
    assert model.tokens.weight.dtype == torch.float32
    assert "embeddings" in str(precision.table())
    session.detach()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.arange(4))
    assert model.seen == torch.float32


def test_a_candidate_that_the_device_lacks_is_never_chosen_and_no_error():
    model = mlp()
    precision = sp.Precision(sp.Adaptive(candidates=(BF16, FP8), sample_every=1, clean_samples=1), profile=Always())
    train(session_of(model, precision), 0, 4)
    assert precision.metrics()["precision.bf16"] == 1


def test_formats_that_the_device_lacks_are_refused_before_anything_is_changed():
    model = mlp()
    with pytest.raises(ValueError, match=r"fp8: this CPU has no fast fp8 product. Use bf16, or say simulate: true"):
        session_of(model, sp.Precision(sp.Rules(low=FP8)))
    with pytest.raises(ValueError, match=r"rules: 'nothing' matches no layer"):
        session_of(model, sp.Precision(sp.Rules({"nothing": "bf16"})))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("fp16", "precision: expected fp32 or bf16, got 'fp16'"),
        (BF16, "precision: expected fp32, bf16 or a policy, got .*Adaptive"),
    ],
    ids=["name", "format"],
)
def test_what_is_no_policy_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        sp.Precision(given)


def test_a_model_without_linear_layers_is_refused():
    model = nn.Conv1d(3, 3, 3)
    with pytest.raises(ValueError, match=r"expected a model with nn.Linear or SparseLinear layers, got none"):
        session_of(model, sp.Precision(sp.Rules()))


def test_the_state_of_another_model_is_refused():
    session = session_of(mlp(), sp.Precision(sp.Rules()))
    other = session_of(nn.Linear(32, 32), sp.Precision(sp.Rules()))
    with pytest.raises(ValueError, match=r"expected a state of the same layers, got one that differs in"):
        other.load_state_dict(session.state_dict())


def test_progressive_goes_from_one_format_to_the_next_and_says_that_it_is_simulated():
    model = mlp()
    precision = sp.Precision(sp.Progressive("fp16", "fp8", transition_steps=6), simulate=True)
    session = session_of(model, precision)
    shares = []
    for step in range(8):
        train(session, step, step + 1)
        shares.append(precision.metrics().get("precision.fp8", 0.0))
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 0.5  # the head, one of two layers, stays
    table = precision.table()
    assert table.simulated
    assert "bf16 for fp16" in str(table) or table.rows[0].forward == "fp8"


@pytest.mark.slow
def test_ranks_decide_alike_though_they_see_other_data(tmp_path):
    on_two_ranks(
        """
torch.manual_seed(0)
model = mlp()
wrapped = DDP(model)
class Always:
    def __init__(self): self.products = self
    def gain(self, *shape): return 2.0 if rank else 1.06
probe = lambda: torch.ones(2) * (1 + rank)
precision = sp.Precision(sp.Adaptive(sample_every=2, clean_samples=2), probe=probe, profile=Always())
session = sp.Session(wrapped, torch.optim.AdamW(model.parameters()), [precision], clip=1.0)
for number in range(12):
    x = torch.randn(8, 13, generator=torch.Generator().manual_seed(100 * rank + number))
    if number == 9 and rank == 1:
        x = x * float("nan")
    step(session, x)
states = gathered({name: one.format for name, one in precision.state.items()})
assert states[0] == states[1], states
assert set(states[0].values()) != {"fp32"}, states
assert session.applied_steps == 11
trends = gathered(precision._trend.mean)
assert trends[0] == trends[1]
""",
        tmp_path,
    )
