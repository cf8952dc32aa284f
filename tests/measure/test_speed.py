"""One number for a machine's speed."""

from __future__ import annotations

import pytest
import torch

from sparsam.measure import dense_flops_per_second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_speed_is_a_speed(dtype):
    assert 1e6 < dense_flops_per_second(dtype, seconds=0.01) < 1e15
