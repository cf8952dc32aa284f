"""The recipes that are promised read as they stand, and run to their end on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsam import report
from sparsam.recipe import read_recipe
from sparsam.run import Run
from sparsam.train import Training, train

FOLDER = Path(__file__).parents[2] / "examples" / "recipes"
TINY = ["model={layers: 1, width: 64, heads: 1}", "twin=none"]
SMALL = "training={steps: 50, batch: 2, context: 16, evaluate_every: 25, evaluate_windows: 4, checkpoint_every: 50}"
# what a run of 50 steps needs, and what it comes to: step at which blocks are compact, densities by step
RECIPES = {
    "a_adaptive_masks": (["sparsity.method.every=10"], 30, {1: 0.8, 10: 0.675, 20: 0.425, 30: 0.3, 50: 0.3}),
    "b_second_order": ([], 37, {3: 1.0, 4: 0.8, 8: 0.64, 28: 0.2, 36: 0.2, 37: 0.4, 50: 0.4}),
    "c_recovery": (["sparsity.method.every=1"], None, {14: 1.0, 15: 0.2, 25: 0.2, 30: 0.225, 40: 1.0}),
    "d_l1": ([], 25, {24: 1.0, 25: 0.2, 50: 0.2}),
}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number} of a small text, over and over\n" for number in range(200)))
    return f"data.path={path}"


def test_every_recipe_is_run_here():
    assert {path.stem for path in FOLDER.glob("*")} == RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_it_runs_to_its_end(name, text, tmp_path):
    path = FOLDER / f"{name}.yaml"
    assert f"sparsam train examples/recipes/{path.name}" in path.read_text()
    as_it_stands = read_recipe(path)
    assert as_it_stands.twin == "full"
    assert as_it_stands.training.steps == 500
    settings, compact_at, densities = RECIPES[name]
    small = ["sparsity.pattern={type: block, rows: 8, cols: 8}", "sparsity.if_slow=compact", SMALL]
    recipe = read_recipe(path, [*TINY, text, *small, *settings])
    with Run.create(tmp_path / "run", recipe.yaml()) as run:
        train(Training(recipe, run, pytest.fail), lambda progress: None, lambda: False)
        records = list(run.records())
        figures = run.read("summary.json")["figures"]
    found = {record["step"]: record["density"] for record in records if record["kind"] == "train"}
    assert {step: found[step] for step in densities} == pytest.approx(densities, abs=0.01)
    assert [record["step"] for record in records if record["kind"] == "compact"] == ([compact_at] if compact_at else [])
    losses = [record["loss"] for record in records if record["kind"] == "eval"]
    assert losses[-1] < losses[0]
    assert figures["training_flops_on_paper"]["value"] < 50 * figures["flops_per_step_dense"]["value"]
    assert report.read(tmp_path / "run").sentence


def test_the_first_one_computes_less_and_its_rate_is_lower(text):
    recipe = read_recipe(FOLDER / "a_adaptive_masks.yaml")
    assert recipe.sparsity.compact_at(500) == 300
    assert recipe.sparsity.lr_factor == 0.75
    method = recipe.sparsity.build_method(500)
    assert [step for step in range(1, 501) if method.due(step)] == [100, 200, 300]


def test_the_third_one_slows_down_after_its_pruning():
    rate = read_recipe(FOLDER / "c_recovery.yaml").rate()
    assert rate(150) < 0.15 * rate(149)
    assert rate(400) > rate(300)
