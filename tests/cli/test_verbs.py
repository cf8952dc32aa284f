from __future__ import annotations

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
    for part in ("Machine", "processor", "Dense products", "Block-sparse 32x32", "90 % sparse", "(measured)"):
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
