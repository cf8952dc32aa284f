"""Two workers that meet every 20 steps: each sees half of the classes only, and both learn all of them. Deltas of a
sparse model go over the wire as int8.

python examples/local_steps.py

starts both on this machine. On two machines start `python examples/local_steps.py worker RANK tcp://HOST:PORT` on each.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import sparsam as sp

WORKERS, STEPS, BATCH, FEATURES, CLASSES = 2, 200, 64, 128, 10


def train(rank: int, address: str) -> None:
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=WORKERS)
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.GELU(), nn.Linear(256, CLASSES))
    sp.sparsify(model, sp.Block(16, 16), density=0.2, exclude=["2"], sparse_fan_in=True)
    local = sp.LocalSteps(every=20, codec=sp.codecs.Int8Rows())
    session = sp.Session(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        # rewired right after every second synchronisation, when all have the same weights
        [local, sp.SparseTraining(sp.rigl(every=40, until=160))],
        clip=1.0,
    )
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    own = torch.arange(rank, CLASSES, WORKERS)
    while session.applied_steps < STEPS:
        labels = own[torch.randint(len(own), (BATCH,))]
        with session.forward():
            loss = nn.functional.cross_entropy(model(centres[labels] + 3 * torch.randn(BATCH, FEATURES)), labels)
        session.backward(loss)
        session.step()

    labels = torch.randint(CLASSES, (2000,))
    with torch.no_grad():
        right = model(centres[labels] + 3 * torch.randn(2000, FEATURES)).argmax(1) == labels
    metrics = session.metrics()
    print(
        f"worker {rank}: accuracy on all classes {100 * right.float().mean():.1f} % after {local.rounds} "
        f"synchronisations of {metrics['comm.bytes'] / 1000:.0f} kB (modelled), {100 * metrics['comm.ratio']:.1f} % of "
        "what float32 gradients at every step would be"
    )
    dist.destroy_process_group()


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        train(int(sys.argv[2]), sys.argv[3])
        return
    with tempfile.TemporaryDirectory() as folder:
        address = (Path(folder) / "store").as_uri()
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "worker", str(rank), address], stdout=subprocess.PIPE, text=True
            )
            for rank in range(WORKERS)
        ]
        for worker in workers:
            print(worker.communicate()[0], end="")
        assert all(worker.returncode == 0 for worker in workers)


if __name__ == "__main__":
    main()
