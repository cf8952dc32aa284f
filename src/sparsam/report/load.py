"""Reads a run folder into plain typed data. Says in one line what is missing or damaged; computes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from sparsam.measure.figure import Figure, measured

__all__ = ["Layer", "ReportError", "RunData", "Side", "TwinMode", "load"]

TwinMode = Literal["none", "sampled", "full"]


class ReportError(ValueError):
    """A run folder that cannot be reported on; the message is one line that says what to do."""


@dataclass(frozen=True)
class Layer:
    """One weight matrix of the model, as `SparsityTable` describes it.

    Attributes:
        density: active share of its weights.
        storage: "compact", "masked" or "dense".
        compact_ms, dense_ms: measured forward and backward of the product alone, or None when it was not timed.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    storage: str
    density: float
    sparse: bool
    reason: str
    compact_ms: float | None
    dense_ms: float | None


@dataclass(frozen=True)
class Side:
    """One training: the sparse one or its dense twin.

    Attributes:
        train, evaluations, rewires, switches: the lines of metrics.jsonl by kind, in order.
        compact_from: the step after which blocks were compact that had been masked before, or None.
        figures: name -> figure of summary.json.
        phases, breakdown: part of a step -> time; empty when it was not recorded.
        finished: whether the training wrote its summary.
        notes: what it said of its own figures.
    """

    train: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    rewires: list[dict[str, Any]]
    switches: list[dict[str, Any]]
    figures: dict[str, Figure]
    phases: dict[str, Figure]
    breakdown: dict[str, Figure]
    finished: bool
    notes: tuple[str, ...] = ()
    compact_from: int | None = None

    @property
    def steps(self) -> int:
        """Last step of which anything is known."""
        return max((int(record["step"]) for record in (*self.train, *self.evaluations)), default=0)


@dataclass(frozen=True)
class RunData:
    """All of a run folder.

    Attributes:
        twin: what the recipe asked for; the twin's numbers are in ``dense``, which is None when it left none.
        layers: the weight matrices; empty for a run without sparsity.
        formats: the format of each layer's products at the end, as `FormatRow` describes it; empty for older runs.
    """

    folder: Path
    sparse: Side
    dense: Side | None
    twin: TwinMode
    layers: list[Layer]
    table: dict[str, float]
    environment: dict[str, Any]
    recipe: dict[str, Any] = field(default_factory=dict)
    recipe_text: str = ""
    formats: list[dict[str, str]] = field(default_factory=list)

    @property
    def by_product(self) -> bool:
        """Whether a policy gives each product a format of its own."""
        return any(row["weight_gradient"] for row in self.formats)

    @property
    def simulated(self) -> bool:
        """Whether a format was only imitated: then no time of the run says anything of it."""
        return any(row["arithmetic"] == "simulated" for row in self.formats)


def load(folder: Path) -> RunData:
    """Reads a run folder. What a run that was stopped early has not written yet is left empty.

    Raises:
        ReportError: no such folder, not a run, nothing trained yet, or a damaged file, by name and line.
    """
    if not folder.is_dir():
        raise ReportError(f"{folder}: expected a run folder, found none. Give the folder that `sparsam train` wrote.")
    if not (folder / "metrics.jsonl").is_file():
        raise ReportError(
            f"{folder}: expected a run folder with metrics.jsonl, found none."
            " Give the folder that `sparsam train` wrote."
        )
    recipe_text = _text(folder / "recipe.yaml")
    recipe = _recipe(folder / "recipe.yaml", recipe_text)
    sparse = _side(folder)
    if not sparse.train:
        raise ReportError(f"{folder}: expected at least one step of training, found none. Train first, then report.")
    dense = _side(folder / "twin") if (folder / "twin" / "metrics.jsonl").is_file() else None
    if dense is not None and not dense.train:
        dense = None
    table = _json(folder / "layers.json")
    return RunData(
        folder=folder,
        sparse=sparse,
        dense=dense,
        twin=_twin(recipe, _json(folder / "summary.json"), dense),
        layers=_layers(folder / "layers.json", table),
        table={
            key: float(table[key]) for key in ("density", "density_all") if isinstance(table, dict) and key in table
        },
        environment=_object(folder / "environment.json"),
        recipe=recipe,
        recipe_text=recipe_text,
        formats=_formats(folder / "formats.json"),
    )


def _side(folder: Path) -> Side:
    records = _records(folder / "metrics.jsonl")
    kinds = {kind: [r for r in records if r.get("kind") == kind] for kind in ("train", "eval", "rewire", "format")}
    summary_path = folder / "summary.json"
    summary = _object(summary_path)
    breakdown = summary.get("breakdown") or _object(folder / "breakdown.json")
    return Side(
        train=kinds["train"],
        evaluations=kinds["eval"],
        rewires=kinds["rewire"],
        switches=kinds["format"],
        figures=_figures(summary_path, summary.get("figures", {})),
        phases=_figures(summary_path, summary.get("phases", {})),
        breakdown=_figures(summary_path, breakdown),
        finished=summary_path.is_file(),
        notes=tuple(map(str, summary.get("notes", ()))),
        compact_from=next((r["step"] for r in records if r.get("kind") == "compact" and r.get("layers")), None),
    )


def _formats(path: Path) -> list[dict[str, str]]:
    rows = _object(path).get("rows", [])
    keys = {"name", "forward", "input_gradient", "weight_gradient", "arithmetic", "reason"}
    if not all(isinstance(row, dict) and keys <= row.keys() for row in rows):
        raise ReportError(f"{path}: expected rows with {', '.join(sorted(keys))}, the file is damaged.")
    return [{key: str(row[key]) for key in keys} for row in rows]


def _records(path: Path) -> list[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record["step"], int):
                raise ValueError
        except (ValueError, KeyError):
            if number == len(lines):
                break  # a kill in the middle of a write leaves a last line without its end
            raise ReportError(
                f"{path}: expected one JSON object with a step per line, line {number} is damaged."
                " Remove the line, or resume the run."
            ) from None
        records.append(record)
    return records


def _json(path: Path) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise ReportError(f"{path}: expected JSON, the file is damaged. Remove it, or resume the run.") from None


def _object(path: Path) -> dict[str, Any]:
    content = _json(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ReportError(
            f"{path}: expected a JSON object, got {type(content).__name__}. Remove it, or resume the run."
        )
    return content


def _figures(path: Path, found: Any) -> dict[str, Figure]:
    if not isinstance(found, Mapping):
        raise ReportError(
            f"{path}: expected figures by name, got {type(found).__name__}. Remove it, or resume the run."
        )
    figures = {}
    for name, value in found.items():
        try:
            figures[str(name)] = measured(value, "ms") if isinstance(value, (int, float)) else Figure.from_json(value)
        except ValueError as problem:
            raise ReportError(f"{path}: {name}: {problem}") from None
    return figures


def _layers(path: Path, table: Any) -> list[Layer]:
    rows = table.get("rows", []) if isinstance(table, dict) else table or []
    try:
        return [
            Layer(
                name=str(row["name"]),
                kind=str(row["kind"]),
                shape=tuple(int(size) for size in row["shape"]),
                storage=str(row["storage"]),
                density=float(row["density"]),
                sparse=row["storage"] != "dense",
                reason=str(row.get("reason", "")),
                compact_ms=row.get("compact_ms"),
                dense_ms=row.get("dense_ms"),
            )
            for row in rows
        ]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ReportError(
            f"{path}: expected rows with name, kind, shape, storage and density, the file is damaged."
            " Remove it, or resume the run."
        ) from None


def _recipe(path: Path, text: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(text) if text else {}
    except yaml.YAMLError:
        raise ReportError(f"{path}: expected YAML, the file is damaged. Remove it, or put it back.") from None
    return content if isinstance(content, dict) else {}


def _twin(recipe: Mapping[str, Any], summary: Any, dense: Side | None) -> TwinMode:
    stated = summary.get("twin") if isinstance(summary, dict) else None
    mode = stated or recipe.get("twin")
    if mode in ("none", "sampled", "full"):
        return mode  # type: ignore[no-any-return]
    # Nothing says so: only a twin that was evaluated can have been a full one.
    if dense is None:
        return "none"
    return "full" if dense.evaluations else "sampled"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
