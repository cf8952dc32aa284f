"""Where the time of one training step goes, part by part, as torch's own profiler sees it.

For finding what is left once the products are fast. Not for comparing two models: that is what clock.py is for.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile

from sparsam.measure.figure import Figure, measured

__all__ = ["PARTS", "step_breakdown"]

_OWN = "GeneratedBackwardFor_sparsam_"
# Part -> beginnings of operator names, first match wins. Read off the profiler, eager mode.
# The forward of an own operator is booked under the autograd function that torch generates for it.
_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("scores for rewiring", ("sparsam::block_scores",)),
    ("block-sparse products", ("sparsam::block_linear", "sparsam::packed_block_linear", _OWN + "block_linear")),
    ("attention", ("sparsam::attention", "sparsam::self_attention", _OWN + "attention", _OWN + "self_attention")),
    ("attention", ("aten::_scaled_dot_product", "aten::scaled_dot_product", "aten::bmm", "aten::baddbmm")),
    ("attention", ("aten::_softmax", "aten::softmax", "aten::tril", "aten::triu", "aten::masked_fill")),
    ("loss", ("aten::_log_softmax", "aten::log_softmax", "aten::nll_loss", "aten::cross_entropy")),
    ("dense products", ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul", "aten::mkldnn", "mkldnn")),
    ("dense products", ("aten::convolution", "aten::_convolution", "aten::mv", "aten::dot")),
    ("activation", ("aten::gelu", "aten::silu", "aten::relu", "aten::threshold", "aten::clamp_min")),
    ("norms", ("aten::native_layer_norm", "aten::layer_norm", "aten::native_batch_norm", "aten::rms_norm")),
    ("norms", ("sparsam::add_layer_norm", "sparsam::layer_norm", _OWN + "add_layer_norm", _OWN + "layer_norm")),
    ("norms", ("aten::_fused_rms_norm", "aten::native_group_norm")),
    ("embedding", ("aten::embedding", "aten::index_select", "aten::index_put", "aten::_index_put")),
    ("optimiser", ("aten::_fused_", "aten::_foreach_", "aten::linalg_vector_norm")),
    ("compiled code", ("Torch-Compiled Region", "CompiledFunction", "Compiled")),
    ("copies and casts", ("aten::copy_", "aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous", "aten::cat")),
    ("copies and casts", ("aten::zero_", "aten::fill_", "aten::zeros", "aten::empty", "aten::new_")),
)
_REST, _OUTSIDE, _OPTIMIZER = "element-wise and other", "Python between operators", "optimiser"
PARTS: tuple[str, ...] = (*dict.fromkeys(part for part, _ in _RULES), _REST, _OUTSIDE)


def step_breakdown(step: Callable[[], object], steps: int = 2, warmup: int = 1) -> dict[str, Figure]:
    """Runs a few training steps under the profiler and adds up the time by part.

    The steps are real ones: they train. The profiler itself adds some per cent, so the parts are good as shares; the
    time of a step is what `clock.interleaved` says.

    Args:
        step: one training step: forward, backward, optimiser.
        steps: how many to average over.
        warmup: run first, not counted.

    Returns:
        part -> ms per step, largest first, parts that took nothing left out; together the whole step.

    Raises:
        ValueError: fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"step_breakdown: expected at least 1 step, got {steps}. Use 2 or more.")
    for _ in range(warmup):
        step()
    recorded = profile(activities=[ProfilerActivity.CPU])
    with _without_traces():
        recorded.start()
    began = time.perf_counter()
    try:
        for _ in range(steps):
            step()
        total_us = (time.perf_counter() - began) * 1e6
    finally:
        with _without_traces():
            recorded.stop()
    spent: dict[str, float] = {}
    for event in recorded.events():
        part = _part(event)
        spent[part] = spent.get(part, 0.0) + event.self_cpu_time_total
    # What the operators do not account for is the interpreter's; other threads may make the sum exceed the clock.
    spent[_OUTSIDE] = spent.get(_OUTSIDE, 0.0) + max(0.0, total_us - sum(spent.values()))
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return {part: measured(us / 1e3 / steps, "ms") for part, us in ordered if us > 0}


def _part(event: Any) -> str:
    parent = event
    while parent is not None:
        if parent.name.startswith("Optimizer."):
            return _OPTIMIZER
        parent = parent.cpu_parent
    name = event.name
    for part, beginnings in _RULES:
        if name.startswith(beginnings):
            return part
    # Frames around operators (autograd nodes, user annotations) hold only the interpreter's time of their own.
    return _REST if name.startswith(("aten::", "sparsam::")) else _OUTSIDE


@contextmanager
def _without_traces() -> Iterator[None]:
    """Keeps the profiler's own trace lines ("USDT:...", written by C++ to stderr) out of the user's terminal."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            caught.seek(0)
            others = [line for line in caught.read().splitlines(keepends=True) if not line.startswith(b"USDT:")]
            if others:
                os.write(2, b"".join(others))
