"""Data-parallel training over a slow link: bytes on the wire, time of a step, and what compression costs in loss.

    python benchmarks/wire.py [--stage times|losses] [--only NAMES] [--ranks 4 8] [--mbit 100 1000] [--rows FILE]

The byte GPT of train_step.py with a fixed batch on each rank. Times: every rank is in a network namespace of its own,
whose link is shaped by tc (Linux, root); bytes are those that the kernel counted on that link, headers and
acknowledgements included; the time of a step is a median, with its share of the steps that rewire. Losses do not depend
on the link: they are taken on the loopback device, from a few hundred steps on the same batches for all.

Contenders run one after the other, each in processes of its own, because their models do not fit in memory together.
torch's hooks are rivals as they are; what blocks or fails is a row that says so. Finished rows are kept in --rows, one
JSON object a line: a benchmark that was stopped goes on after the last one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.distributed as dist
from harness import parse, stop_cleanly, write
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import sparsam as sp
from sparsam.comm.codecs import Codec, Identity, Int8Rows, TopK
from sparsam.measure.heap import keep_heap
from sparsam.measure.memory import peak_rss_bytes, reset_peak_rss
from sparsam.tasks.gpt import GPT
from sparsam.tasks.language import Batch, Batches, loss_of, read_corpus, validation_batches

BLOCK = 32
RATE = 1e-3
WARM_UP_STEPS = 3  # PowerSGD starts at its third
STALLED_SECONDS = 180
# what a link that has rested lets through at once: little against a bucket, or compressed ones would travel free. At
# 20 Mbit/s 128 kB take 0.6 ms with 256 KiB and 41 ms with 32; both reach the same rate up to 1 Gbit/s (measured)
BURST = "32kb"
COUNTER = Path("/sys/class/net/e0/statistics/tx_bytes")


@dataclass(frozen=True)
class Contender:
    """How one model's gradients travel.

    Attributes:
        codec: of `Compression`; None for plain DistributedDataParallel or its hook.
        hook: torch's own.
    """

    density: float = 1.0
    codec: Codec | None = None
    hook: Literal["", "bf16", "fp16", "PowerSGD"] = ""


CONTENDERS = {
    "dense fp32": Contender(),
    "dense bf16": Contender(hook="bf16"),
    "dense fp16": Contender(hook="fp16"),
    "dense PowerSGD": Contender(hook="PowerSGD"),
    "dense top-k": Contender(codec=TopK(0.05)),
    "dense blocks": Contender(codec=TopK(0.4, block=128, values=Int8Rows(), agreed=True)),
    "sparse identity": Contender(0.1, Identity()),
    "sparse int8": Contender(0.1, Int8Rows()),
}


@dataclass(frozen=True)
class Job:
    """One training of one contender on all ranks.

    Attributes:
        mbit: rate of each rank's link in Mbit/s; None for the loopback device and a loss.
        every: steps between rewires of a sparse model.
    """

    contender: str
    ranks: int
    mbit: float | None
    steps: int
    batch: int
    seed: int = 0
    layers: int = 6
    width: int = 512
    tokens: int = 256
    every: int = 100
    precision: str = "fp32"

    @property
    def key(self) -> str:
        link = [] if self.mbit is None else [BURST]
        return json.dumps([asdict(self), repr(CONTENDERS[self.contender]), *link], sort_keys=True)


def main() -> None:
    arguments = parse(
        __doc__,
        stage={"choices": ["times", "losses"], "default": None, "help": "one stage only"},
        only={"nargs": "+", "choices": [*CONTENDERS], "default": [*CONTENDERS], "metavar": "NAME"},
        ranks={"type": int, "nargs": "+", "default": [4]},
        mbit={"type": float, "nargs": "+", "default": [100.0], "help": "rate of each rank's link"},
        steps={"type": int, "default": 300, "help": "of losses, and of the times of sparse models, rewires among them"},
        dense_steps={"type": int, "default": 20, "help": "of the times of dense models, whose steps are all alike"},
        batch={"type": int, "default": 1, "help": "sequences a rank"},
        seeds={"type": int, "nargs": "+", "default": [0, 1, 2], "help": "of losses"},
        precision={"choices": ["bf16", "fp32"], "default": "fp32", "help": "of products; take what is faster"},
        rows={"type": Path, "default": None, "help": "finished rows, read and added to"},
        worker={"default": None, "help": argparse.SUPPRESS},
    )
    if arguments.worker:
        work(Job(**json.loads(arguments.worker)))
    stop_cleanly()
    rows = run(jobs_of(arguments), arguments.rows)
    write(arguments, summarise(rows), rows)


def jobs_of(arguments: argparse.Namespace) -> list[Job]:
    small: dict[str, Any] = {"precision": arguments.precision}
    if arguments.quick:
        small |= {"layers": 2, "width": 128, "tokens": 64, "every": 5}
        arguments.ranks, arguments.mbit, arguments.seeds, arguments.steps, arguments.dense_steps = (
            [2],
            [100.0],
            [0],
            12,
            4,
        )
        arguments.only = ["dense bf16", "dense blocks", "sparse int8", "sparse identity"]
    jobs = []
    for ranks in arguments.ranks if arguments.stage != "losses" else ():
        for mbit in arguments.mbit:
            for name in arguments.only[: 3 if arguments.quick else None]:
                steps = arguments.dense_steps if CONTENDERS[name].density == 1 else arguments.steps
                jobs.append(Job(name, ranks, mbit, steps, arguments.batch, **small))
    for seed in arguments.seeds if arguments.stage != "times" else ():
        for name in arguments.only[2 * arguments.quick :]:
            jobs.append(Job(name, arguments.ranks[0], None, arguments.steps, arguments.batch, seed, **small))
    return jobs


def run(jobs: list[Job], path: Path | None) -> list[dict[str, Any]]:
    """A row for each job; those that the file holds already are not repeated."""
    lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
    done = {row["key"]: row for row in map(json.loads, lines)}
    for job in jobs:
        if job.key not in done:
            done[job.key] = {"key": job.key, **asdict(job), **launched(job)}
            if path is not None:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[job.key]) + "\n")
        print(text_of(done[job.key]), flush=True)
    return [done[job.key] for job in jobs]


def text_of(row: dict[str, Any]) -> str:
    link = "loss" if row["mbit"] is None else f"{row['mbit']:g} Mbit/s"
    head = f"{row['ranks']} ranks, {link:12} {row['contender']:16}"
    if "failed" in row:
        return f"{head} failed: {row['failed']}"
    if row["mbit"] is None:
        return f"{head} seed {row['seed']}: validation loss {row['loss']:.4f} after {row['steps']} steps"
    return (
        f"{head} {row['bytes'] / 1e6:9.3f} MB a step and rank, {row['step_ms']:8.1f} ms a step "
        f"(median {row['median_ms']:.1f}, rewiring {row['rewire_ms'] or math.nan:.1f}, {row['steps']} steps)"
    )


def summarise(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Ratios to dense bf16 on every link, losing ones too; the summary is that of the first link."""
    good = [row for row in rows if "failed" not in row]
    timed = [row for row in good if row["mbit"] is not None]
    links: dict[tuple[int, float], dict[str, dict[str, Any]]] = {}
    for row in timed:
        links.setdefault((row["ranks"], row["mbit"]), {})[row["contender"]] = row
    ratios: list[dict[str, float | None]] = []
    for (ranks, mbit), found in links.items():
        if (base := found.get("dense bf16")) is None:
            continue
        shares = {name: row["bytes"] / base["bytes"] for name, row in found.items()}
        speeds = {name: base["step_ms"] / row["step_ms"] for name, row in found.items()}
        for name, speed in speeds.items():
            print(
                f"{ranks} ranks, {mbit:g} Mbit/s: {name:16} {shares[name]:.4f} of the bytes of dense bf16, its step "
                f"{speed:.2f}x as fast{', which loses' if speed < 1 else ''}"
            )
        one: dict[str, float | None] = {}
        for short, name in (("sparse", "sparse int8"), ("dense", "dense blocks")):
            one |= {f"{short}_bytes_ratio": shares.get(name), f"{short}_step_ratio": speeds.get(name)}
        ratios.append(one)
    none = dict.fromkeys(("sparse_bytes_ratio", "sparse_step_ratio", "dense_bytes_ratio", "dense_step_ratio"))
    summary: dict[str, float | None] = {**(ratios[0] if ratios else none)}
    losses = {(row["contender"], row["seed"]): row["loss"] for row in good if row["mbit"] is None}
    summary["sparse_loss_gap_percent"] = gap_percent(losses, "sparse int8", "sparse identity")
    summary["dense_loss_gap_percent"] = gap_percent(losses, "dense blocks", "dense fp32")
    summary["bf16_loss_gap_percent"] = gap_percent(losses, "dense bf16", "dense fp32")
    summary["top_k_loss_gap_percent"] = gap_percent(losses, "dense top-k", "dense fp32")
    return summary


def gap_percent(losses: dict[tuple[str, int], float], name: str, plain: str) -> float | None:
    """How much higher a loss is than without compression, the mean over the seeds that have both."""
    gaps = [
        100 * (loss / losses[plain, seed] - 1)
        for (one, seed), loss in losses.items()
        if one == name and (plain, seed) in losses
    ]
    return statistics.fmean(gaps) if gaps else None


def launched(job: Job) -> dict[str, Any]:
    """Runs a job's ranks and waits for them: the result, or why there is none."""
    with ExitStack() as undo:
        names = [] if job.mbit is None else undo.enter_context(shaped_links(job.ranks, job.mbit))
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        cores = len(os.sched_getaffinity(0))
        shared = {
            "OMP_NUM_THREADS": str(max(1, cores // job.ranks)),
            "OMP_WAIT_POLICY": "PASSIVE",
            "WORLD_SIZE": str(job.ranks),
            "GLOO_SOCKET_IFNAME": "e0" if names else "lo",
            "MASTER_ADDR": "10.9.0.1" if names else "127.0.0.1",
            "MASTER_PORT": "29555" if names else str(free_port()),
        }
        outputs = [folder / f"{rank}" for rank in range(job.ranks)]
        ranks: list[subprocess.Popen[bytes]] = []
        undo.callback(end, ranks)
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(job))]
        for rank, output in enumerate(outputs):
            where = ["ip", "netns", "exec", names[rank]] if names else []
            with output.open("wb") as file:
                environment = {**os.environ, **shared, "RANK": str(rank)}
                ranks.append(subprocess.Popen([*where, *command], env=environment, stdout=file, stderr=file))
        size, since = 0, time.monotonic()
        while (codes := [rank.poll() for rank in ranks]) != [0] * job.ranks:
            if any(codes):
                failed = next(output for output, code in zip(outputs, codes, strict=True) if code)
                return {"failed": (failed.read_text().strip().splitlines() or ["no message"])[-1]}
            if outputs[0].stat().st_size > size:  # a line for each step
                size, since = outputs[0].stat().st_size, time.monotonic()
            if time.monotonic() - since > STALLED_SECONDS:
                return {"failed": f"no step within {STALLED_SECONDS} s"}
            time.sleep(0.1)
        result: dict[str, Any] = json.loads(outputs[0].read_text().strip().splitlines()[-1])
        return result


@contextmanager
def shaped_links(ranks: int, mbit: float) -> Iterator[list[str]]:
    """Network namespaces on one bridge, each with a link e0 = 10.9.0.(rank + 1) that sends at most so fast."""
    tag = f"{os.getpid() % 100_000}"
    bridge, names = f"wire{tag}", [f"wire{tag}-{rank}" for rank in range(ranks)]
    with ExitStack() as undo:
        undo.callback(quietly, f"ip link del {bridge}")
        execute(f"ip link add {bridge} type bridge")
        execute(f"ip link set {bridge} up")
        for rank, name in enumerate(names):
            undo.callback(quietly, f"ip netns del {name}")
            execute(f"ip netns add {name}")
            link = f"wire{tag}x{rank}"
            undo.callback(quietly, f"ip link del {link}")
            execute(f"ip link add {link} type veth peer name e0 netns {name}")
            execute(f"ip link set {link} master {bridge} up")
            execute(f"ip -n {name} addr add 10.9.0.{rank + 1}/24 dev e0")
            execute(f"ip -n {name} link set e0 up")
            execute(f"ip -n {name} link set lo up")
            execute(f"ip netns exec {name} tc qdisc add dev e0 root tbf rate {mbit:g}mbit burst {BURST} latency 100ms")
        yield names


def execute(line: str) -> None:
    try:
        done = subprocess.run(line.split(), capture_output=True, text=True)
        said = done.stderr.strip() or f"exit status {done.returncode}"
    except OSError as error:
        done, said = None, str(error)
    if done is None or done.returncode:
        raise SystemExit(
            f"wire: expected Linux, root, ip and tc for shaped links, got {said!r} from {line!r}. "
            "--stage losses needs none of them."
        )


def quietly(line: str) -> None:
    with suppress(OSError):  # no such program made nothing
        subprocess.run(line.split(), capture_output=True, check=False)


def end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def work(job: Job) -> None:
    """One rank of a job; rank 0 prints a line for each step, and the result at last."""
    keep_heap()  # for all contenders alike, and so is what follows
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=STALLED_SECONDS))
    rank = dist.get_rank()
    reset_peak_rss()
    base = peak_rss_bytes()
    session = session_of(job)
    result = measure_loss(job, session, rank) if job.mbit is None else measure_times(job, session, rank)
    dist.barrier()
    if rank == 0:
        print(json.dumps(result | {"base_bytes": base, "peak_bytes": peak_rss_bytes()}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still hold tensors, and the interpreter would abort over them


def session_of(job: Job) -> sp.Session:
    one = CONTENDERS[job.contender]
    torch.manual_seed(job.seed)
    model = GPT(job.layers, job.width, max(1, job.width // 64), job.tokens)
    parts: list[sp.Part] = [sp.Precision(job.precision), sp.LearningRate(lambda step: rate(step / job.steps))]  # type: ignore[arg-type]
    if one.density < 1:
        sp.sparsify(model, sp.Block(BLOCK, BLOCK), one.density, sparse_fan_in=True)
        # what is timed rewires to the end
        until = math.ceil(0.75 * job.steps) if job.mbit is None else None
        parts.insert(0, sp.SparseTraining(sp.rigl(every=job.every, until=until)))
    # blocking collectives inside callbacks stop gloo from two buckets on: PowerSGD gets one
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000 if one.hook == "PowerSGD" else None)
    if one.hook == "PowerSGD":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook)
    elif one.hook == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif one.hook == "bf16":
        # by another name: registered as it is, torch asks for NCCL
        wrapped.register_comm_hook(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))
    if one.codec is not None:
        parts.append(sp.Compression(one.codec, "always"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    return sp.Session(wrapped, optimizer, parts, clip=1.0, seed=job.seed)


def rate(progress: float) -> float:
    """Warm-up over a tenth, then a cosine to a tenth."""
    return min(1.0, 10 * progress + 0.01) * (0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, progress))) / 2)


def train(session: sp.Session, batch: Batch) -> None:
    with session.forward():
        loss = loss_of(session.model, batch)
    session.backward(loss)
    session.step()
    print("step", flush=True)


def measure_times(job: Job, session: sp.Session, rank: int) -> dict[str, Any]:
    tokens = torch.randint(256, (job.batch, job.tokens + 1), generator=torch.Generator().manual_seed(rank))
    batch = Batch(tokens[:, :-1], tokens[:, 1:])
    for _ in range(WARM_UP_STEPS):
        train(session, batch)
    dist.barrier()
    before = int(COUNTER.read_text())
    usual: list[float] = []
    rewiring: list[float] = []
    for _ in range(job.steps):
        began = time.perf_counter()
        train(session, batch)
        taken = 1e3 * (time.perf_counter() - began)
        rewires = CONTENDERS[job.contender].density < 1 and session.applied_steps % job.every == 0
        (rewiring if rewires else usual).append(taken)
    dist.barrier()
    sent = torch.tensor(float(int(COUNTER.read_text()) - before))
    dist.all_reduce(sent)
    median = statistics.median(usual)
    extra = sum(taken - median for taken in rewiring) / job.steps
    return {
        "bytes": float(sent) / job.ranks / job.steps,
        "step_ms": median + extra,
        "median_ms": median,
        "rewire_ms": statistics.median(rewiring) if rewiring else None,
        "rewires": len(rewiring),
        "modelled_bytes": session.metrics().get("comm.bytes"),
    }


def measure_loss(job: Job, session: sp.Session, rank: int) -> dict[str, Any]:
    corpus = read_corpus()
    batches = Batches(corpus.train, job.batch, job.tokens, 1000 * job.seed + rank)
    for _ in range(job.steps):
        train(session, batches.next())
    if rank:
        return {}
    model = session.model.get_submodule("module").eval()
    with torch.no_grad(), session.forward():
        losses = [float(loss_of(model, one)) for one in validation_batches(corpus.validation, 16, job.tokens, 64)]
    return {"loss": statistics.fmean(losses)}


if __name__ == "__main__":
    main()
