"""Subnormal numbers are zero inside and what they were outside, and a run says what it was trained with."""

from __future__ import annotations

import pytest
import torch

from sparsam.measure.subnormals import are_flushed, flush_subnormals

needs_flushing = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this machine cannot flush them")


@needs_flushing
def test_they_are_zero_inside_and_as_before_afterwards():
    tiny = torch.full((4,), 1e-40)
    assert not are_flushed()
    with flush_subnormals():
        assert are_flushed()
        assert (tiny * 1.0 == 0).all()
        with flush_subnormals():
            pass
        assert are_flushed()
    assert not are_flushed()
    assert (tiny * 1.0 > 0).all()


@needs_flushing
def test_an_error_inside_leaves_nothing_behind():
    with pytest.raises(RuntimeError), flush_subnormals():
        raise RuntimeError
    assert not are_flushed()
