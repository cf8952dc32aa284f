"""The files of a report: one page that needs nothing else, JSON with kinds, text for the terminal; any name is safe."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess

import pytest
from rich.console import Console

from sparsam import report
from sparsam.report.figures import all_figures
from sparsam.report.load import load
from sparsam.report.tables import grouped_layer_rows, layer_rows

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(params=["full", "sampled", "none", "masked"])
def any_run(request, run_folder):
    if request.param == "masked":
        return run_folder(storage="masked")
    return run_folder(twin=request.param)


def test_both_files_are_written_and_nothing_else(any_run):
    before = {path.name for path in any_run.iterdir()}
    written = report.write(any_run)
    assert {path.name for path in any_run.iterdir()} - before == {"report.html", "report.json"}
    assert (written.html, written.json) == (any_run / "report.html", any_run / "report.json")


def test_the_page_needs_nothing_from_outside(any_run):
    page = report.write(any_run).html.read_text()
    ours = page.replace(page[page.index("<script>") : page.index('<script type="application/json"')], "")
    assert not re.search(r"(?:src|href)\s*=|@import|url\(|https?://", ours)
    assert "{{" not in ours
    assert len(page) > 1_000_000  # plotly itself is inside


def test_every_figure_in_the_json_has_unit_and_kind(any_run):
    content = json.loads(report.write(any_run).json.read_text())
    figures = [f for side in content["figures"].values() for f in side.values()]
    figures += [f for side in content["step_parts"].values() for f in side.values()]
    figures += [f for row in content["comparisons"] for f in (row["sparse"], row["dense"], row["gain"]) if f]
    assert figures
    for figure in figures:
        assert set(figure) == {"value", "unit", "kind"}
        assert figure["kind"] in {"measured", "modelled", "estimated", "simulated"}
    assert content["sentence"].endswith(".")
    assert content["version"] == 1


def test_the_json_shows_sparsity(run_folder):
    content = json.loads(report.write(run_folder()).json.read_text())
    assert content["sparsity"] == {"sparse_layers": pytest.approx(0.9), "all_parameters": pytest.approx(0.86)}
    assert content["layers"][1]["sparsity"] == pytest.approx(0.9)
    assert "density" not in content["layers"][1]


def test_the_page_says_what_the_terminal_says(any_run):
    written = report.write(any_run)
    page, text = written.html.read_text(), written.text()
    plain = re.sub(r"</?b>", "", page)
    for line in (written.sentence, *written.notes):
        assert line in text
        assert line.replace("'", "&#x27;") in plain


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_gets_tables(run_folder, width):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(report.write(run_folder()))
    shown = console.file.getvalue()
    assert "2.00x" in shown
    assert "measured faster block-sparse" in shown
    assert "block-sparse products" in shown
    assert max(len(line) for line in shown.splitlines()) <= width


def test_layers_that_differ_only_in_numbers_share_a_line_on_the_terminal(run_folder):
    layers = load(run_folder()).layers
    assert len(layer_rows(layers)) == 10
    assert [row[0] for row in grouped_layer_rows(layers)] == [
        "token.embedding",
        "blocks.*.attention.qkv (2)",
        "blocks.*.attention.out (2)",
        "blocks.*.mlp.up (2)",
        "blocks.*.mlp.down (2)",
        "head",
    ]


def test_plots_follow_what_was_recorded(run_folder):
    run = load(run_folder())
    assert list(all_figures(run)) == ["loss_by_time", "loss_by_step", "speed", "step_parts", "rewires"]
    assert [trace.name for trace in all_figures(run)["loss_by_time"].data] == ["sparse", "dense twin"]


def test_the_line_to_cross_is_the_smoothed_loss_that_the_time_is_of(run_folder):
    run = load(run_folder())
    lines = [shape.y0 for shape in all_figures(run)["loss_by_time"].layout.shapes if shape.y0 == shape.y1]
    assert lines == [pytest.approx(sum(r["loss"] for r in run.dense.evaluations[-3:]) / 3)]


def test_rewires_are_shown_as_a_share(run_folder):
    run = load(run_folder())
    plot = all_figures(run)["rewires"]
    assert plot.layout.yaxis.title.text == "moved, % of active"
    assert plot.data[0].y[0] == pytest.approx(100 * run.sparse.rewires[0]["grown"] / 600)


def test_a_sampled_twin_has_no_loss_curve(tmp_path, run_folder):
    figures = all_figures(load(run_folder(twin="sampled")))
    assert [trace.name for trace in figures["loss_by_time"].data] == ["sparse"]
    assert [trace.name for trace in figures["loss_by_step"].data] == ["sparse, training", "sparse, validation"]
    assert [trace.name for trace in figures["speed"].data] == ["sparse", "dense twin, sampled"]


def test_one_step_and_nothing_else(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "loss": 5.0}\n')
    written = report.write(tmp_path)
    assert written.html.is_file()
    assert "no dense twin ran" in written.sentence


def test_names_and_recipes_cannot_break_the_page(run_folder):
    folder = run_folder()
    evil = "</script><img src=x onerror=alert(1)>"
    table = json.loads((folder / "layers.json").read_text())
    table["rows"][1]["name"] = table["rows"][1]["reason"] = evil
    (folder / "layers.json").write_text(json.dumps(table))
    summary = json.loads((folder / "summary.json").read_text())
    summary["breakdown"][evil] = {"value": 1.0, "unit": "ms", "kind": "measured"}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text() + f"# {evil} {{{{style}}}}\n")
    page = report.write(folder).html.read_text()
    assert "<img" not in page[page.index("</style>") : page.index("<script>")]
    assert evil not in page
    assert page.count("</script>") == 3
    assert "{{style}}" in page  # shown as it is, not filled in


def test_a_failed_write_leaves_the_old_report(run_folder, monkeypatch):
    folder = run_folder()
    report.write(folder)
    before = (folder / "report.html").read_bytes()

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(report.ReportError, match=r"report.html: expected to write the report, got: No space left"):
        report.write(folder)
    assert (folder / "report.html").read_bytes() == before
    assert not list(folder.glob(".*partial"))


def test_read_writes_nothing(run_folder):
    folder = run_folder()
    read = report.read(folder)
    assert read.html is None
    assert not (folder / "report.html").exists()
    assert read.sentence in read.text()


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize("size", ["1200,900", "390,844"])
def test_the_page_draws_without_errors_offline(run_folder, tmp_path, size):
    page = report.write(run_folder()).html
    done = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
            *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--window-size={size}",
            "--virtual-time-budget=4000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert console == []
    drawn = [tag for tag in re.findall(r"<div[^>]*>", done.stdout) if "js-plotly-plot" in tag]
    names = {re.search(r'id="plot-(\w+)"', tag)[1] for tag in drawn}
    assert names == {"loss_by_time", "loss_by_step", "speed", "step_parts", "rewires"}
    assert done.stdout.count('class="main-svg"') >= 5
