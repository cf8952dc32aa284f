"""Runs a script on two gloo processes or more, for every test of what ranks must agree on."""

from __future__ import annotations

import socket
import subprocess
import sys

__all__ = ["on_ranks", "on_two_ranks"]

HEAD = """
import sys, warnings, torch, torch.distributed as dist, sparsam as sp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from sparsam.sparse.weights import sparse_weights

def mlp():
    return nn.Sequential(nn.Linear(13, 22), nn.Tanh(), nn.Linear(22, 9))

def gathered(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found

def hashes(model):
    return {name: weight.topology.flatten().tolist() for name, weight in sparse_weights(model).items()}

def weights(model):
    return {name: parameter.detach().tolist() for name, parameter in model.named_parameters()}

def session_of(model, method, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return sp.Session(model, optimizer, [sp.SparseTraining(method, options.pop("growth", "auto"))], **options)

def step(session, x, samples=None, last=False):
    with session.forward():
        loss = (session.model(x) - 1).square().mean()
    session.backward(loss, samples)
    return session.step(last)


if __name__ == "__main__":
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=int(sys.argv[3]))
"""

# gloo's threads may still hold tensors when the interpreter goes, which then aborts: it does not go
TAIL = ["dist.barrier()", "dist.destroy_process_group()", "import os", "sys.stdout.flush()", "os._exit(0)"]


def on_two_ranks(body: str, tmp_path) -> None:
    """Runs a script on two ranks; both must end well within a minute."""
    on_ranks(2, body, tmp_path)


def on_ranks(count: int, body: str, tmp_path) -> None:
    """Runs a script on so many ranks; all must end well within a minute."""
    script = tmp_path / "ranks.py"
    script.write_text(HEAD + "".join(f"    {line}\n" for line in [*body.strip().splitlines(), *TAIL]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), f"tcp://127.0.0.1:{port}", str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        output = [rank.communicate(timeout=60)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count, "\n".join(output)
