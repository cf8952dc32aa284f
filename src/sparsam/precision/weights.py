"""Weights kept in bfloat16 alone: rounded at random after each step, with no float32 copy between steps."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsam.formats import BF16
from sparsam.select import nearest
from sparsam.session import Part, Session
from sparsam.shards import refuse_sharded

__all__ = ["BF16Weights"]

# what torch.compile, activation checkpointing and FSDP put between a module and its name
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class BF16Weights(Part):
    """Keeps weights in bfloat16 through stochastic rounding, in place of float32 master weights.

    Rounded to nearest, an update below 1/512 of a weight is lost, at every step again. Here the optimiser works on
    float32 copies of weights and gradients, which last for the time of its step, and the result is rounded to one of
    its two neighbours so that its mean is right. Moments are float32. What random numbers a weight gets depends on
    (seed of the session, applied step, name of the parameter): on no generator, so that ranks agree and a resumed run
    draws the same. Zeros stay zero, and a step that is skipped changes no bit. The copies come and go inside
    `optimizer.step()`, after clipping, whatever other parts there are and in whatever order.

    Bytes per weight between steps, with Adam: 2 + 8 in place of 4 + 8; in the step, when activations are gone, 8 more.
    Gradients are bfloat16, as the weights are, and are summed over a window and clipped in it. For a loop that calls
    `optimizer.step()` without a closure.

    Args:
        convert: globs over names of parameters: trained float32 ones that become bfloat16 when the part is attached,
            and float32 again when it is detached. All bfloat16 parameters of the optimiser are held anyway.

    Raises:
        ValueError: when attached: nothing is bfloat16, a glob matches nothing, or DDP already holds what it would
            convert.

    Source: Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192.
    """

    def __init__(self, convert: Sequence[str] = ()) -> None:
        if isinstance(convert, str):
            raise ValueError(f"convert: expected a list of globs, got the string {convert!r}. Write [{convert!r}].")
        self.convert = convert
        self._held: dict[nn.Parameter, str] = {}
        self._wide: dict[nn.Parameter, nn.Parameter] = {}
        self._converted: list[nn.Parameter] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._loading: Mapping[str, Any] = {}
        self._rounded_moments = False

    def attach(self, session: Session) -> None:
        if sum(isinstance(part, BF16Weights) for part in session.parts) > 1:
            raise ValueError("BF16Weights: expected one in a session, got several. Join their globs in one.")
        refuse_sharded(session.model, "BF16Weights", "Use fully_shard(mp_policy=...) on float32 weights.")
        self.session, optimizer = session, session.optimizer
        names = _trained(session)
        for glob in self.convert:
            if not any(fnmatchcase(name, glob) for name in names.values()):
                raise ValueError(f"convert: {glob!r} matches no weight. {nearest(glob, list(names.values()))}")
        self._convert(
            [
                one
                for one, name in names.items()
                if one.dtype == torch.float32 and any(fnmatchcase(name, glob) for glob in self.convert)
            ]
        )
        self._held = {one: name for one, name in names.items() if one.dtype == torch.bfloat16}
        if not self._held:
            raise ValueError(
                "BF16Weights: expected bfloat16 weights in the optimiser, got none. "
                'Call model.bfloat16() first, or name float32 ones: BF16Weights(convert=["*.weight"]).'
            )
        self._rounded_moments = self._moments_in(torch.float32)
        self._handles = [
            optimizer.register_step_pre_hook(self._widen),
            optimizer.register_step_post_hook(self._round),
            optimizer.register_load_state_dict_pre_hook(self._keep_loaded),
            optimizer.register_load_state_dict_post_hook(self._take_loaded),
        ]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._rounded_moments:
            raise ValueError(
                "BF16Weights: expected the optimiser's state to be loaded after the session was built, got moments "
                "that torch has rounded to bfloat16. Build the session, then load the optimiser, then the session."
            )

    def detach(self) -> None:
        self._give_back()
        for handle in self._handles:
            handle.remove()
        for parameter in self._converted:
            parameter.data = parameter.data.float()
            parameter.grad = None
        self._moments_in(None)
        self._held, self._handles, self._converted, self._rounded_moments = {}, [], [], False

    def _convert(self, parameters: list[nn.Parameter]) -> None:
        if parameters and isinstance(self.session.model, DistributedDataParallel):
            raise ValueError(
                "BF16Weights: expected a model that is not yet in DistributedDataParallel, got one whose weights it "
                "would convert. Convert them with .bfloat16() before wrapping the model."
            )
        for parameter in parameters:
            parameter.data = parameter.data.bfloat16()
            parameter.grad = None
        self._converted = parameters

    def _widen(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimiser is about to step: gives it float32 copies in place of weights that have a gradient."""
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise ValueError(
                "BF16Weights: expected optimizer.step() without a closure, got one: its losses would be those of other "
                "weights. Compute the gradients before the step."
            )
        self._give_back()  # of a step that was broken off
        # copies, not other data in the same parameter: DDP hangs on a parameter's type
        for parameter in self._held:
            if parameter.grad is not None:
                wide = nn.Parameter(parameter.detach().float())
                wide.grad = parameter.grad.float()
                self._wide[parameter] = wide
        self._exchange(self._wide)

    @torch.no_grad()
    def _round(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimiser has stepped: rounds what it made of the copies."""
        for parameter, wide in self._wide.items():
            key = f"{self.session.seed}/{self.session.applied_steps}/{self._held[parameter]}"
            seed = zlib.crc32(key.encode())
            parameter.copy_(BF16.round(wide, rounding="stochastic", seed=seed, dtype=torch.bfloat16))
        self._give_back()

    def _give_back(self) -> None:
        """The optimiser has its own parameters again."""
        self._exchange({wide: parameter for parameter, wide in self._wide.items()})
        self._wide = {}

    def _exchange(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        if not others:
            return
        optimizer = self.session.optimizer
        for group in optimizer.param_groups:
            group["params"][:] = [others.get(one, one) for one in group["params"]]
        for one, other in others.items():
            if one in optimizer.state:
                optimizer.state[other] = optimizer.state.pop(one)

    def _moments_in(self, dtype: torch.dtype | None) -> bool:
        """Brings the moments of held weights to this type, or to the weights' own; whether any was of less."""
        narrow = False
        for parameter in self._held:
            state = self.session.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                    narrow |= value.dtype != torch.float32
                    state[key] = value.to(parameter.dtype if dtype is None else dtype)
        return narrow

    def _keep_loaded(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        self._loading = state

    def _take_loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts moments in as they were saved: torch has cast them to the type of the weights."""
        saved, self._loading = self._loading, {}
        for theirs, ours in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            for number, parameter in zip(theirs["params"], ours["params"], strict=True):
                if parameter in self._held:
                    for key, value in saved["state"].get(number, {}).items():
                        if isinstance(value, torch.Tensor) and value.dim():
                            optimizer.state[parameter][key] = value.detach().clone().to(parameter.device)
        self._rounded_moments = self._moments_in(torch.float32)


def _trained(session: Session) -> dict[nn.Parameter, str]:
    """Parameters of the optimiser by the names that they have in the plain model."""
    model = session.model.module if isinstance(session.model, DistributedDataParallel) else session.model
    held = {parameter for group in session.optimizer.param_groups for parameter in group["params"]}
    return {
        parameter: ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        for name, parameter in model.named_parameters()
        if parameter in held
    }
