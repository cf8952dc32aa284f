"""How long block-sparse training takes to reach what its dense twin reaches in a given time.

    python benchmarks/time_to_quality.py [--precision fp32] [--minutes 15] [--seeds 0 1 2] [--rows FILE] [--json FILE]

Every contender trains a byte GPT on the same text from the same seed, in turns of a few seconds within one process, so
that what disturbs the machine disturbs all alike; each has a clock of its own that stands still while others train and
during evaluation. Learning rates are tuned for each kind over the same grid on short runs. Validation text is held out
by file. The ratio is the first time from which the smoothed validation loss stays below the dense twin's final one,
as a share of the dense twin's time.

Finished runs are kept in --rows, one JSON object a line: a benchmark that was stopped goes on after the last one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch._dynamo
from harness import parse, write

import sparsam as sp
from sparsam.measure.heap import keep_heap
from sparsam.tasks.gpt import GPT
from sparsam.tasks.language import Batches, Corpus, loss_of, read_corpus, validation_batches

BATCH, TOKENS = 16, 256
GRID = (7e-4, 1.5e-3, 3e-3)
LIMITS = (2e-4, 2e-2)  # of rates by which the grid grows where the best one lies at its edge
WIDTHS = {256: 6, 384: 6, 768: 6, 1024: 4}  # dense models to choose the best from, width -> layers
WARM_UP = 0.1  # of the time; with a fiftieth, some ten steps, low rates won for want of a warm-up
SMOOTH = 3  # evaluations in the running mean
TURN_SECONDS = 5.0


@dataclass(frozen=True)
class Contender:
    """One way to spend the time.

    Attributes:
        kind: "dense" or a name of the sparse setting.
        rate: peak learning rate.
        decay_by: share of the time at which the rate reaches its floor, where it then stays.
    """

    kind: str
    rate: float
    seed: int
    minutes: float
    width: int = 512
    layers: int = 6
    precision: str = "bf16"
    density: float = 1.0
    block: int = 32
    every: int = 100
    fraction: float = 0.3
    decay_by: float = 1.0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


SPARSE = {
    "80": Contender("sparse 80 %", 0.0, 0, 0.0, density=0.2, decay_by=0.5),
    "90": Contender("sparse 90 %", 0.0, 0, 0.0, density=0.1, decay_by=0.5),
}


@dataclass
class Run:
    """A contender in training: its session, its clock and its curve of (seconds, steps, validation loss)."""

    contender: Contender
    corpus: Corpus
    compiled: bool
    seconds: float = 0.0
    curve: list[tuple[float, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        one = self.contender
        torch.manual_seed(one.seed)
        self.model = GPT(one.layers, one.width, max(1, one.width // 64), TOKENS)
        parts: list[sp.Part] = [sp.Precision(one.precision), sp.LearningRate(self.rate)]  # type: ignore[arg-type]
        if one.density < 1:
            sp.sparsify(self.model, sp.Block(one.block, one.block), one.density, sparse_fan_in=True)
            method = sp.DropGrow(sp.magnitude, sp.gradient, one.every, self.fraction)
            parts.insert(0, sp.SparseTraining(method))
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=one.rate, betas=(0.9, 0.95), fused=True)
        self.session = sp.Session(self.model, optimizer, parts, clip=1.0, seed=one.seed)
        self.batches = Batches(self.corpus.train, BATCH, TOKENS, one.seed)
        self.loss = torch.compile(loss_of) if self.compiled else loss_of
        if self.compiled:
            self._compile_before_the_clock()

    def rate(self, step: int) -> float:
        """Warm-up over a tenth of the time, cosine to a tenth at `decay_by`."""
        progress = self.progress / self.contender.decay_by
        warm = min(1.0, (self.progress + 1e-3) / WARM_UP)
        return warm * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, progress))) / 2)

    def fraction(self, step: int) -> float:
        """Share of units moved by an update: cosine to 0 at three quarters of the decay."""
        return (
            self.contender.fraction
            * (1 + math.cos(math.pi * min(1.0, self.progress / self.contender.decay_by / 0.75)))
            / 2
        )

    @property
    def progress(self) -> float:
        return self.seconds / (60 * self.contender.minutes)

    def train(self, until: float) -> None:
        """Trains until its own clock shows that many seconds."""
        while self.seconds < min(until, 60 * self.contender.minutes):
            began = time.perf_counter()
            batch = self.batches.next()
            with self.session.forward():
                loss = self.loss(self.model, batch)
            self.session.backward(loss)
            self.session.step()
            self.seconds += time.perf_counter() - began

    @torch.no_grad()
    def evaluate(self, windows: int) -> float:
        """Mean validation loss in nats per byte; takes no time on the clock."""
        self.model.eval()
        with self.session.forward():
            losses = [
                float(loss_of(self.model, batch))
                for batch in validation_batches(self.corpus.validation, BATCH, TOKENS, windows)
            ]
        self.model.train()
        self.curve.append((self.seconds, self.session.applied_steps, statistics.fmean(losses)))
        return self.curve[-1][2]

    def _compile_before_the_clock(self) -> None:
        """Compiles both graphs (update step or not) on a throw-away state."""
        kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        batch = Batches(self.corpus.train, BATCH, TOKENS, 0).next()
        for probing in (False, True):
            weights = [module for module in self.model.modules() if isinstance(module, sp.SparseLinear)]
            for module in weights if probing else ():
                module.probe = torch.zeros(()).expand(module.grid).requires_grad_()
            with self.session.forward():
                self.loss(self.model, batch).backward()
            for module in weights:
                module.probe = None
        self.session.optimizer.zero_grad(set_to_none=True)
        self.model.load_state_dict(kept)


def main() -> None:
    arguments = parse(
        __doc__,
        sparse={"nargs": "+", "choices": [*SPARSE], "default": [*SPARSE], "help": "sparse contenders"},
        precision={"choices": ["bf16", "fp32"], "default": "bf16", "help": "of all; take what is faster for the twin"},
        minutes={"type": float, "default": 15.0},
        tune_minutes={"type": float, "default": 3.0},
        seeds={"type": int, "nargs": "+", "default": [0, 1, 2]},
        rows={"type": Path, "default": None, "help": "finished runs, read and added to"},
        eager={"action": "store_true", "help": "no torch.compile, for either side"},
        only={"choices": ["tune", "pairs", "widths"], "default": None, "help": "one stage only"},
    )
    if arguments.quick:
        arguments.minutes, arguments.tune_minutes, arguments.seeds, arguments.eager = 0.2, 0.05, [0], True
    keep_heap()  # for all contenders alike
    # float32 attention meets so many subnormal numbers at high rates that a dense step takes twice the time
    torch.set_flush_denormal(True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    corpus = read_corpus()
    print(corpus, file=sys.stderr)
    log = Log(arguments.rows)
    dense = Contender("dense", 0.0, 0, 0.0, precision=arguments.precision)
    kinds = [dense, *(replace(SPARSE[name], precision=arguments.precision) for name in arguments.sparse)]
    tuned = tune(kinds, corpus, arguments, log)
    rows: list[dict[str, Any]] = []
    for seed in arguments.seeds if arguments.only != "tune" else ():
        rows += compete([place(one, tuned[one.kind], seed, arguments.minutes) for one in kinds], corpus, arguments, log)
    widths = []
    if not arguments.quick and arguments.only in (None, "widths"):
        others = [replace(dense, width=width, layers=layers) for width, layers in WIDTHS.items()]
        widths = compete([place(one, tuned["dense"], 0, arguments.minutes) for one in others], corpus, arguments, log)
    summary = summarise(rows, widths)
    write(arguments, summary, [*log.rows])


def tune(kinds: list[Contender], corpus: Corpus, arguments: argparse.Namespace, log: Log) -> dict[str, float]:
    """Best rate of the grid for each kind, by the validation loss at the end of a short run."""
    tuned = {}
    for kind in kinds:
        rates = list(GRID)
        while True:
            grid = [place(kind, rate, 0, arguments.tune_minutes) for rate in rates]
            rows = compete(grid, corpus, arguments, log, evaluations=6)
            best = min(rows, key=lambda row: row["curve"][-1][2])["rate"]
            # the best one must have a neighbour on either side
            if best == rates[0] and best > LIMITS[0]:
                rates.insert(0, best / 2)
            elif best == rates[-1] and best < LIMITS[1]:
                rates.append(best * 2)
            else:
                break
        tuned[kind.kind] = best
        found = ", ".join(f"{row['rate']:g} -> {row['curve'][-1][2]:.4f}" for row in rows)
        print(f"{kind.kind}: {found}; {best:g}", flush=True)
    return tuned


def compete(
    contenders: list[Contender], corpus: Corpus, arguments: argparse.Namespace, log: Log, evaluations: int = 60
) -> list[dict[str, Any]]:
    """Trains contenders by turns until each has had its time; runs that the log holds already are not repeated."""
    new = [one for one in contenders if one.key not in log.done]
    torch._dynamo.reset()
    runs = [Run(one, corpus, compiled=not arguments.eager) for one in new]
    windows = 16 if arguments.quick else 64
    gap = 60 * contenders[0].minutes / evaluations  # seconds of training between evaluations
    turn, due = min(gap, TURN_SECONDS), gap
    while any(run.progress < 1 for run in runs):
        for reached in steps_of(due - gap, due, turn):
            for run in runs:
                run.train(until=reached)
        for run in runs:
            run.evaluate(windows)
        due += gap
    for run in runs:
        log.add(run)
        print(
            f"  {run.contender.kind} width {run.contender.width} rate {run.contender.rate:g} "
            f"seed {run.contender.seed}: {run.session.applied_steps} steps, validation loss {run.curve[-1][2]:.4f}",
            flush=True,
        )
    return [log.done[one.key] for one in contenders]


def steps_of(begin: float, end: float, size: float) -> list[float]:
    """begin + size, begin + 2 size, ... up to end, which is always the last."""
    count = max(1, round((end - begin) / size))
    return [begin + (end - begin) * (place + 1) / count for place in range(count)]


class Log:
    """Finished runs, in a file when there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.done[row["key"]] = row

    @property
    def rows(self) -> list[dict[str, Any]]:
        return list(self.done.values())

    def add(self, run: Run) -> None:
        row = {
            "key": run.contender.key,
            **asdict(run.contender),
            "steps": run.session.applied_steps,
            "curve": run.curve,
        }
        self.done[run.contender.key] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def place(one: Contender, rate: float, seed: int, minutes: float) -> Contender:
    return replace(one, rate=rate, seed=seed, minutes=minutes)


def smoothed(curve: list[tuple[float, int, float]]) -> list[tuple[float, float]]:
    """Running mean over the last evaluations: (seconds, loss)."""
    losses = [loss for _, _, loss in curve]
    return [(curve[i][0], statistics.fmean(losses[max(0, i + 1 - SMOOTH) : i + 1])) for i in range(len(curve))]


def time_ratio(sparse: dict[str, Any], dense: dict[str, Any]) -> float:
    """First time from which sparse stays below dense's final smoothed loss, over dense's time; inf when never."""
    goal = smoothed(dense["curve"])[-1][1]
    first = math.inf
    for seconds, loss in reversed(smoothed(sparse["curve"])):
        if loss >= goal:
            break
        first = seconds
    return first / dense["curve"][-1][0]


def summarise(rows: list[dict[str, Any]], widths: list[dict[str, Any]]) -> dict[str, float | None]:
    """Mean ratio over seeds of each sparse kind to the dense twin, and of the best one to the best dense width."""
    summary: dict[str, float | None] = {}
    dense = {row["seed"]: row for row in rows if row["kind"] == "dense"}
    for kind in dict.fromkeys(row["kind"] for row in rows if row["kind"] != "dense"):
        ratios = [time_ratio(row, dense[row["seed"]]) for row in rows if row["kind"] == kind]
        print(f"{kind}: time to the dense twin's final loss, per seed: {', '.join(f'{value:.3f}' for value in ratios)}")
        mean = statistics.fmean(ratios)
        # a seed that never got there leaves no number to average
        summary[kind.removesuffix(" %").replace(" ", "_")] = mean if math.isfinite(mean) else None
    summary = {
        "best_time_ratio": min((value for value in summary.values() if value is not None), default=None),
        **summary,
    }
    if widths and dense:
        best = min([*widths, dense[min(dense)]], key=lambda row: smoothed(row["curve"])[-1][1])
        sparse = [row for row in rows if row["kind"] != "dense" and row["seed"] == best["seed"]]
        summary["best_dense_width"] = float(best["width"])
        against = min(time_ratio(row, best) for row in sparse)
        summary["ratio_to_best_dense_width"] = against if math.isfinite(against) else None
    return summary


if __name__ == "__main__":
    main()
