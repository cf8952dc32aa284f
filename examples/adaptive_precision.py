"""Formats that a policy finds by itself: each product of a small classifier starts in fp32, and is lowered only where
that is faster on this machine and the loss is no worse. The table at the end says what was not taken, and why.

python examples/adaptive_precision.py
"""

from __future__ import annotations

import torch
from torch import nn

import sparsam as sp

STEPS, BATCH, WIDTH = 120, 256, 256  # as many classes as features: one shape of layer, so one set of timings


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    centres = torch.randn(WIDTH, WIDTH)

    def batch(rows: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(WIDTH, (rows,))
        return centres[labels] + 2 * torch.randn(rows, WIDTH), labels

    held = [batch() for _ in range(4)]  # what lower formats are tried on: the same data each time

    def probe() -> torch.Tensor:
        return torch.stack([nn.functional.cross_entropy(model(inputs).float(), labels) for inputs, labels in held])

    # a training of thousands of steps takes the defaults: a sample every 32 steps
    precision = sp.Precision(sp.Adaptive(sample_every=8), probe=probe)
    session = sp.Session(model, optimizer, [precision], clip=1.0)
    for step in range(STEPS):
        inputs, labels = batch()
        with session.forward():
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        session.backward(loss)
        session.step()
        if step % 20 == 0:
            print(f"step {step:3}  loss {loss.detach():.3f}  switches {precision.switches}")
    for switch in precision.take():
        print(f"after step {switch.step}: {switch.layer} {switch.product} {switch.before} -> {switch.after}")
    print(precision.table())

    with torch.no_grad(), session.forward():
        inputs, labels = batch(2000)
        right = model(inputs).argmax(1) == labels
    print(f"accuracy: {100 * right.float().mean():.1f} %")
    session.detach()  # ordinary nn.Linear layers again


if __name__ == "__main__":
    main()
