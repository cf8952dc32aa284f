"""Number formats in the report: where each product switched, what it is in now, and what is only simulated."""

from __future__ import annotations

import json

import pytest

from sparsam import report
from sparsam.report.claims import compare, notes
from sparsam.report.figures import all_figures
from sparsam.report.load import ReportError, load

PRODUCTS = ("forward", "input_gradient", "weight_gradient")


def row(name, formats, arithmetic="real", reason=""):
    return {"name": name, **dict(zip(PRODUCTS, formats, strict=True)), "arithmetic": arithmetic, "reason": reason}


@pytest.fixture
def switched(run_folder):
    """Two layers: one that went from fp32 to bf16 at step 96 and whose forward tried int8, one that stayed."""
    folder = run_folder()
    switch = {"kind": "format", "layer": "blocks.0.up"}
    lines = [{"step": 96, **switch, "product": one, "before": "fp32", "after": "bf16"} for one in PRODUCTS]
    lines += [
        {"step": 192, **switch, "product": "forward", "before": "bf16", "after": "int8"},
        {"step": 224, **switch, "product": "forward", "before": "int8", "after": "bf16"},
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    rows = [
        row("blocks.0.up", ("bf16", "bf16", "bf16"), reason="int8: 0.62x of bf16's speed"),
        row("head", ("fp32", "fp32", "fp32")),
        row("everything else", ("bf16", "", ""), reason="autocast"),
    ]
    (folder / "formats.json").write_text(json.dumps({"rows": rows, "simulated": False}))
    return folder


def test_the_picture_has_a_row_for_each_product_and_a_column_between_switches(switched):
    figure = all_figures(load(switched))["formats"]
    [heat] = figure.data
    assert list(heat.x) == [0, 96, 192, 224, 600]
    assert list(heat.y)[:3] == [f"blocks.0.up {one}" for one in ("forward", "input gradient", "weight gradient")]
    assert [list(line) for line in heat.text] == [
        ["fp32", "bf16", "int8", "bf16"],
        *[["fp32", "bf16", "bf16", "bf16"]] * 2,
        *[["fp32"] * 4] * 3,
    ]
    assert list(heat.colorbar.ticktext) == ["fp32", "bf16", "int8"]


def test_the_page_and_the_json_say_what_and_why(switched):
    written = report.write(switched)
    page = written.html.read_text()
    assert "<h2>Number formats</h2>" in page
    assert "int8: 0.62x of bf16" in page
    kept = json.loads((switched / "report.json").read_text())["formats"]
    assert kept[0]["forward"] == "bf16"


def test_one_format_for_all_has_no_picture(run_folder):
    folder = run_folder()
    assert "formats" not in all_figures(load(folder))
    (folder / "formats.json").write_text(json.dumps({"rows": [row("everything else", ("bf16", "", ""))]}))
    assert "formats" not in all_figures(load(folder))


@pytest.mark.parametrize("content", ['{"rows": [{"name": "up"}]}', '{"rows": [1]}'], ids=["keys", "number"])
def test_a_damaged_file_is_named(run_folder, content):
    folder = run_folder()
    (folder / "formats.json").write_text(content)
    with pytest.raises(ReportError, match=r"formats\.json: expected rows with arithmetic, forward, .*damaged"):
        load(folder)


def simulated(folder):
    content = json.loads((folder / "formats.json").read_text())
    content["rows"][0] |= {"arithmetic": "simulated", "forward": "fp8"}
    (folder / "formats.json").write_text(json.dumps(content))
    return folder


def test_the_sentence_names_the_formats(switched):
    assert "90 % sparse model (32x32 blocks), its products 50 % in bf16 and 50 % in fp32, trains 2.0" in str(
        report.write(switched).sentence
    )


def test_formats_are_a_reason_to_be_faster_without_a_sparse_layer(run_folder, switched):
    layers = json.loads((switched / "layers.json").read_text())
    for layer in layers["rows"]:
        layer |= {"storage": "dense", "density": 1.0, "units": 0}
    (switched / "layers.json").write_text(json.dumps(layers | {"density": 1.0, "density_all": 1.0}))
    rows = {row.name: row for row in compare(load(switched))}
    assert rows["tokens_per_second"].gain.value == pytest.approx(2.0, rel=0.05)
    assert rows["training_bytes"].gain is None


def test_a_simulated_format_claims_nothing(switched):
    run = load(simulated(switched))
    assert all(row.gain is None for row in compare(run))
    reasons = {row.why_not for row in compare(run) if row.dense is not None}
    assert reasons == {"shown side by side", "simulated formats: no gain claimed"}
    assert any("does not multiply in (simulated)" in note for note in notes(run))
    said = report.write(switched).sentence
    assert said.endswith("formats were simulated, so its speed says nothing and no gain is claimed.")
