"""Language modelling: text files become tokens, split by file, and tokens become batches. Models are in `gpt`."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "Task",
    "as_bytes",
    "evaluate",
    "fixed_losses",
    "loss_of",
    "read_corpus",
    "standard_library",
    "validation_batches",
]

_NOT_TEXT = {"__pycache__", "site-packages", "dist-packages", "node_modules"}
_TESTS = {"test", "tests", "idle_test"}

Tokenise = Callable[[bytes], "numpy.ndarray[Any, Any]"]


class Batch(NamedTuple):
    """Tokens and, for each, the token that follows it."""

    inputs: Tensor  # int64 (rows, context)
    targets: Tensor  # int64 (rows, context)


@dataclass(frozen=True)
class Corpus:
    """Tokens to learn from and tokens held out.

    Attributes:
        train: int (n,), files one after another, each followed by `separator`.
        validation: int (m,), of other files than `train` (or the tail of the only file).
        name: what a person calls it.
        files: how many files went into (train, validation).
        skipped: files in the folder that are not text and were left out.
        bytes_per_token: over the whole corpus.
        fingerprint: SHA-256 of both token streams: a resumed run must find the same.
    """

    train: Tensor
    validation: Tensor
    name: str
    files: tuple[int, int]
    skipped: int
    bytes_per_token: float
    fingerprint: str

    def __str__(self) -> str:
        def mega(tokens: Tensor) -> str:
            return f"{len(tokens) * self.bytes_per_token / 1e6:.3g} MB"

        held = "held out, by file" if self.files[1] else "held out, the end of the file"
        skipped = f" · {self.skipped} files that are not text left out" if self.skipped else ""
        return f"{self.name} · {mega(self.train)} to learn from, {mega(self.validation)} {held}{skipped}"


@dataclass(frozen=True)
class Task:
    """A text and what learns it.

    Attributes:
        corpus: the tokens.
        build_model: makes the dense model, int64 (B, T) -> logits (B, T, vocabulary), from the global random state.
        model_name: what a person calls it.
    """

    corpus: Corpus
    build_model: Callable[[], nn.Module]
    model_name: str


def as_bytes(text: bytes) -> numpy.ndarray[Any, Any]:
    """The tokens of a byte-level model: the bytes themselves."""
    return numpy.frombuffer(text, dtype=numpy.uint8)


def standard_library() -> Path:
    """The folder of Python's own standard library: 12 MB of source that every machine has."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(
    path: Path | None = None, validation_share: float = 0.05, tokenise: Tokenise = as_bytes, separator: int = 0
) -> Corpus:
    """Reads text and splits it by file.

    Args:
        path: a text file, or a folder, read to its depths without hidden files; None is Python's standard library.
        validation_share: about this share of the bytes is held out, in whole files drawn by a hash of their name, so
            that a file is on the same side whenever it is read. Of a single file, the end is held out.
        tokenise: text -> token numbers.
        separator: token put after each file. 0 is the byte that no text holds.

    Raises:
        ValueError: nothing there, nothing in it, or not text. One line that says what to do.
    """
    texts, skipped = _texts(path)
    name = "Python standard library" if path is None else path.resolve().name
    train, validation = _split(texts, validation_share)
    files = (len(train), len(validation))
    if not validation:
        [(only, text)] = train.items()
        cut = len(text) - int(len(text) * validation_share)
        while 0 < cut < len(text) and text[cut] & 0xC0 == 0x80:
            cut -= 1  # a byte within a character: each side must be text by itself
        train, validation = {only: text[:cut]}, {only: text[cut:]}
    streams = [_stream(part, tokenise, separator) for part in (train, validation)]
    digest = hashlib.sha256()
    for stream in streams:
        digest.update(stream.numpy().tobytes())
        digest.update(b"|")
    text_bytes = sum(map(len, texts.values()))
    tokens = sum(map(len, streams))
    return Corpus(streams[0], streams[1], name, files, skipped, text_bytes / max(tokens, 1), digest.hexdigest())


class Batches:
    """An endless, deterministic stream of batches: every window once an epoch, in an order drawn anew for each epoch.

    The whole state is how many batches were drawn, so a stream that is set back to a position goes on bit for bit.

    Args:
        tokens: int (n,).
        rows: windows in a batch.
        context: tokens in a window.
        seed: with the epoch's number, decides the order and where the windows start.
        share: (rank, ranks): of each batch this rank's windows alone, an equal part of it. The same batches on any
            number of ranks, and no window on two of them.

    Raises:
        ValueError: there are fewer tokens than one window needs.
    """

    def __init__(self, tokens: Tensor, rows: int, context: int, seed: int = 0, share: tuple[int, int] = (0, 1)) -> None:
        if len(tokens) < context + 1:
            raise ValueError(
                f"expected at least {context + 1} tokens of text for a context of {context}, got {len(tokens)}. "
                "Give more text or set a smaller context."
            )
        self.tokens, self.rows, self.context, self.seed = tokens, rows, context, seed
        self.drawn = 0
        rank, ranks = share
        self._own = range(rank * rows // ranks, (rank + 1) * rows // ranks)
        self._windows = max(1, (len(tokens) - 1) // context - 1)
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)

    def next(self) -> Batch:
        """The next batch, or this rank's share of it: int64 (rows, context) twice."""
        first = self.drawn * self.rows
        self.drawn += 1
        starts = torch.stack([self._start(first + row) for row in self._own])
        return _windows(self.tokens, starts, self.context)

    def state_dict(self) -> dict[str, int]:
        """How far the stream has come."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes to where another stream was."""
        self.drawn = state["drawn"]

    def _start(self, window: int) -> Tensor:
        epoch, place = divmod(window, self._windows)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            # Windows of one epoch never overlap; the shared offset moves their borders from epoch to epoch.
            room = len(self.tokens) - 1 - self._windows * self.context
            offset = torch.randint(room + 1, (), generator=generator)
            self._starts = torch.randperm(self._windows, generator=generator) * self.context + offset
            self._epoch = epoch
        return self._starts[place]


def validation_batches(tokens: Tensor, rows: int, context: int, windows: int) -> Iterator[Batch]:
    """The same windows every time, spread evenly over the held-out tokens.

    Args:
        tokens: int (n,).
        rows: windows in a batch, at most.
        context: tokens in a window; less where the text is shorter.
        windows: how many windows in all, at most.

    Raises:
        ValueError: fewer than two tokens are held out.
    """
    if len(tokens) < 2:
        raise ValueError("expected at least 2 held-out tokens, got fewer. Give more text or a larger validation share.")
    context = min(context, len(tokens) - 1)
    last = len(tokens) - 1 - context
    count = max(1, min(windows, (len(tokens) - 1) // context))
    starts = (torch.arange(count) * last) // max(count - 1, 1)
    for first in range(0, count, rows):
        yield _windows(tokens, starts[first : first + rows], context)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy in nats a token, computed in float32: a float32 scalar."""
    logits = model(batch.inputs)
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())


def fixed_losses(model: nn.Module, corpus: Corpus, batch: int, context: int, count: int = 4) -> Callable[[], Tensor]:
    """Losses of `count` training batches that stay the same, each time they are asked for: what formats are tried on.

    Returns:
        A function without arguments -> float32 (count,).
    """
    batches = Batches(corpus.train, batch, context, seed=-1)
    held = [batches.next() for _ in range(count)]
    return lambda: torch.stack([loss_of(model, one).detach().float() for one in held])


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    forward: Callable[[], AbstractContextManager[object]] = nullcontext,
    summed: Callable[[Sequence[float]], Sequence[float]] = lambda own: own,
) -> tuple[float, float]:
    """How well a model does on batches, in evaluation mode.

    Args:
        model: left in training mode.
        batches: of held-out text.
        forward: surrounds each forward pass, as `session.forward` does.
        summed: adds numbers up over ranks, where each rank has its own batches.

    Returns:
        Mean cross-entropy in nats a token, and the share of tokens that the model held most likely.
    """
    model.eval()
    total, right, tokens = 0.0, 0, 0
    for batch in batches:
        with forward():
            logits = model(batch.inputs).flatten(0, 1).float()
        targets = batch.targets.flatten()
        total += float(functional.cross_entropy(logits, targets)) * len(targets)
        right += int((logits.argmax(1) == targets).sum())
        tokens += len(targets)
    model.train()
    total, sure, count = summed([total, right, tokens])
    return total / count, sure / count


def _windows(tokens: Tensor, starts: Tensor, context: int) -> Batch:
    places = starts[:, None] + torch.arange(context + 1)
    window = tokens[places].long()
    return Batch(window[:, :-1].contiguous(), window[:, 1:].contiguous())


def _texts(path: Path | None) -> tuple[dict[str, bytes], int]:
    if path is None:
        root = standard_library()
        found, _ = _folder(root, _NOT_TEXT | _TESTS, suffix=".py")
        if not found:
            raise ValueError(
                f"{root}: expected Python's standard library source, found none. Give a text with --data PATH."
            )
        return found, 0
    if not path.exists():
        raise ValueError(
            f"{path}: expected a text file or a folder of them, found nothing there. Check the path after --data."
        )
    if path.is_dir():
        found, skipped = _folder(path, _NOT_TEXT)
        if not found:
            reason = f"{skipped} files, none of them text" if skipped else "no file with anything in it"
            raise ValueError(
                f"{path}: expected a folder with text files, found {reason}. Give another with --data PATH."
            )
        return found, skipped
    text = _read(path)
    if not text.strip():
        raise ValueError(f"{path}: expected text, the file is empty. Give another with --data PATH.")
    if not _is_text(text):
        raise ValueError(f"{path}: expected text in UTF-8, got a binary file. Give plain text with --data PATH.")
    return {path.name: text}, 0


def _folder(root: Path, without: set[str], suffix: str = "") -> tuple[dict[str, bytes], int]:
    texts: dict[str, bytes] = {}
    skipped = 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") or not name.endswith(suffix):
                continue
            path = Path(folder, name)
            text = _read(path) if path.is_file() else b""
            if text.strip() and _is_text(text):
                texts[path.relative_to(root).as_posix()] = text
            elif text.strip() and not suffix:
                skipped += 1
    return texts, skipped


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: expected a file that can be read, got: {error.strerror}. Give another with --data PATH."
        ) from error


def _is_text(text: bytes) -> bool:
    if b"\0" in text:
        return False
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _split(texts: Mapping[str, bytes], share: float) -> tuple[dict[str, bytes], dict[str, bytes]]:
    if len(texts) == 1:
        return dict(texts), {}
    order = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
    wanted = share * sum(map(len, texts.values()))
    held: set[str] = set()
    total = 0
    for name in order:
        if (
            total < wanted and total + len(texts[name]) <= 2 * wanted
        ):  # one huge file must not become the validation text
            held.add(name)
            total += len(texts[name])
    if not held:
        held = {min(order, key=lambda name: len(texts[name]))}
    return {n: t for n, t in texts.items() if n not in held}, {n: texts[n] for n in texts if n in held}


def _stream(texts: Mapping[str, bytes], tokenise: Tokenise, separator: int) -> Tensor:
    parts: list[numpy.ndarray[Any, Any]] = []
    for text in texts.values():
        tokens = tokenise(text)
        parts += [tokens, numpy.array([separator], dtype=tokens.dtype)]
    return torch.from_numpy(numpy.concatenate(parts))
