"""Distillation as a part: a teacher's logits, hidden states and attention are terms of the student's loss.

distillation = Distillation(teacher, logits=0.5, temperature=2.0)
session = Session(student, optimizer, [SparseTraining(rigl()), distillation])
...
with session.forward():
    logits = student(inputs)
    loss = distillation.loss(logits, inputs, cross_entropy(logits, labels))
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsam.compress.gradients import evaluating
from sparsam.compress.matching import attended, expect_graph, matched, refuse_compiled, state_of, watching
from sparsam.compress.teaching import attention_loss, relation_loss, soft_target_loss, state_loss
from sparsam.session import Part, Session
from sparsam.window import averages, exchange

__all__ = ["Distillation"]

Widths = tuple[int, int]
_IGNORED = -100


class Distillation(Part):
    """Adds to a loss how far the student is from its teacher: weight times a mean, for each of up to three terms.

    The teacher is in evaluation mode whenever it computes, without gradients and with random numbers of its own; it is
    in no optimiser and no checkpoint. It computes in the session's autocast, once for each call of `loss`. The student
    may be sparse, smaller, or of another kind where only logits are compared. Positions labelled -100, and those that
    an attention mask leaves out, count for nothing.

    Logits alone need no session, and work with a student under torch.compile, DistributedDataParallel and FSDP2.
    Hidden states and attention are read by hooks that are there inside `session.forward()` only, so neither a
    recomputation in the backward nor a copy of the model meets them; models compiled before the session are refused.

    Args:
        teacher: any model that takes the student's inputs; on several ranks each has its own, unwrapped.
        logits: weight of `soft_target_loss`.
        temperature: of it.
        hidden: glob over the student's modules -> glob over the teacher's, whose outputs (the first tensor of each) are
            to be equal. A glob may match several modules, in the same number on both sides.
        hidden_weight: of the mean over all pairs of `state_loss`.
        widths: (student's, teacher's) features of hidden states, where they differ: for all of `hidden`, or by its
            student globs. A linear projection for each glob is trained along with the student: put `parameters()` into
            the optimiser. Four-dimensional states are (B, features, height, width).
        attention: glob -> glob like `hidden`, of modules whose output is (B, T, features): projections to queries, keys
            or values, or all in one; their relations are compared. Or that return a pair (output, attention map).
        attention_weight: of the mean over all pairs.
        relations: groups of features, each of which gives a relation; for queries, keys and values in one projection a
            multiple of 3 keeps them apart.
        seed: of the projections.

    Raises:
        ValueError: a number out of its range, nothing to learn from, a wrapped teacher; when attached: the teacher
            shares weights with the student or is in the optimiser, globs match nothing or other numbers of modules, a
            compiled model, projections that the optimiser lacks.

    Source: Hinton et al. 2015, arXiv:1503.02531; Romero et al. 2015, arXiv:1412.6550; Wang et al. 2020,
    arXiv:2002.10957.
    """

    def __init__(
        self,
        teacher: nn.Module,
        logits: float = 0.5,
        temperature: float = 2.0,
        *,
        hidden: Mapping[str, str] | None = None,
        hidden_weight: float = 1.0,
        widths: Widths | Mapping[str, Widths] | None = None,
        attention: Mapping[str, str] | None = None,
        attention_weight: float = 1.0,
        relations: int = 12,
        seed: int = 0,
    ) -> None:
        if not isinstance(teacher, nn.Module) or isinstance(teacher, DistributedDataParallel):
            raise ValueError(
                f"teacher: expected a model, not wrapped, got a {type(teacher).__name__}. Give the module itself."
            )
        self.weights = {"logits": logits, "hidden": hidden_weight, "attention": attention_weight}
        for name, weight in self.weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(f"{name}: expected a weight of at least 0, got {weight}.")
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature: expected a number above 0, got {temperature}.")
        if relations < 1:
            raise ValueError(f"relations: expected at least 1 group of features, got {relations}.")
        self._globs = {"hidden": dict(hidden or {}), "attention": dict(attention or {})}
        if not (logits or any(self._globs[name] and self.weights[name] for name in self._globs)):
            raise ValueError("Distillation: expected something to learn from, got no term with a weight above 0.")
        self.teacher, self.temperature, self.relations = teacher, temperature, relations
        self._projections = _projections(widths, self._globs["hidden"], seed)
        self._student: nn.Module | None = None
        self._session: Session | None = None
        self._pairs: dict[str, list[tuple[str, str, str]]] = {"hidden": [], "attention": []}
        self._seen: dict[str, Any] = {}
        self._calls: dict[str, int] = {}
        self._last: dict[str, Tensor] = {}
        self._fingerprint: str | None = None

    def parameters(self) -> list[nn.Parameter]:
        """Of the projections, for the optimiser; none where widths are equal."""
        return [parameter for one in self._projections.values() for parameter in one.parameters()]

    def attach(self, session: Session) -> None:
        model = session.model.module if isinstance(session.model, DistributedDataParallel) else session.model
        held = {id(one) for group in session.optimizer.param_groups for one in group["params"]}
        own = {id(parameter) for parameter in model.parameters()} | held
        shared = next((name for name, one in self.teacher.named_parameters() if id(one) in own), None)
        if shared is not None:
            raise ValueError(
                f"teacher: expected weights of its own, got {shared} of the student or its optimiser. "
                "Give copy.deepcopy(model) as the teacher."
            )
        if not all(id(parameter) in held for parameter in self.parameters()):
            raise ValueError(
                "optimizer: expected the projections of Distillation in it, they are missing. "
                "Build it with [*model.parameters(), *distillation.parameters()]."
            )
        pairs = {what: matched(what, globs, model, self.teacher) for what, globs in self._globs.items()}
        if any(pairs.values()):
            for whose, one in (("student", model), ("teacher", self.teacher)):
                refuse_compiled(whose, one)
        self._session, self._student, self._pairs = session, model, pairs

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Surrounds the student's forward pass and the loss: the states that it passes are kept until then."""
        with contextlib.ExitStack() as stack:
            if self._student is not None:
                stack.enter_context(watching(self._student, self._names(0), self._keep))
            try:
                yield
            finally:
                self._seen, self._calls = {}, {}

    def loss(
        self,
        student_output: Any,
        inputs: Any,
        own_loss: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The student's own loss and what it has to learn from the teacher.

        Args:
            student_output: logits, or what has `.logits`.
            inputs: what the student was given: a tensor, a tuple of them, or a mapping by name (without its `labels`).
            own_loss: scalar; None: the teacher's terms alone.
            labels: the shape of the logits without the classes, aligned with them: where -100, logits do not count.
            mask: (B, T), not 0 where there is a token: logits, states and attention elsewhere do not count. None: the
                `attention_mask` among the inputs.

        Returns:
            Scalar; 0 terms where nothing counts.

        Raises:
            ValueError: outputs of teacher and student do not go together, or a matched module has given no state.
        """
        named = inputs if isinstance(inputs, Mapping) else {}
        if self._session is None and any(globs and self.weights[what] for what, globs in self._globs.items()):
            raise ValueError(
                "loss: expected a Distillation in a session, whose forward() sees hidden states and attention. "
                "Write Session(model, optimizer, [..., distillation])."
            )
        if mask is None:
            mask = named.get("attention_mask")
        keep = None if mask is None or mask.dim() != 2 else mask != 0
        device = _device_of(student_output)
        taught, states = self._taught(inputs)
        with torch.autocast(device, enabled=False):
            terms = {}
            if self.weights["logits"]:
                given, wanted = _logits("student", student_output), _logits("teacher", taught)
                counted = _counted(given, keep, labels, named.get("labels"))
                terms["logits"] = soft_target_loss(given, wanted, self.temperature, counted)
            for what, pairs in self._pairs.items():
                if pairs and self.weights[what]:
                    of = self._hidden if what == "hidden" else self._attention
                    found = [of(glob, own, self._of(own), other, states[other], keep) for glob, own, other in pairs]
                    terms[what] = torch.stack(found).mean()
        self._seen, self._calls = {}, {}
        self._last = {name: term.detach() for name, term in terms.items()}
        total = sum((self.weights[name] * term for name, term in terms.items()), start=torch.zeros((), device=device))
        return total if own_loss is None else own_loss + total

    def before_step(self) -> None:
        # DDP knows nothing of the projections; a mean of means that are equal already stays what it is
        if self._projections and self._session is not None and averages(self._session.model):
            exchange(self._session.model, self.parameters())

    def metrics(self) -> dict[str, float]:
        """Each term of the last micro-batch, without its weight."""
        return {f"distillation.{name}": float(term) for name, term in self._last.items()}

    def state_dict(self) -> dict[str, Any]:
        """The projections, and by what the teacher can be recognised; not the teacher."""
        projections = {glob: one.state_dict() for glob, one in self._projections.items()}
        return {"teacher": self._recognised(), "projections": projections}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["teacher"] != self._recognised():
            raise ValueError(
                "teacher: expected the one that this training began with, its weights have changed since. "
                "Put it back, or start anew."
            )
        if state["projections"].keys() != self._projections.keys():
            raise ValueError(
                f"projections: expected those of {list(self._projections)}, got {list(state['projections'])}. "
                "Give the same widths."
            )
        for glob, projection in self._projections.items():
            projection.load_state_dict(state["projections"][glob])

    def detach(self) -> None:
        self._session = self._student = None
        self._pairs = {"hidden": [], "attention": []}
        self._seen, self._calls = {}, {}

    def _names(self, side: int) -> list[str]:
        """Modules that are looked at: of the student (0) or the teacher (1)."""
        return list(dict.fromkeys(pair[1 + side] for pairs in self._pairs.values() for pair in pairs))

    def _keep(self, name: str, output: Any) -> None:
        self._seen[name] = output
        self._calls[name] = self._calls.get(name, 0) + 1

    def _of(self, name: str) -> Any:
        """What a module of the student gave in this forward pass."""
        calls = self._calls.get(name, 0)
        if calls != 1:
            raise ValueError(
                f"{name}: expected one call of it between session.forward() and the loss, got {calls}. Call the model "
                "that the session holds, uncompiled, once for each loss, and name modules that it calls itself."
            )
        return self._seen[name]

    def _taught(self, inputs: Any) -> tuple[Any, dict[str, Any]]:
        """The teacher's output, and that of its matched modules."""
        states: dict[str, Any] = {}
        devices = {one.device.index for one in self.teacher.parameters() if one.device.type == "cuda"}
        with (
            torch.no_grad(),
            evaluating(self.teacher),
            torch.random.fork_rng(sorted(index for index in devices if index is not None)),
            watching(self.teacher, self._names(1), states.__setitem__),
        ):
            if isinstance(inputs, Mapping):
                output = self.teacher(**{name: value for name, value in inputs.items() if name != "labels"})
            else:
                output = self.teacher(*inputs) if isinstance(inputs, tuple | list) else self.teacher(inputs)
        missing = next((name for name in self._names(1) if name not in states), None)
        if missing is not None:
            raise ValueError(f"{missing}: expected a module that the teacher calls, it does not. Name another.")
        return output, states

    def _hidden(self, glob: str, own: str, given: Any, other: str, wanted: Any, keep: Tensor | None) -> Tensor:
        student, teacher = state_of(own, given), state_of(other, wanted)
        expect_graph(own, student)
        if glob in self._projections:
            projection = self._projections[glob]
            if student.shape[-1] != projection.in_features:
                raise ValueError(
                    f"{own}: expected {projection.in_features} features as widths= says, got {student.shape[-1]}."
                )
            student = projection(student.float())
        if student.shape != teacher.shape:
            raise ValueError(
                f"{own}: expected a state of {tuple(teacher.shape)} as the teacher's {other} gives, got "
                f"{tuple(student.shape)}. Where only the features differ, give widths=(student's, teacher's)."
            )
        return state_loss(student, teacher, _fitting(keep, student.shape[:-1]))

    def _attention(self, glob: str, own: str, given: Any, other: str, wanted: Any, keep: Tensor | None) -> Tensor:
        student, teacher = attended(own, given), attended(other, wanted)
        expect_graph(own, student)
        if student.dim() != teacher.dim():
            raise ValueError(
                f"{own}: expected an attention map on both sides or a projection on both, got {tuple(student.shape)} "
                f"and the teacher's {tuple(teacher.shape)}. Name modules of one kind."
            )
        if student.dim() == 3:
            return relation_loss(student, teacher, self.relations, _fitting(keep, student.shape[:-1]))
        rows = student.detach().sum(-1)
        if not bool(((rows - 1).abs() < 0.05).all()):
            raise ValueError(
                f"{own}: expected an attention map whose rows sum to 1, got one after dropout. Set the student's "
                "attention dropout to 0, or name projections of queries, keys or values."
            )
        return attention_loss(student, teacher, _fitting(keep, student.shape[:1] + student.shape[2:3]))

    def _recognised(self) -> str:
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for name, tensor in self.teacher.state_dict().items():
                if isinstance(tensor, Tensor):
                    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint


def _projections(
    widths: Widths | Mapping[str, Widths] | None, globs: Mapping[str, str], seed: int
) -> dict[str, nn.Linear]:
    if widths is None:
        return {}
    by_glob = dict(widths) if isinstance(widths, Mapping) else dict.fromkeys(globs, widths)
    unknown = next((glob for glob in by_glob if glob not in globs), None)
    if unknown is not None or not by_glob:
        raise ValueError(
            f"widths: expected widths of what hidden= names ({', '.join(globs) or 'nothing'}), got {unknown!r}."
        )
    with torch.random.fork_rng([]):  # the student's random numbers are those of a training without a teacher
        torch.manual_seed(seed)
        return {glob: nn.Linear(*pair) for glob, pair in by_glob.items()}


def _logits(whose: str, output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise ValueError(
            f"{whose}: expected logits, or an output with .logits, got a {type(output).__name__}. "
            "Give the logits themselves, or logits=0."
        )
    return found


def _device_of(output: Any) -> str:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return found.device.type if isinstance(found, Tensor) else "cpu"


def _counted(logits: Tensor, keep: Tensor | None, labels: Tensor | None, given: Any) -> Tensor | None:
    """Which positions of the logits count."""
    positions = logits.shape[:-1] if logits.dim() > 1 else logits.shape
    kept = _fitting(keep, positions)
    if labels is None:
        # models with labels of their own shift them, or do not: which of them count cannot be told from here
        if isinstance(given, Tensor) and given.dim() > 1 and bool((given == _IGNORED).any()):
            raise ValueError(
                "labels: expected loss(..., labels=), for those among the inputs hold -100. Give them aligned with the "
                "logits: as they are, or shifted by one for a causal model."
            )
        return kept
    if labels.shape == (*positions, 1):
        labels = labels.squeeze(-1)
    if labels.shape != positions:
        raise ValueError(f"labels: expected {tuple(positions)} as the logits have, got {tuple(labels.shape)}.")
    return labels != _IGNORED if kept is None else kept & (labels != _IGNORED)


def _fitting(keep: Tensor | None, positions: torch.Size) -> Tensor | None:
    """The mask where it is one of these positions: a state of whole rows has none to leave out."""
    return keep if keep is not None and keep.shape == positions else None
