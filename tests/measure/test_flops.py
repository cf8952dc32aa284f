"""FLOPs by hand: products of a step, sparse layers by their blocks, masked layers in full, nothing left behind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsam.kernels.attention import self_attention
from sparsam.kernels.index import build_index
from sparsam.kernels.ops import backend, block_linear
from sparsam.measure import flops


class Compact(nn.Module):
    """The shape of a compact layer: two of six 2x2 blocks of a 6x4 weight, one dead slot."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 4, 6
        self.values = nn.Parameter(torch.randn(3, 2, 2))
        self.register_buffer("block_row", torch.tensor([0, 2, -1], dtype=torch.int32))
        self.register_buffer("block_col", torch.tensor([1, 0, -1], dtype=torch.int32))

    def forward(self, x):
        return block_linear(x, self.values, build_index(self.block_row, self.block_col, 3, 2), 6)


def test_formulas():
    assert flops.linear(3, 4, 5) == 2 * 3 * 4 * 5
    assert flops.linear(3, 4, 5, density=0.5) == 3 * 4 * 5
    assert flops.attention(2, 3, 4, 4, 8, causal=False) == 2 * 2 * (2 * 3 * 4 * 4 * 8)
    assert flops.attention(2, 3, 4, 4, 8, causal=True) == 2 * 2 * (2 * 3 * 10 * 8)


def test_dense_step_is_three_times_the_forward():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    counted = flops.training_step(model, torch.randn(5, 3, 4))
    forward = 2 * 15 * 4 * 8 + 2 * 15 * 8 * 2
    assert counted.dense == counted.computed == counted.on_paper == 3 * forward
    assert set(counted.layers) == {"0", "2"}


def test_compact_layer_counts_its_live_blocks():
    counted = flops.training_step(nn.Sequential(Compact()), torch.randn(5, 4))
    assert counted.dense == 3 * 2 * 5 * 4 * 6
    assert counted.computed == counted.on_paper == 3 * 2 * 5 * (2 * 4)


def test_compact_layer_whose_product_is_dense_computes_everything():
    layer = Compact()
    layer.product = "dense"
    counted = flops.training_step(nn.Sequential(layer), torch.randn(5, 4))
    assert counted.computed == counted.dense
    assert counted.on_paper < counted.dense


def test_masked_layer_saves_on_paper_only():
    layer = nn.Linear(4, 6)
    topology = torch.zeros(6, 4, dtype=torch.bool)
    topology[0] = True
    layer.register_buffer("weight_topology", topology)
    counted = flops.training_step(nn.Sequential(layer), torch.randn(5, 4))
    assert counted.computed == counted.dense
    assert counted.on_paper == pytest.approx(counted.dense / 6)


class Attention(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, qkv):  # (B, T, 3, H, D)
        if self.how == "own":
            return self_attention(qkv)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (q.flatten(0, 1) @ k.flatten(0, 1).mT) @ v.flatten(0, 1)


@pytest.mark.parametrize(("how", "causal"), [("sdpa", True), ("bmm", False)])
def test_attention(how, causal):
    counted = flops.training_step(Attention(how), torch.randn(2, 16, 3, 4, 32))
    assert counted.dense == 3 * flops.attention(2, 4, 16, 16, 32, causal)


def test_own_attention_is_counted_by_the_path_that_it_takes():
    x = torch.randn(2, 16, 3, 4, 32)
    once = flops.attention(2, 4, 16, 16, 32, causal=True)
    full = flops.attention(2, 4, 16, 16, 32, causal=False)  # plain products mask what they have computed
    assert flops.training_step(Attention("own"), x).dense == 3 * full
    with torch.autocast("cpu", torch.bfloat16):
        counted = flops.training_step(Attention("own"), x)
    assert counted.dense == 3 * (once if backend() == "amx" else full)


def test_several_micro_batches():
    counted = flops.training_step(nn.Linear(4, 6), torch.randn(5, 4))
    assert counted.times(3).dense == counted.times(3).layers[""][0] == 3 * counted.dense


def test_convolution():
    counted = flops.training_step(nn.Conv2d(3, 8, 3, padding=1, bias=False), torch.randn(2, 3, 5, 5))
    assert counted.dense == 3 * 2 * (2 * 8 * 25) * (3 * 9)


def test_tied_head_is_seen_through_its_product():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(11, 4)

        def forward(self, ids):
            return F.linear(self.embed(ids), self.embed.weight)

    assert flops.training_step(Tied(), torch.arange(6)[None]).dense == 3 * 2 * 6 * 4 * 11


def test_model_and_random_state_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    model[0].eval()
    before, state = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    flops.training_step(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model] == [False, True, True, True]
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_hooks_are_gone_after_an_error():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        flops.training_step(model, torch.randn(5, 3))
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
