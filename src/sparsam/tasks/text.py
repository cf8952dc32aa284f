"""Text classification: labelled texts in tab-separated files become tokens of one length, and tokens become batches."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsam.tasks.images import Shuffled

__all__ = ["LabelledTokens", "TokenBatch", "accuracy_of", "batches", "read_labelled", "read_table", "tokeniser"]

_LABEL, _TEXT = ("category", "label", "class"), ("text", "content", "document")
# tokens, and 1 where there is one: int64 (n, length) twice
Tokenise = Callable[[list[str]], tuple[Tensor, Tensor]]


class TokenBatch(NamedTuple):
    """Some texts: int64 (rows, length) tokens, int64 (rows, length) 1 where there is one, int64 (rows) labels."""

    tokens: Tensor
    mask: Tensor
    labels: Tensor


@dataclass(frozen=True)
class LabelledTokens:
    """Labelled texts to learn from, and others held out, as tokens.

    Attributes:
        train, test: all texts of each as one batch.
        classes: names, by label.
        fingerprint: SHA-256 of both: a resumed run must find the same.
    """

    train: TokenBatch
    test: TokenBatch
    classes: tuple[str, ...]
    fingerprint: str

    def __str__(self) -> str:
        counts = f"{len(self.train.labels)} texts in {len(self.classes)} classes, {len(self.test.labels)} held out"
        return f"{counts}, {self.train.tokens.shape[1]} tokens each"


def read_table(path: Path) -> list[tuple[str, str]]:
    """(label, text) of each row of a tab-separated file with a line of column names.

    Rows without a text are left out, and so are the two lines by which Orange says what its columns are.

    Raises:
        ValueError: there is no file, no column of labels or texts in it, or no row.
    """
    csv.field_size_limit(1 << 24)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            head, *rows = csv.reader(file, delimiter="\t")
    except FileNotFoundError:
        raise ValueError(f"{path}: expected a tab-separated file, found none. `make data` fetches R8.") from None
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: expected a tab-separated file, it cannot be read ({error}).") from error
    names = [name.strip().lower() for name in head]
    places = [next((names.index(name) for name in known if name in names), None) for known in (_LABEL, _TEXT)]
    if None in places:
        raise ValueError(f"{path}: expected columns {_LABEL[0]} and {_TEXT[0]}, got {', '.join(head)}. Rename them.")
    label, text = (place for place in places if place is not None)
    if rows and rows[0][label : label + 1] in (["d"], ["discrete"]):
        rows = rows[2:]
    found = [(row[label], row[text]) for row in rows if len(row) > max(label, text) and row[text].strip()]
    if not found:
        raise ValueError(f"{path}: expected rows with a label and a text, got none.")
    return found


def read_labelled(train: Path, test: Path, tokenise: Tokenise) -> LabelledTokens:
    """Reads both files and tokenises their texts.

    Args:
        train, test: see `read_table`.
        tokenise: texts -> (tokens, mask); see `tokeniser`.

    Raises:
        ValueError: see `read_table`; or a class is held out that cannot be learnt.
    """
    rows = {"train": read_table(train), "test": read_table(test)}
    classes = tuple(sorted({label for label, _ in rows["train"]}))
    unknown = sorted({label for label, _ in rows["test"]} - set(classes))
    if unknown:
        raise ValueError(f"{test}: expected classes of {train.name}, got {unknown[0]!r}. Leave its rows out.")
    numbers = {name: number for number, name in enumerate(classes)}
    digest = hashlib.sha256()
    found = {}
    for name, pairs in rows.items():
        tokens, mask = tokenise([text for _, text in pairs])
        found[name] = TokenBatch(tokens, mask, torch.tensor([numbers[label] for label, _ in pairs]))
        for tensor in found[name]:
            digest.update(tensor.numpy().tobytes())
    return LabelledTokens(found["train"], found["test"], classes, digest.hexdigest())


def tokeniser(folder: Path, length: int) -> Tokenise:
    """The tokeniser of a Hugging Face model folder, cutting and filling texts to `length` tokens.

    Raises:
        ValueError: there is none in the folder.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder}: expected a model folder with tokenizer.json in it, found none.")
    encoder = Tokenizer.from_file(str(path))
    encoder.enable_truncation(length)
    encoder.enable_padding(length=length)

    def tokenise(texts: list[str]) -> tuple[Tensor, Tensor]:
        encoded = encoder.encode_batch(texts)
        return torch.tensor([one.ids for one in encoded]), torch.tensor([one.attention_mask for one in encoded])

    return tokenise


def batches(data: TokenBatch, size: int, seed: int) -> Callable[[int], TokenBatch]:
    """step -> the batch of that step: every text once an epoch, in an order drawn anew for each (`Shuffled`)."""
    rows = Shuffled(len(data.labels), size, seed)
    return lambda step: TokenBatch(*(tensor[rows(step)] for tensor in data))


@torch.no_grad()
def accuracy_of(logits: Callable[[TokenBatch], Tensor], model: nn.Module, data: TokenBatch, size: int = 64) -> float:
    """Share of texts whose largest logit is that of their label, the model in evaluation mode meanwhile."""
    training = model.training
    model.eval()
    pieces = zip(*(tensor.split(size) for tensor in data), strict=True)
    right = sum(int((logits(batch := TokenBatch(*piece)).argmax(-1) == batch.labels).sum()) for piece in pieces)
    model.train(training)
    return right / len(data.labels)
