"""A run folder made of known numbers: 600 steps, sparse twice as fast, eight times smaller, a little better."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = """version: 1
model: {layers: 2, width: 512, heads: 8}
sparsity:
  pattern: {type: block, rows: 32, cols: 32}
  density: 0.1
  method: {type: rigl, every: 50}
training: {steps: 600, batch: 16, context: 256}
twin: %s
"""
ENVIRONMENT = {
    "cpu": "Intel(R) Xeon(R) Processor",
    "cores": 2,
    "allowed_cpus": 2.0,
    "isa": "amx",
    "threads": 2,
    "memory_bytes": 25276059648,
    "load_average": [0.4, 0.5, 0.6],
    "torch": "2.13.0",
    "python": "3.11.7",
    "sparsam": "0.1.0",
    "transparent_huge_pages": True,
    "warning": None,
}
TOKENS = 16 * 256
BREAKDOWN = {
    "sparse": {
        "block-sparse products": 96.0,
        "attention": 88.0,
        "activation": 12.0,
        "copies and casts": 41.0,
        "norms": 30.0,
        "optimiser": 9.0,
        "element-wise and other": 26.0,
        "Python between operators": 14.0,
    },
    "dense": {
        "dense products": 395.0,
        "attention": 90.0,
        "activation": 61.0,
        "copies and casts": 70.0,
        "norms": 31.0,
        "optimiser": 58.0,
        "element-wise and other": 28.0,
        "Python between operators": 12.0,
    },
}


def _figure(value: float, unit: str, kind: str = "measured") -> dict[str, Any]:
    return {"value": value, "unit": unit, "kind": kind}


def _records(steps: int, step_ms: float, final: float, rewire: bool, every: int = 50) -> list[dict[str, Any]]:
    noise = random.Random(int(step_ms))
    lines: list[dict[str, Any]] = []

    def loss(step: int) -> float:
        return final + (5.5 - final) * math.exp(-step / 90)

    for step in range(steps + 1):
        seconds = step * step_ms / 1e3
        if step:
            took = step_ms * (1 + 0.04 * noise.random())
            lines.append(
                {
                    "step": step,
                    "kind": "train",
                    "loss": loss(step) + 0.05 * noise.gauss(0, 1),
                    "step_ms": took,
                    "tokens_per_second": TOKENS / took * 1e3,
                    "seconds": seconds,
                    "density": 0.1 if rewire else 1.0,
                }
            )
        if step % every == 0:
            value = loss(step) + 0.02
            lines.append(
                {
                    "step": step,
                    "kind": "eval",
                    "loss": value,
                    "bits_per_byte": value / math.log(2),
                    "seconds": seconds,
                }
            )
            if rewire and 0 < step < 450:
                grown = int(90 * (1 + math.cos(math.pi * step / 450)))
                lines.append({"step": step, "kind": "rewire", "layers": 8, "grown": grown, "active": 600})
    return lines


def _layer(
    name: str, shape: tuple[int, int], storage: str, reason: str, times: tuple[float, float] | None
) -> dict[str, Any]:
    sparse = storage != "dense"
    return {
        "name": name,
        "kind": "Linear",
        "shape": list(shape),
        "storage": storage,
        "density": 0.1 if sparse else 1.0,
        "active_units": 10,
        "units": 100 if sparse else 0,
        "reason": reason,
        "compact_ms": None if times is None else times[0],
        "dense_ms": None if times is None else times[1],
    }


def _layers(storage: str) -> dict[str, Any]:
    rows = [_layer("token.embedding", (256, 512), "dense", "an embedding, not a linear layer", None)]
    why = "measured faster block-sparse" if storage == "compact" else "asked for: storage='masked'"
    for block in range(2):
        for name, shape, times in (
            ("attention.qkv", (1536, 512), (3.1, 16.9)),
            ("attention.out", (512, 512), (1.4, 5.9)),
            ("mlp.up", (2048, 512), (4.4, 23.5)),
            ("mlp.down", (512, 2048), (4.0, 22.8)),
        ):
            rows.append(_layer(f"blocks.{block}.{name}", shape, storage, why, times if storage == "compact" else None))
    rows.append(_layer("head", (256, 512), "dense", "excluded by 'head'", None))
    return {"rows": rows, "density": 0.1, "density_all": 0.14, "other_parameters": 20000}


def _summary(
    records: list[dict[str, Any]], step_ms: float, kept: int, flops: float, peak: int, side: str
) -> dict[str, Any]:
    last = [record for record in records if record["kind"] == "eval"][-1]
    figures = {
        "step_ms": _figure(step_ms * 1.02, "ms"),
        "tokens_per_second": _figure(TOKENS / step_ms / 1.02 * 1e3, "tokens/s"),
        "train_seconds": _figure(records[-1]["seconds"] if "seconds" in records[-1] else last["seconds"], "s"),
        "validation_loss": _figure(last["loss"], "nats/token"),
        "bits_per_byte": _figure(last["bits_per_byte"], "bits/byte"),
        "parameter_bytes": _figure(kept, "B"),
        "gradient_bytes": _figure(kept, "B"),
        "optimizer_bytes": _figure(2 * kept, "B"),
        "training_bytes": _figure(4 * kept, "B"),
        "peak_rss_bytes": _figure(peak, "B"),
        "parameters": _figure(kept // 4, "", "modelled"),
        "flops_per_step": _figure(flops, "FLOP", "modelled"),
        "flops_per_step_on_paper": _figure(flops, "FLOP", "modelled"),
    }
    phases = {
        "data": 0.4,
        "forward": step_ms * 0.34,
        "backward": step_ms * 0.6,
        "optimiser and rewiring": step_ms * 0.05,
    }
    return {
        "steps": last["step"],
        "figures": figures,
        "phases": {name: _figure(value, "ms") for name, value in phases.items()},
        "breakdown": {name: _figure(value, "ms") for name, value in BREAKDOWN[side].items()},
    }


def _write(folder: Path, records: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "summary.json").write_text(json.dumps(summary))


def make_run(folder: Path, twin: str = "full", storage: str = "compact", steps: int = 600) -> Path:
    """Writes a run folder of known numbers.

    Args:
        twin: full, sampled or none.
        storage: of the sparse layers, compact or masked. A masked model is as slow and as large as its twin.
    """
    compact = storage == "compact"
    step_ms, dense_ms = (200.0 if compact else 405.0), 400.0
    records = _records(steps, step_ms, 1.30, rewire=True)
    size = 2_500_000 if compact else 20_000_000
    flops = 1.0e11 if compact else 6.0e11
    summary = _summary(records, step_ms, size, flops, 900 << 20 if compact else 1500 << 20, "sparse")
    if not compact:
        summary["figures"]["flops_per_step_on_paper"]["value"] = 1.0e11
        summary["breakdown"] = {name: _figure(value, "ms") for name, value in BREAKDOWN["dense"].items()}
    _write(folder, records, summary)
    (folder / "recipe.yaml").write_text(RECIPE % twin)
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (folder / "layers.json").write_text(json.dumps(_layers(storage)))
    if twin != "none":
        theirs = _records(steps, dense_ms, 1.32, rewire=False)
        summary = _summary(theirs, dense_ms, 20_000_000, 6.0e11, 1500 << 20, "dense")
        if twin == "sampled":
            theirs = [r for r in theirs if r["kind"] == "train" and r["step"] % 75 in (1, 2)]
            del summary["figures"]["validation_loss"], summary["figures"]["bits_per_byte"], summary["breakdown"]
        _write(folder / "twin", theirs, summary)
    return folder


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """`make_run` into a new folder: ``run_folder(twin=..., storage=...)``."""
    return lambda **choices: make_run(tmp_path / "run", **choices)
