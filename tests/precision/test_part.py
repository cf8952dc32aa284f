"""Number formats of the forward pass: bf16 through autocast, weights and moments stay float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam import Precision, Session


@pytest.mark.parametrize(("format", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_forward_runs_in_the_format_and_the_weights_do_not(format, dtype):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    session = Session(model, optimizer, [Precision(format)])
    with session.forward():
        y = model(torch.randn(2, 4))
    assert y.dtype == dtype
    assert model(torch.randn(2, 4)).dtype == torch.float32  # outside, nothing is left
    session.backward(y.float().sum())
    session.step()
    state = optimizer.state[model.weight]
    assert model.weight.dtype == state["exp_avg"].dtype == torch.float32


def test_a_format_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="precision: expected fp32 or bf16, got 'fp8'"):
        Precision("fp8")
