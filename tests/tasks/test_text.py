"""Text classification: what is read from a table, how it becomes batches, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam.tasks import text

ORANGE = "Category\tText\nd\tstring\nclass\t\n"


def letters(texts):
    """Up to four letters of each text as tokens."""
    tokens = torch.tensor([[ord(letter) for letter in one[:4].ljust(4)] for one in texts])
    return tokens, (tokens != ord(" ")).long()


@pytest.fixture
def tables(tmp_path):
    train, test = tmp_path / "train.tab", tmp_path / "test.tab"
    train.write_text(ORANGE + "earn\tprofits rose\nacq\tbought\nearn\t\nearn\tdividend\n")
    test.write_text("text\tlabel\nsold\tacq\n")
    return train, test


def test_a_table_is_its_rows_with_a_text(tables):
    assert text.read_table(tables[0]) == [("earn", "profits rose"), ("acq", "bought"), ("earn", "dividend")]
    assert text.read_table(tables[1]) == [("acq", "sold")]


def test_labels_are_numbered_by_name_and_what_was_read_has_a_fingerprint(tables):
    data = text.read_labelled(*tables, letters)
    assert data.classes == ("acq", "earn")
    assert data.train.labels.tolist() == [1, 0, 1]
    assert data.train.tokens.shape == data.train.mask.shape == (3, 4)
    assert data.fingerprint == text.read_labelled(*tables, letters).fingerprint
    assert str(data) == "3 texts in 2 classes, 1 held out, 4 tokens each"
    tables[1].write_text("text\tlabel\nbuys\tacq\n")
    assert data.fingerprint != text.read_labelled(*tables, letters).fingerprint


def test_batches_hold_every_text_once_an_epoch(tables):
    data = text.read_labelled(*tables, letters)
    of_step = text.batches(data.train, 1, seed=0)
    drawn = [of_step(step).tokens.flatten().tolist() for step in range(3)]
    assert sorted(drawn) == sorted(data.train.tokens.tolist())
    assert torch.equal(of_step(1).labels, text.batches(data.train, 1, seed=0)(1).labels)


def test_accuracy_is_that_of_the_model_in_evaluation_mode(tables):
    data = text.read_labelled(*tables, letters)
    model = nn.Dropout(0.5).train()
    seen = []

    def logits(batch):
        seen.append(model.training)
        return nn.functional.one_hot(torch.ones(len(batch.labels), dtype=torch.int64), 2).float()

    assert text.accuracy_of(logits, model, data.train, size=2) == pytest.approx(2 / 3)
    assert seen == [False, False]
    assert model.training


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a tab-separated file, found none. `make data` fetches R8."),
        ("a\tb\nx\ty\n", "expected columns category and text, got a, b. Rename them."),
        (ORANGE, "expected rows with a label and a text, got none."),
    ],
    ids=["missing", "columns", "empty"],
)
def test_a_file_that_is_no_such_table_is_refused(tmp_path, content, message):
    path = tmp_path / "texts.tab"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"{path}: {message}".replace(".", r"\.")):
        text.read_table(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "texts.tab"
    path.write_bytes(b"text\tlabel\n\xff\xfe\tx\n")
    with pytest.raises(ValueError, match="expected a tab-separated file, it cannot be read"):
        text.read_table(path)


def test_a_class_that_cannot_be_learnt_is_refused(tables):
    tables[1].write_text("text\tlabel\nsold\tcrude\n")
    with pytest.raises(ValueError, match=r"expected classes of train.tab, got 'crude'. Leave its rows out."):
        text.read_labelled(*tables, letters)


def test_a_folder_without_a_tokeniser_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"expected a model folder with tokenizer\.json in it, found none"):
        text.tokeniser(tmp_path, 8)
