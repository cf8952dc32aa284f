"""Tables with a rare class: groups stay together, features are scaled by what is learnt from, and the two measures."""

from __future__ import annotations

import pytest
import torch

from sparsam.tasks.tabular import area_under_curve, average_precision, read_parquet, split_table


@pytest.fixture
def rows():
    random = torch.Generator().manual_seed(0)
    features = torch.randn(400, 3, generator=random) * torch.tensor([1.0, 50.0, 0.0]) + 7
    labels = (torch.rand(400, generator=random) < 0.2).long()
    return features, labels, torch.arange(400) // 8


def test_groups_are_never_split_and_features_are_scaled_by_the_rest(rows):
    features, labels, groups = rows
    table = split_table(*rows)
    test = (groups % 5 == 4).nonzero().flatten()
    assert torch.equal(table.test_labels, labels[test])
    assert len(table.train) + len(table.test) == 400
    assert table.train.mean(0).abs().max() < 1e-5
    assert torch.allclose(table.train.std(0)[:2], torch.ones(2), atol=1e-3)
    assert torch.equal(table.train[:, 2], torch.zeros(320))  # a constant column says nothing and divides nothing
    kept = features[groups % 5 != 4]
    assert torch.allclose(table.test[:, 1], (features[test, 1] - kept[:, 1].mean()) / kept[:, 1].std(), atol=1e-5)
    assert table.fingerprint == split_table(*rows).fingerprint
    assert table.fingerprint != split_table(features + 1e-3 * features.square(), labels, groups).fingerprint
    assert str(table).startswith("320 rows of 3 features, 80 held out, ")


@pytest.mark.parametrize("ties", [False, True])
def test_measures_are_what_counting_pairs_and_ranks_gives(ties):
    random = torch.Generator().manual_seed(1)
    scores, labels = torch.rand(60, generator=random), (torch.rand(60, generator=random) < 0.3).long()
    scores = (scores + 0.3 * labels).mul(8).round() if ties else scores + 0.3 * labels
    positive, negative = scores[labels == 1], scores[labels == 0]
    pairs = [(a > b) + (a == b) / 2 for a in positive for b in negative]
    assert area_under_curve(scores, labels) == pytest.approx(float(sum(pairs)) / len(pairs))
    precisions = [float(labels[scores >= one].double().mean()) for one in positive]
    assert average_precision(scores, labels) == pytest.approx(sum(precisions) / len(precisions))


def test_a_perfect_order_is_one():
    labels = torch.tensor([0, 0, 1, 1])
    assert area_under_curve(labels.float(), labels) == average_precision(labels.float(), labels) == 1


def test_what_is_no_such_table_is_refused(rows):
    features, labels, groups = rows
    with pytest.raises(ValueError, match=r"labels: expected 0 and 1, got 0 to 2. Map them first."):
        split_table(features, labels * 2, groups)
    with pytest.raises(ValueError, match=r"expected both classes among the rows held out, got one"):
        split_table(features, torch.where(groups % 5 == 4, 0, labels), groups)


def test_a_parquet_file_is_read_by_its_columns(tmp_path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    features, labels, groups = rows
    path = tmp_path / "rows.parquet"
    columns = {"id": groups, "other": groups, "target": labels, "a": features[:, 0], "b": features[:, 1]}
    parquet.write_table(pyarrow.table({name: column.numpy() for name, column in columns.items()}), path)
    table = read_parquet(path, "target", "id", ("other",))
    assert table.fingerprint == split_table(features[:, :2].double(), labels, groups).fingerprint
    with pytest.raises(ValueError, match=r"rows.parquet: expected a column fraud, got id, other, target, a, b"):
        read_parquet(path, "fraud", "id")
    with pytest.raises(ValueError, match=r"expected a parquet file, found none. `make data` fetches"):
        read_parquet(tmp_path / "none.parquet", "target", "id")
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"expected a parquet file of numbers, it cannot be read"):
        read_parquet(path, "target", "id")
