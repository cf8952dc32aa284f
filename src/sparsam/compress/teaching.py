"""How far a student is from its teacher: soft targets, hidden states, attention. Functions of tensors, without models.

Each is a mean over the positions that count, so that it does not depend on how many rows or tokens a batch has.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["attention_loss", "relation_loss", "soft_target_loss", "state_loss"]


def soft_target_loss(student: Tensor, teacher: Tensor, temperature: float = 2.0, keep: Tensor | None = None) -> Tensor:
    """KL(teacher || student) of the softmax of logits / temperature, times temperature^2, a mean over positions.

    For every task whose models give logits: classes of a text, an image or a row of a table, tokens of a language
    model. A row of one logit (or logits without a dimension of classes) is that of a yes or no, by the sigmoid.

    Args:
        student: logits (..., classes), or (rows), (rows, 1) of yes or no.
        teacher: the same shape; takes no gradient.
        temperature: higher shows more of what the teacher holds for unlikely.
        keep: bool, the shape of the logits without the classes: positions that count. None: all.

    Returns:
        float32 scalar, 0 where no position counts. Its gradient keeps its size whatever the temperature.

    Raises:
        ValueError: shapes differ, or the temperature is not above 0.

    Source: Hinton et al. 2015, arXiv:1503.02531.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature: expected a number above 0, got {temperature}.")
    if student.shape != teacher.shape:
        raise ValueError(
            f"logits: expected {tuple(teacher.shape)} as the teacher gives, got {tuple(student.shape)}. Teacher and "
            "student need the same classes or vocabulary, and the same inputs."
        )
    if student.dim() < 2 or student.shape[-1] == 1:
        student, teacher = (_yes_or_no(logits) for logits in (student, teacher))
    scaled = (logits.float() / temperature for logits in (student, teacher.detach()))
    return temperature**2 * _mean(_divergence(*scaled), keep, "logits")


def state_loss(student: Tensor, teacher: Tensor, keep: Tensor | None = None) -> Tensor:
    """Mean squared difference of hidden states over positions and features.

    Args:
        student: (..., features).
        teacher: the same shape; takes no gradient.
        keep: bool (...): positions that count. None: all.

    Source: Romero et al. 2015, arXiv:1412.6550, eq. 3. Differs: a mean, not a sum.
    """
    return _mean((student.float() - teacher.detach().float()).square().mean(-1), keep, "hidden")


def relation_loss(student: Tensor, teacher: Tensor, groups: int, keep: Tensor | None = None) -> Tensor:
    """KL(teacher || student) of how positions relate: softmax(X X^T / sqrt(D)) in each group of D features.

    X are queries, keys or values; widths may differ, for a relation is (T, T) in every width. So models are compared
    that fuse their attention, or have other numbers of heads.

    Args:
        student: (B, T, features).
        teacher: (B, T, its features); takes no gradient.
        groups: of features, as many in both; each gives one relation.
        keep: bool (B, T): positions that count, as rows and as columns. None: all.

    Raises:
        ValueError: they are not of the same positions, or features do not divide into the groups.

    Source: Wang et al. 2020, arXiv:2002.10957 (relations of values), 2012.15828 (of queries and keys too, in groups).
    """
    if student.shape[:-1] != teacher.shape[:-1]:
        raise ValueError(
            f"attention: expected states of {tuple(teacher.shape[:-1])} positions as the teacher gives, got "
            f"{tuple(student.shape[:-1])}. Teacher and student need the same tokens."
        )
    scores = (_relations(x, groups, keep) for x in (student, teacher.detach()))
    return _mean(_divergence(*scores).mean(1), keep, "attention")


def attention_loss(student: Tensor, teacher: Tensor, keep: Tensor | None = None) -> Tensor:
    """KL(teacher || student) of attention maps, a mean over heads and queries.

    Args:
        student: (B, H, T, T), rows that sum to 1.
        teacher: the same shape; takes no gradient.
        keep: bool (B, T): queries that count. None: all.

    Raises:
        ValueError: shapes differ, as with other numbers of heads.

    Source: Wang et al. 2020, arXiv:2002.10957, eq. 3.
    """
    if student.shape != teacher.shape:
        raise ValueError(
            f"attention: expected maps (B, H, T, T) of {tuple(teacher.shape)} as the teacher gives, got "
            f"{tuple(student.shape)}. With other numbers of heads name projections of queries, keys or values instead."
        )
    p, q = teacher.detach().float(), student.float()
    smallest = torch.finfo(torch.float32).tiny  # what a mask has made 0 in both adds nothing
    rows = (p * (p.clamp(min=smallest).log() - q.clamp(min=smallest).log())).sum(-1)
    return _mean(rows.mean(1), keep, "attention")


def _yes_or_no(logits: Tensor) -> Tensor:
    rows = logits.squeeze(-1) if logits.dim() > 1 else logits
    return torch.stack([rows, torch.zeros_like(rows)], -1)  # its softmax is the sigmoid


def _divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """KL of the softmax over the last dimension, in float32; classes that the teacher rules out (-inf) add nothing."""
    t, s = functional.log_softmax(teacher, -1), functional.log_softmax(student, -1)
    p = t.exp()
    return torch.where(p > 0, p * (t - s), 0.0).sum(-1)


def _relations(x: Tensor, groups: int, keep: Tensor | None) -> Tensor:
    """(B, T, features) -> scores (B, groups, T, T), of next to no weight in columns that do not count."""
    features = x.shape[-1]
    if features % groups:
        raise ValueError(
            f"attention: expected features that divide into {groups} groups, got {features}. Set relations= to a "
            "number that divides both models' features."
        )
    x = x.float().unflatten(-1, (groups, features // groups)).transpose(1, 2)
    scores: Tensor = x @ x.transpose(-1, -2) / (features // groups) ** 0.5
    # the largest finite number: a row whose columns are all left out stays finite, and is left out itself
    return scores if keep is None else scores.masked_fill(~keep[:, None, None, :], torch.finfo(torch.float32).min)


def _mean(values: Tensor, keep: Tensor | None, what: str) -> Tensor:
    """Mean over positions that count; 0 where there is none."""
    if keep is None:
        return values.mean() if values.numel() else values.sum()
    if values.shape != keep.shape:
        raise ValueError(
            f"{what}: expected a mask of {tuple(values.shape)} positions, got {tuple(keep.shape)}. "
            "Give True for each position that counts."
        )
    return torch.where(keep, values, 0.0).sum() / keep.sum().clamp(min=1)
