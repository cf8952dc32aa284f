"""The promised recipes against their dense twins in full: what of the twin's operations they compute, at what quality.

    python benchmarks/recipes.py [--recipes a] [--seeds 0] [--runs FOLDER] [--quick] [--json FILE]

Each runs as `sparsam train examples/recipes/X_*.yaml` does. `flops_share` is the operations of the whole training,
counted step by step over the density that each step had (modelled), over the twin's; `flops_paper_share` is the same as
if all zeros were skipped, where masked storage multiplies them. `quality_share` is the next-byte accuracy on held-out
text at the end, over the twin's (measured on the same 256 windows); losses stand in the rows. With several seeds the
summary has means.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from harness import parse, write

from sparsam import report
from sparsam.recipe import read_recipe
from sparsam.run import Run
from sparsam.train import Progress, Training, train
from sparsam.twin import TwinProcess

RECIPES = Path(__file__).parents[1] / "examples" / "recipes"
QUICK = [
    "model={layers: 1, width: 64, heads: 1}",
    "training={steps: 50, batch: 4, context: 64, evaluate_every: 25, evaluate_windows: 16}",
    "sparsity.if_slow=compact",
]
QUICK_EVERY = {"a": 10, "c": 1}  # updates within 50 steps


def run_recipe(letter: str, seed: int, folder: Path, quick: bool) -> dict[str, Any]:
    """Trains one recipe and its twin to the end; what both came to."""
    [path] = RECIPES.glob(f"{letter}_*.yaml")
    settings = [*QUICK] if quick else ["training.evaluate_windows=256"]
    if quick and letter in QUICK_EVERY:
        settings.append(f"sparsity.method.every={QUICK_EVERY[letter]}")
    recipe = read_recipe(path, [*settings, f"training.seed={seed}"]).resolved()
    with Run.create(folder, recipe.yaml()) as run:
        training = Training(recipe, run, lambda note: print(f"note: {note}", file=sys.stderr))
        with TwinProcess(folder, _silent, lambda note: print(f"note: {note}", file=sys.stderr)) as twin:
            train(training, lambda progress: _show(path.stem, recipe.training.steps, progress), lambda: False, twin)
    written = report.write(folder)
    print(f"{path.stem}, seed {seed}: {written.sentence}", flush=True)
    ours, theirs = written.data.sparse.figures, written.data.dense.figures  # type: ignore[union-attr]
    return {
        "recipe": path.stem,
        "seed": seed,
        "steps": recipe.training.steps,
        "sparsity": 1 - ours["density"].value,
        "flops_share": ours["training_flops"].value / theirs["training_flops"].value,
        "flops_paper_share": ours["training_flops_on_paper"].value / theirs["training_flops"].value,
        "quality_share": ours["accuracy"].value / theirs["accuracy"].value,
        "accuracy": ours["accuracy"].value,
        "dense_accuracy": theirs["accuracy"].value,
        "loss": ours["validation_loss"].value,
        "dense_loss": theirs["validation_loss"].value,
        "time_share": ours["train_seconds"].value / theirs["train_seconds"].value,
    }


def main() -> None:
    arguments = parse(
        __doc__,
        recipes={"nargs": "+", "default": ["a"], "choices": ["a", "b", "c", "d"]},
        seeds={"nargs": "+", "type": int, "default": [0]},
        runs={"type": Path, "metavar": "FOLDER", "help": "keep the run folders there"},
    )
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        home = arguments.runs or Path(temporary)
        for letter in arguments.recipes:
            for seed in arguments.seeds:
                rows.append(run_recipe(letter, seed, home / f"{letter}-{seed}", arguments.quick))
    shown = ("recipe", "seed", "sparsity", "flops_share", "flops_paper_share", "quality_share", "loss", "dense_loss")
    print("\n" + "  ".join(f"{name:>17}" for name in shown))
    for row in rows:
        cells = (row[name] if isinstance(row[name], str | int) else f"{row[name]:.4f}" for name in shown)
        print("  ".join(f"{cell:>17}" for cell in cells))
    summary = {
        f"recipe_{letter}_{name}": statistics.fmean(row[name] for row in rows if row["recipe"].startswith(f"{letter}_"))
        for letter in arguments.recipes
        for name in ("flops_share", "quality_share")
    }
    write(arguments, summary, rows)


def _show(name: str, steps: int, progress: Progress) -> None:
    if progress.step % max(1, steps // 10) == 0:
        print(f"{name}  step {progress.step} of {steps}  loss {progress.loss:.3f}", file=sys.stderr, flush=True)


def _silent(progress: Progress) -> None:
    pass


if __name__ == "__main__":
    main()
