"""The figures of a training, each with its unit and how it came to be. Comparing them is up to the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sparsam import measure
from sparsam.kernels import scratch_bytes
from sparsam.record import Operations
from sparsam.sparse.table import SparsityTable

__all__ = ["figures_of"]


def figures_of(
    records: Iterable[Mapping[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    flops: measure.StepFlops,
    operations: Operations | None = None,
    table: SparsityTable | None = None,
    simulated: bool = False,
) -> dict[str, measure.Figure]:
    """What metrics and tensors say of a training.

    Args:
        records: the lines of metrics.jsonl. Profiled steps count for nothing that is a time.
        model, optimizer: as trained; their bytes are counted.
        flops: of one optimiser step, as the model is now.
        operations: of all steps; None where not all were taken.
        table: what is sparse.
        simulated: numbers were rounded as in formats that this machine does not multiply in; every figure says so.
    """
    lines = list(records)
    trained = [line for line in lines if line["kind"] == "train" and not line.get("profiled")]
    evaluated = [line for line in lines if line["kind"] == "eval"]
    rewired = [line for line in lines if line["kind"] == "rewire"]
    figures: dict[str, measure.Figure] = {}
    if trained:
        figures["step_ms"] = measure.measured(statistics.median(line["step_ms"] for line in trained), "ms")
        speed = statistics.median(line["tokens_per_second"] for line in trained)
        figures["tokens_per_second"] = measure.measured(speed, "tokens/s")
    since = next((line["step"] for line in lines if line["kind"] == "compact" and line["layers"]), None)
    speeds = [line["tokens_per_second"] for line in trained if since is not None and line["step"] > since]
    if speeds:
        figures["tokens_per_second_compact"] = measure.measured(statistics.median(speeds), "tokens/s")
    if evaluated:
        figures["validation_loss"] = measure.measured(evaluated[-1]["loss"], "nats/token")
        figures["bits_per_byte"] = measure.measured(evaluated[-1]["bits_per_byte"], "bits/byte")
        if "accuracy" in evaluated[-1]:  # runs of 0.1 have none
            figures["accuracy"] = measure.measured(evaluated[-1]["accuracy"], "share")
    if any(line["grown"] for line in rewired):
        moved = statistics.fmean(line["grown"] / max(line["active"], 1) for line in rewired)
        figures["moved_share"] = measure.measured(moved, "share")
    if trained and "ever_active" in trained[-1]:
        figures["ever_active"] = measure.measured(trained[-1]["ever_active"], "share")
    kept = measure.training_bytes(model.parameters(), optimizer)
    for name, size in kept.items():
        figures[f"{name.removesuffix('s')}_bytes"] = measure.measured(size, "B")
    figures["training_bytes"] = measure.measured(sum(kept.values()), "B")
    figures["packed_bytes"] = measure.measured(scratch_bytes(), "B")  # kernels keep it between their calls
    figures["parameters"] = measure.modelled(sum(p.numel() for p in model.parameters()), "")
    for name, value in (("", flops.computed), ("_on_paper", flops.on_paper), ("_dense", flops.dense)):
        figures[f"flops_per_step{name}"] = measure.modelled(value, "FLOP")
    if operations is not None and math.isfinite(operations.computed):
        figures["training_flops"] = measure.modelled(operations.computed, "FLOP")
        figures["training_flops_on_paper"] = measure.modelled(operations.on_paper, "FLOP")
    if table is not None:
        figures["density"] = measure.measured(table.density, "share")
        figures["density_all"] = measure.measured(table.density_all, "share")
    if simulated:
        figures = {name: measure.simulated(figure.value, figure.unit) for name, figure in figures.items()}
    return figures
