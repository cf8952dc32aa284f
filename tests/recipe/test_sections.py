from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsam.recipe import Recipe, parse_recipe
from sparsam.sparse.allocation import erdos_renyi, uniform
from sparsam.sparse.methods import DropGrow, Resize, Then
from sparsam.sparse.patterns import NM, Block, Neuron, Unstructured
from sparsam.sparse.scores import fisher, gradient, magnitude, momentum, taylor


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


def sparsity(steps=500, **section):
    return recipe(sparsity=section, training={"steps": steps}).sparsity


def test_every_pattern_is_built():
    assert sparsity(pattern={"type": "nm", "n": 1, "m": 4}).pattern.build() == NM(1, 4)
    assert sparsity(pattern={"type": "neuron"}).pattern.build() == Neuron()
    assert sparsity(pattern={"type": "nm", "n": 1, "m": 4}).density == 0.25
    assert sparsity(pattern={"type": "nm"}, density=0.1).density == 0.1


@pytest.mark.parametrize(
    ("method", "start", "at", "last", "storage"),
    [
        ({"type": "gmp"}, 1.0, {375: 0.1, 0: 1.0, 187: 0.1 + 0.9 * (188 / 375) ** 3}, 375, "masked"),
        ({"type": "granet", "initial": 0.5, "until": 0.5}, 0.5, {0: 0.5, 250: 0.1}, 250, "masked"),
        ({"type": "taylor_pruning", "every": 20}, 1.0, {0: 1.0, 20: 0.8, 40: 0.64, 220: 0.1}, 220, "masked"),
        ({"type": "ac_dc"}, 1.0, {0: 1.0, 100: 0.1, 200: 1.0, 300: 0.1}, 300, "masked"),
        ({"type": "resize", "schedule": {"initial": 0.8}}, 0.8, {0: 0.8, 375: 0.1}, 375, "masked"),
        (
            {"type": "resize", "schedule": {"type": "stages", "values": [[0, 1], [0.1, 0.3], [0.2, 0.1]]}},
            1.0,
            {49: 1.0, 50: 0.3, 99: 0.3, 100: 0.1},
            100,
            "masked",
        ),
        ({"type": "recovery"}, 0.1, {0: 0.1, 149: 0.1, 250: 0.105, 400: 1.0}, 400, "masked"),
        ({"type": "recovery", "prune": 0.1}, 1.0, {49: 1.0, 50: 0.1, 149: 0.1, 250: 0.105, 400: 1.0}, 400, "masked"),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else None,
)
def test_methods_that_change_density(method, start, at, last, storage):
    section = sparsity(method=method)
    assert section.method.start(section.density) == start
    built = section.build_method(500)
    resize = built.first if isinstance(built, Then) else built
    assert isinstance(resize, Resize)
    assert {step: resize.density(step) for step in at} == pytest.approx(at)
    assert resize.until == last == section.method.last(500, section.density)
    assert section.starts_masked
    assert section.compact_at(500) == (None if method["type"] == "recovery" else last)
    assert str(last) in section.method.text(500, section.density)


def test_what_ends_with_the_training_has_no_use_for_compact_storage():
    assert sparsity(method={"type": "gmp", "until": 1.0}).compact_at(500) is None
    assert sparsity(method={"type": "gmp"}, pattern={"type": "unstructured"}).compact_at(500) is None
    assert sparsity(method={"type": "gmp"}, storage="masked").compact_at(500) is None
    assert sparsity(method={"type": "gmp", "until": 0.29}).compact_at(100) == 29


def test_scores_and_shares_of_a_resize():
    section = sparsity(
        method={"type": "resize", "keep": "taylor", "grow": "momentum", "fraction": 0.2, "every": 7},
        allocation={"type": "by_sensitivity", "score": "taylor"},
    )
    built = section.build_method(500)
    assert isinstance(built, Then)
    assert (built.first.keep, built.first.grow, built.first.every) == (taylor, momentum, 7)
    assert (built.second.drop, built.second.grow, built.second.every, built.second.until) == (taylor, momentum, 7, 375)
    assert (built.second.fraction(0), built.second.fraction(375)) == (0.2, 0.0)
    limited = sparsity(method={"type": "resize", "schedule": {"limit_rate": 0.005}}).build_method(500)
    assert limited.density(1) == pytest.approx(1.0, abs=0.005)
    late = sparsity(method={"type": "resize", "schedule": {"begin": 0.5}}).build_method(500)
    assert (late.begin, late.every, late.due(200), late.due(300)) == (250, 100, False, True)
    stages = sparsity(method={"type": "resize", "schedule": {"type": "stages"}}).build_method(500)
    assert [step for step in range(1, 501) if stages.due(step)] == [250]


def test_methods_of_constant_density():
    built = sparsity(method={"type": "drop_grow", "drop": "fisher", "grow": "random", "every": 3}).build_method(500)
    assert isinstance(built, DropGrow)
    assert (built.drop, built.every, built.until, built.fraction(0)) == (fisher, 3, 375, 0.3)
    section = sparsity(pattern={"type": "nm"}, method={"type": "sr_ste", "decay": 1e-3, "until": 0.5})
    built = section.build_method(500)
    assert (built.hidden_decay, built.every, built.until) == (1e-3, 1, 250)
    assert section.starts_masked
    grows = sparsity(method={"type": "drop_grow", "grow": "momentum"})
    assert grows.starts_masked
    assert grows.compact_at(500) is None
    assert not sparsity().starts_masked


def test_allocations_are_built_one_to_one():
    assert sparsity(allocation="erdos_renyi", method={"type": "gmp"}).build_method(500).allocation is erdos_renyi
    assert sparsity(method={"type": "gmp"}).build_method(500).allocation is uniform
    named = sparsity(allocation="global", method={"type": "taylor_pruning", "every": 5}).allocation
    assert (named.type, named.score, named.floor) == ("global", "magnitude", 0.1)
    built = sparsity(allocation={"type": "global", "score": "gradient"}, method={"type": "gmp"}).build_method(500)
    assert built.needs_gradient
    assert sparsity(pattern={"type": "nm"}, method={"type": "ac_dc"}).build_method(500).allocation is uniform
    assert sparsity(method={"type": "ac_dc"}).build_method(500).allocation is not uniform
    assert built.keep is magnitude
    assert built.grow is not gradient


def test_a_penalty_ends_where_it_is_told_to():
    penalty = sparsity(l1={"strength": 0.01, "until": 0.3, "groups": True}).l1
    part = penalty.build(100, Block(32, 32))
    assert [part.strength(step) for step in (0, 29, 30)] == [0.01, 0.01, 0.0]
    assert part.groups == Block(32, 32)
    assert sparsity(l1={"strength": 0.01}).l1.build(100, Block(32, 32)).groups is False


def test_recovery_lowers_the_rate():
    found = recipe(
        sparsity={"method": {"type": "recovery", "prune": 0.2, "low_rate": 0.5}},
        optimizer={"warm_up": 0.0, "final_lr": 1.0},
        training={"steps": 100},
    )
    rate = found.rate()
    assert [rate(step) for step in (0, 19, 20, 29, 55, 80, 99)] == pytest.approx([1, 1, 0.5, 0.5, 0.75, 1, 1])
    assert found.rate(sparse=False)(20) == 1.0


MODEL = {"model": {"layers": 1, "width": 32, "heads": 1}, "training": {"steps": 8, "batch": 2, "context": 16}}
SMALL = {"type": "block", "rows": 8, "cols": 8}
GRADUAL = {"type": "gmp", "every": 2, "until": 0.5}


@pytest.mark.parametrize(
    ("section", "density", "storage", "slots"),
    [
        ({"method": GRADUAL}, 1.0, "masked", None),
        ({"method": {**GRADUAL, "initial": 0.5}, "storage": "compact", "density": 0.25}, 0.5, "compact", 64),
        ({"method": GRADUAL, "storage": "masked"}, 1.0, "masked", None),
        ({"method": {"type": "drop_grow", "grow": "momentum"}, "density": 0.25}, 0.25, "masked", None),
    ],
)
def test_where_a_model_begins(section, density, storage, slots):
    found = recipe(sparsity={"pattern": SMALL, **section}, **MODEL)
    model = found.build_model()
    table = found.sparsity.apply(model, None, found)
    assert table.density == density
    assert {row.storage for row in table.rows if row.units} == {storage}
    if slots is not None:
        assert len(model.blocks[0].up.values) == slots
    reasons = {row.reason for row in table.rows if row.units}
    planned = {"masked until step 4, then compact where that is faster"}
    assert reasons == (planned if found.sparsity.compact_at(8) and storage == "masked" else {"asked for"})
    assert found.sparsity.inspect(found.build_model(), None, found).rows == table.rows
