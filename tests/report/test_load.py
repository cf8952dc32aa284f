"""Reading a run folder: whole ones, torn ones, and one line for each that is none."""

from __future__ import annotations

import json

import pytest

from sparsam.report.load import ReportError, load


def test_a_whole_run(run_folder):
    run = load(run_folder())
    assert run.twin == "full"
    assert run.sparse.steps == run.dense.steps == 600
    assert (len(run.sparse.train), len(run.sparse.evaluations), len(run.sparse.rewires)) == (600, 13, 8)
    assert run.sparse.figures["tokens_per_second"].unit == "tokens/s"
    assert run.sparse.finished
    assert [layer.storage for layer in run.layers].count("compact") == 8
    assert run.table == {"density": 0.1, "density_all": 0.14}
    assert run.recipe["training"]["steps"] == 600
    assert run.environment["isa"] == "amx"


def test_a_line_cut_short_by_a_kill_is_left_out(run_folder):
    folder = run_folder()
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 601, "kind": "tra')
    assert load(folder).sparse.steps == 600


def test_a_run_that_was_stopped_early_needs_only_its_metrics(run_folder):
    folder = run_folder(twin="none")
    for name in ("summary.json", "layers.json", "environment.json", "recipe.yaml"):
        (folder / name).unlink()
    run = load(folder)
    assert not run.sparse.finished
    assert run.twin == "none"
    assert run.layers == []


def test_a_twin_that_has_not_taken_a_step_is_no_twin(run_folder):
    folder = run_folder()
    (folder / "twin" / "metrics.jsonl").write_text("")
    assert load(folder).dense is None


@pytest.mark.parametrize(("evaluated", "mode"), [(True, "full"), (False, "sampled")])
def test_without_a_recipe_only_an_evaluated_twin_counts_as_full(run_folder, evaluated, mode):
    folder = run_folder(twin="full" if evaluated else "sampled")
    (folder / "recipe.yaml").unlink()
    assert load(folder).twin == mode


def test_a_breakdown_beside_the_summary_is_read_too(run_folder):
    folder = run_folder()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "breakdown.json").write_text(json.dumps(summary.pop("breakdown")))
    (folder / "summary.json").write_text(json.dumps(summary))
    assert load(folder).sparse.breakdown["attention"].value == 88.0


def test_no_folder_and_no_run(tmp_path):
    with pytest.raises(
        ReportError, match=r"nowhere: expected a run folder, found none. Give the folder that `sparsam train`"
    ):
        load(tmp_path / "nowhere")
    with pytest.raises(ReportError, match=r"expected a run folder with metrics.jsonl, found none. Give the folder"):
        load(tmp_path)


def test_nothing_trained_yet(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "kind": "eval", "loss": 5.5}\n')
    with pytest.raises(
        ReportError, match=r"expected at least one step of training, found none. Train first, then report"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "metrics.jsonl",
            '{"step": 1}\nnonsense\n{"step": 2}\n',
            r"metrics.jsonl: expected one JSON object .*, line 2 is",
        ),
        ("metrics.jsonl", "[1]\n", r"metrics.jsonl: expected one JSON object with a step per line, line 1 is damaged"),
        ("summary.json", "{", r"summary.json: expected JSON, the file is damaged. Remove it, or resume the run"),
        ("summary.json", "[]", r"summary.json: expected a JSON object, got list"),
        ("summary.json", '{"figures": []}', r"summary.json: expected figures by name, got list"),
        ("summary.json", '{"figures": {"a": {"value": 1}}}', r"summary.json: a: figure: expected value, unit and kind"),
        ("summary.json", '{"figures": {"a": NaN}}', r"summary.json: a: figure: expected a finite number"),
        ("layers.json", '{"rows": [{"name": "a"}]}', r"layers.json: expected rows with name, kind, shape, storage"),
        ("layers.json", '{"rows": [3]}', r"layers.json: expected rows with name"),
        ("environment.json", "\x00", r"environment.json: expected JSON, the file is damaged"),
        ("recipe.yaml", "a: [", r"recipe.yaml: expected YAML, the file is damaged"),
    ],
)
def test_damaged_files_are_named(run_folder, name, content, message):
    folder = run_folder()
    (folder / name).write_text(content)
    with pytest.raises(ReportError, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)
