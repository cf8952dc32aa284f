"""What one worker puts on the wire for one tensor, and how it is read back. No process group: see allreduce.py.

    codec = Int8Rows()
    payload = codec.encode(gradient)          # payload.tensors go through collectives, payload.nbytes in all
    gradient_ = codec.decode(payload, n)      # float32, what the receiver knows of it

The shapes of a payload are a function of n alone, so that collectives need no exchange of sizes. A codec has no state
and draws no random numbers: the same input gives the same bytes on every rank. What it leaves out is kept by
`Residuals`. Non-finite input never vanishes: what is decoded is non-finite somewhere, and the step can be skipped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsam.formats import FLOAT32_MAX, INT8_ROWS, Quantised

__all__ = ["BF16", "Codec", "Identity", "Int8Rows", "Payload", "TopK"]


@dataclass(frozen=True, eq=False)
class Payload:
    """What one worker puts on the wire for one tensor.

    Attributes:
        tensors: contiguous; int8, int32, bfloat16 or float32. They may share memory with what was encoded.
    """

    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Codec(ABC):
    """One way to write a gradient.

    Attributes:
        additive: whether the sum of payloads decodes to the sum of what each decodes to, up to rounding in the
            payload's type, so that a ring all-reduce of payloads is right. For a mean divide before `encode`: sums
            then stay within the type's range.
        lossless: whether `decode` gives back exactly what `encode` was given.
    """

    additive: ClassVar[bool] = False
    lossless: ClassVar[bool] = False

    @property
    def reads_weights(self) -> bool:
        """Whether `encode` needs `weights`."""
        return False

    @property
    def grain(self) -> int | None:
        """How many neighbours are written together, whatever else is in the tensor: tensors that are filled up to
        multiples of it are written in one call as each is by itself. Each tensor of the payload then has equally many
        entries for each grain, `grain` of them or fewer. None: what a value becomes depends on the whole tensor."""
        return None

    @abstractmethod
    def encode(self, x: Tensor, *, weights: Tensor | None = None) -> Payload:
        """Writes a tensor.

        Args:
            x: float32 (n,), a gradient with its residual.
            weights: (n,), what x is the gradient of, for codecs with `reads_weights`; others ignore it.

        Raises:
            ValueError: x is of another type or shape, or weights are missing or do not match.
        """

    @abstractmethod
    def decode(self, payload: Payload, n: int) -> Tensor:
        """float32 (n,) of what `encode` made of n values; may share memory with the payload."""

    @abstractmethod
    def bytes_of(self, n: int) -> int:
        """Bytes of the payload of n values, exactly."""


@dataclass(frozen=True)
class Identity(Codec):
    """float32 as it is: 4 bytes a value, and no copy."""

    additive: ClassVar[bool] = True
    lossless: ClassVar[bool] = True

    def encode(self, x: Tensor, *, weights: Tensor | None = None) -> Payload:
        return Payload((_flat(x).contiguous(),))

    def decode(self, payload: Payload, n: int) -> Tensor:
        return payload.tensors[0].view(n)

    def bytes_of(self, n: int) -> int:
        return 4 * n


@dataclass(frozen=True)
class BF16(Codec):
    """bfloat16, rounded to nearest: 2 bytes a value.

    It has float32's range, so neither a large gradient nor a small one needs a scale; fp16 would lose what is below
    6e-8 and above 65504.
    """

    additive: ClassVar[bool] = True

    def encode(self, x: Tensor, *, weights: Tensor | None = None) -> Payload:
        return Payload((_flat(x).to(torch.bfloat16).contiguous(),))

    def decode(self, payload: Payload, n: int) -> Tensor:
        return payload.tensors[0].view(n).to(torch.float32)

    def bytes_of(self, n: int) -> int:
        return 2 * n


@dataclass(frozen=True)
class Int8Rows(Codec):
    """Integers from -127 to 127 and a float32 scale for each `row` neighbours: 1 + 4 / row bytes a value.

    Not additive: integers of other scales do not add up, and their sum wraps. Reduce in two steps (all-to-all, sum in
    float32, all-gather).

    Args:
        row: values under one scale, the largest magnitude among them / 127. The last row may be shorter.

    Source: Alistarh et al. 2017, arXiv:1610.02132 (QSGD, buckets of 512). Differs: rounded to nearest, which is biased
        and has a quarter of the mean squared error; the bias is what error feedback takes care of. Scaled by the
        largest magnitude instead of the norm. A row with a non-finite value decodes to NaN, by its scale.
    """

    row: int = 512

    def __post_init__(self) -> None:
        if self.row < 1:
            raise ValueError(f"row: expected at least 1 value under a scale, got {self.row}. 512 is a good choice.")

    @property
    def grain(self) -> int:
        return self.row

    def encode(self, x: Tensor, *, weights: Tensor | None = None) -> Payload:
        written = [_quantised(rows) for rows in self._rows(_flat(x).contiguous())]
        return Payload((_joined([codes for codes, _ in written]), _joined([scale for _, scale in written])))

    def decode(self, payload: Payload, n: int) -> Tensor:
        codes, scale = payload.tensors
        full = n // self.row
        scales = (scale[:full].view(-1, 1), scale[full:].view(-1, 1))
        rows = zip(self._rows(codes.view(n)), scales, strict=True)
        return _joined([Quantised(part, part_scale, INT8_ROWS).dequantise() for part, part_scale in rows])

    def bytes_of(self, n: int) -> int:
        return n + 4 * -(-n // self.row)

    def _rows(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Full rows as a matrix, and what is left as a matrix of one row or none. Views: padding would copy."""
        rest = len(flat) % self.row
        body = len(flat) - rest
        return flat[:body].view(-1, self.row), flat[body:].view(-1, rest or 1)


@dataclass(frozen=True)
class TopK(Codec):
    """The most important values and where they are: 4 bytes for each run of them, and what `values` makes of them.

    Always ceil(share * runs) of them: an exact count, and between equal ones those that come first. Each worker
    chooses its own, so payloads are not additive: gather them, and add up what each decodes to.

    `agreed` is for dense models: all ranks choose the same runs, by the mean of their scores, which goes over the wire
    first (4 bytes a run), and then no index does. The chosen values alone are averaged, in the way of `values`:

        TopK(0.4, block=128, values=Int8Rows(), agreed=True)   # about 0.4 bytes a value, for each of the two steps

    Args:
        share: of the runs that are sent, in (0, 1].
        importance: "gradient", |g|, what a step would change most; or "taylor", |w g|, what it would change the loss
            by, to first order, if the weight went. Added up over a run.
        block: neighbours in one run, which share an index. The last run is filled up with zeros on the wire.
        values: how the values are written.
        agreed: whether ranks choose together, in `mean_over_ranks`. `encode` by itself asks nobody, and writes indices.

    Source: Lin et al. 2018, arXiv:1712.01887 (deep gradient compression); |w g|: Molchanov et al. 2019,
        arXiv:1906.10771. Differs: an exact top-k of the whole tensor, not a threshold from a sample; what is left out
        is kept as it is (`Residuals`), without momentum correction, factor masking or warm-up.
    """

    share: float
    importance: Literal["gradient", "taylor"] = "gradient"
    block: int = 1
    values: Codec = Identity()
    agreed: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share: expected a share of values in (0, 1], got {self.share}. 0.01 sends 1 %.")
        if self.importance not in ("gradient", "taylor"):
            raise ValueError(f"importance: expected 'gradient' or 'taylor', got {self.importance!r}. Name one of them.")
        if self.block < 1:
            raise ValueError(f"block: expected runs of at least 1 value, got {self.block}. 1 sends single values.")

    @property
    def reads_weights(self) -> bool:
        return self.importance == "taylor"

    def encode(self, x: Tensor, *, weights: Tensor | None = None) -> Payload:
        chosen = self.choose(self.scores(x, weights))
        return Payload((chosen.to(torch.int32), *self.values.encode(self.take(x, chosen)).tensors))

    def decode(self, payload: Payload, n: int) -> Tensor:
        chosen, *values = payload.tensors
        decoded = self.values.decode(Payload(tuple(values)), len(chosen) * self.block)
        return self.put(decoded, chosen.long(), decoded.new_zeros(n))

    def bytes_of(self, n: int) -> int:
        count = self._count(self.runs(n))
        return 4 * count + self.values.bytes_of(count * self.block)

    def runs(self, n: int) -> int:
        """How many runs n values make."""
        return -(-n // self.block)

    def scores(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """float32 (runs,): the importance of each, infinite where a value of it is not finite."""
        rows = self._rows(_flat(x))
        if not self.reads_weights:
            read = rows
        elif weights is None or weights.shape != x.shape:
            got = "none" if weights is None else f"{tuple(weights.shape)}"
            raise ValueError(
                f"weights: expected {tuple(x.shape)} for importance 'taylor', got {got}. "
                "Give encode the weights, or choose importance='gradient'."
            )
        else:
            read = rows * self._rows(weights.detach())
        scores = torch.linalg.vector_norm(read, 1, -1)  # one pass without a copy
        if not bool(scores.isfinite().all()):
            # finite values may add up to infinity: still less than one that is infinite, in a mean over ranks too
            scores = scores.nan_to_num_(nan=FLOAT32_MAX).masked_fill_(~rows.isfinite().all(-1), math.inf)
        return torch.where(scores.isinf(), scores, scores.clamp(max=FLOAT32_MAX / 2))

    def choose(self, scores: Tensor) -> Tensor:
        """int64, rising: which runs are sent."""
        count = self._count(len(scores))
        if count == len(scores):
            return torch.arange(count, device=scores.device)
        # torch.topk promises no order among equals
        smallest = scores.topk(count, sorted=False).values.min()
        above = (scores > smallest).nonzero().view(-1)
        equal = (scores == smallest).nonzero().view(-1)[: count - len(above)]
        return torch.cat([above, equal]).sort().values

    def take(self, x: Tensor, chosen: Tensor) -> Tensor:
        """float32 (chosen * block,): the values of the chosen runs."""
        return self._rows(_flat(x)).index_select(0, chosen).view(-1)

    def put(self, values: Tensor, chosen: Tensor, out: Tensor) -> Tensor:
        """Writes values to where in `out`, float32 (n,), they were taken from."""
        values, rest = values.view(-1, self.block), len(out) % self.block
        body = out[: len(out) - rest].view(-1, self.block)
        if rest and len(chosen) and int(chosen[-1]) == len(body):
            out[-rest:] = values[-1, :rest]
            values, chosen = values[:-1], chosen[:-1]
        body.index_copy_(0, chosen, values)
        return out

    def _count(self, runs: int) -> int:
        return math.ceil(self.share * runs * (1 - 1e-12))  # 0.07 * 100 is a little more than 7

    def _rows(self, flat: Tensor) -> Tensor:
        missing = -len(flat) % self.block
        return (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).reshape(-1, self.block)


def _flat(x: Tensor) -> Tensor:
    if x.dtype != torch.float32 or x.dim() != 1:
        raise ValueError(
            f"encode: expected a flat float32 tensor, got {x.dtype} of {tuple(x.shape)}. Call .float().flatten() first."
        )
    return x.detach()


def _quantised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """int8 codes and the scale of each row (rows, 1), NaN where a row is not finite."""
    amax = torch.maximum(rows.amax(-1, keepdim=True), -rows.amin(-1, keepdim=True))
    broken = ~amax.isfinite()
    scale = INT8_ROWS.scale_of(amax)
    assert scale is not None  # rows have scales
    if bool(broken.any()):
        rows = rows.masked_fill(broken, 0.0)  # integers have no NaN; their scale has
    codes = INT8_ROWS.quantise(rows, scale=scale).codes
    return codes, scale.masked_fill(broken, math.nan)


def _joined(parts: list[Tensor]) -> Tensor:
    """Flat; without a copy where only one part holds anything."""
    filled = [part.view(-1) for part in parts if part.numel()]
    return filled[0] if len(filled) == 1 else torch.cat([part.view(-1) for part in parts])
