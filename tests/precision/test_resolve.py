"""What a format becomes on a device: a table."""

from __future__ import annotations

import pytest
import torch

from sparsam.kernels.formats import BF16, FP8, FP8_ROWS, FP16, FP32, INT8, MX_FP8, PRODUCT_FORMATS, TF32, arithmetic
from sparsam.precision.progressive import Progressive
from sparsam.precision.resolve import Resolved, requested, resolve
from sparsam.precision.rules import Rules

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("simulate", [False, True])
@pytest.mark.parametrize(
    ("asked", "becomes", "reason"),
    [
        (FP32, FP32, ""),
        (TF32, FP32, "fp32 for tf32: this CPU has no fast tf32 product"),
        (BF16, BF16, ""),
        (FP16, BF16, "bf16 for fp16: this CPU has no fast fp16 product"),
        (INT8, INT8, ""),
    ],
    ids=str,
)
def test_what_a_cpu_computes_in(asked, becomes, reason, simulate):
    assert resolve(asked, CPU, simulate) == Resolved(asked, becomes, "real", reason)


@pytest.mark.parametrize("asked", [FP8, FP8_ROWS, MX_FP8], ids=str)
def test_what_a_cpu_only_simulates(asked):
    with pytest.raises(ValueError) as error:
        resolve(asked, CPU)
    assert str(error.value) == (
        f"{asked}: this CPU has no fast {asked} product. "
        "Use bf16, or say simulate: true for its numbers at no gain in speed."
    )
    reason = f"this CPU has no fast {asked} product"
    assert resolve(asked, CPU, simulate=True) == Resolved(asked, asked, "simulated", reason)


def test_a_gpu_multiplies_in_bf16_fp16_and_fp32():
    with pytest.raises(ValueError, match=r"fp8: there is no fast fp8 product for cuda here. Use bf16, or say simulate"):
        resolve(FP8, GPU)
    found = {str(one.asked): one for one in requested(PRODUCT_FORMATS, GPU, simulate=True)}
    assert {name for name, one in found.items() if one.format == one.asked and one.arithmetic == "real"} == {
        "fp32",
        "bf16",
        "fp16",
    }
    assert found["tf32"].format == FP32
    assert found["tf32"].reason == "fp32 for tf32: there is no fast tf32 product for cuda here"


def test_kernels_of_blocks_know_less():
    with pytest.raises(ValueError, match=r"^int8: there is no fast int8 product of block-sparse weights. Use bf16, or"):
        resolve(INT8, CPU, blocks=True)
    assert resolve(INT8, CPU, simulate=True, blocks=True).arithmetic == "simulated"
    assert resolve(BF16, CPU, blocks=True) == Resolved(BF16, BF16)
    assert resolve(FP16, GPU, blocks=True).format == BF16


@pytest.mark.parametrize("device", [CPU, GPU, torch.device("mps")], ids=str)
@pytest.mark.parametrize("asked", PRODUCT_FORMATS, ids=str)
def test_what_it_is_called_is_what_the_product_says(asked, device):
    for blocks in (False, True):
        found = resolve(asked, device, simulate=True, blocks=blocks)
        assert found.arithmetic == arithmetic(found.format, device, blocks)
        assert bool(found.reason) == (found.format != asked or found.arithmetic == "simulated")


def test_a_policy_is_checked_as_a_whole():
    policy = Progressive("fp16", "fp8")
    with pytest.raises(ValueError, match=r"^fp8: this CPU .* simulate: true"):
        requested(policy.lowest, CPU)
    found = requested(policy.lowest, CPU, simulate=True)
    assert [(str(one.asked), str(one.format), one.arithmetic) for one in found] == [
        ("fp8", "fp8", "simulated"),
        ("fp16", "bf16", "real"),
        ("fp32", "fp32", "real"),
    ]
    assert [one.format for one in requested([*Rules().lowest, BF16], CPU)] == [BF16, FP32]
