"""Images: idx files (MNIST, Fashion-MNIST) become tensors, and tensors become batches. Not for photographs on disk."""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch
from torch import Tensor

__all__ = ["Images", "Shuffled", "default_folder", "normalise", "read_images"]

_PLACES = (Path("data/fashion-mnist"), Path("/usr/share/datasets/fashion-mnist"))
_UINT8 = 8  # how idx files name their only type here


@dataclass(frozen=True)
class Images:
    """Labelled grey images to learn from, and others held out.

    Attributes:
        train: uint8 (n, height, width).
        train_labels: int64 (n).
        test: uint8 (m, height, width).
        test_labels: int64 (m).
        classes: number of classes, 1 + the largest label.
        mean: of the training pixels, as shares of white.
        std: the same.
        fingerprint: SHA-256 of all four tensors: a resumed run must find the same.
    """

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    classes: int
    mean: float
    std: float
    fingerprint: str

    def __str__(self) -> str:
        size = " x ".join(map(str, self.train.shape[1:]))
        return f"{len(self.train)} images of {size} in {self.classes} classes, {len(self.test)} held out"


class Shuffled:
    """Which rows make up a batch: a new order in every epoch, and a pure function of (seed, step).

    Batches follow each other without a gap: where the size does not divide the number of rows, one of them holds the
    end of an epoch and the beginning of the next, so that all have the same shape.

    Args:
        count: rows there are.
        size: rows in a batch.
        seed: orders them.

    Raises:
        ValueError: there is no row, or no row in a batch.
    """

    def __init__(self, count: int, size: int, seed: int = 0) -> None:
        if count < 1 or size < 1:
            raise ValueError(f"Shuffled: expected at least 1 row and 1 row in a batch, got {count} and {size}.")
        self.count, self.size, self.seed = count, size, seed
        self._orders: dict[int, Tensor] = {}

    def __call__(self, step: int) -> Tensor:
        """The rows of batch `step` (the first is 0): int64 (size)."""
        begin, end = step * self.size, (step + 1) * self.size
        epochs = range(begin // self.count, (end - 1) // self.count + 1)
        for epoch in epochs:
            if epoch not in self._orders:
                # at most the last one is needed again
                self._orders = {old: order for old, order in self._orders.items() if old in epochs}
                self._orders[epoch] = self._order(epoch)
        parts = [self._orders[epoch][max(0, begin - epoch * self.count) : end - epoch * self.count] for epoch in epochs]
        return torch.cat(parts)

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))


def normalise(images: Tensor, mean: float, std: float) -> Tensor:
    """uint8 (rows, height, width) -> float32 (rows, height * width) of mean 0 and deviation 1."""
    return images.flatten(1).float().mul_(1 / (255 * std)).sub_(mean / std)


def default_folder() -> Path:
    """Where Fashion-MNIST is on this machine: what `make data` fetched, or the Debian package dataset-fashion-mnist.

    Raises:
        ValueError: neither is there.
    """
    for place in _PLACES:
        if place.is_dir():
            return place
    raise ValueError(
        f"expected Fashion-MNIST in {' or '.join(map(str, _PLACES))}, found neither. "
        "Run `make data`, or install the Debian package dataset-fashion-mnist."
    )


def read_images(folder: Path | None = None) -> Images:
    """Reads the four idx files of MNIST or Fashion-MNIST, with .gz or without.

    Args:
        folder: where they are; None: `default_folder()`.

    Raises:
        ValueError: a file is missing, cut off, or not what its name says.
    """
    folder = default_folder() if folder is None else folder
    parts = []
    for part in ("train", "t10k"):
        images = _read(folder, f"{part}-images-idx3-ubyte", 3)
        labels = _read(folder, f"{part}-labels-idx1-ubyte", 1)
        if len(images) != len(labels):
            raise ValueError(
                f"{folder}: expected as many labels as images in the {part} files, "
                f"got {len(labels)} and {len(images)}. Take all four files from one place."
            )
        parts += [images, labels]
    digest = hashlib.sha256()
    for array in parts:
        digest.update(repr(array.shape).encode() + array.tobytes())
    train, test = torch.from_numpy(parts[0]), torch.from_numpy(parts[2])
    # of whole numbers, in float64: the same on every machine and for any number of threads
    counts = torch.bincount(train.flatten(), minlength=256).double()
    shares = torch.arange(256, dtype=torch.float64) / 255
    mean = float((counts * shares).sum() / counts.sum())
    variance = float((counts * (shares - mean).square()).sum() / counts.sum())
    return Images(
        train,
        torch.from_numpy(parts[1]).long(),
        test,
        torch.from_numpy(parts[3]).long(),
        classes=1 + int(max(parts[1].max(), parts[3].max())),
        mean=mean,
        std=math.sqrt(variance) or 1.0,
        fingerprint=digest.hexdigest(),
    )


def _read(folder: Path, name: str, dimensions: int) -> numpy.ndarray[tuple[int, ...], numpy.dtype[numpy.uint8]]:
    """The uint8 array of an idx file: two zero bytes, type, number of dimensions, sizes (big-endian), then the data."""
    path = next((path for path in (folder / f"{name}.gz", folder / name) if path.is_file()), None)
    if path is None:
        raise ValueError(
            f"{folder / name}: expected this file, with .gz or without, found none. "
            "Run `make data`, or give the folder that holds the four files."
        )
    again = "Delete it and run `make data`, or fetch it again."
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}: expected a whole gzip file, got one that does not unpack ({error}). {again}"
        ) from error
    except OSError as error:
        raise ValueError(f"{path}: expected a file that can be read, got: {error.strerror}. {again}") from error
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes((0, 0, _UINT8, dimensions)):
        raise ValueError(
            f"{path}: expected an idx file of bytes in {dimensions} dimensions, got one that begins with "
            f"{content[:4].hex() or 'nothing'}. {again}"
        )
    shape = tuple(int.from_bytes(content[place : place + 4], "big") for place in range(4, head, 4))
    if len(content) - head != math.prod(shape) or not math.prod(shape):
        raise ValueError(
            f"{path}: expected {' x '.join(map(str, shape))} = {math.prod(shape)} bytes after the head, at least 1, "
            f"got {len(content) - head}. {again}"
        )
    # a copy, because torch wants memory that may be written to
    return numpy.frombuffer(content, numpy.uint8, offset=head).reshape(shape).copy()
