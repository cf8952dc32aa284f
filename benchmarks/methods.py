"""All methods at 80, 90 and 95 % sparse, in blocks of 1, 16 and 32, against the dense twin: images and text.

    python benchmarks/methods.py [--rows FILE] [--only time] [--tasks images] [--methods rigl gmp] [--json FILE]

Images: an MLP, 784 -> 512 -> 512 -> 512 -> 10, on Fashion-MNIST, float32, SGD; quality is test accuracy. Text: a byte
GPT of width 256 and 4 layers on Python's standard library, AdamW; quality is the loss on held-out files. Learning
rates are the same for all and tuned for none, unlike those of time_to_quality.py.

Equal time: the dense twin and all methods of one density and block size train in turns within one process, each for the
same seconds on a clock of its own. Equal steps: each method takes as many steps as a dense twin took in that time. All
schedules (learning rate, density, share of moved weights) follow the progress of a run, whichever way it is counted.

Blocks of 16 and 32 are stored compact, also at density 1, where the gradual methods begin. Single weights are masked,
which costs time and saves none; on images they become compact at densities of 10 % and less, where CSR products are
faster.

A share of the twin's quality is accuracy / accuracy of the twin, or loss of the twin / loss: higher is better. Finished
runs are kept in --rows; a benchmark that was stopped goes on with the next ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.nn.functional as F
from contest import Loop, Rows, density_of, sparse_start
from harness import parse, write
from torch import nn

import sparsam as sp
from sparsam.measure.heap import keep_heap
from sparsam.tasks.gpt import GPT
from sparsam.tasks.images import Shuffled, normalise, read_images
from sparsam.tasks.language import Batches, loss_of, read_corpus, validation_batches

METHODS = ("static", "set", "rigl", "gmp", "granet", "taylor", "ac_dc")
GRADUAL = ("gmp", "granet", "taylor", "ac_dc")  # start at density 1
DENSITIES, BLOCKS = (0.2, 0.1, 0.05), (1, 16, 32)
FRACTION = 0.3
SETTLED = 0.75  # share of a run after which topologies stay
TURN_SECONDS = 2.0
NEVER = 10**12


@dataclass(frozen=True)
class Contender:
    """One run: so many seconds, or so many steps."""

    task: str
    method: str
    density: float
    block: int
    seconds: float | None
    steps: int | None
    heat: str
    seed: int
    precision: str

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Task(ABC):
    """Data, model, optimiser and measure of quality; `every` so many steps topologies change."""

    every: int
    higher_is_better: bool
    single_below: float  # density at which single weights become compact
    clip: float | None = None
    precision = "fp32"

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer: ...

    @abstractmethod
    def batches(self, seed: int) -> Callable[[], Any]: ...

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor: ...

    @abstractmethod
    def rate(self, progress: float) -> float: ...

    @abstractmethod
    def quality(self, model: nn.Module) -> float: ...

    def parts(self) -> list[sp.Part]:
        return []

    def share(self, quality: float, twin: float) -> float:
        """Quality as a share of the twin's."""
        return quality / twin if self.higher_is_better else twin / quality


class ImageTask(Task):
    higher_is_better, single_below = True, 0.1

    def __init__(self, folder: Path | None, every: int) -> None:
        self.images, self.every = read_images(folder), every

    def model(self) -> nn.Module:
        sizes = (self.images.train[0].numel(), 512, 512, 512)
        model = nn.Sequential()
        for position, (inputs, outputs) in enumerate(itertools.pairwise(sizes), 1):
            model.add_module(f"hidden{position}", nn.Linear(inputs, outputs))
            model.add_module(f"relu{position}", nn.ReLU())
        model.add_module("head", nn.Linear(sizes[-1], self.images.classes))
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4, fused=True)

    def batches(self, seed: int) -> Callable[[], Any]:
        rows = Shuffled(len(self.images.train), 128, seed)
        steps = itertools.count()

        def draw() -> tuple[torch.Tensor, torch.Tensor]:
            chosen = rows(next(steps))
            return self._pixels(self.images.train[chosen]), self.images.train_labels[chosen]

        return draw

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def rate(self, progress: float) -> float:
        return max(0.01, 1 - progress)

    def quality(self, model: nn.Module) -> float:
        test = zip(self.images.test.split(1000), self.images.test_labels.split(1000), strict=True)
        right = sum(int((model(self._pixels(images)).argmax(1) == labels).sum()) for images, labels in test)
        return 100 * right / len(self.images.test)

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        return normalise(images, self.images.mean, self.images.std)


class TextTask(Task):
    higher_is_better, single_below, clip = False, 0.0, 1.0
    batch, context = 16, 128

    def __init__(self, windows: int, every: int, precision: str) -> None:
        self.corpus, self.windows, self.every, self.precision = read_corpus(), windows, every, precision

    def model(self) -> nn.Module:
        return GPT(layers=4, width=256, heads=4, context=self.context)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, 3e-3, betas=(0.9, 0.95), fused=True)

    def batches(self, seed: int) -> Callable[[], Any]:
        return Batches(self.corpus.train, self.batch, self.context, seed).next

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch)

    def rate(self, progress: float) -> float:
        return min(1.0, (progress + 1e-3) / 0.05) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, progress))) / 2)

    def quality(self, model: nn.Module) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
            held = validation_batches(self.corpus.validation, self.batch, self.context, self.windows)
            return statistics.fmean(float(loss_of(model, batch)) for batch in held)

    def parts(self) -> list[sp.Part]:
        return [sp.Precision(self.precision)]  # type: ignore[arg-type]


class Run:
    """A contender in training, on its own clock."""

    def __init__(self, contender: Contender, task: Task) -> None:
        self.contender, self.task = contender, task
        self.seconds, self.losses = 0.0, [math.nan]
        one = contender
        torch.manual_seed(one.seed)
        model = task.model()
        self.method = None if one.method == "dense" else self._build_method()
        if self.method is not None:
            density = 1.0 if one.method in GRADUAL else one.density
            compact = one.block > 1 or density <= task.single_below
            sparse_start(model, one.block, density, "compact" if compact else "masked", init="own", seed=one.seed)
        self.loop = Loop(model, task.optimizer, self._parts, task.loss, one.seed, task.clip)
        self.draw = task.batches(one.seed)

    @property
    def progress(self) -> float:
        one = self.contender
        return self.seconds / one.seconds if one.seconds is not None else self.loop.steps / (one.steps or 1)

    def train(self, until: float) -> None:
        """Trains to that share of the run."""
        while self.progress < min(1.0, until):
            began = time.perf_counter()
            for _ in range(10 if self.contender.seconds is None else 1):
                if self.progress < 1:
                    self.loop.step(self.draw())
            if self.loop.steps % (5 * self.task.every) == 0 and self._shrinks():
                self.loop.tighten(1.0 if self.contender.block > 1 else self.task.single_below)
            self.seconds += time.perf_counter() - began

    @torch.no_grad()
    def row(self) -> dict[str, Any]:
        """What a finished run leaves."""
        quality = self.task.quality(self.loop.model.eval())
        return {
            "key": self.contender.key,
            **asdict(self.contender),
            "quality": quality,
            "final_density": density_of(self.loop.model),
            "storage": self.loop.storage,
            "taken_steps": self.loop.steps,
            "taken_seconds": self.seconds,
        }

    def _shrinks(self) -> bool:
        """Whether units that are gone will stay away in such a number."""
        return self.contender.method in GRADUAL and (self.contender.method != "ac_dc" or self.progress > SETTLED)

    def _parts(self) -> list[sp.Part]:
        sparse = [] if self.method is None else [sp.SparseTraining(self.method)]
        return [*sparse, *self.task.parts(), sp.LearningRate(lambda _: self.task.rate(self.progress))]

    def _build_method(self) -> sp.Method:
        """The published methods with schedules over the progress of the run, be it counted in steps or in seconds."""
        one, every = self.contender, self.task.every

        def settling() -> float:
            return min(1.0, self.progress / SETTLED)

        def fraction(_: int) -> float:
            return FRACTION * (1 + math.cos(math.pi * settling())) / 2

        def cubic(_: int) -> float:
            return one.density + (1 - one.density) * (1 - settling()) ** 3

        def stairs(_: int) -> float:
            # a fifth of what is left goes at each of so many updates, see sp.taylor_pruning
            updates = math.ceil(math.log(one.density) / math.log(0.8))
            return max(one.density, 0.8 ** math.floor(settling() * updates))

        def turns(_: int) -> float:
            # a warm-up, then ten phases, sparse and dense in turns, then sparse
            phase = math.floor((settling() - 0.1) / 0.09)
            return 1.0 if settling() < 0.1 or (phase % 2 and settling() < 1) else one.density

        rigl = sp.DropGrow(sp.magnitude, sp.gradient, every, fraction)
        methods: dict[str, Callable[[], sp.Method]] = {
            "static": sp.static,
            "set": lambda: sp.DropGrow(sp.magnitude, sp.random, every, fraction),
            "rigl": lambda: rigl,
            "gmp": lambda: sp.Resize(sp.magnitude, cubic, every, NEVER),
            "granet": lambda: sp.Then(sp.Resize(sp.magnitude, cubic, every, NEVER, allocation=sp.global_()), rigl),
            "taylor": lambda: sp.Resize(sp.fisher, stairs, every, NEVER, allocation=sp.global_(sp.fisher)),
            "ac_dc": lambda: sp.Resize(sp.magnitude, turns, every, NEVER, allocation=sp.global_()),
        }
        return methods[one.method]()


def main() -> None:
    arguments = parse(
        __doc__,
        tasks={"nargs": "+", "choices": ["images", "text"], "default": ["images", "text"]},
        methods={"nargs": "+", "choices": METHODS, "default": list(METHODS)},
        densities={"nargs": "+", "type": float, "default": list(DENSITIES)},
        blocks={"nargs": "+", "type": int, "default": list(BLOCKS)},
        only={"choices": ["time", "steps"], "default": None, "help": "one of the two comparisons"},
        image_seconds={"type": float, "default": 20.0, "help": "of the dense twin on images"},
        text_seconds={"type": float, "default": 60.0, "help": "of the dense twin on text"},
        precision={"choices": ["bf16", "fp32"], "default": "bf16", "help": "of text; take what is faster for the twin"},
        seed={"type": int, "default": 0},
        data={"type": Path, "default": None, "help": "folder of the idx files"},
        rows={"type": Path, "default": None, "help": "finished runs, read and added to"},
    )
    if arguments.quick:
        arguments.densities, arguments.blocks = [0.1], [16]
        arguments.image_seconds, arguments.text_seconds = 1.0, 1.5
    keep_heap()  # for all contenders alike
    torch.set_flush_denormal(True)  # as `sparsam train` does
    rows = Rows(arguments.rows)
    found: list[dict[str, Any]] = []
    summary: dict[str, float | None] = {}
    tasks: dict[str, Task] = {}
    for name in arguments.tasks:
        if name == "images":
            tasks[name] = ImageTask(arguments.data, every=10 if arguments.quick else 100)
            seconds = arguments.image_seconds
        else:
            tasks[name] = TextTask(*((8, 1) if arguments.quick else (256, 20)), arguments.precision)
            seconds = arguments.text_seconds
        found += compare(name, tasks[name], seconds, arguments, rows)
    for name, task in tasks.items():
        for heat in ("time", "steps"):
            report(name, task, heat, [row for row in found if row["task"] == name], arguments)
    summary = summarise(found, tasks, arguments.densities)
    write(arguments, summary, found)


def compare(name: str, task: Task, seconds: float, arguments: argparse.Namespace, rows: Rows) -> list[dict[str, Any]]:
    """Both comparisons on one task."""
    cells = list(itertools.product(arguments.blocks[::-1], arguments.densities))
    result = []
    if arguments.only != "steps":
        for block, density in cells:
            heat = f"{density:g} in blocks of {block}"
            kinds = ["dense", *arguments.methods]
            heats = [
                Contender(name, kind, density, block, seconds, None, heat, arguments.seed, task.precision)
                for kind in kinds
            ]
            result += compete(heats, task, rows)
    if arguments.only != "time":
        twin = Contender(name, "dense", 1.0, 1, seconds, None, "steps", arguments.seed, task.precision)
        result += compete([twin], task, rows)
        steps = result[-1]["taken_steps"]
        for (block, density), kind in itertools.product(cells, arguments.methods):
            one = Contender(name, kind, density, block, None, steps, "steps", arguments.seed, task.precision)
            result += compete([one], task, rows)
    return result


def compete(contenders: Sequence[Contender], task: Task, rows: Rows) -> list[dict[str, Any]]:
    """Trains contenders by turns; a heat whose runs are all there is not repeated."""
    if any(one.key not in rows.done for one in contenders):
        runs = [Run(one, task) for one in contenders]
        seconds = contenders[0].seconds
        turns = max(1, round(seconds / TURN_SECONDS)) if seconds is not None else 1
        for turn in range(1, turns + 1):
            for run in runs:
                run.train(until=turn / turns)
        for run in runs:
            row = run.row()
            rows.add(row)
            print(
                f"{row['task']} {row['method']} {row['density']:g} x{row['block']} ({row['heat']}): "
                f"{row['quality']:.4f} after {row['taken_steps']} steps and {row['taken_seconds']:.0f} s, "
                f"{row['storage']}",
                file=sys.stderr,
                flush=True,
            )
    return [rows.done[one.key] for one in contenders]


def report(name: str, task: Task, heat: str, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Prints quality and share of the twin's of one comparison: methods down, densities and blocks across."""
    rows = [row for row in rows if (row["heat"] == "steps") == (heat == "steps")]
    if not rows:
        return
    unit = "test accuracy in percent" if task.higher_is_better else "loss on held-out text, nats a byte"
    print(f"\n{name} at equal {heat}: {unit} (share of the dense twin's quality)")
    cells = list(itertools.product(arguments.densities, arguments.blocks))
    print(f"{'':8}" + "".join(f"{f'{100 * (1 - density):g} % x{block}':>17}" for density, block in cells))
    for method in ("dense", *arguments.methods):
        line = []
        for density, block in cells:
            (twin,) = [row for row in rows if row["method"] == "dense" and is_twin(row, density, block)]
            mine = [
                row
                for row in rows
                if row["method"] == method and (method == "dense" or (row["density"], row["block"]) == (density, block))
            ]
            row = twin if method == "dense" else mine[0]
            share = f"{task.share(row['quality'], twin['quality']):.3f}" if arrived(row) else "too dense"
            line.append(f"{row['quality']:.4g} ({share})")
        print(f"{method:8}" + "".join(f"{cell:>17}" for cell in line))


def arrived(row: dict[str, Any]) -> bool:
    """Whether a run was long enough to reach the density that it is listed under."""
    return row["method"] == "dense" or abs(row["final_density"] / row["density"] - 1) < 0.05


def is_twin(row: dict[str, Any], density: float, block: int) -> bool:
    """Whether a dense run is what this cell is held against."""
    return row["heat"] == "steps" or (row["density"], row["block"]) == (density, block)


def summarise(
    rows: list[dict[str, Any]], tasks: dict[str, Task], densities: Sequence[float]
) -> dict[str, float | None]:
    """Best share of the twin's quality at equal time, by sparsity: the mean over tasks, and each task's own."""
    summary: dict[str, float | None] = {}
    timed = [row for row in rows if row["heat"] != "steps"]
    for density in densities:
        best = {}
        for name, task in tasks.items():
            twins = {row["heat"]: row["quality"] for row in timed if row["task"] == name and row["method"] == "dense"}
            shares = {
                (row["method"], row["block"]): task.share(row["quality"], twins[row["heat"]])
                for row in timed
                if row["task"] == name and row["method"] != "dense" and row["density"] == density and arrived(row)
            }
            if shares:
                winner = max(shares, key=shares.__getitem__)
                best[name] = shares[winner]
                print(f"{name}, {100 * (1 - density):g} %: best at equal time is {winner[0]} in blocks of {winner[1]}")
        percent = f"{100 * (1 - density):g}"
        summary[f"best_{percent}"] = statistics.fmean(best.values()) if best else None
        summary |= {f"best_{percent}_{name}": share for name, share in best.items()}
    return summary


if __name__ == "__main__":
    main()
