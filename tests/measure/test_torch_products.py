"""Torch's own products in low formats: where torch knows them, they are products."""

from __future__ import annotations

import pytest
import torch

from sparsam.kernels.formats import FP32
from sparsam.measure import product_profile
from sparsam.measure.product_profile import ProductPath, ProductShape
from sparsam.measure.torch_products import TORCH_PATHS


@pytest.mark.parametrize("name", TORCH_PATHS)
def test_what_is_timed_is_the_product(name):
    shape = ProductShape("forward", 16, 48, 32, 1)
    try:
        y = product_profile._call(shape, TORCH_PATHS[name])()
    except (RuntimeError, AttributeError) as missing:
        pytest.skip(f"torch does not know it here: {missing}")
    exact = product_profile._call(shape, ProductPath(FP32))()
    assert y.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(y.float().flatten(), exact.flatten(), dim=0) > 0.99
