"""Decides what a run may claim: which figures stand side by side, and which gains follow from them.

The rules: no saving without the dense twin; no quality from a sampled twin; no gain from masked storage, which keeps
and multiplies its zeros; quality and time are compared at a step that both have reached.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sparsam.measure.figure import Figure, measured
from sparsam.report.load import RunData, Side

__all__ = ["Comparison", "compare", "figure_of", "notes", "smoothed_losses", "sparsity", "time_to_twin"]

Better = Literal["higher", "lower", "neither"]

_QUALITY = frozenset({"validation_loss", "bits_per_byte", "accuracy"})
_TIMES = frozenset({"tokens_per_second", "step_ms", "train_seconds", "time_to_twin"})
_ON_PAPER = frozenset({"flops_per_step_on_paper", "training_flops_on_paper"})
_TOPOLOGY = frozenset({"moved_share", "ever_active"})
_ONCE_COMPACT = "tokens_per_second_compact"
_UNITS = {"train_seconds": "s", "bits_per_byte": "bits/byte", "accuracy": "share"}
_LEAST_PAIRS = 3
_SMOOTHED_EVALUATIONS = 3


@dataclass(frozen=True)
class Comparison:
    """One figure of the sparse training beside the same of its dense twin.

    Attributes:
        gain: how many times better the sparse one is (2.0 = half the time, half the bytes, twice the speed), or None
            where nothing may be claimed.
        why_not: one line when there are two figures and no claim.
    """

    name: str
    label: str
    better: Better
    sparse: Figure | None
    dense: Figure | None
    gain: Figure | None = None
    why_not: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "label": self.label,
            "better": self.better,
            "sparse": None if self.sparse is None else self.sparse.to_json(),
            "dense": None if self.dense is None else self.dense.to_json(),
            "gain": None if self.gain is None else self.gain.to_json(),
            "why_not": self.why_not,
        }


_ROWS: tuple[tuple[str, str, Better], ...] = (
    ("validation_loss", "Validation loss", "lower"),
    ("bits_per_byte", "Validation bits per byte", "lower"),
    ("accuracy", "Validation accuracy, next token", "higher"),
    ("tokens_per_second", "Training speed, median step", "higher"),
    (_ONCE_COMPACT, "Training speed once blocks were compact, median step", "higher"),
    ("step_ms", "Time of one step, median", "lower"),
    ("train_seconds", "Training time, all steps but a profiled one", "lower"),
    ("time_to_twin", "Time to the dense twin's final loss", "lower"),
    ("flops_per_step", "Operations of one step", "lower"),
    ("flops_per_step_on_paper", "Operations on paper, if zeros were skipped", "lower"),
    ("training_flops", "Operations of the whole training", "lower"),
    ("training_flops_on_paper", "The same on paper, if zeros were skipped", "lower"),
    ("training_bytes", "Parameters + gradients + optimiser", "lower"),
    ("parameter_bytes", "of which parameters", "lower"),
    ("gradient_bytes", "of which gradients", "lower"),
    ("optimizer_bytes", "of which optimiser", "lower"),
    ("packed_bytes", "Scratch memory that the kernels hold, beside these", "lower"),
    ("peak_rss_bytes", "Peak memory of the process", "lower"),
    ("moved_share", "Active units that one update moved, mean", "neither"),
    ("ever_active", "Units that were active at some time, of all", "neither"),
)


def compare(run: RunData) -> list[Comparison]:
    """All figures of a run in the order of the report, with the gains it may claim; unknown figures are left out."""
    rows = []
    for name, label, better in _ROWS:
        sparse, dense = _pair(run, name)
        if (sparse is None and dense is None) or (name in _ON_PAPER and not _differs_on_paper(run, name)):
            continue
        reason = _why_not(run, name)
        gain = None
        if sparse is not None and dense is not None and not reason:
            gain = _gain(run, name, better, sparse, dense)
        rows.append(Comparison(name, label, better, sparse, dense, gain, reason if dense is not None else ""))
    return rows


def notes(run: RunData) -> list[str]:
    """What a reader has to know beside the figures, one line each."""
    lines = []
    if run.dense is None:
        lines.append("No dense twin ran beside this training, so no saving is claimed.")
    elif run.twin == "sampled":
        lines.append(
            "The dense twin was sampled: it ran a few steps for its time and bytes."
            " Nothing is said about the quality it would have reached."
        )
    if run.simulated:
        lines.append(
            "Some products were rounded to formats that this machine does not multiply in (simulated):"
            " their quality is that of the format, their time is not. No gain is claimed."
        )
    elif run.layers and not any(layer.storage == "compact" for layer in run.layers):
        if any(layer.storage == "masked" for layer in run.layers):
            lines.append(
                "Masked storage keeps its zeros and multiplies them: fewer operations on paper, same time and bytes."
                " No gain is claimed."
            )
        else:
            lines.append("No layer is sparse in this model, so no gain is claimed.")
    lines += _about_topologies(run)
    if not run.sparse.finished:
        lines.append(f"The training is not finished: the figures are those of its first {run.sparse.steps} steps.")
    if run.dense is not None and run.twin == "full" and run.dense.steps < run.sparse.steps:
        lines.append(
            f"The dense twin has reached step {run.dense.steps} of {run.sparse.steps}:"
            " quality and time are compared where both have been."
        )
    sides = [("This run", run.sparse)] + ([] if run.dense is None else [("Dense twin", run.dense)])
    lines += [f"{name}: {note}." for name, side in sides for note in side.notes]
    warning = run.environment.get("warning")
    if warning:
        lines.append(str(warning))
    if run.dense is not None:
        lines.append(
            "Both trainings ran on this machine in turns;"
            " the gain in speed is the median over the steps that both took."
        )
        if time_to_twin(run) is not None:
            lines.append(
                "Time to the twin's final loss: training time from which the validation loss, averaged over three"
                " evaluations in a row, stays at or below the twin's."
            )
    return lines


def sparsity(run: RunData) -> float | None:
    """1 - density over the sparse layers, as people are shown it; None when no layer is sparse."""
    rows = [layer for layer in run.layers if layer.sparse]
    weights = [_product(layer.shape) for layer in rows]
    if sum(weights):
        return 1 - sum(layer.density * size for layer, size in zip(rows, weights, strict=True)) / sum(weights)
    density = run.sparse.figures.get("density")
    return 1 - density.value if density is not None and density.value < 1 else None


def figure_of(side: Side, name: str, last_step: int | None = None) -> Figure | None:
    """A figure of one training: from its summary, or from its metrics where it was stopped before writing one.

    Args:
        last_step: read quality and training time at this step instead of at the end.
    """
    if name in _TOPOLOGY and name not in side.figures:
        return _of_topology(side, name)
    if name in _QUALITY or name == "train_seconds":
        known = side.figures.get(name)
        at = [r for r in side.evaluations if last_step is None or r["step"] <= last_step]
        key = {"validation_loss": "loss", "train_seconds": "seconds"}.get(name, name)
        if name == "train_seconds":
            at = [r for r in (*side.train, *side.evaluations) if last_step is None or r["step"] <= last_step]
            at.sort(key=lambda record: (record["step"], record.get(key, 0.0)))
        values = [r[key] for r in at if isinstance(r.get(key), (int, float))]
        if known is not None and (last_step is None or last_step >= side.steps):
            return known
        if not values:
            return None
        unit = known.unit if known is not None else _UNITS.get(name)
        return measured(float(values[-1]), unit or "nats/token")
    if name in side.figures:
        return side.figures[name]
    if name in ("tokens_per_second", "step_ms"):
        values = [r[name] for r in side.train if isinstance(r.get(name), (int, float))]
        unit = "ms" if name == "step_ms" else "tokens/s"
        return measured(statistics.median(values), unit) if values else None
    if name == "training_bytes":
        parts = [side.figures.get(f"{part}_bytes") for part in ("parameter", "gradient", "optimizer")]
        known_parts = [part for part in parts if part is not None]
        if len(known_parts) == len(parts):
            return measured(sum(part.value for part in known_parts), "B")
    return None


def time_to_twin(run: RunData) -> tuple[Figure, Figure] | None:
    """Training time from which the sparse model's validation loss stays at or below the dense twin's final one.

    Losses are smoothed over three evaluations on both sides; time is training time, evaluation excluded.

    Returns:
        (time of the sparse one, time of the twin), or None where it never got there, or nobody can say.
    """
    if run.dense is None or run.twin != "full" or not (run.sparse.finished and run.dense.finished):
        return None
    ours, theirs = smoothed_losses(run.sparse), smoothed_losses(run.dense)
    if len(ours) < _SMOOTHED_EVALUATIONS or len(theirs) < _SMOOTHED_EVALUATIONS:
        return None
    end, target = theirs[-1]
    reached = None
    for seconds, loss in reversed(ours):
        if loss > target:
            break
        reached = seconds
    if reached is None or end <= 0 or reached <= 0:
        return None
    return measured(reached, "s"), measured(end, "s")


def smoothed_losses(side: Side) -> list[tuple[float, float]]:
    """(seconds, validation loss smoothed over the last three evaluations)."""
    points = [(r["seconds"], r["loss"]) for r in side.evaluations if "seconds" in r]
    smooth = []
    for place, (seconds, _) in enumerate(points):
        window = [loss for _, loss in points[max(0, place - _SMOOTHED_EVALUATIONS + 1) : place + 1]]
        smooth.append((float(seconds), statistics.fmean(window)))
    return smooth


def _pair(run: RunData, name: str) -> tuple[Figure | None, Figure | None]:
    if name == "time_to_twin":
        return time_to_twin(run) or (None, None)
    if name == _ONCE_COMPACT:
        since = run.sparse.compact_from
        if since is None:
            return None, None
        return _speed(run.sparse, since), None if run.dense is None else _speed(run.dense, since)
    at = None
    if run.dense is not None and run.twin == "full":
        at = min(run.sparse.steps, run.dense.steps)
        if name in _QUALITY:
            # Both must have been evaluated at the step that is compared.
            steps = {r["step"] for r in run.sparse.evaluations} & {r["step"] for r in run.dense.evaluations}
            at = max(steps, default=0) if run.sparse.evaluations and run.dense.evaluations else None
    sparse = figure_of(run.sparse, name, at)
    if run.dense is None or (run.twin == "sampled" and name in (*_QUALITY, "train_seconds")):
        return sparse, None
    return sparse, figure_of(run.dense, name, at)


def _speed(side: Side, since: int) -> Figure | None:
    """Median tokens per second of the steps after one."""
    values = [r["tokens_per_second"] for r in side.train if r["step"] > since and "tokens_per_second" in r]
    return measured(statistics.median(values), "tokens/s") if values else None


def _of_topology(side: Side, name: str) -> Figure | None:
    """A figure of how the topology moved, of a training that was stopped before its summary."""
    if name == "ever_active":
        shares = [float(r[name]) for r in side.train if isinstance(r.get(name), (int, float))]
        return measured(shares[-1], "share") if shares else None
    moved = [r["grown"] / r["active"] for r in side.rewires if r.get("active") and "grown" in r]
    return measured(statistics.fmean(moved), "share") if any(moved) else None


def _about_topologies(run: RunData) -> list[str]:
    """What the figures of a topology that moved mean, and those of one whose density changed."""
    lines, side = [], run.sparse
    moved, ever = (figure_of(side, name) for name in ("moved_share", "ever_active"))
    if moved is not None and ever is not None:
        tried = "all units were active at some time"
        if ever.value < 1:
            tried = f"{ever.text} of all units were active at some time, the others were never tried"
        lines.append(
            f"Of the active units, an update moved {moved.text} to other places, on average over {len(side.rewires)}"
            f" updates; {tried}."
        )
    densities = [float(r["density"]) for r in side.train if isinstance(r.get("density"), (int, float))]
    if densities and max(densities) - min(densities) > 0.01:
        lines.append(
            f"Sparsity went from {100 * (1 - densities[0]):.3g} % at the first step to"
            f" {100 * (1 - densities[-1]):.3g} % at the last: bytes and operations of one step are those at"
            " the end, operations of the whole training are added up step by step."
        )
    if side.compact_from is not None:
        lines.append(
            f"Up to step {side.compact_from} all weights were kept and multiplied, zeros too (masked storage);"
            " after it blocks were compact."
        )
    return lines


def _differs_on_paper(run: RunData, name: str) -> bool:
    computed, paper = run.sparse.figures.get(name.removesuffix("_on_paper")), run.sparse.figures.get(name)
    return computed is not None and paper is not None and paper.value < 0.99 * computed.value


def _why_not(run: RunData, name: str) -> str:
    if name in _QUALITY or name in _ON_PAPER or name == "packed_bytes":
        return "shown side by side"
    if run.simulated:
        return "simulated formats: no gain claimed"
    if run.by_product and name in _TIMES and run.twin != "none":
        return ""  # formats are a reason of their own to be faster
    if not any(layer.storage == "compact" for layer in run.layers):
        return "masked storage: no gain claimed" if any(layer.sparse for layer in run.layers) else "no sparse layer"
    if run.twin == "none":
        return "no dense twin was asked for"
    return ""


def _gain(run: RunData, name: str, better: Better, sparse: Figure, dense: Figure) -> Figure | None:
    above, below = (sparse, dense) if better == "higher" else (dense, sparse)
    if below.value <= 0:
        return None
    value = above.value / below.value
    if name in ("tokens_per_second", "step_ms", _ONCE_COMPACT) and run.dense is not None:
        since = run.sparse.compact_from if name == _ONCE_COMPACT else None
        value = _by_pairs(run.sparse, run.dense, since or 0) or value
    # A quotient is no better founded than the weaker of its two parts.
    kinds = {sparse.kind, dense.kind}
    weakest = next(kind for kind in ("simulated", "estimated", "modelled", "measured") if kind in kinds)
    return Figure(value, "x", weakest)


def _by_pairs(sparse: Side, dense: Side, since: int = 0) -> float | None:
    """Median over the steps that both took of dense time / sparse time: a slow minute of the machine cancels."""
    ours, theirs = _times(sparse.train), _times(dense.train)
    pairs = [theirs[step] / ours[step] for step in ours.keys() & theirs.keys() if step > since and ours[step] > 0]
    return statistics.median(pairs) if len(pairs) >= _LEAST_PAIRS else None


def _times(records: list[dict[str, Any]]) -> Mapping[int, float]:
    return {r["step"]: float(r["step_ms"]) for r in records if isinstance(r.get("step_ms"), (int, float))}


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
