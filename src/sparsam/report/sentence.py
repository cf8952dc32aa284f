"""The one sentence a person can quote: what was trained, what it saved against its dense twin, and at what loss."""

from __future__ import annotations

from collections.abc import Mapping

from sparsam.measure.figure import Figure
from sparsam.report.claims import Comparison, sparsity
from sparsam.report.formats import PRODUCTS
from sparsam.report.load import RunData

__all__ = ["sentence"]


def sentence(run: RunData, comparisons: list[Comparison]) -> str:
    """One sentence, true by itself: every gain in it has its dense twin, and what was not compared is not spoken of.

    Args:
        run: the run folder's content.
        comparisons: of the same run, see `compare`.

    Returns:
        One sentence with a full stop.
    """
    rows = {row.name: row for row in comparisons}
    subject = _subject(run) + _formats(run)
    speed = rows.get("tokens_per_second")
    if not any(row.gain for row in comparisons):
        return _without_claim(run, subject, rows)
    clauses = []
    if speed is not None and speed.gain is not None and speed.sparse is not None and speed.dense is not None:
        clauses.append(_speed(speed.gain, speed.sparse, speed.dense))
    memory = rows.get("training_bytes")
    if memory is not None and memory.gain is not None and memory.sparse is not None and memory.dense is not None:
        share = memory.sparse.value / memory.dense.value
        clauses.append(f"needs {100 * share:.0f} % of the twin's bytes for weights, gradients and optimiser")
    clauses += _quality(rows)
    end = "; the twin was sampled, quality was not compared" if run.twin == "sampled" else ""
    return f"{subject} {_join(clauses)}{_where(run)}{end}."


def _subject(run: RunData) -> str:
    share = sparsity(run)
    if share is None:
        return "This dense model"
    if share < 5e-4:
        return "This model, dense again at the end of its training,"
    pattern = _pattern(run.recipe)
    return f"This {100 * share:.3g} % sparse model{f' ({pattern})' if pattern else ''}"


def _formats(run: RunData) -> str:
    """How many products ended in which format, where a policy decided."""
    if not run.by_product:
        return ""
    formats = [row[product] for row in run.formats if row["weight_gradient"] for product in PRODUCTS]
    shares = {name: formats.count(name) / len(formats) for name in dict.fromkeys(formats)}
    if len(shares) == 1:
        return f", its products in {formats[0]},"
    parts = [f"{100 * share:.0f} % in {name}" for name, share in sorted(shares.items(), key=lambda one: -one[1])]
    return f", its products {_join(parts)},"


def _pattern(recipe: Mapping[str, object]) -> str:
    section = recipe.get("sparsity")
    pattern = section.get("pattern") if isinstance(section, Mapping) else None
    if isinstance(pattern, Mapping) and "rows" in pattern and "cols" in pattern:
        return f"{pattern['rows']}x{pattern['cols']} blocks"
    return ""


def _speed(gain: Figure, sparse: Figure, dense: Figure) -> str:
    times, figures = f"{gain.value:.2f}x", f"{sparse.value:,.0f} against {dense.value:,.0f} tokens/s"
    if gain.value >= 1.005:
        return f"trains {times} as fast as its dense twin ({figures})"
    if gain.value > 0.995:
        return f"trains as fast as its dense twin ({figures})"
    return f"trains slower than its dense twin, at {times} its speed ({figures})"


def _quality(rows: Mapping[str, Comparison]) -> list[str]:
    loss, reached = rows.get("validation_loss"), rows.get("time_to_twin")
    if loss is None or loss.sparse is None or loss.dense is None:
        return []
    clauses = []
    if reached is not None and reached.gain is not None and reached.sparse is not None and reached.dense is not None:
        share = reached.sparse.value / reached.dense.value
        clauses.append(f"reaches the twin's final loss in {share:.2f} of the twin's time")
    clauses.append(f"ends at a validation loss of {_loss(loss.sparse)} against {_loss(loss.dense)} {loss.sparse.unit}")
    return clauses


def _loss(figure: Figure) -> str:
    return f"{figure.value:.3f}"


def _without_claim(run: RunData, subject: str, rows: Mapping[str, Comparison]) -> str:
    facts = []
    speed, loss = rows.get("tokens_per_second"), rows.get("validation_loss")
    if speed is not None and speed.sparse is not None:
        beside = f" (its dense twin: {speed.dense.value:,.0f})" if speed.dense is not None else ""
        facts.append(f"trained at {speed.sparse.value:,.0f} tokens/s{beside}")
    if loss is not None and loss.sparse is not None:
        beside = f" (its dense twin: {loss.dense.value:.3f})" if loss.dense is not None else ""
        facts.append(f"reached a validation loss of {loss.sparse.value:.3f} {loss.sparse.unit}{beside}")
    if run.dense is None:
        reason = "no dense twin ran, so no saving is claimed"
    elif run.simulated:
        reason = "formats were simulated, so its speed says nothing and no gain is claimed"
    elif any(layer.storage == "masked" for layer in run.layers):
        reason = "it keeps and multiplies its zeros (masked storage), so no gain is claimed"
    else:
        reason = "no layer of it is stored sparse, so no gain is claimed"
    return f"{subject} {_join(facts) if facts else 'was trained'}{_where(run)}; {reason}."


def _where(run: RunData) -> str:
    cpu, threads = str(run.environment.get("cpu") or ""), run.environment.get("threads")
    cpu = cpu.replace("(R)", "").replace("(TM)", "")
    if not cpu:
        return ""
    article = "an" if cpu[:1].lower() in "aeiou" else "a"
    return f", on {threads} thread{'' if threads == 1 else 's'} of {article} {cpu}"


def _join(clauses: list[str]) -> str:
    if len(clauses) < 2:
        return "".join(clauses)
    return ", ".join(clauses[:-1]) + " and " + clauses[-1]
