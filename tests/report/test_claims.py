"""What may be claimed: gains by hand, and none without a twin, of quality from a sample, or from masked storage."""

from __future__ import annotations

import json

import pytest

from sparsam.report.claims import compare, notes, sparsity, time_to_twin
from sparsam.report.load import load
from sparsam.report.sentence import sentence


def rows_of(folder):
    return {row.name: row for row in compare(load(folder))}


def text_of(folder):
    run = load(folder)
    return sentence(run, compare(run))


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_gains_by_hand(run_folder):
    rows = rows_of(run_folder())
    assert rows["training_bytes"].gain.value == pytest.approx(8.0)
    assert rows["training_bytes"].gain.kind == "measured"
    assert rows["flops_per_step"].gain.value == pytest.approx(6.0)
    assert rows["flops_per_step"].gain.kind == "modelled"
    assert rows["tokens_per_second"].gain.value == pytest.approx(2.0, rel=0.02)
    assert rows["train_seconds"].gain.value == pytest.approx(2.0)
    assert rows["validation_loss"].gain is None
    assert all(row.gain is None or row.dense is not None for row in rows.values())


def test_speed_is_taken_pair_by_pair(run_folder):
    """A machine that was ten times slower for a while, for both, changes the medians alike and the ratio not at all."""
    folder = run_folder()
    before = rows_of(folder)["step_ms"].gain.value
    for metrics in (folder / "metrics.jsonl", folder / "twin" / "metrics.jsonl"):
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        for record in records:
            if record["kind"] == "train" and record["step"] > 250:
                record["step_ms"] *= 10
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert rows_of(folder)["step_ms"].gain.value == pytest.approx(before)


def test_time_to_the_twin_s_loss(run_folder):
    reached, whole = time_to_twin(load(run_folder()))
    assert whole.value == pytest.approx(240.0)
    assert 0 < reached.value < 120.0


def test_a_loss_that_rises_above_the_twin_s_again_has_not_arrived(run_folder):
    folder = run_folder()
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 600, "kind": "eval", "loss": 5.0, "seconds": 120.0}) + "\n")
    assert time_to_twin(load(folder)) is None


def test_no_twin_no_saving(run_folder):
    folder = run_folder(twin="none")
    rows = rows_of(folder)
    assert all(row.dense is None and row.gain is None for row in rows.values())
    assert rows["training_bytes"].sparse.value == 10_000_000
    assert "no dense twin ran, so no saving is claimed" in text_of(folder)
    assert "No dense twin ran beside this training, so no saving is claimed." in notes(load(folder))


def test_a_sampled_twin_says_nothing_of_quality(run_folder):
    folder = run_folder(twin="sampled")
    rows = rows_of(folder)
    assert rows["tokens_per_second"].gain.value == pytest.approx(2.0, rel=0.05)
    assert rows["training_bytes"].gain.value == pytest.approx(8.0)
    for name in ("validation_loss", "bits_per_byte", "train_seconds"):
        assert rows[name].dense is None
        assert rows[name].gain is None
    assert "time_to_twin" not in rows
    text = text_of(folder)
    assert "quality was not compared" in text
    assert "loss" not in text


def test_a_sampled_twin_that_was_evaluated_says_nothing_of_quality_either(run_folder):
    folder = run_folder(twin="full")
    recipe = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("twin: full", "twin: sampled"))
    rows = rows_of(folder)
    assert rows["validation_loss"].dense is None
    assert "time_to_twin" not in rows


def test_masked_storage_reports_time_and_bytes_and_claims_no_gain(run_folder):
    folder = run_folder(storage="masked")
    rows = rows_of(folder)
    assert rows["step_ms"].sparse.kind == rows["step_ms"].dense.kind == "measured"
    assert rows["training_bytes"].sparse.value == rows["training_bytes"].dense.value == 80_000_000
    assert rows["flops_per_step_on_paper"].sparse.value == 1.0e11
    assert all(row.gain is None for row in rows.values())
    assert rows["step_ms"].why_not == "masked storage: no gain claimed"
    assert "no gain is claimed" in text_of(folder)
    assert any(line.startswith("Masked storage keeps its zeros") for line in notes(load(folder)))


def test_a_model_that_was_grown_back_is_called_dense_again(run_folder):
    folder = run_folder(storage="masked")

    def dense_again(table):
        table["density"] = 1.0
        for row in table["rows"]:
            row["density"] = 1.0

    edit(folder / "layers.json", dense_again)
    assert text_of(folder).startswith("This model, dense again at the end of its training, trained at")


def test_masked_storage_claims_nothing_even_where_the_clock_was_kind(run_folder):
    folder = run_folder(storage="masked")
    edit(folder / "summary.json", lambda s: s["figures"]["peak_rss_bytes"].update(value=1))
    assert all(row.gain is None for row in rows_of(folder).values())


def test_one_compact_layer_is_enough_for_a_claim(run_folder):
    folder = run_folder(storage="masked")
    edit(folder / "layers.json", lambda table: table["rows"][1].update(storage="compact"))
    assert rows_of(folder)["training_bytes"].gain is not None


def test_all_layers_left_dense(run_folder):
    folder = run_folder()

    def dense(table):
        for row in table["rows"]:
            row.update(storage="dense", density=1.0)

    edit(folder / "layers.json", dense)
    edit(folder / "summary.json", lambda s: s["figures"].pop("density", None))
    assert all(row.gain is None for row in rows_of(folder).values())
    assert "No layer is sparse in this model, so no gain is claimed." in notes(load(folder))
    assert text_of(folder).startswith("This dense model trained at ")
    assert sparsity(load(folder)) is None


def test_slower_than_the_twin_is_said(run_folder):
    folder = run_folder()
    for metrics in (folder / "metrics.jsonl",):
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
        for record in records:
            if record["kind"] == "train":
                record["step_ms"] *= 4
        metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert rows_of(folder)["step_ms"].gain.value == pytest.approx(0.5, rel=0.02)
    assert "trains slower than its dense twin, at 0.50x its speed" in text_of(folder)


def test_quality_is_compared_at_a_step_that_both_have_reached(run_folder):
    folder = run_folder()
    lines = (folder / "twin" / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 310]
    (folder / "twin" / "metrics.jsonl").write_text("".join(kept))
    (folder / "twin" / "summary.json").unlink()
    run = load(folder)
    rows = {row.name: row for row in compare(run)}
    at_300 = [r["loss"] for r in run.sparse.evaluations if r["step"] == 300]
    assert rows["validation_loss"].sparse.value == at_300[0]
    assert rows["train_seconds"].sparse.value == pytest.approx(62.0)
    assert rows["train_seconds"].dense.value == pytest.approx(124.0)
    assert "time_to_twin" not in rows
    assert any(line.startswith("The dense twin has reached step 310 of 600") for line in notes(run))


def test_an_unfinished_run_is_read_from_its_metrics(run_folder):
    folder = run_folder(twin="none")
    (folder / "summary.json").unlink()
    rows = rows_of(folder)
    assert rows["tokens_per_second"].sparse.value == pytest.approx(20_000, rel=0.05)
    assert rows["validation_loss"].sparse.unit == "nats/token"
    assert "peak_rss_bytes" not in rows
    assert "The training is not finished: the figures are those of its first 600 steps." in notes(load(folder))


def test_the_machine_s_warning_is_passed_on(run_folder):
    folder = run_folder()
    edit(folder / "environment.json", lambda machine: machine.update(warning="threads: too many"))
    assert "threads: too many" in notes(load(folder))


def test_the_sentence_of_a_full_run(run_folder):
    assert text_of(run_folder()) == (
        "This 90 % sparse model (32x32 blocks) trains 2.00x as fast as its dense twin (20,078 against 10,039 tokens/s),"
        " needs 12 % of the twin's bytes for weights, gradients and optimiser, reaches the twin's final loss in 0.46 of"
        " the twin's time and ends at a validation loss of 1.325 against 1.345 nats/token, on 2 threads of an"
        " Intel Xeon Processor."
    )


def test_people_are_shown_sparsity(run_folder):
    assert sparsity(load(run_folder())) == pytest.approx(0.9)


def test_what_a_side_says_of_its_figures_is_a_note(run_folder):
    folder = run_folder()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "notes": ["the peak is another"]}))
    assert "This run: the peak is another." in notes(load(folder))
