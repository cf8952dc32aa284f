from __future__ import annotations

from pathlib import Path

import pytest

from sparsam import __version__
from sparsam.cli import main


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["train", "--help"], ["inspect", "--help"]])
def test_help(sparsam, arguments):
    result = sparsam(*arguments)
    assert result.status == 0
    assert "Usage: sparsam" in result.out


def test_version(sparsam):
    assert sparsam("--version").out == f"sparsam {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tarin"], "No such command 'tarin'"),
        (["report"], ". See: sparsam report --help"),
        (["report", "nowhere"], "nowhere: expected a run folder, found none."),
        (["inspect", "nowhere"], "nowhere: expected a recipe (a YAML file), found nothing there."),
    ],
)
def test_a_wrong_command_line_is_one_line(sparsam, arguments, message):
    result = sparsam(*arguments)
    assert result.status in (1, 2)
    assert message in result.err


def test_report_of_a_run(sparsam, recipe):
    sparsam("train", recipe, "--out", "run")
    result = sparsam("report", "run")
    assert result.status == 0
    assert "Report: run/report.html" in result.out


def test_inspect_a_recipe_and_a_run(sparsam, recipe):
    result = sparsam("inspect", recipe)
    assert result.status == 0
    for part in ("blocks.0.up", "128 x 32", "compact", "75.0 %", "embedding", "output head", "of the sparse layers"):
        assert part in result.out, part
    sparsam("train", recipe, "--out", "run", "--steps", 1)
    assert sparsam("inspect", "run").out == result.out
    assert "50.0 %" in sparsam("inspect", recipe, "--set", "sparsity.density=0.5").out


def test_inspect_shows_where_the_units_of_a_run_are(sparsam, recipe):
    method = ["--set", "sparsity.method={type: gmp, every: 1, until: 0.5}", "--set", "sparsity.density=0.1"]
    begun = sparsam("inspect", recipe, *method)
    assert "16 × 4, 100 %" in begun.out
    assert "masked until step 3, then compact" in begun.out
    assert "That is at the start; GMP every 1 steps until step 3, from 0 % to 90 % sparse." in begun.out
    sparsam("train", recipe, "--out", "run", *method)
    ended = sparsam("inspect", "run", "--picture", "run.svg")
    assert ended.status == 0
    for part in ("Picture: run.svg", "16 × 4, 9.38 %", "compact"):
        assert part in ended.out, part
    assert "at the start" not in ended.out
    assert "run: topology after step 6" in Path("run.svg").read_text()


def test_inspect_of_the_default_recipe(sparsam):
    small = ["--set", "model={layers: 1, width: 64, heads: 1}", "--set", "training={batch: 2, context: 16}"]
    result = sparsam("inspect", *small, "--set", "sparsity.if_slow=compact", "--picture", "first.html")
    assert result.status == 0
    assert "8 × 2" in result.out
    assert "default recipe: first topology" in Path("first.html").read_text()


def test_pictures_that_are_refused(sparsam, recipe):
    assert "expected a picture file that ends in .svg or .html" in sparsam("inspect", recipe, "--picture", "x.png").err
    missing = sparsam("inspect", recipe, "--picture", "nowhere/x.svg")
    assert "nowhere/x.svg: expected to write the picture, got: No such file or directory." in missing.err


def test_a_damaged_checkpoint_is_one_line(sparsam, recipe):
    sparsam("train", recipe, "--out", "run", "--steps", 1)
    [weights] = Path("run/checkpoints").glob("*/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "not a whole checkpoint (model.safetensors: expected" in sparsam("inspect", "run").err


def test_inspect_of_a_dense_recipe(sparsam, recipe):
    result = sparsam("inspect", recipe, "--set", "sparsity=null")
    assert result.status == 1
    assert "expected a recipe with a sparsity section, its model is dense." in result.err


def test_doctor(sparsam, monkeypatch):
    from sparsam.cli import doctor
    from sparsam.measure.doctor import measure

    monkeypatch.setattr(doctor, "measure", lambda progress: measure(progress, quick=True))
    result = sparsam("doctor")
    assert result.status == 0
    for part in (
        "Machine",
        "processor",
        "Dense products",
        "Formats, one product",
        "Block-sparse 32x32",
        "90 % sparse",
        "(measured)",
    ):
        assert part in result.out, part


def test_ctrl_c_before_there_is_anything_to_save(sparsam, recipe, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparsam.cli.train.Training", interrupt)
    result = sparsam("train", recipe, "--out", "run")
    assert (result.status, result.err) == (130, "error stopped.\n")


def test_the_module_is_the_command(start):
    process = start("--help")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Usage: sparsam" in out
    assert callable(main)
