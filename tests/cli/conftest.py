"""Runs `sparsam` inside the test's process, where nothing has to be started, or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from sparsam.cli import main

TINY = """
version: 1
model: {layers: 1, width: 32, heads: 1}
sparsity:
  pattern: {type: block, rows: 8, cols: 8}
  density: 0.25
  method: {type: rigl, every: 2, until: 1.0}
  if_slow: compact
training: {steps: 6, batch: 2, context: 16, evaluate_every: 3, evaluate_windows: 4, checkpoint_every: 1}
twin: none
"""


@dataclass
class Result:
    status: int
    out: str
    err: str


@pytest.fixture
def sparsam(capsys, monkeypatch, tmp_path):
    """Calls the command line and returns what came out; an error must be one line and no traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")

    def call(*arguments: object) -> Result:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        result = Result(int(end.value.code or 0), captured.out, captured.err)
        if result.status not in (0, 130):
            assert result.err.startswith("error "), result.err
            assert result.err.count("\n") == 1, result.err
        return result

    return call


@pytest.fixture
def start(tmp_path):
    """Starts `python -m sparsam` as a process of its own."""
    started = []

    def call(*arguments: object, **options) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "sparsam", *map(str, arguments)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **options},
        )
        started.append(process)
        return process

    yield call
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def recipe(tmp_path):
    """A training of a second, on a text of its own."""
    text = tmp_path / "text"
    text.mkdir()
    for number in range(4):
        (text / f"{number}.txt").write_text(f"line {number} of a small text, over and over\n" * 20)
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"data: {{path: {text}}}\n")
    return path
