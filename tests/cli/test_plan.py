"""`sparsam plan`: from a file of a cluster to tables, JSON and a page; and each line that refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CLUSTER = """
version: 1
nodes: 2
ranks_per_node: 2
device: DEVICE
memory_gib: 1
links:
  inside: {alpha_seconds: 1e-6, bits_per_second: 1e11}
  between: {alpha_seconds: 1e-5, bits_per_second: 1e9}
price_per_hour: 1.0
"""
STATED = "{flops_per_second: 1e12, memory_bytes_per_second: 1e11}"


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "stated.yaml"
    path.write_text(CLUSTER.replace("DEVICE", STATED))
    return path


def test_a_plan(sparsam, cluster, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = sparsam("plan", "gpt:2x128", "--cluster", cluster, "--batch", 2, "--json", "p.json", "--html", "p.html")
    assert result.status == 0
    for part in (
        "Every figure is modelled",
        "2 nodes of 2 ranks, 2 x 256 tokens",
        "sparse, compressed",
        "256 workers: 62 % fewer bytes sent, 1.83x the speed: modelled over Gbit/s between nodes",
        "1024 workers: 78 % fewer bytes between nodes, 92 % efficiency: modelled over Gbit/s between nodes",
    ):
        assert part in " ".join(result.out.split()), part
    text = " ".join(result.out.split())
    assert " measured" not in text.replace("none measured on this cluster", "")
    # no column is lost in a narrow terminal
    assert text.count("kept saved 0.1 1 10 100 400") == 2
    plan = json.loads(Path("p.json").read_text())
    assert list(plan["settings"]) == ["dense", "dense, compressed", "sparse", "sparse, compressed"]
    figures = [figure for row in plan["settings"].values() for figure in row.values()]
    assert {figure["kind"] for figure in [*figures, *plan["promises"]]} == {"modelled"}
    assert plan["settings"]["sparse"]["sent_bytes"]["value"] < plan["settings"]["dense"]["sent_bytes"]["value"]
    assert plan["efficiency"]["dense"][0] == [1, 1.0, "modelled"]
    page = Path("p.html").read_text()
    assert "Parallel efficiency against workers" in page
    assert 'src="http' not in page  # nothing is loaded


def test_a_recipe_says_all_but_the_model(sparsam, recipe, cluster):
    result = sparsam("plan", "gpt:1x64", "--cluster", cluster, "--recipe", recipe, "--shard", "--recompute", 1)
    assert result.status == 0
    assert "1 layer, width 64, 1 head, 75 % sparse" in result.out
    assert "2 x 16 tokens" in result.out


def test_a_recipe_that_recomputes_is_planned_so(sparsam, recipe, cluster):
    def memory(*more):
        assert sparsam("plan", recipe, "--cluster", cluster, "--batch", 16, "--json", "p.json", *more).status == 0
        return json.loads(Path("p.json").read_text())["settings"]["dense"]["memory_bytes"]["value"]

    text = recipe.read_text().replace("layers: 1", "layers: 4")
    recipe.write_text(text)
    plain, asked = memory(), memory("--recompute", 1)
    recipe.write_text(text + "memory: {recompute: 1}\n")
    assert memory() == asked < plain
    recipe.write_text(text + "memory: {recompute: 1, selective: true}\n")
    assert memory() == plain  # not modelled


def test_a_plan_from_a_short_run(sparsam, recipe, tmp_path):
    (tmp_path / "here.yaml").write_text(CLUSTER.replace("DEVICE", "measured here"))
    result = sparsam("plan", recipe, "--cluster", "here.yaml", "--json", "p.json")
    assert result.status == 0
    step = json.loads(Path("p.json").read_text())["settings"]["sparse"]["step_ms"]
    assert step["value"] > 0
    assert step["kind"] == "modelled"


def test_a_dense_recipe_is_planned_dense(sparsam, recipe, cluster):
    text = recipe.read_text()
    begin, end = text.index("sparsity:"), text.index("training:")
    recipe.write_text(text[:begin] + "sparsity: null\n" + text[end:])
    result = sparsam("plan", recipe, "--cluster", cluster, "--json", "p.json")
    assert result.status == 0
    assert list(json.loads(Path("p.json").read_text())["settings"]) == ["dense", "dense, compressed"]


def test_what_does_not_fit_is_said(sparsam, cluster):
    cluster.write_text(cluster.read_text().replace("memory_gib: 1", "memory_gib: 0.001"))
    assert "do not fit into 0.001 GiB." in sparsam("plan", "gpt:1x64", "--cluster", cluster).out


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("gpt:6", [], "gpt:6: expected gpt:LAYERSxWIDTH, e.g. gpt:6x512. Other GPTs go into a recipe."),
        ("gpt:0x64", [], "model.layers: expected at least 1, got 0."),
        ("nowhere", [], "nowhere: expected a recipe (a YAML file), found nothing there."),
        ("gpt:1x64", ["--recipe", "nowhere"], "nowhere: expected a recipe (a YAML file), found nothing there."),
        ("gpt:1x64", ["--batch", "0"], "Invalid value for '--batch'"),
        ("gpt:1x64", ["--recompute", "0"], "Invalid value for '--recompute'"),
        ("gpt:1x64", ["--json", "nowhere/p.json"], "nowhere/p.json: expected to write the plan, got: No such file"),
    ],
)
def test_refused_in_one_line(sparsam, cluster, model, more, message):
    result = sparsam("plan", model, "--cluster", cluster, *more)
    assert result.status != 0
    assert message in result.err


def test_a_cluster_is_needed_and_read(sparsam, tmp_path):
    assert "Missing option '--cluster'" in sparsam("plan", "gpt:1x64").err
    missing = sparsam("plan", "gpt:1x64", "--cluster", "nowhere.yaml")
    assert "nowhere.yaml: expected the description of a cluster (a YAML file), found nothing there." in missing.err


def test_windows_of_micro_batches_are_refused(sparsam, recipe, cluster):
    recipe.write_text(recipe.read_text().replace("training: {", "training: {accumulate: 2, "))
    result = sparsam("plan", recipe, "--cluster", cluster)
    assert "plan: expected training.accumulate 1, got 2." in result.err
