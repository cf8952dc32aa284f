"""Published accuracies of sparse training on Fashion-MNIST, reproduced: dense, SET, RigL, GMP, GraNet at 99 %.

    python benchmarks/accuracy_mlp.py [--methods ...] [--rows FILE] [--folder DIR] [--json FILE]
    python benchmarks/accuracy_mlp.py --density 0.1 --block 16     # what blocks cost

Published, 99 % sparse, in percent (Zhang et al. 2025, arXiv:2501.19107): dense 90.88, SET 89.00, RigL 89.91, GMP 90.29,
GraNet 89.98.

The setting, with where it is from ("paper": what it prints; "code": github.com/biomedical-cybernetics/
Cannistraci-Hebb-training, mlp_and_cnn/, by the same authors, where the paper does not say):

- Model: 784 -> 1568 -> 1568 -> 1568 -> 10, ReLU, biases, no dropout, no normalisation layers. The three hidden weights
  are sparse, each by the same share; the output layer stays dense (code: model.py, dst_util.py).
- Data: pixels normalised by mean 0.2860 and deviation 0.3530, no augmentation, all 60,000 images (code: load_data.py).
  There is no validation set: accuracies are those of the 10,000 test images.
- Training: batch 32, 100 epochs, SGD, momentum 0.9, weight decay 5e-4 on everything (paper). The learning rate falls in
  a line from 0.025 to 2.5e-4, once per epoch, over the first 90 epochs, and stays (code: run.py, decay_factor 0.9).
- SET: after each epoch but the last, 0.3 of the active weights move (zeta), by magnitude and at random, and start at 0
  (paper; code: dst_scheduler.py). The share is constant; with adaptive_zeta the code lets it fall as RigL does.
- RigL: the same moves by the gradient of one batch of 32, with RigL's own cosine to 0 at three quarters of the training
  (arXiv:1911.11134); whether the published run used it is not said. --constant keeps zeta as it is, and came closer.
- GMP and GraNet: their MLP runs are not in the code. As in the authors' later code for language models (github.com/
  biomedical-cybernetics/Cannistraci-Hebb-Training-Soft-Rule-, dst_scheduler.py), each update prunes every layer by the
  same share, along GraNet's cubic, to three quarters of the training; here from density 1, as both methods were
  published (--initial 0.5 is what that code's example begins with). GraNet moves weights after each pruning, as RigL.
- Initialisation: the dense model has torch's own. Sparse ones have a random topology and normal weights of variance
  2 / fan-in, where fan-in counts active inputs ("swi" in the code). --init kaiming counts all inputs, which is what the
  code's example for SET does: at 99 % activations then shrink tenfold per layer. SET came closer with it.
- Accuracy: the code keeps the best epoch by test accuracy. Here the summary is that of the last epoch, which selects
  nothing on test images; the best epoch at the final density is in the rows and under NAME_best. An epoch is evaluated
  after its update, as in the code.

How a step is taken (float32; measured, see README): static, SET and RigL are compact from the start. GMP and GraNet
start masked and become compact when their density is low enough for that to be faster. A run that was stopped goes on
from its last checkpoint in --folder, with the bits of one that was not; finished runs are kept in --rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.nn.functional as F
from contest import Loop, Rows, density_of, sparse_start
from harness import parse, write
from torch import nn

import sparsam as sp
from sparsam import checkpoint
from sparsam.measure.heap import keep_heap
from sparsam.tasks.images import Images, Shuffled, normalise, read_images

PUBLISHED = {"dense": 90.88, "set": 89.00, "rigl": 89.91, "gmp": 90.29, "granet": 89.98}
METHODS = (*PUBLISHED, "static")
BATCH, RATE, END, DECAY_SHARE = 32, 0.025, 0.01, 0.9
# density at which compact storage takes over from masked: where the products of single weights, or of blocks, cost less
COMPACT_BELOW = {1: 0.15}
COMPACT_BELOW_BLOCKS = 1.0


@dataclass(frozen=True)
class Setting:
    """One training.

    Attributes:
        initial: density that GMP and GraNet start from.
        constant: RigL's and GraNet's share of moved weights stays what it is.
        dense_first: the first layer stays dense.
        examples: training images, the first ones; None: all.
    """

    method: str
    density: float = 0.01
    block: int = 1
    epochs: int = 100
    width: int = 1568
    seed: int = 0
    init: str = "fan_in"
    allocation: str = "uniform"
    fraction: float = 0.3
    initial: float = 1.0
    constant: bool = False
    dense_first: bool = False
    examples: int | None = None

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def is_published(self) -> bool:
        """Whether the published number is of this model, density and length, however the details are chosen."""
        size = (self.density, self.block, self.epochs, self.width, self.examples)
        return size == (0.01, 1, 100, 1568, None) and not self.dense_first

    def build_method(self, epoch: int) -> sp.Method:
        """The method when an epoch has so many steps."""
        last, until = max(1, self.epochs - 1) * epoch, max(1, round(0.75 * self.epochs)) * epoch
        constant = sp.constant(self.fraction)
        match self.method:
            case "static":
                return sp.static()
            case "set":
                return sp.DropGrow(sp.magnitude, sp.random, epoch, constant, until=last)
            case "rigl":
                return self._rigl(epoch, last, until)
            case "gmp":
                return sp.gmp(self.density, epoch, until, initial=self.initial, allocation=self._shares())
            case "granet":
                prune = sp.gmp(self.density, epoch, until, initial=self.initial, allocation=self._shares())
                return sp.Then(prune, self._rigl(epoch, until, until))
        raise ValueError(f"expected one of {', '.join(METHODS)}, got {self.method!r}.")

    def build_model(self, inputs: int, classes: int, storage: str | None = None) -> nn.Module:
        """The untrained model; `storage` is that of a checkpoint to be loaded into it."""
        torch.manual_seed(self.seed)
        sizes = [inputs, *[self.width] * 3]
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for position in range(3):
            layers[f"hidden{position + 1}"] = nn.Linear(sizes[position], sizes[position + 1])
            layers[f"relu{position + 1}"] = nn.ReLU()
        layers["head"] = nn.Linear(self.width, classes)
        model = nn.Sequential(layers)
        if self.method != "dense":
            gradual = self.method in ("gmp", "granet")
            sparse_start(
                model,
                self.block,
                self.initial if gradual else self.density,
                storage or ("masked" if gradual else "compact"),  # type: ignore[arg-type]
                init=self.init,  # type: ignore[arg-type]
                allocation=self._shares(),
                exclude=["hidden1"] if self.dense_first else [],
                seed=self.seed,
            )
        return model

    def _rigl(self, every: int, last: int, until: int) -> sp.DropGrow:
        if self.constant:
            return sp.DropGrow(sp.magnitude, sp.gradient, every, sp.constant(self.fraction), until=last)
        return sp.rigl(every, self.fraction, until)

    def _shares(self) -> Any:
        return {"uniform": sp.uniform, "erdos_renyi": sp.erdos_renyi, "global": sp.global_()}[self.allocation]


class Training:
    """A setting in training, from the start or from its last checkpoint."""

    def __init__(self, setting: Setting, images: Images, folder: Path | None) -> None:
        self.setting, self.images = setting, images
        self.count = len(images.train) if setting.examples is None else min(setting.examples, len(images.train))
        self.epoch_steps = -(-self.count // BATCH)
        self.batches = Shuffled(self.count, BATCH, setting.seed)
        self.folder = None
        found: dict[str, Any] | None = None
        if folder is not None:
            self.folder = folder / hashlib.sha256(setting.key.encode()).hexdigest()[:12]
            self.folder.mkdir(parents=True, exist_ok=True)
            whole = sorted(self.folder.glob("epoch-*"))
            found = checkpoint.read(whole[-1]) if whole else None
        self.curve: list[list[float]] = []
        self.seconds: dict[str, float] = {}
        if found is not None:
            if found["run"]["data"] != images.fingerprint:
                raise ValueError(
                    f"{self.folder}: expected a checkpoint of this data, got one of other data. Delete it."
                )
            self.curve, self.seconds = found["run"]["curve"], found["run"]["seconds"]
        rate = sp.linear(1.0, END, steps=max(1, int(DECAY_SHARE * setting.epochs)))
        method = setting.build_method(self.epoch_steps) if setting.method != "dense" else None

        def parts() -> list[sp.Part]:
            sparse = [sp.SparseTraining(method)] if method is not None else []
            return [*sparse, sp.LearningRate(lambda step: rate(step // self.epoch_steps))]

        self.loop = Loop(
            setting.build_model(
                images.train[0].numel(), images.classes, None if found is None else found["loop"]["storage"]
            ),
            lambda model: torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-4, fused=True),
            parts,
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            setting.seed,
            state=None if found is None else found["loop"],
        )

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return len(self.curve)

    def run_epoch(self) -> None:
        """Trains and evaluates one epoch."""
        storage, began = self.loop.storage, time.perf_counter()
        loss = torch.zeros(())
        for step in range(self.epoch * self.epoch_steps, (self.epoch + 1) * self.epoch_steps):
            rows = self.batches(step)
            loss += self.loop.step((self._pixels(self.images.train[rows]), self.images.train_labels[rows]))
        spent = time.perf_counter() - began
        self.seconds[storage] = self.seconds.get(storage, 0.0) + spent
        self.seconds[f"{storage} steps"] = self.seconds.get(f"{storage} steps", 0) + self.epoch_steps
        self.curve.append([float(loss) / self.epoch_steps, self.accuracy(), density_of(self.loop.model)])
        self.loop.tighten(COMPACT_BELOW.get(self.setting.block, COMPACT_BELOW_BLOCKS))

    @torch.no_grad()
    def accuracy(self) -> float:
        """Percent of test images in their class."""
        model = self.loop.model.eval()
        right = sum(
            int((model(self._pixels(images)).argmax(1) == labels).sum())
            for images, labels in zip(self.images.test.split(1000), self.images.test_labels.split(1000), strict=True)
        )
        model.train()
        return 100 * right / len(self.images.test)

    def save(self) -> None:
        """Writes a checkpoint and deletes the ones before it."""
        if self.folder is None:
            return
        before = list(self.folder.glob("epoch-*"))
        run = {"data": self.images.fingerprint, "curve": self.curve, "seconds": self.seconds}
        checkpoint.write(self.folder / f"epoch-{self.epoch:05}", {"loop": self.loop.state_dict(), "run": run})
        for old in before:
            shutil.rmtree(old)

    def row(self) -> dict[str, Any]:
        """What a finished run leaves."""
        final = self.curve[-1][2]
        times = {name: seconds for name, seconds in self.seconds.items() if not name.endswith("steps")}
        return {
            "key": self.setting.key,
            **asdict(self.setting),
            "last": self.curve[-1][1],
            "best": max(accuracy for _, accuracy, density in self.curve if density == final),
            "final_density": final,
            "seconds": sum(times.values()),
            "step_ms": {name: 1e3 * seconds / self.seconds[f"{name} steps"] for name, seconds in times.items()},
            "curve": self.curve,
        }

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        return normalise(images, self.images.mean, self.images.std)


def main() -> None:
    arguments = parse(
        __doc__,
        methods={"nargs": "+", "choices": METHODS, "default": list(PUBLISHED)},
        density={"type": float, "default": 0.01, "help": "active share of the hidden layers' weights"},
        block={"type": int, "default": 1, "help": "side of a block"},
        epochs={"type": int, "default": 100},
        seed={"type": int, "default": 0},
        init={"choices": ["fan_in", "kaiming"], "default": "fan_in"},
        allocation={"choices": ["uniform", "erdos_renyi", "global"], "default": "uniform"},
        fraction={"type": float, "default": 0.3, "help": "share of active weights that an update moves (zeta)"},
        initial={"type": float, "default": 1.0, "help": "density that gmp and granet start from"},
        constant={"action": "store_true", "help": "no annealing of the share that rigl and granet move"},
        dense_first={"action": "store_true", "help": "the first layer stays dense"},
        data={"type": Path, "default": None, "help": "folder of the idx files"},
        rows={"type": Path, "default": None, "help": "finished runs, read and added to"},
        folder={"type": Path, "default": None, "help": "checkpoints of the run under way"},
        save_every={"type": int, "default": 5, "help": "epochs between checkpoints"},
    )
    setting = Setting("dense")
    if arguments.quick:
        arguments.epochs = 4
        setting = replace(setting, width=512, examples=3200)
    keep_heap()
    images = read_images(arguments.data)
    print(images, file=sys.stderr)
    rows = Rows(arguments.rows)
    chosen = {
        name: getattr(arguments, name)
        for name in ("density", "block", "epochs", "seed", "init", "allocation", "fraction", "initial")
    } | {"constant": arguments.constant, "dense_first": arguments.dense_first}
    finished = []
    for method in arguments.methods:
        # a dense run is the same whatever the sparse ones look like
        one = replace(setting, method=method, **(chosen if method != "dense" else _of_dense(chosen)))
        if one.key not in rows.done:
            rows.add(train(one, images, arguments))
        finished.append(rows.done[one.key])
    write(arguments, summarise(finished), finished)


def train(setting: Setting, images: Images, arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains to the end, from the last checkpoint when there is one."""
    training = Training(setting, images, arguments.folder)
    if training.epoch:
        print(f"{setting.method}: goes on after epoch {training.epoch}", file=sys.stderr)
    while training.epoch < setting.epochs:
        training.run_epoch()
        loss, accuracy, density = training.curve[-1]
        print(
            f"{setting.method} epoch {training.epoch}: loss {loss:.4f}, test accuracy {accuracy:.2f} %, "
            f"sparsity {100 * (1 - density):.2f} %, {training.loop.storage}",
            file=sys.stderr,
        )
        if training.epoch % arguments.save_every == 0 and training.epoch < setting.epochs:
            training.save()
    if training.folder is not None:
        shutil.rmtree(training.folder)
    return training.row()


def summarise(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Prints the table; accuracy of the last and of the best epoch by method, in percent."""
    print("method     sparsity  block |   last   best  published |  minutes  ms a step")
    for row in rows:
        setting = Setting(**{name: row[name] for name in Setting.__dataclass_fields__})
        published = PUBLISHED.get(row["method"]) if setting.is_published else None
        block = "" if row["method"] == "dense" else f"{row['block']} x {row['block']}"
        print(
            f"{row['method']:10} {100 * (1 - row['final_density']):6.2f} % {block:>7} | {row['last']:6.2f} "
            f"{row['best']:6.2f}  {'n/a' if published is None else published:>9} | {row['seconds'] / 60:8.1f}  "
            + ", ".join(f"{name} {milliseconds:.2f}" for name, milliseconds in row["step_ms"].items())
        )
    last: dict[str, float | None] = {row["method"]: row["last"] for row in rows}
    return last | {f"{row['method']}_best": row["best"] for row in rows}


def _of_dense(chosen: dict[str, Any]) -> dict[str, Any]:
    return {name: chosen[name] for name in ("epochs", "seed")}


if __name__ == "__main__":
    main()
