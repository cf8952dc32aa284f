from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from torch import nn

from sparsam.tasks import language
from sparsam.tasks.language import Batch, Batches, evaluate, read_corpus, validation_batches


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def text_of(tokens):
    return bytes(tokens.numpy())


def test_the_standard_library_is_split_by_file():
    corpus = read_corpus()
    total = len(corpus.train) + len(corpus.validation)
    assert total > 5_000_000
    assert 0.03 < len(corpus.validation) / total < 0.1
    assert min(corpus.files) > 10
    assert corpus.skipped == 0
    assert str(corpus).startswith("Python standard library · ")
    assert str(corpus).endswith("held out, by file")
    train = set(text_of(corpus.train).split(b"\0"))
    held = [text for text in text_of(corpus.validation).split(b"\0") if len(text) > 500]
    assert held
    assert not train.intersection(held)
    assert corpus.fingerprint == read_corpus().fingerprint


def test_a_folder(tmp_path):
    files = {f"sub__{i}_txt": f"text number {i}\n" * 20 for i in range(30)}
    write(tmp_path, **files, picture=b"\x89PNG\0\0", latin=b"caf\xe9", blank_txt=" \n", **{".hidden": "secret"})
    corpus = read_corpus(tmp_path, validation_share=0.2)
    assert sum(corpus.files) == 30
    assert corpus.skipped == 2
    assert "2 files that are not text left out" in str(corpus)
    together = text_of(corpus.train) + text_of(corpus.validation)
    assert sorted(together.split(b"\0")[:-1]) == sorted(text.encode() for text in files.values())
    assert 0.1 < len(corpus.validation) / len(together) < 0.4


def test_a_file_stays_on_its_side_when_others_come(tmp_path):
    write(tmp_path, **{f"{i}_txt": f"{i:03} " * 40 for i in range(40)})
    before = text_of(read_corpus(tmp_path, 0.25).validation)
    write(tmp_path, new_txt="new " * 40)
    after = text_of(read_corpus(tmp_path, 0.25).validation)
    assert len(set(before.split(b"\0")) & set(after.split(b"\0"))) >= 8


def test_two_files_of_very_different_size(tmp_path):
    corpus = read_corpus(write(tmp_path, a_txt="a" * 5000, b_txt="b" * 100))
    assert text_of(corpus.validation) == b"b" * 100 + b"\0"


def test_one_file_holds_out_its_end(tmp_path):
    corpus = read_corpus(write(tmp_path, a_txt="x" * 90 + "y" * 10) / "a.txt", validation_share=0.1)
    assert text_of(corpus.train) == b"x" * 90 + b"\0"
    assert text_of(corpus.validation) == b"y" * 10 + b"\0"
    assert str(corpus).endswith("held out, the end of the file")


def test_tokens_of_another_tokeniser(tmp_path):
    write(tmp_path, a_txt="one two", b_txt="three four five six")
    corpus = read_corpus(
        tmp_path, tokenise=lambda text: np.array([len(w) for w in text.split()], np.int32), separator=9
    )
    assert corpus.train.tolist() == [5, 4, 4, 3, 9]
    assert corpus.validation.tolist() == [3, 3, 9]
    assert corpus.bytes_per_token == pytest.approx(26 / 8)


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "x", r"x: expected a text file or a folder of them, found nothing there\. Check the path after --data\."),
        ({"a_txt": ""}, "a.txt", r"a\.txt: expected text, the file is empty\. Give another with --data PATH\."),
        ({"a_txt": " \n\n"}, "a.txt", "the file is empty"),
        ({"a_txt": b"\x7fELF\0\1"}, "a.txt", r"expected text in UTF-8, got a binary file\. Give plain text"),
        ({"a_txt": b"caf\xe9"}, "a.txt", "got a binary file"),
        ({"d__a_txt": b"\0"}, "d", r"expected a folder with text files, found 1 files, none of them text"),
        ({"d__a_txt": ""}, "d", r"found no file with anything in it\. Give another with --data PATH\."),
    ],
)
def test_texts_that_are_refused(tmp_path, files, path, message):
    write(tmp_path, **files)
    with pytest.raises(ValueError, match=message) as error:
        read_corpus(tmp_path / path)
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    write(tmp_path, a_txt="text")

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ValueError, match=r"a\.txt: expected a file that can be read, got: Permission denied\."):
        read_corpus(tmp_path / "a.txt")


def test_no_standard_library(tmp_path, monkeypatch):
    monkeypatch.setattr(language, "standard_library", lambda: tmp_path)
    with pytest.raises(ValueError, match=r"expected Python's standard library source, found none\. Give a text with"):
        read_corpus()


def test_targets_follow_inputs():
    batch = Batches(torch.arange(200, dtype=torch.uint8), rows=3, context=7).next()
    assert batch.inputs.shape == batch.targets.shape == (3, 7)
    assert batch.inputs.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)


def test_an_epoch_sees_every_window_once():
    batches = Batches(torch.arange(1000), rows=4, context=10, seed=5)
    rows = [tuple(row) for _ in range(49) for row in batches.next().inputs.tolist()]
    windows = 98  # of 99 that fit: one window's room lets the borders move
    for epoch in (rows[:windows], rows[windows : 2 * windows]):
        seen = [token for row in epoch for token in row]
        assert len(set(seen)) == len(seen) == windows * 10
    assert rows[:windows] != rows[windows : 2 * windows]


def test_the_stream_goes_on_from_its_state():
    tokens = torch.arange(300)
    one = Batches(tokens, rows=4, context=16, seed=1)
    for _ in range(9):
        one.next()
    two = Batches(tokens, rows=4, context=16, seed=1)
    two.load_state_dict(one.state_dict())
    for _ in range(20):
        assert torch.equal(one.next().inputs, two.next().inputs)
    assert not torch.equal(one.next().inputs, Batches(tokens, rows=4, context=16, seed=2).next().inputs)


@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 30])
def test_short_texts(length):
    batches = Batches(torch.arange(length), rows=2, context=8)
    for _ in range(5):
        batch = batches.next()
        assert torch.equal(batch.targets, batch.inputs + 1)


def test_a_text_shorter_than_a_window():
    with pytest.raises(
        ValueError, match=r"expected at least 9 tokens of text for a context of 8, got 8\. Give more text"
    ):
        Batches(torch.arange(8), rows=2, context=8)


@pytest.mark.parametrize(
    ("length", "windows", "shapes"), [(100, 4, [(3, 8), (1, 8)]), (17, 9, [(2, 8)]), (5, 4, [(1, 4)])]
)
def test_validation_windows(length, windows, shapes):
    batches = list(validation_batches(torch.arange(length), rows=3, context=8, windows=windows))
    assert [tuple(batch.inputs.shape) for batch in batches] == shapes
    assert batches[0].inputs[0, 0] == 0
    if len(shapes) > 1:
        assert batches[-1].targets[-1, -1] == length - 1
    assert all(torch.equal(batch.targets, batch.inputs + 1) for batch in batches)


def test_validation_of_nothing():
    with pytest.raises(ValueError, match="expected at least 2 held-out tokens"):
        list(validation_batches(torch.arange(1), rows=3, context=8, windows=4))


def test_the_loss_of_knowing_nothing():
    class Uniform(nn.Module):
        def forward(self, tokens):
            return torch.zeros(*tokens.shape, 256, dtype=torch.bfloat16)

    loss = language.loss_of(Uniform(), Batches(torch.arange(100), 2, 8).next())
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(math.log(256))


def test_a_single_file_is_cut_between_characters(tmp_path):
    text = "学而时习之，不亦说乎。有朋自远方来，不亦乐乎。" * 20

    def characters(part):
        return np.array([ord(character) for character in part.decode()], dtype=np.int64)

    for extra in range(3):
        write(tmp_path, a_txt="a" * extra + text)
        corpus = read_corpus(tmp_path / "a.txt", 0.1, characters)
        both = torch.cat([corpus.train[:-1], corpus.validation[:-1]])
        assert "".join(map(chr, both.tolist())) == "a" * extra + text


def test_evaluation_by_hand():
    """A model that always says 1, with two batches of different lengths."""

    class Ones(torch.nn.Module):
        def forward(self, tokens):
            assert not self.training
            return torch.nn.functional.one_hot(torch.ones_like(tokens), 3) * 10.0

    model = Ones()
    targets = [torch.tensor([[1, 1, 0]]), torch.tensor([[2]])]
    entered = []
    loss, accuracy = evaluate(
        model,
        [Batch(torch.zeros_like(target), target) for target in targets],
        lambda: contextlib.nullcontext(entered.append(1)),
    )
    right = math.log(1 + 2 * math.exp(-10))
    assert loss == pytest.approx((2 * right + 2 * (right + 10)) / 4)
    assert accuracy == 0.5
    assert (len(entered), model.training) == (2, True)
