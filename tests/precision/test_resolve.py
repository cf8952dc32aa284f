"""What a format becomes on a device: a table."""

from __future__ import annotations

import pytest
import torch

from sparsam.kernels.formats import BF16, FP8, FP8_ROWS, FP16, FP32, INT8, MX_FP8, PRODUCT_FORMATS, TF32
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


@pytest.mark.parametrize(
    ("capability", "lacking"),
    [
        ((7, 5), {"tf32", "int8", "fp8", "fp8_rows", "mx_fp8"}),
        ((8, 0), {"fp8", "fp8_rows", "mx_fp8"}),
        ((8, 9), {"fp8_rows", "mx_fp8"}),
        ((9, 0), {"mx_fp8"}),
        ((10, 0), set()),
    ],
)
def test_what_a_gpu_computes_in(capability, lacking, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = requested(PRODUCT_FORMATS, GPU, simulate=True)
    assert {one.asked.name for one in found if one.arithmetic == "simulated" or one.format != one.asked} == lacking
    if FP8.name in lacking:
        with pytest.raises(ValueError, match=r"fp8: this device \(cuda\) has no fast fp8 product"):
            resolve(FP8, GPU)


def test_other_devices_have_no_8_bit_products():
    found = requested(PRODUCT_FORMATS, torch.device("mps"), simulate=True)
    assert [one.asked for one in found if one.format == one.asked and not one.reason] == [FP32, BF16, FP16]


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
