from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsam as sp
from ranks import on_two_ranks
from sparsam.compress.distil import Distillation
from sparsam.compress.teaching import attention_loss, relation_loss, soft_target_loss, state_loss
from sparsam.tasks.gpt import GPT


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(width, classes=4, seed=0, inputs=6):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
    )


def gpt(width=24, heads=2, layers=2, seed=0):
    torch.manual_seed(seed)
    return GPT(layers=layers, width=width, heads=heads, context=8, vocabulary=16)


def tokens(rows=3, length=8, seed=0):
    return torch.randint(16, (rows, length), generator=torch.Generator().manual_seed(seed))


def session_of(student, distillation, *parts, **options):
    trained = [*student.parameters(), *distillation.parameters()]
    return sp.Session(student, torch.optim.SGD(trained, lr=0.1), [*parts, distillation], **options)


def trained(student, distillation, steps=3, *parts, inputs=None, **options):
    """The losses of a few steps."""
    session = session_of(student, distillation, *parts, **options)
    inputs = made(5, 6) if inputs is None else inputs
    losses = []
    for _ in range(steps):
        for _ in range(session.accumulate):
            with session.forward():
                loss = distillation.loss(student(inputs), inputs)
            session.backward(loss)
            losses.append(float(loss.detach()))
        session.step()
    return losses


def test_soft_targets_of_a_table_that_can_be_checked_by_hand():
    student, teacher = torch.zeros(1, 2), torch.tensor([[math.log(3), 0.0]])
    by_hand = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert float(soft_target_loss(student, teacher, 1.0)) == pytest.approx(by_hand, rel=1e-6)
    # at temperature 2 the same shares come of twice the logits, and the loss is times 4
    assert float(soft_target_loss(student, 2 * teacher, 2.0)) == pytest.approx(4 * by_hand, rel=1e-6)
    # a yes or no with one logit is a choice between it and 0
    for shape in [(1,), (1, 1)]:
        one, other = torch.zeros(shape), torch.full(shape, math.log(3))
        assert float(soft_target_loss(one, other, 1.0)) == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("shape", [(5, 4), (5, 7, 4), (5,), (5, 1)], ids=["rows", "tokens", "binary", "one-logit"])
def test_soft_targets_of_every_task(shape):
    student, teacher = made(*shape).requires_grad_(), made(*shape, seed=1)
    assert float(soft_target_loss(teacher.clone(), teacher)) == 0
    loss = soft_target_loss(student, teacher)
    assert loss > 0
    assert loss.dtype == soft_target_loss(student.bfloat16(), teacher.bfloat16()).dtype == torch.float32
    twice = soft_target_loss(torch.cat([student, student]), torch.cat([teacher, teacher]))
    assert float(twice.detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    keep = torch.arange(5) < 3
    positions = keep[:, None].expand(5, 7) if len(shape) == 3 else keep
    part = float(soft_target_loss(student[:3], teacher[:3]).detach())
    assert float(soft_target_loss(student, teacher, keep=positions).detach()) == pytest.approx(part, rel=1e-5)
    assert float(soft_target_loss(student, teacher, keep=torch.zeros_like(positions)).detach()) == 0
    loss.backward()
    assert student.grad.abs().sum() > 0


def test_a_class_that_is_ruled_out_adds_nothing_and_gradients_are_finite():
    student, teacher = made(3, 4).requires_grad_(), made(3, 4, seed=1)
    mask = torch.tensor([0.0, 0.0, -math.inf, 0.0])
    loss = soft_target_loss(student + mask, teacher + mask)
    kept = [0, 1, 3]
    assert float(loss.detach()) == pytest.approx(
        float(soft_target_loss(student[:, kept].detach(), teacher[:, kept])), rel=1e-5
    )
    loss.backward()
    assert student.grad.isfinite().all()


def test_the_gradient_keeps_its_size_whatever_the_temperature():
    sizes = []
    for temperature in (20.0, 40.0):
        student = made(6, 5).requires_grad_()
        soft_target_loss(student, made(6, 5, seed=1), temperature).backward()
        sizes.append(float(student.grad.norm()))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def maps(seed):
    return made(2, 3, 5, 5, seed=seed).softmax(-1)


LOSSES = {
    "states": (state_loss, made(2, 5, 12), made(2, 5, 12, seed=1)),
    "relations": (lambda a, b, keep=None: relation_loss(a, b, 3, keep), made(2, 5, 12), made(2, 5, 12, seed=1)),
    "of other widths": (lambda a, b, keep=None: relation_loss(a, b, 3, keep), made(2, 5, 6), made(2, 5, 12, seed=1)),
    "maps": (attention_loss, maps(0), maps(1)),
}


@pytest.mark.parametrize(("loss", "student", "teacher"), LOSSES.values(), ids=LOSSES.keys())
def test_what_holds_of_states_and_attention(loss, student, teacher):
    assert float(loss(teacher.clone(), teacher)) == 0
    found = float(loss(student, teacher))
    assert found > 0
    assert float(loss(student.repeat_interleave(2, 0), teacher.repeat_interleave(2, 0))) == pytest.approx(
        found, rel=1e-5
    )
    keep = torch.tensor([[True] * 5, [False] * 5])
    assert float(loss(student, teacher, keep)) == pytest.approx(float(loss(student[:1], teacher[:1])), rel=1e-5)
    assert float(loss(student, teacher, keep & False)) == 0


def test_padding_changes_no_relation():
    student, teacher, keep = made(2, 5, 12), made(2, 5, 12, seed=1), torch.arange(5).expand(2, 5) < 3
    found = float(relation_loss(student, teacher, 3, keep))
    assert found == pytest.approx(float(relation_loss(student[:, :3], teacher[:, :3], 3)), rel=1e-5)


def test_gradients_reach_the_student_alone_and_nothing_stays_on_either_model():
    teacher, student = gpt(48, 4), gpt()
    distillation = Distillation(
        teacher,
        hidden={"blocks.?": "blocks.?"},
        widths=(24, 48),
        attention={"blocks.1.qkv": "blocks.1.qkv"},
    )
    session = session_of(student, distillation)
    with session.forward():
        output = student(tokens())
        loss = distillation.loss(output, tokens(), F.cross_entropy(output.flatten(0, 1), tokens(seed=1).flatten()))
    assert all(not module._forward_hooks for model in (teacher, student) for module in model.modules())
    session.backward(loss)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert all(parameter.grad is not None for parameter in distillation.parameters())
    session.step()
    assert all(teacher.training == module.training for module in teacher.modules())
    metrics = session.metrics()
    assert {name for name in metrics if name.startswith("distillation.")} == {
        "distillation.logits",
        "distillation.hidden",
        "distillation.attention",
    }
    copy.deepcopy(student)
    session.detach()
    with pytest.raises(ValueError, match="expected a Distillation in a session"):
        distillation.loss(output, tokens())


def test_the_sum_is_own_loss_and_weighed_terms():
    teacher, student, x = network(9), network(9, seed=1), made(5, 6)
    distillation = Distillation(teacher, 0.25, 3.0, hidden={"0": "0"}, hidden_weight=2.0)
    session = session_of(student, distillation)
    with session.forward():
        loss = distillation.loss(student(x), (x,), torch.tensor(7.0))
    soft = soft_target_loss(student(x), teacher(x), 3.0)
    expected = 7 + 0.25 * soft + 2 * F.mse_loss(student[0](x), teacher[0](x))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)


PARTS = {
    "bf16": [sp.Precision("bf16")],
    "recomputed": [sp.Recompute(1)],
    "recomputed in bf16": [sp.Precision("bf16"), sp.Recompute(2)],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS.keys())
def test_works_beside_other_parts(parts):
    def run(parts):
        student = gpt()
        distillation = Distillation(
            gpt(48, 4), hidden={"blocks.0": "blocks.1"}, widths=(24, 48), attention={"blocks.1.qkv": "blocks.1.qkv"}
        )
        trained(student, distillation, 2, *parts, inputs=tokens(), accumulate=2)
        return torch.cat([one.detach().flatten() for one in [*student.parameters(), *distillation.parameters()]])

    plain = run([sp.Precision("bf16")] if isinstance(parts[0], sp.Precision) else [])
    assert torch.equal(run([copy.deepcopy(part) for part in parts]), plain)


def test_a_sparse_student_learns_from_a_dense_teacher_and_keeps_its_density():
    teacher = network(32)
    student = copy.deepcopy(teacher)
    sp.sparsify(student, sp.Unstructured(), density=0.25, exclude=["4"])
    distillation = Distillation(teacher, 1.0, hidden={"2": "2"})
    losses = trained(student, distillation, 60, sp.SparseTraining(sp.rigl(every=4)))
    assert losses[-1] < 0.7 * losses[0]
    assert int((student[2].weight != 0).sum()) <= 0.25 * 32 * 32


def test_a_small_student_learns_more_with_the_teacher_than_alone():
    """Few rows, most of them labelled wrongly: the teacher knows better, and says so in every class."""
    teacher = network(48, seed=3)
    with torch.no_grad():
        for layer in (0, 2, 4):
            teacher[layer].weight.mul_(2)
    x, held_out = made(200, 6, seed=1), made(1000, 6, seed=2)
    with torch.no_grad():
        labels, truth = teacher(x).argmax(-1), teacher(held_out).argmax(-1)
    wrong = torch.rand(200, generator=torch.Generator().manual_seed(4)) < 0.6
    labels[wrong] = torch.randint(4, (200,), generator=torch.Generator().manual_seed(5))[wrong]
    found = {}
    for weight in (0.0, 3.0):
        student = network(12, seed=7)
        parts = [Distillation(teacher, weight)] if weight else []
        session = sp.Session(student, torch.optim.Adam(student.parameters(), lr=0.01), parts)
        for _ in range(200):
            with session.forward():
                logits = student(x)
                loss = F.cross_entropy(logits, labels)
                loss = parts[0].loss(logits, x, loss) if parts else loss
            session.backward(loss)
            session.step()
        found[weight] = float((student(held_out).argmax(-1) == truth).float().mean())
    assert found[3.0] > found[0.0] + 0.1, found


def test_what_does_not_count_is_left_out():
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.key, self.head = nn.Embedding(11, 8), nn.Linear(8, 12), nn.Linear(8, 11)

        def forward(self, input_ids, attention_mask=None):
            x = self.embedding(input_ids)
            self.key(x)
            return SimpleNamespace(logits=self.head(x))

    teacher, student = Reader(), Reader()
    distillation = Distillation(teacher, hidden={"embedding": "embedding"}, attention={"key": "key"}, relations=2)
    session = session_of(student, distillation)

    def loss_of(ids, attention_mask=None, **options):
        inputs = {"input_ids": ids, "attention_mask": attention_mask}
        with session.forward():
            return float(distillation.loss(student(**inputs), inputs, **options).detach())

    ids = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
    padded = ids.clone()
    padded[:, 4:] = 0
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)
    short = loss_of(ids[:, :4])
    assert loss_of(padded, attention_mask=mask) == pytest.approx(short, rel=1e-5)
    assert loss_of(padded, mask=mask.bool()) == pytest.approx(short, rel=1e-5)
    assert loss_of(padded) != pytest.approx(short, rel=1e-5)
    distillation.weights.update(hidden=0.0, attention=0.0)
    labels = torch.where(mask.bool(), ids, -100)
    assert loss_of(padded, labels=labels) != loss_of(padded)
    message = r"labels: expected loss\(\.\.\., labels=\), for those among the inputs hold -100"
    with pytest.raises(ValueError, match=message), session.forward():
        distillation.loss(student(padded), {"input_ids": padded, "labels": labels})


def test_state_goes_on_and_another_teacher_is_refused():
    def training():
        student = network(6)
        return student, Distillation(network(9), hidden={"0": "0"}, widths=(6, 9), logits=0.0)

    student, distillation = training()
    trained(student, distillation, 2)
    state, weights = copy.deepcopy(distillation.state_dict()), copy.deepcopy(student.state_dict())
    expected = trained(student, distillation, 2)
    student, distillation = training()
    student.load_state_dict(weights)
    distillation.load_state_dict(state)
    assert trained(student, distillation, 2) == expected
    with torch.no_grad():
        other = network(9)
        other[0].bias.add_(1)
    with pytest.raises(ValueError, match="teacher: expected the one that this training began with"):
        Distillation(other, hidden={"0": "0"}, widths=(6, 9)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"projections: expected those of \[\], got \['0'\]"):
        Distillation(network(9)).load_state_dict(state)


def bert(implementation, heads=2, width=16, seed=0, dropout=0.0):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=16,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=heads,
        intermediate_size=32,
        num_labels=3,
        attention_probs_dropout_prob=dropout,
    )
    config._attn_implementation = implementation
    return transformers.BertForSequenceClassification(config).train()


MAP = "bert.encoder.layer.1.attention.self"
ENCODERS = {
    "maps": (bert("eager"), bert("eager", seed=1), {MAP: MAP}, None),
    "relations": (
        bert("sdpa", 2),
        bert("sdpa", 4, 32, seed=1),
        {f"{MAP}.{name}": f"{MAP}.{name}" for name in ("query", "key", "value")},
        None,
    ),
    "no maps": (bert("sdpa"), bert("sdpa", seed=1), {MAP: MAP}, "attn_implementation='eager'"),
    "other heads": (bert("eager"), bert("eager", 4, seed=1), {MAP: MAP}, "With other numbers of heads"),
    "dropout": (bert("eager", dropout=0.5), bert("eager", seed=1), {MAP: MAP}, "whose rows sum to 1"),
}


@pytest.mark.parametrize(("student", "teacher", "attention", "error"), ENCODERS.values(), ids=ENCODERS.keys())
def test_attention_of_an_encoder(student, teacher, attention, error):
    layer = "bert.encoder.layer.1"
    hidden = {} if teacher.config.hidden_size != student.config.hidden_size else {layer: layer}
    distillation = Distillation(teacher, hidden=hidden, attention=attention, relations=4)
    session = session_of(student, distillation)
    batch = {"input_ids": tokens(), "attention_mask": (torch.arange(8) < 6).expand(3, 8).long()}
    with session.forward():
        output = student(**batch)
        if error is not None:
            with pytest.raises(ValueError, match=error):
                distillation.loss(output, batch)
            return
        loss = distillation.loss(output, batch)
    session.backward(loss)
    assert student.get_submodule(MAP).query.weight.grad.abs().sum() > 0
    assert session.metrics()["distillation.attention"] > 0


def test_logits_go_through_the_compiler_and_a_compiled_model_is_refused_for_what_is_inside():
    teacher, student, x = network(9), network(6, seed=1), made(5, 6)
    compiled = torch.compile(student, backend="eager")
    found = Distillation(teacher).loss(compiled(x), x)
    assert torch.equal(found, Distillation(teacher).loss(student(x), x))
    with pytest.raises(ValueError, match="expected a student that is not compiled"):
        session_of(compiled, Distillation(teacher, hidden={"*.0": "0"}))
    # compiled after the session, what is inside it is seen
    student = network(9, seed=1)
    distillation = Distillation(teacher, hidden={"0": "0"})
    session = session_of(student, distillation)
    with session.forward():
        plain = distillation.loss(student(x), x)
    compiled = torch.compile(student, backend="eager")
    for _ in range(2):
        with session.forward():
            assert torch.equal(distillation.loss(compiled(x), x), plain)


def test_ranks_train_one_projection(tmp_path):
    on_two_ranks(
        """
import copy
from torch.distributed.fsdp import fully_shard
from sparsam.compress.distil import Distillation
torch.manual_seed(0)
teacher, student = nn.Sequential(nn.Linear(13, 30), nn.Tanh(), nn.Linear(30, 9)), DDP(mlp())
torch.manual_seed(rank)
distillation = Distillation(teacher, hidden={"0": "0"}, widths=(22, 30))
optimizer = torch.optim.SGD([*student.parameters(), *distillation.parameters()], lr=0.1)
session = sp.Session(student, optimizer, [distillation], accumulate=2)
alone = copy.deepcopy(student.module)
again = Distillation(teacher, hidden={"0": "0"}, widths=(22, 30))
single = sp.Session(alone, torch.optim.SGD([*alone.parameters(), *again.parameters()], lr=0.1), [again], accumulate=2)
def take(session, distillation, x):
    with session.forward():
        loss = distillation.loss(session.model(x), x)
    session.backward(loss)
    session.step()
for step in range(2):
    for micro in range(2):
        x = torch.randn(8, 13, generator=torch.Generator().manual_seed(2 * step + micro))
        take(session, distillation, x[4 * rank : 4 * rank + 4])
        take(single, again, x)
for one, other in zip([*student.parameters(), *distillation.parameters()], [*alone.parameters(), *again.parameters()]):
    assert torch.allclose(one, other, atol=1e-6), (one - other).abs().max()
torch.manual_seed(5)
sharded, whole = mlp(), mlp()
whole.load_state_dict(sharded.state_dict())
fully_shard(sharded)
found = []
for model in (sharded, whole):
    heard = Distillation(teacher)
    session = sp.Session(model, torch.optim.SGD(model.parameters(), lr=0.1), [heard])
    for step in range(2):
        take(session, heard, torch.ones(4, 13) * (step + 1))
    found.append(model(torch.ones(1, 13)).detach())
assert torch.allclose(*found, atol=1e-6)
found = gathered([one.tolist() for one in distillation.parameters()])
assert found[0] == found[1]
try:
    Distillation(student)
except ValueError as error:
    assert "not wrapped" in str(error)
else:
    raise AssertionError
""",
        tmp_path,
    )


REFUSED = {
    "a weight below 0": (lambda: Distillation(network(4), -1.0), r"logits: expected a weight of at least 0, got -1"),
    "no temperature": (
        lambda: Distillation(network(4), temperature=0.0),
        r"temperature: expected a number above 0, got 0",
    ),
    "no relations": (lambda: Distillation(network(4), relations=0), r"relations: expected at least 1 group"),
    "no teacher": (lambda: Distillation("run"), r"teacher: expected a model, not wrapped, got a str"),
    "nothing to learn": (lambda: Distillation(network(4), 0.0), r"expected something to learn from"),
    "widths of nothing": (lambda: Distillation(network(4), widths=(4, 5)), r"widths: .* \(nothing\), got None"),
    "widths of another": (
        lambda: Distillation(network(4), hidden={"0": "0"}, widths={"1": (4, 5)}),
        r"widths: expected widths of what hidden= names \(0\), got '1'",
    ),
    "no temperature in the function": (
        lambda: soft_target_loss(made(2, 3), made(2, 3), -1.0),
        r"temperature: expected a number above 0",
    ),
    "another vocabulary": (
        lambda: Distillation(network(4, classes=5)).loss(network(4)(made(2, 6)), made(2, 6)),
        r"logits: expected \(2, 5\) as the teacher gives, got \(2, 4\)",
    ),
    "no logits": (
        lambda: Distillation(network(4)).loss({"scores": 1}, made(2, 6)),
        r"student: expected logits, or an output with \.logits, got a dict",
    ),
    "a mask that does not fit": (
        lambda: soft_target_loss(made(2, 3), made(2, 3), keep=torch.ones(3, dtype=torch.bool)),
        r"logits: expected a mask of \(2,\) positions, got \(3,\)",
    ),
    "labels that do not fit": (
        lambda: Distillation(network(4)).loss(network(4)(made(2, 6)), made(2, 6), labels=torch.zeros(3)),
        r"labels: expected \(2,\) as the logits have, got \(3,\)",
    ),
    "other tokens": (
        lambda: relation_loss(made(2, 3, 4), made(2, 5, 4), 2),
        r"attention: expected states of \(2, 5\) positions as the teacher gives, got \(2, 3\)",
    ),
    "groups": (lambda: relation_loss(made(2, 3, 4), made(2, 3, 4), 3), r"features that divide into 3 groups, got 4"),
    "the student itself": (lambda: (lambda one: session_of(one, Distillation(one)))(network(4)), r"weights of its own"),
    "globs": (
        lambda: session_of(network(4), Distillation(network(4), hidden={"[02]": "0"})),
        r"as many modules of the student as of the teacher, got 2 for '\[02\]' and 1 for '0'",
    ),
    "no such module": (
        lambda: session_of(network(4), Distillation(network(4), hidden={"9": "0"})),
        r"'9' matches no layer",
    ),
    "projections nobody trains": (
        lambda: (
            lambda one: sp.Session(
                one,
                torch.optim.SGD(one.parameters(), lr=0.1),
                [Distillation(network(6), hidden={"0": "0"}, widths=(4, 6))],
            )
        )(network(4)),
        r"optimizer: expected the projections of Distillation in it",
    ),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_go_together_is_refused(call, message):
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


class Odd(nn.Module):
    """Has what cannot be compared."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.pair, self.number = nn.Linear(6, 4), nn.Linear(6, 4), nn.Identity(), nn.Identity()
        self.map = nn.Identity()

    def forward(self, x):
        self.pair((x, None))
        self.number(torch.arange(3))
        self.map((x, torch.full((2, 3, 3), 1 / 3)))
        return self.first(self.first(x)[..., [0, 1, 2, 3, 0, 1]])


INSIDE = {
    "features": (network(6), network(4), {"hidden": {"0": "0"}}, r"0: expected a state of \(2, 6\) .* got \(2, 4\)"),
    "other widths": (
        network(6),
        network(4),
        {"hidden": {"0": "0"}, "widths": (5, 6)},
        r"0: expected 5 features as widths= says, got 4",
    ),
    "called twice": (Odd(), Odd(), {"hidden": {"first": "first"}}, r"first: expected one call of it .* got 2"),
    "not called": (network(4), Odd(), {"hidden": {"unused": "0"}}, r"unused: expected one call of it .* got 0"),
    "not called by the teacher": (
        Odd(),
        network(4),
        {"hidden": {"0": "unused"}},
        r"unused: expected a module that the",
    ),
    "no state": (Odd(), Odd(), {"hidden": {"number": "number"}}, r"number: expected a module that gives a state"),
    "no gradient": (Odd(), Odd(), {"hidden": {"pair": "pair"}}, r"pair: expected a state with a gradient"),
    "no map": (Odd(), Odd(), {"attention": {"pair": "pair"}}, r"pair: expected its attention map beside its output"),
    "no projection": (network(4), network(4), {"attention": {"0": "0"}}, r"0: expected a projection that gives \(B, T"),
}


@pytest.mark.parametrize(("teacher", "student", "options", "message"), INSIDE.values(), ids=INSIDE.keys())
def test_what_cannot_be_compared_is_refused_by_its_name(teacher, student, options, message):
    distillation = Distillation(teacher, 0.0, **options)
    session = session_of(student, distillation)
    with session.forward():
        output = student(made(2, 6))
        with pytest.raises(ValueError, match=message):
            distillation.loss(output, made(2, 6))


def test_a_map_on_one_side_and_a_projection_on_the_other_is_refused():
    distillation = Distillation(gpt(), attention={"blocks.1.qkv": "blocks.1.qkv"})
    with pytest.raises(ValueError, match="expected an attention map on both sides or a projection on both"):
        distillation._attention("", "one", made(2, 3, 4).requires_grad_(), "two", (None, maps(0)), None)
