"""`sparsam plan`: what a model would take on a cluster, dense and sparse, plain and compressed. All of it modelled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, nn

from sparsam.cli.model import recipe_of
from sparsam.cli.screen import console, plain_table
from sparsam.comm.codecs import Codec
from sparsam.measure.device_profile import DeviceProfile
from sparsam.plan.cluster import Cluster, Device, read_cluster
from sparsam.plan.predict import Setting, efficiency, figures_of
from sparsam.plan.settings import DENSITIES, PROMISES, Case, plain_and_compressed, scan
from sparsam.plan.times import CodecCost, Compute, measured_codec, measured_compute, stated_codec, stated_compute
from sparsam.plan.workload import Workload, read_workload
from sparsam.precision.part import Precision
from sparsam.recipe import ALL_SLOW, Recipe, all_slow, read_recipe
from sparsam.report.plan import efficiency_over_workers, render_plan
from sparsam.session import Part, Session
from sparsam.sparse.allocation import uniform
from sparsam.sparse.part import SparseTraining
from sparsam.sparse.published import static
from sparsam.sparse.sparsify import inspect, sparsify
from sparsam.sparse.table import SparsityTable

__all__ = ["plan"]

_LINES = {
    "step_ms": "step",
    "compute_ms": "computing",
    "exposed_ms": "exposed",
    "rewire_ms": "rewiring",
    "sent_bytes": "sent by a rank",
    "between_bytes": "leaves a node",
    "memory_bytes": "memory",
    "tokens_per_second": "tokens/s, all",
    "efficiency": "efficiency",
    "cost_1000_steps": "cost/1000 steps",
    "cost_run": "cost of the run",
}
_MOST_WORKERS = 1024


def plan(
    model: Annotated[
        Path,
        typer.Argument(
            help="A Hugging Face model folder, gpt:LAYERSxWIDTH, a recipe, or a run folder.", show_default=False
        ),
    ],
    cluster: Annotated[
        Path, typer.Option("--cluster", metavar="FILE", help="Nodes, links, prices (YAML).", show_default=False)
    ],
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", metavar="RECIPE", help="All but the model is its.", show_default=False),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences of a rank in a step.", show_default=False)] = None,
    recompute: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Compute activations of K blocks at a time again.", show_default=False),
    ] = None,
    shard: Annotated[bool, typer.Option("--shard", help="Shard weights and optimiser (FSDP).")] = False,
    json_: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with a plot.", show_default=False)
    ] = None,
) -> None:
    """Predicts step time, traffic, memory, efficiency and cost of a training on a cluster. Nothing of it is measured
    there: figures are modelled, from a short run on this machine or from the throughputs that the file states."""
    described = read_cluster(cluster)
    chosen = recipe_of(model, [])
    if recipe is not None:
        chosen = read_recipe(recipe).model_copy(update={"model": chosen.model})
    if batch is not None:
        chosen = chosen.model_copy(update={"training": chosen.training.model_copy(update={"batch": batch})})
    if chosen.training.accumulate > 1:
        raise ValueError(
            f"plan: expected training.accumulate 1, got {chosen.training.accumulate}. A window of micro-batches talks "
            "to other ranks once, like one larger batch: give that with --batch."
        )
    screen = console()
    network = described.network
    spread: dict[str, Any] = {"slowest": described.slowest, "jitter": described.jitter}
    if recompute is None and chosen.memory is not None and not chosen.memory.selective:
        recompute = chosen.memory.recompute
    how: dict[str, Any] = {"sharding": "fsdp" if shard else "none", "recompute_every": recompute}
    with screen.status("looking at the model") as status:
        planner = _Planner(chosen, described, status.update)
        dense = planner.settings("dense", 1.0, **how)
        own = chosen.sparsity.density if chosen.sparsity else None
        sparse = {
            density: planner.settings("sparse", density, rewire_every=planner.rewire_every, **how)
            for density in sorted({*DENSITIES, own} if own else (), reverse=True)
        }
    settings = [*dense, *(sparse[own] if own else [])]
    notes = [
        f"{described.nodes} nodes of {described.ranks_per_node} ranks, {chosen.training.batch} x "
        f"{chosen.training.context} tokens a rank and step. Every figure is modelled, none measured on this cluster.",
        *planner.notes,
    ]
    figures = {one.name: figures_of(one, described, chosen.training.steps) for one in settings}
    for name, row in figures.items():
        if row["memory_bytes"].value > described.memory_gib * (1 << 30):
            notes.append(f"{name}: {row['memory_bytes'].text} do not fit into {described.memory_gib:g} GiB.")
    curves = {
        one.name: [(ranks, efficiency(one, network.resized(ranks), **spread)) for ranks in _workers(described)]
        for one in settings
    }
    every = [*dense, *(one for pair in sparse.values() for one in pair)]
    cases = scan(every, dense[0], network, **spread)

    title = f"Plan of {_name(chosen)}, {_sparsity(own)}"
    rows = [
        [label, *(row[key].text.removesuffix(" tokens/s") for row in figures.values())]
        for key, label in _LINES.items()
        if all(key in row for row in figures.values())
    ]
    tables = [("One step, modelled", ["", *figures], rows)]
    tables += [
        (f"{promise.text}: modelled over Gbit/s between nodes, \u2713 where it holds", *_promised(cases, promise.text))
        for promise in PROMISES
    ]
    _print(screen, title, notes, tables)
    if json_ is not None:
        content = {
            "model": str(model),
            "settings": {name: {key: figure.to_json() for key, figure in row.items()} for name, row in figures.items()},
            "efficiency": {name: [[ranks, share, "modelled"] for ranks, share in row] for name, row in curves.items()},
            "promises": [_plain(case) for case in cases],
            "notes": notes,
        }
        _write(json_, json.dumps(content, indent=1) + "\n")
    if html is not None:
        _write(html, render_plan(title, notes, tables, efficiency_over_workers(curves, network.ranks)))
        screen.print(f"Page: {html}", soft_wrap=True)


class _Planner:
    """Workloads and times of one recipe's model, dense and at any density."""

    def __init__(self, recipe: Recipe, cluster: Cluster, tell: Callable[[str], None]) -> None:
        self.recipe, self.device, self.tell = recipe, cluster.device, tell
        self.notes: list[str] = []
        self.profile = DeviceProfile()
        training = recipe.training
        self.dense = read_workload(
            recipe.build_model, training.batch, training.context, recipe.format, fake=not recipe.starts_trained
        )
        self._codecs: dict[Codec, CodecCost] = {}
        self._dense_backward = 0.0

    @property
    def rewire_every(self) -> int | None:
        assert self.recipe.sparsity is not None
        return getattr(self.recipe.sparsity.method, "every", None)

    def settings(self, name: str, density: float, **how: Any) -> list[Setting]:
        """Plain and compressed."""
        self.tell(f"{name}, {_sparsity(density)}")
        workload, compute = self._stated(density) if isinstance(self.device, Device) else self._measured(density)
        return plain_and_compressed(name, workload, compute, self._codec, **how)

    def _stated(self, density: float) -> tuple[Workload, Compute]:
        assert isinstance(self.device, Device)
        workload = self.dense
        if density < 1:
            with torch.device("meta"):
                network = self.recipe.build_model()
            workload = workload.sparse(inspect(network, **self._sparsity(density)), self._kept)
        return workload, stated_compute(workload, self.device)

    def _measured(self, density: float) -> tuple[Workload, Compute]:
        network = self.recipe.build_model()
        workload, parts = self.dense, list[Part]([Precision("fp32" if self.recipe.format == "fp32" else "bf16")])
        rewire = 0.0
        if density < 1:
            table = self._made_sparse(network, density)
            if table is not None:
                workload = workload.sparse(table, self._kept)
                parts.insert(0, SparseTraining(static()))
                # the gradients of dense weights: half of a dense backward pass
                rewire = self._dense_backward / 2
        optimizer = self.recipe.optimizer.build(network)
        session = Session(network, optimizer, parts, clip=self.recipe.optimizer.clip)
        compute = measured_compute(session, self._loss_of(network), workload)
        if density == 1:
            self._dense_backward = compute.backward
        return workload, replace(compute, rewire=rewire)

    def _made_sparse(self, network: nn.Module, density: float) -> SparsityTable | None:
        training = self.recipe.training
        options: dict[str, Any] = {
            **self._sparsity(density),
            "profile": self.profile,
            "tokens": training.batch * training.context,
            "format": self.recipe.format,
            "if_slow": getattr(self.recipe.sparsity, "if_slow", "dense"),
        }
        found = inspect(network, **options)
        if all_slow(found):
            if ALL_SLOW not in self.notes:
                self.notes.append(ALL_SLOW)
            return None
        return sparsify(network, **options)

    def _sparsity(self, density: float) -> dict[str, Any]:
        section = self.recipe.sparsity
        assert section is not None
        return {
            "pattern": section.pattern.build(),
            "density": density,
            "include": section.include,
            "exclude": section.exclude,
            "allocation": section.allocation.build() if section.allocation else uniform,
        }

    @property
    def _kept(self) -> int:
        return 2 if self.recipe.format == "bf16" else 0

    def _codec(self, codec: Codec) -> CodecCost:
        if codec not in self._codecs:
            self._codecs[codec] = (
                stated_codec(self.device) if isinstance(self.device, Device) else measured_codec(codec)
            )
        return self._codecs[codec]

    def _loss_of(self, network: nn.Module) -> Callable[[], Tensor]:
        embeddings = [module.num_embeddings for module in network.modules() if isinstance(module, nn.Embedding)]
        vocabulary = embeddings[0] if embeddings else 2
        training = self.recipe.training
        random = torch.Generator().manual_seed(training.seed)
        tokens = torch.randint(vocabulary, (training.batch, training.context), generator=random)
        return lambda: F.cross_entropy(network(tokens).float().flatten(0, 1), tokens.flatten())


def _workers(cluster: Cluster) -> Iterator[int]:
    """Powers of two within a node, then nodes by powers of two."""
    ranks = 1
    while ranks < cluster.ranks_per_node:
        yield ranks
        ranks *= 2
    ranks = cluster.ranks_per_node
    while ranks <= _MOST_WORKERS:
        yield ranks
        ranks *= 2


def _promised(cases: list[Case], text: str) -> tuple[list[str], list[list[str]]]:
    """Settings down, links across; where a promise holds the cell says so."""
    mine = [case for case in cases if case.promise.text == text]
    rates = list(dict.fromkeys(case.bits_per_second for case in mine))
    rows = []
    for name, density in dict.fromkeys((case.setting, case.density) for case in mine):
        row = [case for case in mine if (case.setting, case.density) == (name, density)]
        # eight columns in 80 characters
        cells = [_reached(case) + ("\u2713" if case.holds else "") for case in row]
        saved = max(case.saved for case in row)
        rows.append([name, f"{100 * density:.0f} %", f"{100 * saved:.0f} %", *cells])
    return ["", "kept", "saved", *(f"{rate / 1e9:g}" for rate in rates)], rows


def _reached(case: Case) -> str:
    return f"{case.speedup:.3g}x" if case.promise.what == "speed-up" else f"{100 * case.efficiency:.0f} %"


def _plain(case: Case) -> dict[str, Any]:
    names = ("setting", "density", "bits_per_second", "two_level", "saved", "speedup", "efficiency", "holds")
    return {"promise": case.promise.text, **{name: getattr(case, name) for name in names}, "kind": "modelled"}


def _name(recipe: Recipe) -> str:
    return Path(recipe.model).resolve().name if isinstance(recipe.model, str) else recipe.model.text


def _sparsity(density: float | None) -> str:
    return "dense" if density is None or density == 1 else f"{100 * (1 - density):.3g} % sparse"


def _print(screen: Console, title: str, notes: list[str], tables: list[tuple[str, Any, list[list[str]]]]) -> None:
    screen.print(f"[bold]{title}[/]")
    for note in notes:
        screen.print(note)
    for caption, head, rows in tables:
        screen.print(f"\n[bold]{caption}[/]")
        screen.print(plain_table(head, rows, right=head[1:]))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: expected to write the plan, got: {error.strerror}.") from error
