"""`sparsam train` on several ranks, as a person starts it, and what becomes of it when one of them fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparsam import checkpoint

SETTINGS = ("--set", "training.steps=10", "--set", "training.checkpoint_every=2")
SMALL_INT8 = ("--set", "compression={codec: {type: int8, row: 64}, when: always}")
# a rank that does something of its own at some step; started by torchrun in the place of `-m sparsam`
WORKER = """
import os, sys, torch
from sparsam.cli import main
from sparsam.tasks import language
rank = int(os.environ["RANK"])
{body}
if __name__ == "__main__":
    main()
"""


def records_of(run: Path) -> list[dict]:
    clocks = ("step_ms", "tokens_per_second", "seconds", "profiled_ms")
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in clocks} for line in lines]


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [one["step"] for one in records_of(run) if one["kind"] == "train"] if path.exists() else []


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def state_of(run: Path, ranks: int = 2) -> list:
    state = checkpoint.read(newest(run))
    for measured in ("seconds", "peak_rss_bytes", "profile", "timed_for"):
        state["run"].pop(measured)
    return [state, *(checkpoint.read_own(newest(run), rank) for rank in range(ranks))]


def same(a, b) -> bool:
    one, two = checkpoint.pack(a), checkpoint.pack(b)
    return one[1] == two[1] and all(one[0][name].equal(two[0][name]) for name in one[0])


@pytest.fixture
def torchrun(tmp_path):
    """Runs a command under torchrun on two ranks: (exit status, stdout, stderr)."""

    def call(*arguments: object, worker: str | None = None) -> tuple[int, str, str]:
        program = ["-m", "sparsam"]
        if worker is not None:
            program = [str(tmp_path / "worker.py")]
            Path(program[0]).write_text(WORKER.format(body=worker))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, *launcher, *program, "train", *map(str, arguments)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return call


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """rank -> process number, of the processes that a launcher has started."""
    found = {}
    for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        try:
            environment = dict(
                one.split("=", 1) for one in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in one
            )
        except OSError:
            continue
        if "RANK" in environment:
            found[int(environment["RANK"])] = int(child)
    return found


def wait_for(what, process, seconds=100):
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def errors_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error ")]


REFUSED = {
    "a batch that cannot be shared": (
        ["--ranks", 3],
        "training.batch: expected one that 3 ranks can share, got 2. Set another batch",
    ),
    "a dense twin": (["--ranks", 2, "--set", "twin=full"], "twin: expected none on 2 ranks, got full: the dense twin"),
    "compiled": (
        ["--ranks", 2, "--set", "training.compile=true"],
        "training.compile: expected false on 2 ranks, got true.",
    ),
    "restarts of one process": (["--restarts", 1], "--restarts: expected with --ranks N of at least 2."),
    "no ranks": (["--ranks", 0], "--ranks"),
    "an unknown codec": (
        ["--set", "compression.codec=zip"],
        "codec: expected identity or bf16 or int8 or topk, got 'zip'.",
    ),
    "a share that is none": (
        ["--set", "compression.codec={type: topk, share: 2}"],
        "compression.codec.share: expected at most 1, got 2.",
    ),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_ranks_cannot_do_is_one_line(sparsam, recipe, arguments, message):
    result = sparsam("train", recipe, "--out", "run", *arguments)
    assert message in result.err
    assert not Path("run").exists()


def test_torchrun_and_ranks_are_not_mixed(sparsam, recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "--ranks: expected alone, got torchrun's ranks too." in sparsam("train", recipe, "--ranks", 2).err


def test_compression_does_nothing_on_one_rank(sparsam, recipe):
    result = sparsam("train", recipe, "--out", "run", "--steps", 1, *SMALL_INT8)
    assert (result.status, result.err) == (0, "")
    assert "compression: nothing is sent on one rank" in result.out
    assert "comm.bytes" not in records_of(Path("run"))[-2]


@pytest.mark.slow
def test_both_commands_are_the_same_run(sparsam, recipe, start, torchrun, tmp_path):
    process = start("train", recipe, "--out", "a", "--ranks", 2, *SETTINGS, *SMALL_INT8)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), err
    said = " ".join(out.split())
    assert "2 · 1 of 2 sequences each" in said
    assert "compression is on: when='always'." in said
    assert "bytes a step from each rank, 2" in said
    assert said.count("ring's (modelled)") == 1
    status, out, err = torchrun(recipe, "--out", "b", *SETTINGS, *SMALL_INT8)
    assert status == 0, err
    assert records_of(tmp_path / "a") == records_of(tmp_path / "b")
    assert same(state_of(tmp_path / "a"), state_of(tmp_path / "b"))
    first, last = state_of(tmp_path / "a")[1:]
    assert not same(first["compression"]["residuals"], last["compression"]["residuals"])

    # one process sees the same batches: the same loss at first, and about the same after
    sparsam("train", recipe, "--out", "alone", *SETTINGS)
    ours, theirs = ([one["loss"] for one in records_of(tmp_path / run) if "loss" in one] for run in ("a", "alone"))
    assert ours == pytest.approx(theirs, rel=0.02)
    assert ours[:2] == pytest.approx(theirs[:2], rel=1e-3)

    # what began on two ranks goes on on one
    (newest(tmp_path / "b")).rename(tmp_path / "b" / "checkpoints" / "gone")
    result = sparsam("train", "--resume", "b")
    assert "not bit for bit: ranks 2 then, 1 now" in " ".join(result.out.split()).replace("threads", "ranks")
    assert steps_of(tmp_path / "b") == list(range(1, 11))


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(recipe, start, tmp_path):
    arguments = ["train", recipe, "--ranks", 2, *SMALL_INT8, "--set", "training.steps=60"]
    arguments += ["--set", "training.checkpoint_every=7"]
    whole = start(*arguments, "--out", "whole")
    assert whole.wait(timeout=120) == 0, whole.communicate()
    process = start(*arguments, "--out", "run", "--restarts", 1)
    wait_for(lambda: len(steps_of(tmp_path / "run")) > 9, process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), err
    assert "started again after a failure (1 times so far), from step" in " ".join(out.split())
    assert steps_of(tmp_path / "run") == list(range(1, 61))
    assert records_of(tmp_path / "run") == records_of(tmp_path / "whole")
    assert same(state_of(tmp_path / "run"), state_of(tmp_path / "whole"))

    process = start(*arguments, "--out", "once")
    wait_for(lambda: len(steps_of(tmp_path / "once")) > 9, process)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    [line] = errors_in(err)
    assert "rank 1: ended by SIGKILL" in line
    assert line.endswith("sparsam train --resume once --ranks 2")


@pytest.mark.slow
def test_ctrl_c_stops_all_ranks_at_one_step(recipe, start, tmp_path):
    process = start("train", recipe, "--ranks", 2, "--out", "run", "--set", "training.steps=2000")
    wait_for(lambda: len(steps_of(tmp_path / "run")) > 5, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, ""), err
    assert "sparsam train --resume run --ranks 2" in out
    assert int(newest(tmp_path / "run").name[5:]) == steps_of(tmp_path / "run")[-1] < 2000
    owns = {path.name for path in newest(tmp_path / "run").glob("rank-*.json")}
    assert owns == {"rank-00000.json", "rank-00001.json"}


@pytest.mark.slow
def test_a_slow_rank_is_waited_for_and_a_hanging_one_is_not(recipe, start, tmp_path):
    process = start("train", recipe, "--ranks", 2, "--out", "run", "--set", "training.timeout_seconds=4")
    run = tmp_path / "run"
    wait_for(lambda: steps_of(run), process)
    slow = ranks_of(process)[1]
    os.kill(slow, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(slow, signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), err
    assert steps_of(run) == list(range(1, 7))

    settings = ("--set", "training.timeout_seconds=3", "--set", "training.steps=5000")
    process = start("train", recipe, "--ranks", 2, "--out", "other", *settings)
    wait_for(lambda: steps_of(tmp_path / "other"), process)
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    [line] = errors_in(err)
    assert "rank 0: expected the other ranks within 3 s (training.timeout_seconds)" in line


@pytest.mark.slow
def test_the_error_of_the_rank_that_failed_is_what_is_said(recipe, torchrun):
    raises = """
draw = language.Batches.next
def broken(batches):
    if rank == 1 and batches.drawn == 4:
        raise ValueError("row 5: expected text, got noise.")
    return draw(batches)
language.Batches.next = broken
"""
    status, _, err = torchrun(recipe, "--out", "run", *SETTINGS, worker=raises)
    assert status != 0
    assert errors_in(err) == ["error row 5: expected text, got noise."]
    status, _, err = torchrun(recipe, "--out", "other", "--set", "training.batch=3")
    assert status != 0
    [line] = errors_in(err)
    assert "training.batch: expected one that 2 ranks can share, got 3." in line


@pytest.mark.slow
def test_topologies_agree_after_every_update_and_a_difference_stops_all(recipe, torchrun, tmp_path):
    agree = """
from sparsam.sparse import part
from sparsam.tasks.gpt import GPT
build, compare = GPT.__init__, part.compare_ranks
def tied(model, *arguments, **options):  # every weight as important as the next
    build(model, *arguments, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sign_().mul_(0.02)
    torch.manual_seed(100 + rank)
def noted(weights, step, *group):
    with open(f"hashes-{rank}", "a") as file:
        print(step, *(part.topology_hash({name: one}) for name, one in weights.items()), file=file)
    compare(weights, step, *group)
GPT.__init__, part.compare_ranks = tied, noted
"""
    still = ("--set", "optimizer.lr=1e-30", "--set", "training.evaluate_every=100")
    status, _, err = torchrun(recipe, "--out", "run", *SETTINGS, *still, worker=agree)
    assert status == 0, err
    first, second = ((tmp_path / f"hashes-{rank}").read_text().splitlines() for rank in (0, 1))
    assert first == second
    assert [int(line.split()[0]) for line in first] == [2, 4, 6, 8, 10]
    assert len({line.split(" ", 1)[1] for line in first}) > 2

    differ = """
from sparsam.sparse import part
compare = part.compare_ranks
def spoilt(weights, step, *group):
    if rank == 1 and step == 4:
        layer = weights["blocks.0.up"].module
        layer.block_col[0] ^= 1
    compare(weights, step, *group)
part.compare_ranks = spoilt
"""
    status, _, err = torchrun(recipe, "--out", "other", *SETTINGS, worker=differ)
    assert status != 0
    [line] = errors_in(err)
    assert line.startswith("error blocks.0.up: ")
    assert (
        "blocks.0.up: expected the same topology on every rank after step 4, but ranks [1] differ from rank 0" in line
    )
