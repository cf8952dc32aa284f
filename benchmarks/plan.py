"""Whether the planner tells the truth: fits on some links and contenders, predicts others that were measured too.

    python benchmarks/plan.py [--quick] [--json FILE] [--rows FILE] [--ranks 4]

Measured steps are rows of wire.py: ranks in network namespaces with links shaped by tc (Linux, root). Without --rows it
takes them itself, in short trainings. The model of compute is one rank's short run in this process. What is fitted: how
much slower ranks are that share the machine, for the dense and the sparse model, what of a link's rate arrives, what a
message and a byte cost, and for how long a codec of several steps keeps a bucket waiting. Held out: a link between the
others. Beside that, fitted on uncompressed contenders alone, the compressed ones on all links: their model's compute
and their codec's cost are known, but not how long they wait.
"""

from __future__ import annotations

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import wire
from harness import parse, stop_cleanly, write

import sparsam as sp
from sparsam.comm.codecs import BF16, Codec, Identity
from sparsam.measure.clock import on_threads
from sparsam.measure.heap import keep_heap
from sparsam.plan.fit import Fit, Observation, fitted
from sparsam.plan.memory import memory_of
from sparsam.plan.predict import Setting
from sparsam.plan.times import Compute, measured_codec, measured_compute
from sparsam.plan.workload import Workload, read_workload
from sparsam.tasks.gpt import GPT
from sparsam.tasks.language import Batch, loss_of

PLAIN = ("dense fp32", "dense bf16", "sparse identity")
COMPRESSED = ("dense blocks", "sparse int8")
LINKS, HELD_OUT = (100.0, 400.0, 1000.0), (200.0,)
CODECS: dict[str, Codec] = {"": Identity(), "bf16": BF16()}


@dataclass(frozen=True)
class Shape:
    """What rows must have in common to be of one model."""

    layers: int
    width: int
    tokens: int
    batch: int
    precision: str


def main() -> None:
    arguments = parse(
        __doc__,
        rows={"type": Path, "default": None, "help": "finished rows of wire.py --rows; none are taken then"},
        keep={"type": Path, "default": None, "help": "where rows that are taken here are kept, to go on after a stop"},
        ranks={"type": int, "nargs": "+", "default": [4]},
    )
    stop_cleanly()
    if arguments.rows is not None:
        rows = [json.loads(line) for line in arguments.rows.read_text(encoding="utf-8").splitlines()]
    else:
        rows = wire.run(jobs_of(arguments.quick, arguments.ranks), arguments.keep)
    names = {*PLAIN, *COMPRESSED}
    rows = [row for row in rows if row["mbit"] is not None and row["contender"] in names and "failed" not in row]
    shapes = {Shape(*(row[name] for name in Shape.__annotations__)) for row in rows}
    if len(shapes) != 1:
        raise SystemExit(f"plan: expected rows of one model, got {len(shapes)}. Give the rows of one run of wire.py.")
    keep_heap()
    torch.set_flush_denormal(True)
    settings = settings_of(shapes.pop(), rows)
    report = judged(rows, settings)
    write(arguments, *report)


def jobs_of(quick: bool, ranks: Sequence[int]) -> list[wire.Job]:
    """Every contender on every link; the held-out link twice, for the spread of repeats."""
    small: dict[str, Any] = {"layers": 2, "width": 128, "tokens": 64, "every": 5} if quick else {"every": 20}
    links, held_out = ((20.0, 200.0), (60.0,)) if quick else (LINKS, HELD_OUT)
    names = ("dense bf16", "sparse int8") if quick else (*PLAIN, *COMPRESSED)
    jobs = []
    for count in (2,) if quick else ranks:
        for mbit in (*links, *held_out):
            for name in names:
                steps = 10 if quick else 12 if wire.CONTENDERS[name].density == 1 else 60
                repeats = range(2 if mbit in held_out and not quick else 1)
                jobs += [wire.Job(name, count, mbit, steps, 1, seed, **small) for seed in repeats]
    return jobs


def settings_of(shape: Shape, rows: list[dict[str, Any]]) -> dict[str, Setting]:
    """The contenders as settings, with the compute of one rank alone on as many threads as it has among others."""
    threads = max(1, len(os.sched_getaffinity(0)) // max(row["ranks"] for row in rows))

    def build() -> GPT:
        return GPT(shape.layers, shape.width, max(1, shape.width // 64), shape.tokens)

    dense = read_workload(build, shape.batch, shape.tokens, shape.precision)
    with on_threads(threads):
        plain = computed(shape, build, 1.0, dense)
        settings = {}
        for name in dict.fromkeys(row["contender"] for row in rows):
            one = wire.CONTENDERS[name]
            workload, compute = dense, plain[1]
            if one.density < 1:
                workload, compute = computed(shape, build, one.density, dense)
                compute = replace(compute, rewire=plain[1].backward / 2)  # the gradients of dense weights
            codec = one.codec or CODECS[one.hook]
            settings[name] = Setting(name, workload, replace(compute, codec=measured_codec(codec)), codec)
    return settings


def computed(shape: Shape, build: Callable[[], GPT], density: float, dense: Workload) -> tuple[Workload, Compute]:
    torch.manual_seed(0)
    model, workload = build(), dense
    parts: list[sp.Part] = [sp.Precision(shape.precision)]  # type: ignore[arg-type]
    if density < 1:
        table = sp.sparsify(model, sp.Block(wire.BLOCK, wire.BLOCK), density, sparse_fan_in=True)
        workload = dense.sparse(table, 2 if shape.precision == "bf16" else 0)
        parts.insert(0, sp.SparseTraining(sp.static()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=wire.RATE, fused=True)
    session = sp.Session(model, optimizer, parts, clip=1.0)
    tokens = torch.randint(256, (shape.batch, shape.tokens + 1))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    return workload, measured_compute(session, lambda: loss_of(model, batch), workload, steps=7, warmup=2)


def judged(
    rows: list[dict[str, Any]], settings: dict[str, Setting]
) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    """Fits on some rows, predicts the others: errors, and the rows with what was predicted."""
    links = sorted({row["mbit"] for row in rows})
    if len(links) < 3:
        raise SystemExit(f"plan: expected rows on at least 3 links, two to fit on, got {len(links)}. Measure more.")
    held_out = links[(len(links) - 1) // 2]  # between others: a fit is not asked beyond what it has seen
    known = [row for row in rows if row["mbit"] != held_out]
    fit = fitted([observed(row, settings) for row in known])
    print(
        f"fit: {1e6 * fit.alpha:.0f} us a message, {100 * fit.share:.0f} % of the rate, "
        f"{1e9 * fit.seconds_per_byte:.2g} ns a byte; slower than alone: "
        + ", ".join(f"{name} on {ranks} ranks {factor:.2f}x" for (name, ranks), factor in fit.factors.items())
        + "".join(
            f"; {type(codec).__name__} on {ranks} ranks waits {1e3 * wait:.1f} ms a bucket"
            for (codec, ranks), wait in fit.waits.items()
        )
    )
    offset = memory_offset(known, settings)
    judgements = [judgement(row, settings, fit, offset, row in known) for row in rows]
    held = [row for row in judgements if not row["fitted"]]
    errors = [abs(row["error_percent"]) for row in held]
    memory = [abs(row["memory_error_percent"]) for row in held if row["memory_error_percent"] is not None]
    summary = {
        "mean_error_percent": statistics.fmean(errors),
        "worst_error_percent": max(errors),
        "memory_error_percent": max(memory) if memory else None,
        "bytes_error_percent": max(abs(row["bytes_error_percent"]) for row in held),
        "repeats_percent": repeats_percent(rows),
        "other_contenders_error_percent": other_contenders(rows, settings),
        "fitted_error_percent": statistics.fmean(abs(row["error_percent"]) for row in judgements if row["fitted"]),
    }
    return summary, judgements


def other_contenders(rows: list[dict[str, Any]], settings: dict[str, Setting]) -> float | None:
    """Mean error for compressed contenders, none of whose steps were seen: their model's factor is fitted without."""
    plain = [observed(row, settings) for row in rows if row["contender"] in PLAIN]
    known = {(one.group, one.ranks) for one in plain}
    seen = (observed(row, settings) for row in rows if row["contender"] in COMPRESSED)
    others = [one for one in seen if (one.group, one.ranks) in known]
    if not others:
        return None
    fit = fitted(plain)
    errors = []
    for one in others:
        step = fit.predict(one.setting, one.group, one.ranks, one.bits_per_second).step
        errors.append(100 * abs(step / one.seconds - 1))
    return statistics.fmean(errors)


def observed(row: dict[str, Any], settings: dict[str, Setting]) -> Observation:
    setting = _rewiring(settings[row["contender"]], row)
    return Observation(setting, group(row["contender"]), row["ranks"], 1e6 * row["mbit"], row["step_ms"] / 1e3)


def judgement(
    row: dict[str, Any], settings: dict[str, Setting], fit: Fit, offset: float | None, is_fitted: bool
) -> dict[str, Any]:
    name, ranks = row["contender"], row["ranks"]
    one = fit.predict(_rewiring(settings[name], row), group(name), ranks, 1e6 * row["mbit"])
    kept = _memory(row)
    predicted = None if offset is None else _modelled_memory(name, settings, ranks) + offset
    made = {
        **{key: row[key] for key in ("contender", "ranks", "mbit", "steps", "step_ms", "bytes")},
        "fitted": is_fitted,
        "modelled_step_ms": 1e3 * one.step,
        "modelled_exposed_ms": 1e3 * one.exposed,
        "modelled_bytes": one.sent,
        "error_percent": 100 * (1e3 * one.step / row["step_ms"] - 1),
        "bytes_error_percent": 100 * (one.sent / row["bytes"] - 1),
        "memory_bytes": kept,
        "modelled_memory_bytes": predicted,
        "memory_error_percent": 100 * (predicted / kept - 1) if kept and predicted else None,
    }
    print(
        f"{'fitted' if is_fitted else 'held out':8} {ranks} ranks {row['mbit']:6g} Mbit/s {name:16} "
        f"{row['step_ms']:8.1f} ms measured, {1e3 * one.step:8.1f} modelled ({made['error_percent']:+.1f} %), "
        f"bytes {made['bytes_error_percent']:+.1f} %"
    )
    return made


def memory_offset(rows: list[dict[str, Any]], settings: dict[str, Setting]) -> float | None:
    """What the allocator, kernels and messages keep beside what is modelled, from the rows that are fitted."""
    beside = [
        kept - _modelled_memory(row["contender"], settings, row["ranks"])
        for row in rows
        if (kept := _memory(row)) is not None
    ]
    return statistics.median(beside) if beside else None


def repeats_percent(rows: list[dict[str, Any]]) -> float | None:
    """How far apart steps are that were measured twice, in the mean: no model can be nearer than that."""
    found: dict[tuple[str, int, float], list[float]] = {}
    for row in rows:
        found.setdefault((row["contender"], row["ranks"], row["mbit"]), []).append(row["step_ms"])
    spreads = [100 * (max(times) / min(times) - 1) for times in found.values() if len(times) > 1]
    return statistics.fmean(spreads) if spreads else None


def group(contender: str) -> str:
    return "sparse" if wire.CONTENDERS[contender].density < 1 else "dense"


def _rewiring(setting: Setting, row: dict[str, Any]) -> Setting:
    return replace(setting, rewire_every=row["steps"] / row["rewires"] if row["rewires"] else None)


def _memory(row: dict[str, Any]) -> float | None:
    """Peak of a rank without what it held before there was a model."""
    return row["peak_bytes"] - row["base_bytes"] if "peak_bytes" in row else None


def _modelled_memory(name: str, settings: dict[str, Setting], ranks: int) -> float:
    one = settings[name]
    # torch's own hooks keep no residuals
    codec = one.codec if wire.CONTENDERS[name].codec is not None else Identity()
    return memory_of(one.workload, ranks, codec).total


if __name__ == "__main__":
    main()
