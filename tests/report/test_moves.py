"""How the topology moved: churn, what was ever active, a density that falls, and blocks that become compact."""

from __future__ import annotations

import json

import pytest

from sparsam import report
from sparsam.report.claims import compare, notes
from sparsam.report.figures import all_figures
from sparsam.report.load import load

COMPACT_FROM = 300


@pytest.fixture
def gradual(run_folder):
    """600 steps: 100 % to 10 % of the units until step 300, then compact and three times as fast as the twin."""
    folder = run_folder()
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["kind"] == "train":
            density = max(0.1, 1 - 0.9 * record["step"] / COMPACT_FROM)
            record |= {"density": density, "sparsity": 1 - density, "ever_active": 0.6 + 0.0001 * record["step"]}
            if record["step"] > COMPACT_FROM:
                record["step_ms"], record["tokens_per_second"] = 400 / 3, 4096 / (0.4 / 3)
    records.append({"step": COMPACT_FROM, "kind": "compact", "layers": 8, "masked": 0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for path, flops in ((folder / "summary.json", 2.4e14), (folder / "twin" / "summary.json", 3.6e14)):
        summary = json.loads(path.read_text())
        figure = {"value": flops, "unit": "FLOP", "kind": "modelled"}
        paper = {**figure, "value": 1.8e14 if path.parent == folder else flops}
        summary["figures"] |= {"training_flops": figure, "training_flops_on_paper": paper}
        accuracy = 0.59 if path.parent == folder else 0.6
        summary["figures"]["accuracy"] = {"value": accuracy, "unit": "share", "kind": "measured"}
        path.write_text(json.dumps(summary))
    return folder


def rows_of(folder):
    return {row.name: row for row in compare(load(folder))}


def test_operations_are_those_of_the_whole_training(gradual):
    rows = rows_of(gradual)
    assert rows["training_flops"].gain.value == pytest.approx(1.5)
    assert rows["training_flops"].gain.kind == "modelled"
    paper = rows["training_flops_on_paper"]
    assert (paper.sparse.value, paper.gain, paper.why_not) == (1.8e14, None, "shown side by side")


def test_accuracy_stands_beside_the_twin_s_and_is_no_gain(gradual):
    row = rows_of(gradual)["accuracy"]
    assert (row.sparse.text, row.dense.text, row.gain) == ("59 %", "60 %", None)


def test_the_speed_once_compact_is_compared_over_the_same_steps(gradual):
    row = rows_of(gradual)["tokens_per_second_compact"]
    assert row.gain.value == pytest.approx(3.0, rel=0.05)
    assert row.sparse.value == pytest.approx(4096 / (0.4 / 3))
    assert rows_of(gradual)["tokens_per_second"].gain.value < row.gain.value


def test_how_the_topology_moved_is_two_figures_and_a_sentence(gradual):
    rows = rows_of(gradual)
    rewires = load(gradual).sparse.rewires
    mean = sum(record["grown"] / 600 for record in rewires) / len(rewires)
    assert rows["moved_share"].sparse.to_json() == {"value": pytest.approx(mean), "unit": "share", "kind": "measured"}
    assert rows["ever_active"].sparse.value == pytest.approx(0.66)
    assert rows["moved_share"].gain is rows["ever_active"].gain is rows["ever_active"].dense is None
    told = notes(load(gradual))
    assert f"on average over {len(rewires)} updates; 66 % of all units were active at some time, the others" in str(
        told
    )
    assert any(line.startswith("Sparsity went from 0.3 % at the first step to 90 % at the last") for line in told)
    assert "Up to step 300 all weights were kept and multiplied, zeros too (masked storage)" in str(told)


def test_a_summary_s_own_figures_come_first(gradual):
    path = gradual / "summary.json"
    summary = json.loads(path.read_text())
    summary["figures"]["ever_active"] = {"value": 1.0, "unit": "share", "kind": "measured"}
    path.write_text(json.dumps(summary))
    assert rows_of(gradual)["ever_active"].sparse.value == 1.0
    assert "updates; all units were active at some time." in str(notes(load(gradual)))


def test_the_picture_of_it(gradual):
    figures = all_figures(load(gradual))
    assert list(figures)[-2:] == ["rewires", "topology"]
    active, ever = figures["topology"].data
    assert (active.x[-1], active.y[-1], ever.y[-1]) == (600, pytest.approx(10.0), pytest.approx(66.0))
    assert [shape.x0 for shape in figures["topology"].layout.shapes] == [COMPACT_FROM]
    page = report.write(gradual).html.read_text()
    assert "Units active now and at some time" in page
    assert "Operations of the training" in page
    assert "Operations per step" not in page


def test_runs_that_noted_none_of_it_say_nothing_of_it(run_folder):
    folder = run_folder()
    assert not {"ever_active", "training_flops", "accuracy", "tokens_per_second_compact"} & rows_of(folder).keys()
    assert "topology" not in all_figures(load(folder))
    assert not any("at some time" in line or "Sparsity went" in line for line in notes(load(folder)))


def test_a_run_that_only_pruned_moved_nothing(run_folder):
    folder = run_folder()
    text = (folder / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in text.splitlines()]
    text = "".join(json.dumps(record | ({"grown": 0} if "grown" in record else {})) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    assert "moved_share" not in rows_of(folder)
