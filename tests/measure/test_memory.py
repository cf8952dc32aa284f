"""Bytes, counted by hand on small tensors; the peak only by its order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam.measure.memory import buffer_bytes, peak_rss_bytes, reset_peak_rss, tensor_bytes, training_bytes


def test_peak_does_not_fall_without_a_reset_and_sees_a_large_tensor():
    before = peak_rss_bytes()
    assert before > 2**20
    allowed = reset_peak_rss()
    torch.ones(64 * 2**20, dtype=torch.uint8).sum()
    after = peak_rss_bytes()
    assert after > 2**20
    assert after >= before or allowed


def test_reset_says_when_the_kernel_refuses(monkeypatch, tmp_path):
    monkeypatch.setattr("sparsam.measure.memory._CLEAR", tmp_path / "missing" / "clear_refs")
    assert reset_peak_rss() is False


def test_peak_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr("sparsam.measure.memory._STATUS", tmp_path / "missing")
    assert peak_rss_bytes() > 2**20


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4 * 50),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 2 * 4 * 50 + 2 * 4),
    ],
    ids=["sgd", "momentum", "adamw"],
)
def test_training_bytes_by_hand(optimizer, state):
    layer = nn.Linear(9, 5)  # 45 weights and 5 biases
    chosen = optimizer(layer.parameters())
    layer(torch.ones(2, 9)).sum().backward()
    chosen.step()
    expected = {"parameters": 200, "gradients": 200, "optimizer": state}
    assert training_bytes(layer.parameters(), chosen) == expected
    chosen.zero_grad()  # freed between steps, and still what training needs
    assert training_bytes(layer.parameters(), chosen) == expected


def test_ties_count_once_and_frozen_parameters_have_no_gradient():
    layer = nn.Linear(4, 4, bias=False)
    frozen = nn.Parameter(torch.ones(8), requires_grad=False)
    assert training_bytes([layer.weight, layer.weight, frozen]) == {"parameters": 96, "gradients": 64, "optimizer": 0}


def test_half_precision_counts_half():
    assert training_bytes(nn.Linear(4, 4, bias=False).bfloat16().parameters())["parameters"] == 32


def test_only_the_named_parameters_are_counted_in_the_optimiser():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(5, 5, bias=False)
    optimizer = torch.optim.SGD([first.weight, second.weight], lr=0.1, momentum=0.9)
    (first(torch.ones(1, 3)).sum() + second(torch.ones(1, 5)).sum()).backward()
    optimizer.step()
    assert training_bytes(first.parameters(), optimizer)["optimizer"] == 36


def test_views_sparse_meta_and_empty_tensors():
    base = torch.zeros(10)
    assert tensor_bytes([base, base[:5], base.view(2, 5)]) == 40
    indices = torch.tensor([[0, 2]])
    assert tensor_bytes([torch.sparse_coo_tensor(indices, torch.ones(2), (4,), check_invariants=True)]) == 2 * 8 + 2 * 4
    assert tensor_bytes([torch.empty(3, device="meta"), torch.empty(0)]) == 12


def test_buffers():
    assert buffer_bytes(nn.BatchNorm1d(4)) == 2 * 16 + 8
