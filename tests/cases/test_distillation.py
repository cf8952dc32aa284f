"""Faults of distillation that users of public tools reported, by number, each with its whole kind."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsam as sp
from sparsam import checkpoint
from sparsam.compress.distil import Distillation
from sparsam.compress.teaching import soft_target_loss


class Noisy(nn.Module):
    """Draws random numbers in evaluation mode too."""

    def forward(self, x):
        return x + 0.01 * torch.randn_like(x)


def teacher_of(width=16):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5), Noisy(), nn.Linear(width, 4)
    )


def student_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4))


def train(student, distillation, listens=True, steps=4):
    """The session after a few steps, in which a student hears its teacher out, and listens or does not."""
    parts = [] if distillation is None else [distillation]
    trained = [*student.parameters(), *(distillation.parameters() if distillation else [])]
    session = sp.Session(student, torch.optim.AdamW(trained, lr=0.01), parts, accumulate=2)
    torch.manual_seed(2)
    for step in range(2 * steps):
        student.train()
        x = torch.randn(12, 6, generator=torch.Generator().manual_seed(step))
        with session.forward():
            logits = student(x)
            loss = own = F.cross_entropy(logits, (x[:, :4]).argmax(-1))
            if distillation is not None:
                loss = distillation.loss(logits, x, own)
        session.backward(loss if listens else own)
        session.step()
    return session


def same(left, right):
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("mode", [True, False], ids=["in training mode", "in evaluation mode"])
def test_q1_a_teacher_stays_as_it_is(mode):
    teacher, student = teacher_of().train(mode), student_of()
    before, weights = copy.deepcopy(teacher.state_dict()), copy.deepcopy(student.state_dict())
    session = train(student, Distillation(teacher, 2.0, hidden={"0": "0"}, widths=(8, 16)))
    assert same(teacher.state_dict(), before)
    assert not same(student.state_dict(), weights)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(module.training is mode for module in teacher.modules())  # as its owner has left it
    optimised = {id(one) for group in session.optimizer.param_groups for one in group["params"]}
    assert not optimised & {id(parameter) for parameter in teacher.parameters()}


def test_q1_a_teacher_in_training_mode_says_what_it_says_in_evaluation_mode():
    teacher, student, x = teacher_of().train(), student_of().eval(), torch.randn(12, 6)
    teacher[4] = nn.Identity()
    found = Distillation(teacher, 1.0, 3.0).loss(student(x), x)
    assert torch.equal(found, soft_target_loss(student(x), teacher.eval()(x), 3.0))


def test_q1_the_random_numbers_of_the_student_are_those_without_a_teacher():
    alone, heard = student_of(), student_of()
    train(alone, None)
    after = torch.rand(3)
    train(heard, Distillation(teacher_of()), listens=False)
    assert torch.equal(torch.rand(3), after)
    assert same(alone.state_dict(), heard.state_dict())


@pytest.mark.parametrize("dimension", [0, 1], ids=["batch", "length"])
def test_q1_the_loss_depends_on_neither_batch_nor_length(dimension):
    torch.manual_seed(0)
    student, teacher = nn.Embedding(9, 5), nn.Embedding(9, 5)
    distillation, tokens = Distillation(teacher, 1.0), torch.randint(9, (3, 7))
    twice = torch.cat([tokens, tokens], dimension)
    once = float(distillation.loss(student(tokens), tokens).detach())
    assert float(distillation.loss(student(twice), twice).detach()) == pytest.approx(once, rel=1e-6)


@pytest.mark.parametrize("refused", ["the student itself", "weights in the optimiser", "a part of the student"])
def test_q1_a_teacher_that_would_be_trained_is_refused(refused):
    student, teacher = student_of(), teacher_of()
    trained = [*student.parameters()]
    if refused == "the student itself":
        teacher = student
    elif refused == "a part of the student":
        teacher = student[:2]
    else:
        trained += teacher.parameters()
    with pytest.raises(ValueError, match="teacher: expected weights of its own"):
        sp.Session(student, torch.optim.AdamW(trained), [Distillation(teacher)])


def test_q7_a_checkpoint_of_the_student_is_that_of_plain_training(tmp_path):
    sizes, names = [], []
    for place, distillation in enumerate([None, Distillation(teacher_of(512))]):
        student = student_of()
        session = train(student, distillation)
        state = {
            "model": student.state_dict(),
            "optimizer": checkpoint.optimizer_state(student, session.optimizer),
            "session": session.state_dict(),
        }
        checkpoint.write(tmp_path / str(place), state)
        files = sorted((tmp_path / str(place)).glob("*.safetensors"))
        sizes.append([(file.name, file.stat().st_size) for file in files])
        names.append([[*state["model"]], [*state["optimizer"]]])
    assert sizes[0] == sizes[1]
    assert names[0] == names[1]
