from __future__ import annotations

import errno
import os
import random
import resource
import signal
import time
import warnings

import pytest
import torch

from sparsam import checkpoint
from sparsam.run import Run, RunError


@pytest.fixture
def run(tmp_path):
    with Run.create(tmp_path / "run", "version: 1\n") as run:
        yield run


def state(step):
    return {"model": {"w": torch.full((64, 64), float(step))}, "run": {"step": step}}


def steps_of(run):
    return sorted(int(folder.name[5:]) for folder in run.checkpoints.glob("step-*"))


def never(note):
    pytest.fail(f"unexpected note: {note}")


def test_a_run_is_a_folder(run):
    run.write("environment.json", {"cpu": "x"})
    run.append({"step": 1, "kind": "train", "loss": 2.5})
    run.save(1, state(1))
    assert sorted(path.name for path in run.folder.iterdir() if not path.name.startswith(".")) == [
        "checkpoints",
        "environment.json",
        "metrics.jsonl",
        "recipe.yaml",
    ]
    assert run.recipe == "version: 1\n"
    assert run.read("environment.json") == {"cpu": "x"}
    assert run.read("summary.json") is None
    assert list(run.records()) == [{"step": 1, "kind": "train", "loss": 2.5}]


def test_the_newest_two_checkpoints_are_kept(run):
    for step in (3, 6, 9, 100):
        run.save(step, state(step))
    assert steps_of(run) == [9, 100]
    step, found = run.load(never)
    assert step == 100
    assert found["run"] == {"step": 100}
    assert torch.equal(found["model"]["w"], torch.full((64, 64), 100.0))


def test_a_folder_in_use_is_refused(run, tmp_path):
    with pytest.raises(RunError, match=r"another process is training in this run folder\. Wait for it, or stop it"):
        Run.open(run.folder)
    run.close()
    Run.open(run.folder).close()


def test_a_folder_that_holds_something_is_not_made_a_run(tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    with pytest.raises(
        RunError, match=r"expected a new or empty folder .* Choose another --out, or go on with --resume"
    ):
        Run.create(tmp_path, "")
    with pytest.raises(RunError, match="expected a new or empty folder"):
        Run.create(tmp_path / "thesis.txt", "")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("make", [False, True])
def test_no_run_there(tmp_path, make):
    if make:
        (tmp_path / "x").mkdir()
    with pytest.raises(RunError, match=r"x: expected a run folder \(with recipe\.yaml in it\), found none\."):
        Run.open(tmp_path / "x")


def test_a_damaged_checkpoint_gives_way_to_the_one_before_with_a_message(run):
    for step in (1, 2, 3):
        run.append({"step": step})
    run.save(2, state(2))
    run.save(3, state(3))
    (run.checkpoints / "step-00000003" / "model.safetensors").write_bytes(b"rubbish")
    notes = []
    step, found = run.load(notes.append)
    assert step == 2
    assert found["run"]["step"] == 2
    [note] = notes
    assert "step-00000003: not a whole checkpoint" in note
    assert note.endswith("from the checkpoint of step 2 instead.")
    assert [record["step"] for record in run.records()] == [1, 2]
    run.save(3, state(3))  # the step is reached again
    assert run.load(never)[0] == 3


def test_no_whole_checkpoint_left(run):
    run.save(1, state(1))
    (run.checkpoints / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"No whole checkpoint is left\. .* Start anew with: sparsam train"):
        run.load(never)


def test_metrics_are_cut_back_to_the_checkpoint(run):
    for step in (1, 2, 3):
        run.append({"step": step})
    run.save(2, state(2))
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a kill in the middle of a line
    assert [record["step"] for record in run.records()] == [1, 2, 3]
    run.load(never)
    assert [record["step"] for record in run.records()] == [1, 2]
    run.append({"step": 3})
    assert [record["step"] for record in run.records()] == [1, 2, 3]


def test_without_a_checkpoint_a_run_begins_anew(run):
    run.append({"step": 0, "kind": "eval"})
    run.append({"step": 1})
    assert run.load(never) is None
    assert list(run.records()) == []


def test_leftovers_of_a_kill_are_cleared(run):
    run.save(1, state(1))
    stray = run.checkpoints / ".partial-step-00000002"
    stray.mkdir()
    (stray / "model.safetensors").write_bytes(b"half")
    assert run.load(never)[0] == 1
    assert not stray.exists()


@pytest.fixture
def small_files():
    """Every file may grow to 100 kB: a full disk, as the kernel reports it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_leaves_the_checkpoint_before(run, small_files):
    run.save(1, state(1))
    small_files()
    with pytest.raises(RunError) as error:
        run.save(2, {"model": {"w": torch.zeros(1_000_000)}})
    message = str(error.value)
    assert "the checkpoint of step 2 is not written: no space is left on its disk" in message
    assert "The checkpoint of step 1 is whole; then go on with: sparsam train --resume" in message
    assert "\n" not in message
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]
    assert run.load(never)[0] == 1


@pytest.mark.parametrize("where", ["fsync", "rename"])
def test_a_full_disk_at_the_last_moment(run, monkeypatch, where):
    run.save(1, state(1))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "fsync":
        monkeypatch.setattr(checkpoint.os, "fsync", full)
    else:
        monkeypatch.setattr(checkpoint.Path, "rename", full)
    with pytest.raises(
        RunError, match=r"not written: no space is left on its disk \(\d+ MB free\)\. Free some space\."
    ):
        run.save(2, state(2))
    monkeypatch.undo()
    assert steps_of(run) == [1]
    assert run.load(never)[0] == 1


def test_metrics_on_a_full_disk(run, monkeypatch):
    class Full:
        def write(self, line):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    run._metrics = Full()
    with pytest.raises(RunError, match=r"metrics\.jsonl cannot grow: no space is left"):
        run.append({"step": 1})


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with pytest.raises(RunError, match=r"the run folder is not made: Permission denied\. Put that right\."):
        Run.create(tmp_path / "run", "")


def test_kill_at_any_instant_leaves_a_whole_checkpoint(tmp_path):
    chance = random.Random(0)
    folder = tmp_path / "run"
    Run.create(folder, "version: 1\n").close()
    reached = 0
    for _ in range(12):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads; the child only writes files
            child = os.fork()
        if child == 0:
            try:
                with Run.open(folder) as run:
                    step = reached
                    while True:
                        step += 1
                        run.append({"step": step})
                        run.save(step, state(step))
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0.02, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with Run.open(folder) as run:
            found = run.load(never)
            if found is None:
                continue
            step, saved = found
            assert step >= reached
            assert saved["run"]["step"] == step
            assert torch.equal(saved["model"]["w"], state(step)["model"]["w"])
            assert [record["step"] for record in run.records()] == list(range(1, step + 1))
            reached = step
    assert reached > 0
