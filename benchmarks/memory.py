"""Peak memory of each rank of a dense 12-layer GPT against plain DDP, activations included, and of a sparse one.

    python benchmarks/memory.py [--quick] [--json FILE]

4 gloo ranks on this machine, width 768, 256 tokens, batch 8 on each rank, bf16 autocast, AdamW; each contender in
processes of its own. The peak is what the fullest rank held resident, without what it held before its model was built
(the interpreter, torch and its libraries, after two steps of a tiny model): both figures are shown. It is reached in
two steps; the time of a step is the median of those that follow, the ranks sharing the cores. Freed memory goes back to
the system at once, for all alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import ended_together, parse, stop_cleanly, write
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsam as sp
from sparsam.measure.memory import peak_rss_bytes, reset_peak_rss, resident_bytes
from sparsam.tasks.gpt import GPT

PLAIN = "DDP"
# name -> (sharded, density, recomputed every so many layers, selective)
CONTENDERS: dict[str, tuple[bool, float | None, int | None, bool]] = {
    PLAIN: (False, None, None, False),
    "DDP, recompute 1": (False, None, 1, False),
    "DDP, recompute 5": (False, None, 5, False),
    "DDP, recompute 1 selective": (False, None, 1, True),
    "FSDP2": (True, None, None, False),
    "FSDP2, recompute 1": (True, None, 1, False),
    "DDP, 90 % sparse": (False, 0.1, None, False),
    "DDP, 90 % sparse, recompute 1": (False, 0.1, 1, False),
    "FSDP2, 90 % sparse, recompute 1": (True, 0.1, 1, False),
}
QUICK = (PLAIN, "FSDP2, recompute 1", "DDP, 90 % sparse, recompute 1")
MIB = 1 << 20


def main() -> None:
    hidden = {"worker": {"nargs": 4, "metavar": ("NAME", "RANK", "PORT", "FILE"), "help": argparse.SUPPRESS}}
    arguments = parse(__doc__, only={"nargs": "+", "choices": CONTENDERS, "help": "these beside plain DDP"}, **hidden)
    if arguments.worker:
        worker(arguments.quick, *arguments.worker)
        return
    stop_cleanly()
    names = QUICK if arguments.quick else tuple(arguments.only or CONTENDERS)
    rows = [measure(name, arguments.quick) for name in dict.fromkeys((PLAIN, *names))]
    plain = rows[0]
    for row in rows:
        row["peak_ratio"] = row["peak_bytes"] / plain["peak_bytes"]
        row["slowdown"] = row["step_ms"] / plain["step_ms"]
        print(
            f"{row['name']:30} peak {row['peak_bytes'] / MIB:7,.0f} MiB = {row['peak_ratio']:.3f} of plain DDP "
            f"(with the interpreter {row['peak_with_interpreter_bytes'] / MIB:7,.0f}), step {row['step_ms']:8,.0f} ms, "
            f"{row['slowdown']:.2f}x, loss {row['loss']:.4f}"
        )
        kinds = ("parameters", "gradients", "optimizer", "activations")
        print("    " + ", ".join(f"{kind} {row[f'memory.{kind}'] / MIB:,.0f}" for kind in kinds) + " MiB")
    by_name = {row["name"]: row for row in rows}
    dense, sparse = by_name.get("FSDP2, recompute 1"), by_name.get("DDP, 90 % sparse, recompute 1")
    summary = {
        f"{prefix}{kind}": None if row is None else row[kind]
        for prefix, row in (("", dense), ("sparse_", sparse))
        for kind in ("peak_ratio", "slowdown")
    }
    write(arguments, summary, rows)


def measure(name: str, quick: bool) -> dict[str, Any]:
    """The row of one contender: the fullest rank's memory, rank 0's kinds, the slowest rank's time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(rank) for rank in range(ranks(quick))]
        quickly = ["--quick"] if quick else []
        codes = ended_together(
            [
                [sys.executable, __file__, *quickly, "--worker", name, str(rank), port, str(file)]
                for rank, file in enumerate(files)
            ],
            environment,
        )
        if any(code != 0 for code in codes):
            sys.exit(f"{name}: expected ranks that end with 0, got {codes}. Is there enough memory?")
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    fullest = max(found, key=lambda one: one["peak_bytes"])
    return {"name": name, **found[0], **fullest, "step_ms": max(one["step_ms"] for one in found)}


def worker(quick: bool, name: str, rank: str, port: str, file: str) -> None:
    """One rank of one contender."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=int(rank), world_size=ranks(quick))
    dist.all_reduce(torch.ones(1))
    layers, width, heads, length, batch = (4, 256, 4, 128, 4) if quick else (12, 768, 12, 256, 8)
    # what torch and its libraries load with the first steps of a training is not the model's
    train(name, int(rank), ranks(quick), GPT(2, 64, 2, 32), 2, 2, 0)
    torch.manual_seed(0)
    gc.collect()
    own_bytes = resident_bytes()
    whole = not reset_peak_rss()
    row = train(name, int(rank), ranks(quick), GPT(layers, width, heads, length), batch, 3 if quick else 5, own_bytes)
    Path(file).write_text(json.dumps({"peak_is_whole": whole, **row}), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # gloo's threads may still hold tensors


def train(name: str, rank: int, count: int, model: torch.nn.Module, batch: int, steps: int, own_bytes: int) -> Any:
    """A few steps of a contender on random tokens; its row."""
    sharded, density, every, selective = CONTENDERS[name]
    length = model.context
    if density is not None:
        sp.sparsify(model, sp.Block(32, 32), density, if_slow="compact", sparse_fan_in=True)
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parts: list[sp.Part] = [sp.Precision("bf16")]
    if density is not None:
        parts.append(sp.SparseTraining(sp.static()))
    if every is not None:
        parts.append(sp.Recompute(every, selective))
    session = sp.Session(model, optimizer, [*parts, meter := sp.MemoryMeter(every=2, own_bytes=own_bytes)])
    generator = torch.Generator().manual_seed(rank)
    times, loss = [], torch.zeros(())
    for _ in range(steps):
        tokens = torch.randint(256, (batch, length + 1), generator=generator)
        dist.barrier()
        start = time.perf_counter()
        with session.forward():
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        session.backward(loss)
        session.step()
        times.append(time.perf_counter() - start)
    dist.all_reduce(mean := loss.detach() / count)
    peak = peak_rss_bytes()
    return {
        "own_bytes": own_bytes,
        "peak_bytes": peak - own_bytes,
        "peak_with_interpreter_bytes": peak,
        "step_ms": 1e3 * statistics.median(times[2:] or times),
        "loss": float(mean),
        **{key: value for key, value in meter.metrics().items() if not key.startswith("memory.peak")},
    }


def ranks(quick: bool) -> int:
    return 2 if quick else 4


if __name__ == "__main__":
    main()
