from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from sparsam.sparse.patterns import Block
from sparsam.sparse.sparsify import densify, sparsify
from sparsam.tasks.gpt import GPT


def tiny(**options):
    torch.manual_seed(0)
    return GPT(**{"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 50, **options})


def test_shapes_and_the_loss_of_an_untrained_model():
    tokens = torch.randint(50, (3, 16))
    logits = tiny()(tokens)
    assert logits.shape == (3, 16, 50)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    assert float(loss.detach()) == pytest.approx(math.log(50), abs=0.2)
    assert tiny()(tokens[:, :5]).shape == (3, 5, 50)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_no_token_sees_what_follows_it(precision):
    model, tokens = tiny(width=64), torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 50
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.equal(before[0, 9:], after[0, 9:])


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "relu2", "silu"])
def test_sparse_at_full_density_is_the_dense_model(activation):
    model, tokens = tiny(activation=activation), torch.randint(50, (2, 16))
    expected = model(tokens)
    table = sparsify(model, Block(8, 8), density=1.0)
    assert {row.name for row in table.rows if row.storage == "compact"} == {
        f"blocks.{block}.{layer}" for block in (0, 1) for layer in ("qkv", "out", "up", "down")
    }
    torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
    densify(model)
    assert list(model.state_dict()) == list(tiny(activation=activation).state_dict())


def test_what_is_refused():
    with pytest.raises(ValueError, match="expected heads that divide width, got 3 heads for width 32"):
        tiny(heads=3)
    with pytest.raises(ValueError, match="expected at most 16 tokens in a sequence, got 17"):
        tiny()(torch.zeros(1, 17, dtype=torch.int64))
