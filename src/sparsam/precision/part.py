"""The part that chooses number formats: one for everything through torch's autocast, or a policy for each product."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from sparsam.kernels.formats import PRODUCTS, ProductFormat, Products, arithmetic, product_format
from sparsam.measure.device_profile import DeviceProfile
from sparsam.precision.agreement import mean_over_ranks, of_rank_zero, on_all_ranks
from sparsam.precision.embeddings import EmbeddingOutputs
from sparsam.precision.gradients import gradient_norm
from sparsam.precision.layers import compiled_around, format_layers, multiplies_blocks, restore_layers
from sparsam.precision.policies import Evidence, Policy, UnitState
from sparsam.precision.resolve import Resolved, requested, resolve
from sparsam.precision.running import RunningStatistics
from sparsam.precision.sampling import Sampler
from sparsam.precision.snapshot import Snapshot
from sparsam.precision.stats import LossTrend, ProductSample
from sparsam.precision.table import FormatRow, FormatTable
from sparsam.session import Part, Session
from sparsam.shards import refuse_sharded

__all__ = ["Precision", "Switch"]


@dataclass(frozen=True)
class Switch:
    """One product went from one format to another after `step` applied steps."""

    step: int
    layer: str
    product: str
    before: str
    after: str


class Precision(Part):
    """Chooses the formats that a model is computed in. Weights and moments stay float32.

    With a name, the forward pass runs under autocast, or not. With a policy, each of the three products of each linear
    layer has its own format, and everything else runs under autocast as soon as one forward product is of 16 bits or
    fewer: outputs of embeddings too, while norms and softmax compute in float32 inside. Linear layers that compute in a
    way of their own (subclasses of nn.Linear, attention's own projections) follow autocast. Formats change between
    steps, never within an accumulation window or between a forward pass and its recomputation.

    With a policy no step is taken whose gradients, or their squares, are not finite, and batch norms forget its batch.
    A gradient that overflows while a `LossScaler` scales the loss is that part's to answer for: policies do not hear of
    it. In a loop that owns backward and clipping, both are the loop's own affair.

    A compiled model works with a policy that does not sample; it is compiled again whenever formats change.

    Args:
        policy: "fp32", "bf16", or a `Policy`.
        simulate: allow formats that this device cannot multiply in: numbers are rounded as in the format, and times
            say nothing of it.
        probe: returns losses (any shape, one for each sample or batch) of the model as it is on data that stays the
            same; without it a policy goes by statistics alone.
        profile: times of products on this device; None reads and keeps them in the user's cache folder.
        snapshot: keep a copy of weights and optimiser state while a lower format is on trial, and go back to it when a
            step is refused or the loss leaps.

    Attributes:
        switches: how many changes of format there were.

    Raises:
        ValueError: another name; when attached: a format that this device lacks, without `simulate`; a second part of
            this kind; no linear layers; a compiled model and a policy that samples.

    Source: policies as in `Adaptive` and `Progressive`.
    """

    def __init__(
        self,
        policy: Policy | Literal["fp32", "bf16"] = "bf16",
        *,
        simulate: bool = False,
        probe: Callable[[], Tensor] | None = None,
        profile: DeviceProfile | None = None,
        snapshot: bool = True,
    ) -> None:
        if isinstance(policy, str) and policy not in ("fp32", "bf16"):
            raise ValueError(f"precision: expected fp32 or bf16, got {policy!r}. bf16 is the one that CPUs run fast.")
        if not isinstance(policy, str | Policy):
            raise ValueError(f"precision: expected fp32, bf16 or a policy, got {policy!r}. Adaptive() is a policy.")
        self.policy = None if isinstance(policy, str) else policy
        self._plain = policy if isinstance(policy, str) else "fp32"
        self.simulate, self.probe, self.keeps_snapshot = simulate, probe, snapshot
        self._profile = profile
        self.switches = 0
        self._new: list[Switch] = []
        self.state: Mapping[str, UnitState] = {}
        self._layers: dict[str, torch.nn.Module] = {}
        self._embeddings: EmbeddingOutputs | None = None
        self._snapshot: Snapshot | None = None
        self._trend = LossTrend()
        self._scaled = False
        self._window: list[Tensor] = []  # losses of its micro-batches

    def attach(self, session: Session) -> None:
        if sum(isinstance(part, Precision) for part in session.parts) > 1:
            raise ValueError(
                "precision: expected one Precision in a session, got several. Keep the one with the policy."
            )
        self.session = session
        self.device = next(session.model.parameters()).device
        if self.policy is None:
            return
        refuse_sharded(session.model, "precision", 'Use Precision("bf16") or fully_shard(mp_policy=...).')
        if session.apart:  # each decision is one message at least, and ranks are not at the same batch
            raise ValueError(
                f"precision: expected one format under LocalSteps(every={session.apart}), got a policy, on which all "
                'ranks decide together at every step. Use Precision("bf16").'
            )
        # refuses what the device lacks; a candidate that it lacks is never chosen
        sure = [one for one in self.policy.lowest if one not in self.policy.candidates]
        requested(sure, self.device, self.simulate)
        self._layers = format_layers(session.model)
        self._sampler, self._running = Sampler(self._layers, self._wanted), RunningStatistics(session.model)
        self._embeddings = EmbeddingOutputs(session.model)
        try:
            if not self._layers:
                raise ValueError(
                    "precision: expected a model with nn.Linear or SparseLinear layers, got none. "
                    'Use Precision("bf16"), which needs none.'
                )
            if self.policy.sample_every and (compiled := compiled_around(session.model, self._layers)) is not None:
                raise ValueError(
                    f"precision: expected a model that is not compiled, got {compiled or 'one that is'}: compiled code "
                    "runs without the hooks that sample. Use Rules, Progressive or a name, or leave compile out."
                )
            units = tuple(f"{layer}/{product}" for layer in self._layers for product in PRODUCTS)
            start = self.policy.start(units)
            for unit, one in start.items():
                for format in self.policy.reach(one):
                    self._resolve(unit.rpartition("/")[0], format)  # refused now, not in the middle of the training
            self._set(start)
        except BaseException:
            self.detach()
            raise

    def forward(self) -> contextlib.AbstractContextManager[object]:
        if self.policy is not None and torch.is_grad_enabled():  # an evaluation has no gradients to look at
            self._running.keep()
            every = self.policy.sample_every
            if every and (self.session.applied_steps + 1) % every == 0:
                self._sampler.watch()
        return self._autocast()

    def after_loss(self, loss: Tensor) -> None:
        if self.policy is not None and self.policy.sample_every:
            self._window.append(loss)

    def before_step(self) -> None:
        self._scaled = any(part.loss_scale() != 1.0 for part in self.session.parts)

    def accepts_step(self) -> bool:
        if self.policy is None or self.session.clip is not None:  # clipping measures the norm anyway
            return True
        parameters = (parameter for group in self.session.optimizer.param_groups for parameter in group["params"])
        fits = gradient_norm(parameters) ** 2 <= torch.finfo(torch.float32).max  # optimisers keep squares
        return on_all_ranks(fits, self.device)

    def after_step(self, applied: bool) -> None:
        if self.policy is None:
            return
        losses, self._window = self._window, []
        loss = mean_over_ranks(torch.stack(losses).float().mean()) if losses else None
        samples = self._sampler.take()
        if applied:
            self._running.forget()
        else:
            self._running.put_back()
            if self._scaled and loss is not None and math.isfinite(loss):
                return  # the scale was too high for the gradients; formats have no part in it
        self._decide(loss, applied, samples)

    def _decide(self, loss: float | None, applied: bool, samples: Mapping[str, Mapping[str, ProductSample]]) -> None:
        """Asks the policy, and does what it says."""
        assert self.policy is not None
        evidence = Evidence(
            samples=samples,
            finite=applied and (loss is None or math.isfinite(loss)),
            loss_score=0.0 if loss is None else self._trend.score(loss),
            gain=self._gain,
            probe=None if self.probe is None else self._gap,
        )
        if loss is not None:
            self._trend = self._trend.seen(loss)
        decided = self.policy.decide(self.state, evidence, self.session.applied_steps)
        if samples:
            decided = of_rank_zero(decided)  # samples, gains and probes are each rank's own
        raised = any(one.backoffs > self.state[unit].backoffs for unit, one in decided.items())
        self._become(decided, tripped=raised and (not evidence.finite or evidence.loss_score > self.policy.spike))

    def metrics(self) -> dict[str, float]:
        if self.policy is None:
            return {}
        names = [self._actual(unit).name for unit in self.state]
        shares = {f"precision.{name}": names.count(name) / len(names) for name in dict.fromkeys(names)}
        kept = {} if self._snapshot is None else {"precision.snapshot_bytes": float(self._snapshot.nbytes)}
        return {"precision.switches": float(self.switches), **shares, **kept}

    def take(self) -> list[Switch]:
        """The changes of format since it was last asked."""
        new, self._new = self._new, []
        return new

    def table(self) -> FormatTable:
        """In which format each product runs now, and the rest of the model."""
        rows = []
        for layer in self._layers:
            states = [self.state[f"{layer}/{product}"] for product in PRODUCTS]
            found = [self._resolve(layer, product_format(state.format)) for state in states]
            reasons = [one.reason for one in found if one.reason]
            reasons += [f"{name}: {why}" for state in states for name, why in state.rejected.items()]
            simulated = any(one.arithmetic == "simulated" for one in found)
            rows.append(
                FormatRow(
                    layer,
                    **{product: one.format.name for product, one in zip(PRODUCTS, found, strict=True)},
                    arithmetic="simulated" if simulated else "real",
                    reason="; ".join(dict.fromkeys(reasons)),
                )
            )
        low = self._ambient() is not None if self.policy is not None else self._plain != "fp32"
        rest = "bf16" if low else "fp32"
        rows.append(FormatRow("everything else", rest, reason="autocast" if low else ""))
        if low:
            inside = "float32 inside, stored as what they are given"
            rows.append(FormatRow("norms, softmax, loss", "fp32", reason=inside))
            if self._embeddings is not None and self._embeddings.names:
                rows.append(FormatRow("embeddings", rest, reason="their outputs; tables stay float32"))
        return FormatTable(tuple(rows))

    def state_dict(self) -> dict[str, Any]:
        if self.policy is None:
            return {}
        return {
            "units": {name: asdict(state) for name, state in self.state.items()},
            "trend": asdict(self._trend),
            "switches": self.switches,
            "snapshot": None if self._snapshot is None else self._snapshot.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if bool(state) != (self.policy is not None):
            kinds = ("one format", "a policy")
            raise ValueError(
                f"precision: expected the state of {kinds[self.policy is not None]}, got that of "
                f"{kinds[bool(state)]}. Resume with the precision that was saved."
            )
        if self.policy is None:
            return
        if state["units"].keys() != self.state.keys():
            other = next(iter(state["units"].keys() ^ self.state.keys()))
            raise ValueError(
                f"precision: expected a state of the same layers, got one that differs in {other}. "
                "Resume with the model that was saved."
            )
        self._set({name: UnitState(**one) for name, one in state["units"].items()})
        self._trend = LossTrend(**state["trend"])
        self.switches = int(state["switches"])
        self._snapshot = None if state["snapshot"] is None else Snapshot.from_state(state["snapshot"])

    def after_rewire(self, event: object) -> None:
        self._snapshot = None  # of another topology: it would bring back weights that are gone

    def detach(self) -> None:
        if self._embeddings is not None:  # a policy was attached
            self._sampler.take()
            self._embeddings.remove()
        restore_layers(self._layers.values())
        self._layers, self._snapshot, self._embeddings, self.state = {}, None, None, {}

    def _become(self, state: Mapping[str, UnitState], tripped: bool = False) -> None:
        """Takes over a decision: notes the switches, and keeps a snapshot while lower formats are on trial."""
        if state is self.state and self._snapshot is None:
            return  # as most steps leave it
        step, before = self.session.applied_steps, {unit: self._actual(unit) for unit in self.state}
        trial = self.policy.trial_steps if self.policy is not None and self.keeps_snapshot else 0
        lowered = [unit for unit in state if product_format(state[unit].format).bits < before[unit].bits]
        if self._snapshot is not None and step - self._snapshot.step > trial:
            self._snapshot = None
        if tripped and self._snapshot is not None:
            self._snapshot.restore(self.session)
            self._snapshot = None
        elif lowered and trial:
            self._snapshot = Snapshot.take(self.session)
        changed = [unit for unit in state if state[unit].format != self.state[unit].format]
        if changed:
            self._set(state)
        self.state = state
        for unit in changed:
            layer, _, product = unit.rpartition("/")
            self._new.append(Switch(step, layer, product, before[unit].name, self._actual(unit).name))
        self.switches += len(changed)

    def _set(self, state: Mapping[str, UnitState]) -> None:
        """Gives every layer its formats; what autocast does just as well is left to it."""
        self.state = state
        plain = "fp32" if self._ambient() is None else "bf16"
        for layer, module in self._layers.items():
            found = Products(*(self._actual(f"{layer}/{product}") for product in PRODUCTS))
            module.formats = None if {one.name for one in found} == {plain} else found  # type: ignore[assignment]

    def _resolve(self, layer: str, format: ProductFormat) -> Resolved:
        return resolve(format, self.device, self.simulate, blocks=multiplies_blocks(self._layers[layer]))

    def _actual(self, unit: str) -> ProductFormat:
        """What a unit's product is computed in now."""
        return self._resolve(unit.rpartition("/")[0], product_format(self.state[unit].format)).format

    def _ambient(self) -> torch.dtype | None:
        """The type of autocast, None without."""
        forwards = [self._actual(unit) for unit in self.state if unit.endswith(f"/{PRODUCTS[0]}")]
        if all(one.bits > 16 for one in forwards):
            return None
        return torch.float16 if any(one.name == "fp16" for one in forwards) else torch.bfloat16

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        dtype = self._ambient() if self.policy is not None else (torch.bfloat16 if self._plain == "bf16" else None)
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def _wanted(self, unit: str) -> Sequence[ProductFormat]:
        """The formats worth a look: those lower than now if it may be lowered, and the one of now where it is low."""
        assert self.policy is not None
        state = self.state[unit]
        waits = state.pinned or self.session.applied_steps + 1 < state.wait
        now, blocks = self._actual(unit), multiplies_blocks(self._layers[unit.rpartition("/")[0]])
        lower = [
            one
            for one in self.policy.candidates
            if not waits and one.bits < now.bits and (self.simulate or arithmetic(one, self.device, blocks) == "real")
        ]
        return [*lower, now] if now.bits <= 16 else lower

    def _gain(self, unit: str, format: ProductFormat) -> float:
        """Time of a unit's product now over its time in a format; 0 where that is not multiplied in itself."""
        layer, _, product = unit.rpartition("/")
        module: Any = self._layers[layer]
        now = self._actual(unit)
        if arithmetic(format, self.device, blocks=multiplies_blocks(module)) == "simulated":
            return 0.0
        if self._profile is None:
            self._profile = DeviceProfile()
        tokens, inputs, outputs = self._sampler.tokens[layer], module.in_features, module.out_features
        if not multiplies_blocks(module):
            return self._profile.products.gain(product, tokens, inputs, outputs, now, format)
        # blocks are timed as a whole layer: forward and backward
        rows, cols, density = module.pattern.rows, module.pattern.cols, module.density
        before, after = (
            self._profile.linear(tokens, inputs, outputs, rows, cols, density, one.name).compact_ms
            for one in (now, format)
        )
        return before / after

    def _gap(self, changes: Mapping[str, ProductFormat]) -> float:
        """Upper 95 % bound of the relative gap in loss between the formats of now and these, on the same data."""
        before = self.state
        now = self._probed()
        try:
            self._set({**before, **{unit: replace(before[unit], format=one.name) for unit, one in changes.items()}})
            then = self._probed()
        finally:
            self._set(before)
        if not bool(then.isfinite().all()):
            return math.inf
        gaps = (then - now) / now.mean().abs().clamp(min=1e-12)
        spread = float(gaps.std()) if len(gaps) > 1 else 0.0
        return float(gaps.mean()) + 1.645 * spread / math.sqrt(len(gaps))

    @torch.no_grad()
    def _probed(self) -> Tensor:
        assert self.probe is not None
        training = {module: module.training for module in self.session.model.modules()}
        fast = torch.backends.mha.get_fastpath_enabled()
        self.session.model.eval()  # a probe draws no dropout and moves no running mean
        torch.backends.mha.set_fastpath_enabled(False)  # in which torch's transformer layers pass their linears by
        try:
            with torch.random.fork_rng([] if self.device.type == "cpu" else [self.device]), self._autocast():
                return torch.as_tensor(self.probe()).detach().double().flatten()
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, mode in training.items():
                module.training = mode
