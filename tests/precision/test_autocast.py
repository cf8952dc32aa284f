"""What the rest of a model is computed in under autocast on a CPU: torch's own choices, on which the table relies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

WIDTH = 96


def rows():
    return 3 * torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()


OPERATIONS = {
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,), torch.linspace(0.5, 2, WIDTH), torch.linspace(-1, 1, WIDTH)),
    "group norm": lambda x: F.group_norm(x.view(8, 8, WIDTH), 2),
    "batch norm": lambda x: F.batch_norm(x, None, None, torch.ones(WIDTH), torch.zeros(WIDTH), training=True),
    "softmax": lambda x: F.softmax(x, -1),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_norms_and_softmax_are_float32_inside(operation):
    """Computed from bf16 in float32 and rounded once, so that a rule "norms in fp32" has nothing left to do."""
    x = rows()
    with torch.autocast("cpu", torch.bfloat16):
        low = operation(x)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, operation(x.float()).bfloat16())


LOSSES = {
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(64)),
    "mean square": lambda x: F.mse_loss(x, x.roll(1, 0)),
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, x.float().sigmoid().roll(1, 0)),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_losses_are_float32(loss):
    x = rows()
    with torch.autocast("cpu", torch.bfloat16):
        low = loss(x)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, loss(x.float()))
