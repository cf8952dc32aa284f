"""A policy beside everything else that a training may have: other parts, and models of other people's making."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sparsam as sp
from sparsam.kernels.formats import FP8, INT8
from sparsam.tasks.gpt import GPT


class Faster:
    """A profile in which lower is always faster, of blocks too."""

    def __init__(self) -> None:
        self.products = self

    def gain(self, *shape):
        return 2.0

    def linear(self, *shape):
        return {"fp32": Time(2.0), "bf16": Time(1.0)}[shape[-1]]


class Time:
    def __init__(self, compact_ms) -> None:
        self.compact_ms = compact_ms


def policy_of(**options):
    return sp.Adaptive(**{"sample_every": 2, "clean_samples": 1, "cool_down": 8, "trial_steps": 4} | options)


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))


def data(step, *shape):
    return torch.randn(*(shape or (16, 32)), generator=torch.Generator().manual_seed(step))


def train(session, steps, loss_of, micro=1):
    losses = []
    for step in range(steps):
        for part in range(micro):
            with session.forward():
                loss = loss_of(step * micro + part)
            session.backward(loss)
            losses.append(loss.item())
        session.step()
    return losses


def square_loss(model):
    return lambda step: (model(data(step)).float() - 1).square().mean()


def session_of(model, precision, parts=(), **options):
    return sp.Session(model, torch.optim.AdamW(model.parameters(), 1e-2), [*parts, precision], **options)


def formats_of(precision, product=""):
    return {one.format for unit, one in precision.state.items() if unit.endswith(product)}


class Recomputed(nn.Module):
    def __init__(self, inner, reentrant=False) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("storage", ["compact", "masked"])
@pytest.mark.parametrize("first", ["sparse", "precision"])
def test_all_parts_in_one_loop(storage, first):
    model = Recomputed(mlp())
    sp.sparsify(model, sp.Block(8, 8), 0.5, storage=storage)
    precision = sp.Precision(policy_of(), probe=lambda: torch.ones(2), profile=Faster())
    parts = [sp.SparseTraining(sp.rigl(every=3, until=20)), sp.MovingAverage(0.5), sp.LossScaler(initial=2.0**8)]
    parts = [*parts, precision] if first == "sparse" else [precision, *parts]
    session = sp.Session(model, torch.optim.AdamW(model.parameters(), 1e-2), parts, accumulate=3, clip=1.0)
    losses = train(session, 24, square_loss(model), micro=3)
    assert sum(losses[-3:]) < sum(losses[:3])
    assert formats_of(precision) == {"bf16" if storage == "compact" else "int8"}
    bad = lambda step: model(data(step) * float("nan")).square().mean()  # noqa: E731
    train(session, 1, bad, micro=3)
    assert session.applied_steps == 24
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    train(session, 2, square_loss(model), micro=3)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(data(0)), model(data(0)))
    session.detach()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    square_loss(model)(0).backward()  # the model and a plain loop go on
    optimizer.step()
    assert precision.metrics()["precision.switches"] > 0
    assert len(precision.table().rows) == 1  # it has no layers now
    assert bool(square_loss(twin)(0).isfinite())


def test_a_second_session_after_the_first_starts_anew():
    model = mlp()
    first = session_of(model, sp.Precision(policy_of(), profile=Faster()))
    train(first, 6, square_loss(model))
    first.detach()
    precision = sp.Precision(policy_of(), profile=Faster())
    second = session_of(model, precision)
    assert formats_of(precision) == {"fp32"}
    train(second, 6, square_loss(model))
    assert formats_of(precision) == {"bf16"}


@pytest.mark.parametrize("second", ["bf16", "policy"])
def test_two_precisions_are_one_too_many(second):
    model = mlp()
    other = sp.Precision("bf16" if second == "bf16" else sp.Rules())
    with pytest.raises(ValueError, match=r"precision: expected one Precision in a session, got several. Keep the one"):
        session_of(model, sp.Precision(sp.Rules()), [other])
    assert type(model[0]) is nn.Linear


def test_a_transition_that_blocks_cannot_make_is_refused_at_the_start():
    model = mlp()
    sp.sparsify(model, sp.Block(8, 8), 0.5, exclude=["2"])
    with pytest.raises(ValueError, match=r"int8: there is no fast int8 product of block-sparse weights"):
        session_of(model, sp.Precision(sp.Progressive("bf16", INT8)))
    session_of(model, sp.Precision(sp.Progressive("bf16", INT8, rules={"0": "bf16"})))


def test_a_state_of_the_other_kind_is_refused():
    plain, policy = session_of(mlp(), sp.Precision("bf16")), session_of(mlp(), sp.Precision(sp.Rules()))
    with pytest.raises(ValueError, match=r"precision: expected the state of one format, got that of a policy. Resume"):
        plain.load_state_dict(policy.state_dict())
    with pytest.raises(ValueError, match=r"precision: expected the state of a policy, got that of one format. Resume"):
        policy.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("inside", [False, True], ids=["whole", "part"])
def test_a_compiled_model_and_a_policy_that_samples_are_refused(inside):
    model = mlp()
    if inside:
        outer = nn.Sequential(model)
        model.compile(backend="eager")
    else:
        outer = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"precision: expected a model that is not compiled, got .*leave compile out"):
        session_of(outer, sp.Precision(policy_of(), profile=Faster()))
    assert type(model[0]) is nn.Linear


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, while it looks for graphs
def test_a_compiled_model_follows_a_policy_that_does_not_sample():
    def run(compiled):
        model = mlp()
        precision = sp.Precision(sp.Progressive("bf16", INT8, transition_steps=4, head=INT8))
        session = session_of(torch.compile(model, backend="eager") if compiled else model, precision)
        return train(session, 6, square_loss(session.model)), precision.switches

    torch._dynamo.reset()
    assert run(True) == run(False)
    torch._dynamo.reset()


def test_a_reentrant_checkpoint_is_sampled_in_its_backward():
    model = Recomputed(mlp(), reentrant=True)
    precision = sp.Precision(policy_of(), profile=Faster())
    session = session_of(model, precision)
    train(session, 6, lambda step: (model(data(step).requires_grad_()).float() - 1).square().mean())
    assert formats_of(precision) == {"bf16"}


def test_what_comes_before_all_trained_layers_has_a_forward_product_only():
    model = mlp()
    model[0].requires_grad_(False)
    precision = sp.Precision(policy_of(), profile=Faster())
    train(session_of(model, precision), 6, square_loss(model))
    assert formats_of(precision, "0/forward") == {"bf16"}
    assert formats_of(precision, "0/weight_gradient") == {"fp32"}


def test_layers_may_be_called_by_keyword():
    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            return self.fc(input=x)

    model = Called()
    precision = sp.Precision(policy_of(), profile=Faster())
    train(session_of(model, precision), 6, square_loss(model))
    assert formats_of(precision) == {"bf16"}


def test_what_waits_is_not_sampled_for_lower_formats():
    model = mlp()
    precision = sp.Precision(policy_of(cool_down=64), profile=Faster())
    session = session_of(model, precision)
    train(session, 6, square_loss(model))  # int8 needs a probe: tried again in 64 steps
    assert [one.name for one in precision._wanted("0/forward")] == ["bf16"]
    assert precision.state["0/forward"].wait > session.applied_steps


def test_tied_weights_have_formats_of_their_own_and_one_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    model[2].weight = model[0].weight
    precision = sp.Precision(sp.Rules({"0": INT8, "2": "fp32"}))
    session = session_of(model, precision)
    train(session, 3, square_loss(model))
    assert model[0].weight is model[2].weight
    assert model[0].formats != model[2].formats
    session.detach()
    assert model[0].weight is model[2].weight


def test_attention_and_transformer_layers_of_torch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True), nn.Linear(32, 32))
    x = data(3, 4, 8, 32)
    probed = []

    def probe():
        probed.append(model(x).square().mean((1, 2)))
        return probed[-1]

    precision = sp.Precision(policy_of(max_gap=0.1), probe=probe, profile=Faster())
    session = session_of(model, precision)
    assert "0.self_attn.out_proj/forward" not in precision.state  # attention reads its weight
    # in eval mode torch would pass linear1 and linear2 by, and a probe would find nothing
    before = torch.backends.mha.get_fastpath_enabled()
    assert precision._gap({"0.linear1/forward": INT8, "0.linear2/forward": INT8}) != 0
    assert torch.backends.mha.get_fastpath_enabled() == before
    train(session, 10, lambda step: (model(data(step, 4, 8, 32)).float() - 1).square().mean())
    assert formats_of(precision) == {"int8"}


def test_a_probe_that_fails_leaves_the_formats_as_they_were():
    model = mlp()
    answers = iter([torch.ones(2)])
    precision = sp.Precision(sp.Rules(), probe=lambda: next(answers))
    session_of(model, precision)
    before = [layer.formats for layer in (model[0], model[2])]
    with pytest.raises(StopIteration):
        precision._gap({"0/forward": INT8})
    assert [layer.formats for layer in (model[0], model[2])] == before
    assert model.training


def test_a_gpt_in_simulated_eight_bits_with_everything():
    torch.manual_seed(0)
    model = GPT(vocabulary=64, context=16, layers=2, width=32, heads=2)
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
    precision = sp.Precision(sp.Progressive("bf16", FP8, transition_steps=10, begin=2, cooldown_at=16), simulate=True)
    session = session_of(model, precision, [sp.LossScaler(initial=2.0**8)], clip=1.0)

    def loss_of(step):
        return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())

    losses = train(session, 20, loss_of)
    assert losses[-1] < 0.8 * losses[0]
    assert "fp8" not in formats_of(precision, "/forward")
    assert "fp8" in formats_of(precision, "gradient")


@pytest.mark.integration
def test_a_model_of_transformers():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertForSequenceClassification(config)
    tokens = torch.randint(0, 40, (8, 12), generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % 2
    precision = sp.Precision(policy_of(), profile=Faster())
    session = session_of(model, precision, clip=1.0)
    losses = train(session, 10, lambda step: model(input_ids=tokens, labels=labels).loss)
    assert losses[-1] < losses[0]
    assert formats_of(precision) == {"bf16"}
    assert "bert.encoder.layer.0.attention.self.query" in {row.name for row in precision.table().rows}
