from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam.recipe import Recipe, parse_recipe
from sparsam.sparse.patterns import Block, Unstructured


def recipe(**sections) -> Recipe:
    return Recipe.model_validate({"version": 1, **sections})


def test_patterns_and_methods_are_built_one_to_one():
    sparsity = recipe(sparsity={"pattern": {"rows": 16, "cols": 8}, "method": {"type": "set", "every": 3}}).sparsity
    assert sparsity.pattern.build() == Block(16, 8)
    method = sparsity.method.build(steps=40)
    assert (method.every, method.until, method.needs_gradient) == (3, 30, False)
    assert method.fraction(0) == pytest.approx(0.3)
    assert method.fraction(30) == 0.0
    sparsity = recipe(sparsity={"pattern": {"type": "unstructured"}, "method": {"type": "static"}}).sparsity
    assert sparsity.pattern.build() == Unstructured()
    assert not sparsity.method.build(10).due(5)
    assert recipe().sparsity.method.build(1000).needs_gradient


def test_weight_decay_spares_vectors():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = recipe(optimizer={"lr": 0.5, "weight_decay": 0.3}).optimizer.build(model)
    decays = {len(p.shape): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.3, 1: 0.0}
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 0.5


def test_the_rate_warms_up_and_falls_to_its_share():
    schedule = recipe(optimizer={"warm_up": 0.1, "final_lr": 0.2}).optimizer.schedule(100)
    assert [schedule(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert schedule(55) == pytest.approx(0.6)
    assert schedule(100) == pytest.approx(0.2)
    assert all(0.2 <= schedule(step) <= schedule(step - 1) for step in range(11, 101))


def test_the_twin_is_the_same_in_all_but_sparsity():
    sparse = parse_recipe("version: 1\ntraining: {seed: 3}\noptimizer: {lr: 0.5}")
    dense = sparse.dense()
    assert dense.sparsity is None
    assert dense.twin == "none"
    assert dense.model_dump(exclude={"sparsity", "twin"}) == sparse.model_dump(exclude={"sparsity", "twin"})
    assert parse_recipe(dense.yaml()) == dense


def test_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = recipe(data={"path": "text"}, model="models/x").resolved()
    assert (found.data.path, found.model) == (str(tmp_path / "text"), str(tmp_path / "models" / "x"))
    assert recipe().resolved() == recipe()
