"""Clocks, counters and figures: what every benchmark and report measures with."""

from sparsam.measure.breakdown import step_breakdown
from sparsam.measure.clock import Ratio, Timing, geometric_mean, interleaved, ratio
from sparsam.measure.device_profile import DeviceProfile, LinearShape, LinearTiming
from sparsam.measure.figure import Figure, estimated, measured, modelled, simulated
from sparsam.measure.flops import StepFlops, training_step
from sparsam.measure.machine import allowed_cpus, describe, thread_allowance, thread_warning
from sparsam.measure.memory import peak_rss_bytes, reset_peak_rss, training_bytes
from sparsam.measure.product_profile import ProductPair, ProductProfile, ProductShape, ProductTime
from sparsam.measure.speed import dense_flops_per_second
from sparsam.measure.subnormals import are_flushed, flush_subnormals

__all__ = [
    "DeviceProfile",
    "Figure",
    "LinearShape",
    "LinearTiming",
    "ProductPair",
    "ProductProfile",
    "ProductShape",
    "ProductTime",
    "Ratio",
    "StepFlops",
    "Timing",
    "allowed_cpus",
    "are_flushed",
    "dense_flops_per_second",
    "describe",
    "estimated",
    "flush_subnormals",
    "geometric_mean",
    "interleaved",
    "measured",
    "modelled",
    "peak_rss_bytes",
    "ratio",
    "reset_peak_rss",
    "simulated",
    "step_breakdown",
    "thread_allowance",
    "thread_warning",
    "training_bytes",
    "training_step",
]
