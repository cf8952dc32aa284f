from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from sparsam import __version__, checkpoint
from sparsam.tasks import language


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def steps_of(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "train"]


def wait_for(what, process, seconds=120):
    end = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_train_says_what_it_does_and_reports(sparsam, recipe):
    result = sparsam("train", recipe, "--out", "run")
    assert result.status == 0
    assert result.err == ""
    for part in (
        f"sparsam {__version__}",
        "text · 0.0",
        "byte-level GPT · 1 layer, width 32, 1 head",
        "75 % of 4 of 7 matrices · blocks of 8 × 8 · RigL every 2 steps until step 6",
        "6/6  loss ",
        "Report: run/report.html",
    ):
        assert part in result.out, part
    assert {path.name for path in Path("run").iterdir()} >= {
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "report.html",
        "report.json",
    }
    assert [folder.name for folder in checkpoints(Path("run"))] == ["step-00000005", "step-00000006"]


def test_with_its_twin_in_a_process_of_its_own(sparsam, recipe):
    result = sparsam("train", recipe, "--out", "run", "--set", "twin=full", "--steps", 4)
    assert result.status == 0, result.err
    assert "dense twin  4/4  loss " in result.out
    assert steps_of(Path("run")) == steps_of(Path("run/twin")) == [1, 2, 3, 4]
    report = json.loads(Path("run/report.json").read_text())
    assert report["twin"] == "full"
    assert report["figures"].keys() == {"sparse", "dense"}
    peaks = [report["figures"][side]["peak_rss_bytes"]["value"] for side in ("sparse", "dense")]
    assert min(peaks) > 10e6


def test_the_twins_death_costs_nothing_of_the_run(sparsam, recipe, monkeypatch):
    from sparsam.twin import TwinProcess

    advance = TwinProcess.advance

    def advance_or_die(twin, step):
        if step == 3:
            twin._process.kill()
        advance(twin, step)

    arguments = ("--out", "run", "--set", "twin=full", "--set", "training.checkpoint_every=100")
    with monkeypatch.context() as patch:
        patch.setattr(TwinProcess, "advance", advance_or_die)
        result = sparsam("train", recipe, *arguments)
    assert result.status == 1
    assert (
        "dense twin: its process ended (exit status -9), perhaps for lack of memory. Go on with --resume" in result.err
    )
    assert [folder.name for folder in checkpoints(Path("run"))] == ["step-00000003"]
    assert sparsam("train", "--resume", "run").status == 0
    assert steps_of(Path("run")) == steps_of(Path("run/twin")) == [1, 2, 3, 4, 5, 6]


def test_a_fault_of_the_twins_is_said(sparsam, recipe):
    sparsam("train", recipe, "--out", "run", "--steps", 1, "--set", "twin=full")
    for folder in checkpoints(Path("run/twin")):
        (folder / "manifest.json").unlink()
    result = sparsam("train", "--resume", "run")
    assert "dense twin: No whole checkpoint is left." in result.err


def test_a_sampled_twin_claims_no_quality(sparsam, recipe):
    result = sparsam("train", recipe, "--out", "run", "--set", "twin=sampled")
    assert result.status == 0, result.err
    assert len(steps_of(Path("run/twin"))) == 14
    assert checkpoints(Path("run/twin")) == []
    report = json.loads(Path("run/report.json").read_text())
    assert report["twin"] == "sampled"
    assert "validation_loss" not in report["figures"]["dense"]
    assert next(row for row in report["comparisons"] if row["name"] == "validation_loss")["gain"] is None


def test_out_has_a_default(sparsam, recipe):
    assert sparsam("train", recipe, "--steps", 1).status == 0
    [run] = Path("runs").iterdir()
    assert (run / "report.html").is_file()


def test_data_from_the_command_line(sparsam, recipe):
    Path("mine.txt").write_text("my own words, many of them, " * 30)
    result = sparsam("train", recipe, "--data", "mine.txt", "--steps", 1, "--out", "run")
    assert result.status == 0
    assert "mine.txt · " in result.out
    assert f"path: {Path('mine.txt').resolve()}" in Path("run/recipe.yaml").read_text()


REFUSED = {
    "a misspelt key": (
        ["--set", "sparsity.densty=0.1"],
        "tiny.yaml: sparsity.densty: there is no such key; did you mean",
    ),
    "a glob that matches nothing": (["--set", "sparsity.exclude=[blocks.*.upp]"], "blocks.*.upp"),
    "a precision that is not there": (
        ["--set", "precision=fp16"],
        "the usable precisions are bf16 and fp32, or a policy such as {type: adaptive}.",
    ),
    "missing data": (["--data", "nowhere"], "nowhere: expected a text file or a folder of them, found nothing there."),
    "binary data": (["--data", "noise"], "noise: expected text in UTF-8, got a binary file."),
    "an empty text": (["--data", "empty"], "empty: expected text, the file is empty."),
    "a short text": (["--data", "short"], "expected at least 17 tokens of text for a context of 16, got"),
    "no model folder": (
        ["--set", "model=nowhere"],
        "nowhere: expected a Hugging Face model folder, found nothing there.",
    ),
    "zero steps": (["--steps", 0], "training.steps: expected at least 1, got 0."),
    "words for steps": (["--steps", "many"], "valid int"),
    "an unknown option": (["--stepz", 3], "No such option: --stepz"),
    "a folder in use": (["--out", "."], "expected a new or empty folder for the run, it holds something."),
    "a density that is none": (["--set", "sparsity.density=1.5"], "sparsity.density: expected at most 1, got 1.5."),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_one_line(sparsam, recipe, arguments, message):
    Path("noise").write_bytes(bytes(range(256)))
    Path("empty").write_text("")
    Path("short").write_text("brief")
    before = sorted(Path().iterdir())
    result = sparsam("train", recipe, *arguments)
    assert result.status in (1, 2)
    assert message in result.err
    left = [path for path in Path().iterdir() if path not in before and path.name != "runs"]
    assert left == []
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


def test_incompatible_features_are_refused_before_data_loads(sparsam, recipe, monkeypatch):
    def refuse(*arguments, **options):
        pytest.fail("read the data")

    monkeypatch.setattr(language, "read_corpus", refuse)
    result = sparsam(
        "train", recipe, "--set", "sparsity.pattern={type: unstructured}", "--set", "sparsity.storage=compact"
    )
    assert result.status == 1
    assert "storage compact needs pattern block, got unstructured" in result.err


def test_resume_of_a_finished_run_reports_again(sparsam, recipe):
    sparsam("train", recipe, "--out", "run")
    result = sparsam("train", "--resume", "run")
    assert result.status == 0
    assert "run · from step 6" in result.out
    assert "Report: " in result.out
    assert steps_of(Path("run")) == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_under_the_report_costs_the_report_alone(sparsam, recipe, monkeypatch):
    write_text = Path.write_text

    def full(path, *arguments, **options):
        if path.name == ".report.html.partial":
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        result = sparsam("train", recipe, "--out", "run")
    assert result.status == 1
    assert "run/report.html: expected to write the report, got: No space left on device." in result.err
    assert steps_of(Path("run")) == [1, 2, 3, 4, 5, 6]
    assert checkpoints(Path("run"))[-1].name == "step-00000006"
    assert sparsam("report", "run").status == 0


def test_a_refusal_after_the_first_step_keeps_the_run(sparsam, recipe, monkeypatch):
    from sparsam.train import Training

    def refuse(training):
        raise ValueError("figure: expected a finite number.")

    monkeypatch.setattr(Training, "finish", refuse)
    assert sparsam("train", recipe, "--out", "run").status == 1
    assert checkpoints(Path("run"))


def test_without_fast_kernels_it_trains_dense_and_says_so(recipe, start):
    arguments = ["train", recipe, "--out", "run", "--set", "sparsity.if_slow=dense", "--set", "twin=full"]
    process = start(*arguments, SPARSAM_CPU_ISA="reference", OMP_NUM_THREADS="1")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    said = " ".join(out.split())
    assert "no compiled kernels in use: products run on the PyTorch reference" in said
    assert "no layer is faster in blocks on this machine: all left dense; sparsity.if_slow: compact trains" in said
    assert "so no gain is claimed" in said


def test_resume_alone(sparsam, recipe):
    result = sparsam("train", recipe, "--resume", "run", "--steps", 3)
    assert "--resume keeps the recipe of its run: expected it alone, got RECIPE, --steps too." in result.err
    result = sparsam("train", "--resume", "nowhere")
    assert "nowhere: expected a run folder (with recipe.yaml in it), found none." in result.err


def test_a_fault_of_ours_is_one_line_too(sparsam, recipe, monkeypatch):
    def break_(*arguments, **options):
        raise KeyError("inside")

    monkeypatch.setattr("sparsam.cli.train.Training", break_)
    result = sparsam("train", recipe, "--out", "run")
    assert result.status == 1
    assert result.err.startswith("error a fault of Sparsam's: KeyError: 'inside'. SPARSAM_TRACEBACK=1 shows where")
    monkeypatch.setenv("SPARSAM_TRACEBACK", "1")
    from sparsam.cli import main

    with pytest.raises(KeyError):
        main(["train", str(recipe), "--out", "other"])


def whole_state(run: Path) -> dict:
    state = checkpoint.read(checkpoints(run)[-1])
    for measured in ("seconds", "peak_rss_bytes"):
        state["run"].pop(measured)
    return state


def same(a: dict, b: dict) -> bool:
    one, two = checkpoint.pack(a), checkpoint.pack(b)
    return one[1] == two[1] and all(one[0][name].equal(two[0][name]) for name in one[0])


def test_ctrl_c_saves_and_says_how_to_go_on(sparsam, recipe, start, tmp_path):
    arguments = ["train", recipe, "--steps", 300, "--set", "twin=full"]
    arguments += ["--set", "training.checkpoint_every=1000", "--set", "training.evaluate_every=60"]
    sparsam(*arguments, "--out", "whole")
    process = start(*arguments, "--out", "run")
    run = tmp_path / "run"
    wait_for(lambda: len(steps_of(run)) > 5, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, ""), err
    assert "of 300; all of it is saved. Go on with:" in out
    assert "sparsam train --resume run" in out
    [saved] = checkpoints(run)
    assert int(saved.name[5:]) == steps_of(run)[-1] < 300
    assert checkpoints(run / "twin")
    assert sparsam("train", "--resume", "run").status == 0
    assert steps_of(run) == steps_of(tmp_path / "whole")
    assert same(whole_state(run), whole_state(tmp_path / "whole"))
    assert same(whole_state(run / "twin"), whole_state(tmp_path / "whole" / "twin"))


def test_kill_at_random_instants_and_resume_is_the_uninterrupted_run(sparsam, recipe, start, tmp_path):
    sparsam("train", recipe, "--out", "whole", "--steps", 60)
    run, chance = tmp_path / "run", random.Random(0)
    arguments = ["train", recipe, "--out", "run", "--steps", 60]
    for _ in range(3):
        process = start(*arguments)
        already = len(steps_of(run))
        wait_for(lambda already=already: len(steps_of(run)) > already, process)
        time.sleep(chance.uniform(0, 0.3))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        arguments = ["train", "--resume", "run"]
    assert sparsam(*arguments).status == 0
    assert steps_of(run) == steps_of(tmp_path / "whole")
    assert same(whole_state(run), whole_state(tmp_path / "whole"))


@pytest.mark.integration
def test_a_hugging_face_folder_learns(sparsam, recipe, tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained("model")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained("model")
    result = sparsam("train", recipe, "--out", "run", "--set", "model=model", "--set", "twin=full")
    assert result.status == 0, result.err
    assert "75 % of 14 of 15 matrices" in result.out
    assert sparsam("train", "--resume", "run").status == 0
    result = sparsam("inspect", "model", "--set", "sparsity={pattern: {rows: 8, cols: 8}, if_slow: compact}")
    assert "model.model.layers.*.mlp.up_proj" in result.out
    assert result.err == ""


def test_a_gradual_recipe_says_where_it_goes(sparsam, recipe):
    method = "sparsity.method={type: gmp, every: 2, until: 0.5}"
    result = sparsam("train", recipe, "--out", "run", "--set", method)
    assert result.status == 0
    for part in ("4 of 7 matrices", "GMP every 2 steps until step 3, from 0 % to 75 % sparse", "0 % to 75 % sparse"):
        assert part in result.out, part


@pytest.mark.parametrize(
    ("bf16", "fp32", "width", "steps", "format"),
    [(2e12, 3e11, 512, 220, "bf16"), (1e11, 5e10, 256, 180, "bf16"), (1.6e11, 3e11, 256, 180, "fp32")],
)
def test_the_demo_is_one_that_the_machine_gets_through(sparsam, monkeypatch, bf16, fp32, width, steps, format):
    """Without a recipe: the format that is fastest here, and where that is slow the small model."""
    chosen = []

    def stop(recipe, *_):
        chosen.append(recipe)
        raise ValueError("that will do")

    speeds = {torch.bfloat16: bf16, torch.float32: fp32}
    monkeypatch.setattr("sparsam.measure.dense_flops_per_second", speeds.__getitem__)
    monkeypatch.setattr("sparsam.cli.train._train", stop)
    result = sparsam("train", "--out", "run")
    assert result.err == "error that will do\n"
    [recipe] = chosen
    assert (recipe.model.width, recipe.training.steps, recipe.precision) == (width, steps, format)
    said = f"multiplies {format} fastest, at {max(bf16, fp32) / 1e9:.0f} GFLOP/s"
    assert (said in result.out) == (width == 256)
    assert sparsam("train", "--out", "other", "--set", "precision=bf16").err == "error that will do\n"
    assert chosen[1].precision == "bf16"
