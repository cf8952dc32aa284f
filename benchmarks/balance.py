"""A pipeline whose layers move by measured load, against no balancing and against the best split that does not move.

    python benchmarks/balance.py [--quick] [--json FILE] [--steps N]

Four ranks, each in a control group of its own with 0.45 of a CPU, so that they do not share cores and hide what waits
for what; needs root and Linux (control groups v1 or v2). The chain has 12 residual MLP blocks, the first 4 dense, the
others 95 % sparse in 32 x 32 blocks. "skewed": all ranks are alike. "straggler": rank 1 has half of a CPU share.

Contenders take turns in the same processes, by moving the layers: "even" has 3 layers on each rank; "best" is the
fastest split of all that are measured: "even", what balancing came to, and the three of all 165 that an oracle predicts
best, from each layer's CPU time and the ranks' true shares of a CPU; "balanced" is what `Balance` came to, beginning
with "even" and knowing neither. Its column includes what measuring, deciding and moving took, spread over the steps
between two decisions. Times are medians of rounds, of the whole step, with the move before each round left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import ended_together, parse, stop_cleanly, write
from torch import nn

import sparsam as sp
from sparsam.comm.balance import stage_seconds

RANKS, LAYERS, DENSE_LAYERS, MICRO_BATCHES = 4, 12, 4, 8
CPU, PERIOD_US = 0.45, 100_000
CASES = {"skewed": (CPU, CPU, CPU, CPU), "straggler": (CPU, CPU / 2, CPU, CPU)}
EVEN = (0, 3, 6, 9, 12)
CGROUPS = Path("/sys/fs/cgroup")


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--rank":
        rank_of(int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))
        return
    arguments = parse(
        __doc__, steps={"type": int, "default": 50, "metavar": "N", "help": "between decisions; rounds take a fifth"}
    )
    stop_cleanly()
    options = {"width": 128, "batch": 64, "every": 10, "round": 4, "rounds": 2}
    if not arguments.quick:
        options = {"width": 384, "batch": 256, "every": arguments.steps, "round": arguments.steps // 5, "rounds": 3}
    rows = []
    columns = ("even", "best", "balanced", "even / balanced", "balanced / best")
    print(f"{'ms a step':12}" + "".join(f"{column:>17}" for column in columns))
    for case, shares in CASES.items():
        with limited(shares) as folders:
            if folders is None:
                raise SystemExit("balance: expected to be allowed to make CPU control groups; run as root on Linux.")
            row = {"name": case, "cpu": shares} | on_ranks(folders, {**options, "shares": shares})
        rows.append(row)
        print(
            f"{case:12}{row['even']:17.1f}{row['best']:17.1f}{row['balanced']:17.1f}"
            f"{row['gain']:17.2f}{row['to_best']:17.2f}"
        )
        print(
            f"  best {row['best_bounds']}, balanced {row['balanced_bounds']}, {row['overhead_ms']:.1f} ms for balance"
        )
        for decision in row["decisions"]:
            print(f"  {decision}")
    summary = {f"{row['name']}_{key}": row[key] for row in rows for key in ("gain", "to_best")}
    write(arguments, summary, rows)


@contextlib.contextmanager
def limited(shares: tuple[float, ...]) -> Iterator[list[Path] | None]:
    """A control group for each rank, with its share of a CPU; None where that is not permitted."""
    old = CGROUPS / "cpu" / "cpu.cfs_quota_us"
    base = CGROUPS / "cpu" if old.parent.is_dir() else CGROUPS
    folders: list[Path] = []
    try:
        try:
            for rank, share in enumerate(shares):
                folder = base / f"sparsam-{os.getpid()}-{rank}"
                folder.mkdir()
                folders.append(folder)
                quota = round(share * PERIOD_US)
                if base != CGROUPS:
                    (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (folder / "cpu.cfs_quota_us").write_text(str(quota))
                else:
                    (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        except OSError:
            yield None
        else:
            yield folders
    finally:
        for folder in folders:
            for _ in range(50):  # a process that has ended may be listed a little longer
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.1)


def on_ranks(folders: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    """Runs one case; the row of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "row.json"
        given = [json.dumps({**options, "out": str(out), "cgroup": str(folder)}) for folder in folders]
        codes = ended_together(
            [[sys.executable, __file__, "--rank", str(rank), address, one] for rank, one in enumerate(given)]
        )
        if any(code != 0 for code in codes):
            raise SystemExit(f"balance: expected ranks that end with 0, got {codes}.")
        row: dict[str, Any] = json.loads(out.read_text())
        return row


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Watched(sp.Balance):
    """Notes what was decided, and what the ranks' load was."""

    def __init__(self, every: int) -> None:
        super().__init__(every)
        self.decisions: list[str] = []

    def decide(self, bounds, load):  # type: ignore[no-untyped-def]
        decision = super().decide(bounds, load)
        self.load = load
        self.decisions.append(f"{tuple(bounds)} -> {decision.bounds}: {decision.text}")
        return decision


def rank_of(rank: int, address: str, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    width = options["width"]
    model = nn.Sequential(*[Block(width) for _ in range(LAYERS)])
    dense = [f"{number}.*" for number in range(DENSE_LAYERS)]
    sp.sparsify(model, sp.Block(32, 32), 0.05, exclude=dense)
    watched = Watched(options["every"])
    pipeline = sp.Pipeline(
        model,
        nn.functional.mse_loss,
        lambda stage: torch.optim.AdamW(stage.parameters(), lr=1e-4),
        [sp.SparseTraining(sp.static())],
        micro_batches=MICRO_BATCHES,
        balance=watched,
        bounds=EVEN,
    )
    (Path(options["cgroup"]) / "cgroup.procs").write_text(str(os.getpid()))
    x = torch.randn(options["batch"], width)
    seconds, losses = train(pipeline, x, 2)  # connections, memory
    pipeline.steps = 0
    pipeline.stage.forget_times()
    # where it comes to, and what that takes: the step of a decision against the median of the others
    overheads = []
    for _ in range(3):
        seconds, losses = train(pipeline, x, options["every"])
        overheads.append(seconds[-1] - median(seconds[:-1]))
    pipeline.balance = None
    found = pipeline.bounds
    # the oracle: CPU time of each layer, true shares of a CPU
    splits = [(0, *inner, LAYERS) for inner in combinations(range(1, LAYERS), RANKS - 1)]
    splits.sort(key=lambda bounds: max(stage_seconds(watched.load.work, options["shares"], bounds)))
    contenders = list(dict.fromkeys([EVEN, found, *splits[:3]]))
    times: dict[tuple[int, ...], list[float]] = {bounds: [] for bounds in contenders}
    for _ in range(options["rounds"]):
        for bounds in contenders:
            pipeline.repartition(bounds)
            seconds, losses = train(pipeline, x, options["round"] + 1)
            times[bounds] += [sum(seconds[1:]) / (len(seconds) - 1)]
    if rank == 0:
        medians = {bounds: 1e3 * median(one) for bounds, one in times.items()}
        best = min(contenders, key=lambda bounds: medians[bounds])
        # the first decision moves layers, once: its step is in the list of overheads, not in the steady state
        overhead_ms = 1e3 * max(0.0, median(overheads)) / options["every"]
        balanced = medians[found] + overhead_ms
        row = {
            "even": medians[EVEN],
            "best": medians[best],
            "balanced": balanced,
            "gain": medians[EVEN] / balanced,
            "to_best": balanced / medians[best],
            "overhead_ms": overhead_ms,
            "overheads_s": overheads,
            "best_bounds": best,
            "balanced_bounds": found,
            "decisions": watched.decisions,
            "speeds": watched.load.speeds,
            "work": watched.load.work,
            "times_ms": {str(bounds): [1e3 * one for one in rounds] for bounds, rounds in times.items()},
            "last_loss": losses[-1],
        }
        Path(options["out"]).write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still hold tensors


def train(pipeline: sp.Pipeline, x: torch.Tensor, steps: int) -> tuple[list[float], list[float]]:
    """Seconds and losses of some steps."""
    seconds, losses = [], []
    for _ in range(steps):
        begin = time.perf_counter()
        losses.append(pipeline.step(x, x.sin()))
        seconds.append(time.perf_counter() - begin)
    return seconds, losses


if __name__ == "__main__":
    main()
