"""Sparse training in a plain PyTorch loop: a small classifier, 90 % block-sparse, RigL, bf16, averaged weights.

python examples/loop.py
"""

from __future__ import annotations

import torch
from torch import nn

import sparsam as sp

STEPS, BATCH, FEATURES, CLASSES = 300, 128, 256, 10


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        sp.ActivatedLinear(FEATURES, 1024, activation="gelu"),  # a linear layer and its activation, fused when sparse
        sp.ActivatedLinear(1024, 1024, activation="gelu"),
        nn.Linear(1024, CLASSES),
    )
    # untrained weights, so their scale is made to fit the fewer inputs; the last layer stays dense
    print(sp.sparsify(model, sp.Block(32, 32), density=0.1, exclude=["2"], sparse_fan_in=True))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    average = sp.MovingAverage(decay=0.98)
    session = sp.Session(
        model,
        optimizer,
        [
            sp.SparseTraining(sp.rigl(every=20, until=STEPS * 3 // 4)),
            sp.Precision("bf16"),
            sp.LearningRate(sp.warm_up(sp.cosine(1.0, 0.1, steps=STEPS), 20)),
            average,
        ],
        clip=1.0,
    )
    centres = torch.randn(CLASSES, FEATURES)
    for step in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,))
        inputs = centres[labels] + 4 * torch.randn(BATCH, FEATURES)
        with session.forward():
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        session.backward(loss)
        session.step()
        if step % 50 == 0:
            print(f"step {step:3}  loss {loss.detach():.3f}  sparsity {session.metrics()['sparsity']:.3f}")

    with torch.no_grad():
        labels = torch.randint(CLASSES, (2000,))
        right = average.model(centres[labels] + 4 * torch.randn(2000, FEATURES)).argmax(1) == labels
    print(f"accuracy of the averaged weights: {100 * right.float().mean():.1f} %")

    session.detach()
    sp.densify(model)  # ordinary linear layers again, with the same weights
    print(
        f"dense again: {type(model[0]).__name__}, {(model[0].weight == 0).float().mean():.2f} of its weights are zero"
    )


if __name__ == "__main__":
    main()
