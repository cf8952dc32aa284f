"""A Hugging Face model folder as the model: its causal language model and its tokenizer. Nothing is ever downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
from torch import Tensor, nn

__all__ = ["FolderModel", "LogitsOnly"]


class LogitsOnly(nn.Module):
    """A causal language model of Transformers that takes tokens and gives logits.

    Args:
        model: its call returns an object with `.logits`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 (B, T) -> logits (B, T, vocabulary)."""
        return self.model(tokens, use_cache=False).logits  # type: ignore[no-any-return]


class FolderModel:
    """A model folder, looked at: weights are read in `build_model` only.

    Args:
        folder: holds config.json, the weights and a tokenizer.

    Raises:
        ValueError: Transformers is not installed, or the folder is not such a model; one line.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            what = "nothing there" if not folder.exists() else "no config.json in it"
            raise ValueError(
                f"{folder}: expected a Hugging Face model folder, found {what}. "
                "Give the path of a folder on this machine; models are not downloaded."
            )
        try:
            import transformers
        except ImportError:
            raise ValueError(
                f"{folder}: expected the package transformers for a model folder, it is not installed. "
                "Install it with: pip install 'sparsam[hf]'"
            ) from None
        self.folder = folder
        self._transformers = transformers
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._tokenizer = self._load("tokenizer", transformers.AutoTokenizer)
        # The tokenizer warns of texts longer than the model; ours are cut into windows afterwards.
        self._tokenizer.model_max_length = 10**30

    @property
    def context(self) -> int | None:
        """The most tokens that the model takes at once, where its configuration says."""
        for name in ("max_position_embeddings", "n_positions"):
            if isinstance(self.config.get(name), int):
                return int(self.config[name])
        return None

    @property
    def separator(self) -> int:
        """The token between two texts."""
        end = self._tokenizer.eos_token_id
        return 0 if end is None else int(end)

    def tokenise(self, text: bytes) -> numpy.ndarray[Any, Any]:
        """UTF-8 -> int32 token numbers."""
        return numpy.array(
            self._tokenizer(text.decode("utf-8"), add_special_tokens=False)["input_ids"], dtype=numpy.int32
        )

    def build_model(self) -> nn.Module:
        """Reads the weights, in float32, ready to train.

        Raises:
            ValueError: they cannot be read as a causal language model.
        """
        import torch

        return LogitsOnly(
            self._load("causal language model", self._transformers.AutoModelForCausalLM, dtype=torch.float32)
        ).train()

    def _load(self, what: str, loader: Any, **options: Any) -> Any:
        log = self._transformers.utils.logging
        bars = log.is_progress_bar_enabled()
        log.disable_progress_bar()  # the screen is not theirs
        try:
            return loader.from_pretrained(str(self.folder), local_files_only=True, **options)
        except Exception as error:  # Transformers raises what its many backends raise
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"{self.folder}: expected a {what}, it does not load: {type(error).__name__}: {reason}"
            ) from error
        finally:
            if bars:
                log.enable_progress_bar()
