"""Tables with two classes, one of them rare: columns become standardised features, and groups of rows stay together."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["Table", "area_under_curve", "average_precision", "read_parquet", "split_table"]


@dataclass(frozen=True)
class Table:
    """Rows to learn from, and others held out.

    Attributes:
        train: float32 (n, features), mean 0 and standard deviation 1 in each column.
        train_labels: int64 (n), 0 or 1.
        test: float32 (m, features), by the same means and deviations.
        test_labels: int64 (m).
        fingerprint: SHA-256 of all four: a resumed run must find the same.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    fingerprint: str

    def __str__(self) -> str:
        share = float(self.train_labels.double().mean())
        counts = f"{len(self.train)} rows of {self.train.shape[1]} features, {len(self.test)} held out"
        return f"{counts}, {100 * share:.2f} % positive"


def read_parquet(path: Path, label: str, group: str, drop: tuple[str, ...] = (), held_out: int = 5) -> Table:
    """Reads a table from a parquet file.

    Args:
        path: the file.
        label: column of 0 and 1.
        group: column whose equal values mark rows that belong together: they are never split, for rows of one group
            resemble each other and would tell the answer. It is no feature.
        drop: other columns that are no features.
        held_out: one group in so many is.

    Raises:
        ValueError: pyarrow is not installed, there is no such file, or it lacks a column.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path}: expected the package pyarrow for a parquet file, it is not installed. "
            "Install it with: pip install 'sparsam[tables]'"
        ) from None
    try:
        columns: dict[str, Any] = {
            name: torch.tensor(column.to_numpy())
            for name, column in zip(*_columns(pyarrow.parquet.read_table(path)), strict=True)
        }
    except FileNotFoundError:
        raise ValueError(f"{path}: expected a parquet file, found none. `make data` fetches the tables.") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise ValueError(f"{path}: expected a parquet file of numbers, it cannot be read ({error}).") from error
    for name in (label, group, *drop):
        if name not in columns:
            raise ValueError(f"{path}: expected a column {name}, got {', '.join(list(columns)[:5])}, ... Name another.")
    features = [column.double() for name, column in columns.items() if name not in (label, group, *drop)]
    return split_table(torch.stack(features, 1), columns[label].long(), columns[group], held_out)


def split_table(features: Tensor, labels: Tensor, groups: Tensor, held_out: int = 5) -> Table:
    """Holds out one group in so many, in the order of their numbers, and standardises by what is left.

    Args:
        features: (n, features).
        labels: int64 (n), 0 or 1.
        groups: (n), equal for rows that stay together.
        held_out: at least 2.

    Raises:
        ValueError: labels are others, or a side would be without one of the classes.
    """
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError(f"labels: expected 0 and 1, got {int(labels.min())} to {int(labels.max())}. Map them first.")
    _, number = groups.unique(return_inverse=True)
    test = number % held_out == held_out - 1
    for what, side in (("to learn from", ~test), ("held out", test)):
        if len(labels[side].unique()) < 2:
            raise ValueError(f"labels: expected both classes among the rows {what}, got one. Give more groups.")
    mean, deviation = features[~test].mean(0), features[~test].std(0).clamp(min=1e-12)
    scaled = ((features - mean) / deviation).float()
    tensors = scaled[~test], labels[~test], scaled[test], labels[test]
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().numpy().tobytes())
    return Table(*tensors, digest.hexdigest())


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """Share of (positive, negative) pairs in which the positive one scores higher; ties count half.

    Args:
        scores: (n).
        labels: (n), 0 or 1, both there.
    """
    scores = scores.double()
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    rank = (last - (counts - 1) / 2)[place]  # mean rank of equal scores, from 1
    positive = int(labels.sum())
    below = float(rank[labels == 1].sum()) - positive * (positive + 1) / 2
    return below / (positive * (len(labels) - positive))


def average_precision(scores: Tensor, labels: Tensor) -> float:
    """Mean of the precision at each positive row, rows sorted by falling score; equal scores are taken at once.

    Args:
        scores: (n).
        labels: (n), 0 or 1, at least one positive.
    """
    _, place = scores.double().unique(return_inverse=True)
    place = place.max() - place  # from the highest score down
    rows = torch.bincount(place).double().cumsum(0)
    hits = torch.bincount(place, labels.double())
    return float((hits * hits.cumsum(0) / rows).sum() / hits.sum())


def _columns(table: Any) -> tuple[list[str], list[Any]]:
    return table.column_names, table.columns
