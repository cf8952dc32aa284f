"""The whole training step of a byte GPT, block-sparse against its dense twin, in one process, interleaved.

    python benchmarks/train_step.py [--quick] [--json FILE]

Both sides get the better of eager and torch.compile, the same attention, activation, optimiser and allocator settings.
A step is forward, backward, clipping, AdamW; the sparse one also carries its share of a RigL update every 100 steps.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for tensors: both sides gain, the sparse one more

import torch
import torch._dynamo
import torch.nn.functional as F
from harness import parse, write

import sparsam as sp
from sparsam.kernels import scratch_bytes
from sparsam.measure.clock import Ratio, interleaved, ratio
from sparsam.measure.heap import keep_heap
from sparsam.measure.memory import training_bytes
from sparsam.tasks.gpt import GPT

BATCH, TOKENS, EVERY = 16, 256, 100
RATE = 1e-4  # small: the numbers of a step stay ordinary ones over the whole run


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int


def main() -> None:
    arguments = parse(__doc__)
    repeats = 3 if arguments.quick else 15
    keep_heap()  # for all contenders alike
    # a model that silently fell back to eager would count as compiled, with no recompiles
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    cases = [(Size(512, 6, 8), (0.1, 0.2)), (Size(1024, 4, 16), (0.1,))]
    rows: list[dict[str, Any]] = []
    for size, densities in cases[: 1 if arguments.quick else None]:
        rows += measure(size, densities, repeats, compiled=not arguments.quick, plain=size.width == 512)
    for row in rows:
        print(
            f"width {row['width']}, {row['sparsity_percent']:.0f} % sparse: {row['tokens_per_second']:,.0f} tokens/s "
            f"({row['way']}), dense twin {row['dense_tokens_per_second']:,.0f} "
            f"({row['dense_way']}): {row['ratio']:.2f}x, quartiles {row['ratio_low']:.2f} and {row['ratio_high']:.2f}"
            + (f"; plain fp32 loop {row['fp32_ratio']:.2f}x" if row["fp32_ratio"] else "")
        )
        print(
            f"    bytes of sparse layers {row['sparse_bytes']:,} = {row['bytes_share_of_dense']:.4f} of dense; "
            f"packed_bytes {row['packed_bytes']:,}; recompiles over 100 rewires: {row['recompiles']}"
        )
    by_name = {f"w{row['width']}_{row['sparsity_percent']:.0f}": row for row in rows}
    summary = {name: row["ratio"] for name, row in by_name.items()}
    summary["w512_90_vs_fp32"] = by_name["w512_90"]["fp32_ratio"]
    write(arguments, summary, rows)


def measure(
    size: Size, densities: tuple[float, ...], repeats: int, compiled: bool, plain: bool
) -> list[dict[str, Any]]:
    """One row per density, all contenders of this size timed round-robin."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(size.layers, size.width, size.heads, TOKENS)
    tokens = torch.randint(256, (BATCH, TOKENS + 1))
    steps: dict[str, Callable[[], object]] = {"dense eager": training(model, tokens)}
    sparse: dict[float, dict[str, Any]] = {}
    if compiled:
        steps["dense compiled"] = training(model, tokens, compiled=True)
    if plain:
        steps["plain fp32"] = plain_loop(size, tokens)
    for density in densities:
        for way in ("eager", "compiled")[: 2 if compiled else 1]:
            session = sparse_session(model, density)
            steps[f"{density} {way}"] = training(session, tokens, compiled=way == "compiled")
            sparse.setdefault(density, {})[way] = session
    timings = interleaved(steps, repeats=repeats, warmup=3)
    for name, timing in timings.items():
        print(f"  width {size.width} {name}: {timing.median_ms:.1f} ms, spread {timing.spread:.2f}", file=sys.stderr)
    dense_way = min(
        (way for way in ("dense eager", "dense compiled") if way in timings), key=lambda w: timings[w].median_ms
    )
    rows = []
    for density in densities:
        way = min(sparse[density], key=lambda w: timings[f"{density} {w}"].median_ms)
        session = sparse[density][way]
        chosen = timings[f"{density} {way}"]
        rewire_ms = rewire_extra_ms(session, steps[f"{density} {way}"], repeats)
        share = chosen.median_ms / (chosen.median_ms + rewire_ms / EVERY)
        speed = scaled(ratio(timings[dense_way], chosen), share)
        kept, whole = bytes_of_sparse_layers(session)
        rows.append(
            {
                "width": size.width,
                "layers": size.layers,
                "sparsity_percent": 100 * (1 - density),
                "block": 32,
                "way": way,
                "dense_way": dense_way.removeprefix("dense "),
                "step_ms": chosen.median_ms + rewire_ms / EVERY,
                "rewire_extra_ms": rewire_ms,
                "dense_step_ms": timings[dense_way].median_ms,
                "tokens_per_second": BATCH * TOKENS / (chosen.median_ms + rewire_ms / EVERY) * 1e3,
                "dense_tokens_per_second": BATCH * TOKENS / timings[dense_way].median_ms * 1e3,
                "ratio": speed.median,
                "ratio_low": speed.low,
                "ratio_high": speed.high,
                "fp32_ratio": ratio(timings["plain fp32"], chosen).median * share if plain else None,
                "all_ms": {name: timing.median_ms for name, timing in timings.items()},
                "sparse_bytes": kept,
                "bytes_share_of_dense": kept / whole,
                "packed_bytes": scratch_bytes(),  # the kernels' scratch memory of all threads: packs, panels, sums
                "recompiles": recompiles(session, steps[f"{density} {way}"]) if way == "compiled" else 0,
            }
        )
    return rows


def sparse_session(model: GPT, density: float) -> sp.Session:
    """A sparse copy of the model with its optimiser and RigL."""
    model = copy.deepcopy(model)
    sp.sparsify(model, sp.Block(32, 32), density, sparse_fan_in=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    return sp.Session(model, optimizer, [sp.SparseTraining(sp.rigl(every=EVERY)), sp.Precision("bf16")], clip=1.0)


def training(model: GPT | sp.Session, tokens: torch.Tensor, compiled: bool = False) -> Callable[[], object]:
    """One training step as a function, with everything a real loop does."""
    if isinstance(model, sp.Session):
        session = model
    else:
        twin = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(twin.parameters(), lr=RATE, fused=True)
        session = sp.Session(twin, optimizer, [sp.Precision("bf16")], clip=1.0)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(session.model(inputs).float().flatten(0, 1), targets.flatten())

    run = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        with session.forward():
            loss = run(tokens[:, :-1], tokens[:, 1:])
        session.backward(loss)
        session.step()

    return step


def plain_loop(size: Size, tokens: torch.Tensor) -> Callable[[], object]:
    """What a user has today: float32, PyTorch's own attention and optimiser defaults."""
    model = PlainGPT(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step() -> None:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class PlainGPT(torch.nn.Module):
    """The same model from torch.nn's own transformer layers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(256, size.width)
        self.positions = torch.nn.Embedding(TOKENS, size.width)
        layer = torch.nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = torch.nn.LayerNorm(size.width)
        self.blocks = torch.nn.TransformerEncoder(layer, size.layers, norm, enable_nested_tensor=False)
        self.head = torch.nn.Linear(size.width, 256, bias=False)
        self.register_buffer("mask", torch.nn.Transformer.generate_square_subsequent_mask(TOKENS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.blocks(x, self.mask, is_causal=True))


def rewire_extra_ms(session: sp.Session, step: Callable[[], object], repeats: int) -> float:
    """How much longer the step of a RigL update takes than another, measured by turns."""

    def until(remainder: int) -> Callable[[], object]:
        def at() -> None:
            session.applied_steps = remainder
            step()

        return at

    timings = interleaved({"update": until(EVERY - 1), "other": until(0)}, repeats=min(repeats, 5), warmup=1)
    return max(0.0, timings["update"].median_ms - timings["other"].median_ms)


def recompiles(session: sp.Session, step: Callable[[], object]) -> int:
    """Compilations that happen during 100 rewires, after both graphs (update step or not) exist."""
    from torch._dynamo.utils import counters

    for _ in range(2):
        session.applied_steps = EVERY - 1
        step()
        step()
    graphs = counters["stats"].get("unique_graphs", 0)
    for _ in range(100):
        session.applied_steps = EVERY - 1
        step()
    return counters["stats"].get("unique_graphs", 0) - graphs


def bytes_of_sparse_layers(session: sp.Session) -> tuple[int, int]:
    """Bytes of parameters + gradients + optimiser state of the sparse layers' weights, and of the dense ones."""
    values = [module.values for module in session.model.modules() if isinstance(module, sp.SparseLinear)]
    for parameter in values:
        parameter.grad = torch.zeros_like(parameter)
    kept = sum(training_bytes(values, session.optimizer).values())
    dense = sum(
        module.out_features * module.in_features
        for module in session.model.modules()
        if isinstance(module, sp.SparseLinear)
    )
    return kept, dense * 16


def scaled(speed: Ratio, share: float) -> Ratio:
    return Ratio(speed.median * share, speed.low * share, speed.high * share)


if __name__ == "__main__":
    main()
