"""A trained model as files that any program can read: plain safetensors, and a JSON header that says what they mean.

    save(model, "folder")                # sparsam.json and model.safetensors, whole or not at all
    load("folder", build())              # into the dense model that was built the same

Only blocks and weights that exist are stored, in the order of the matrix; layouts of instruction sets never are, those
are made at load. Nothing is ever unpickled. The form: docs/format.md. Not for going on with a training: checkpoint.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsam.deploy.layers import restore_layer, store_layers
from sparsam.shards import refuse_sharded

__all__ = ["FORMAT", "StorageError", "load", "read_header", "save"]

FORMAT = 1
HEADER, TENSORS = "sparsam.json", "model.safetensors"
_CHUNK_BYTES = 1 << 24


class StorageError(ValueError):
    """A stored model that is damaged, newer than this program, or of another model; the message is one line."""


def save(model: nn.Module, folder: str | os.PathLike[str], *, texts: Mapping[str, str] | None = None) -> int:
    """Writes a model as it is: dense layers, blocks, masked weights, quantised layers, each in the type that it has.

    To write it smaller, change the model first: `quantise(model)`, `model.bfloat16()`.

    Args:
        model: not wrapped, on any device; its session is detached. Optimiser and session are not saved.
        folder: where it goes; must not exist. Its parents are made.
        texts: files that go with it, by name, such as the recipe that builds the model.

    Returns:
        Bytes of the folder.

    Raises:
        ValueError: the folder is there, the model is wrapped or sharded, or holds what is no tensor.
        OSError: the disk is full or not writable; then there is nothing under the name.
    """
    path = Path(folder)
    if path.exists():
        raise ValueError(f"{path}: expected a new folder for the model, it exists. Name another, or remove it.")
    refuse_sharded(model, "save", "Load its state into a plain model and save that; docs/sharding.md says how.")
    if hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(f"save: expected the plain model, got it in {type(model).__name__}. Give the inner one.")
    tensors, header = _stored(model)
    texts = dict(texts or {})
    if odd := [name for name in texts if not _plain_name(name) or name in (HEADER, TENSORS)]:
        raise ValueError(f"save: expected plain names of files in texts, got {odd[0]!r}. Leave out folders.")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        save_file(tensors, partial / TENSORS)
        for name, text in texts.items():
            (partial / name).write_bytes(text.encode())
        header["files"] = {name: _entry(partial / name) for name in (TENSORS, *texts)}
        header["sha256"] = _digest(header)
        (partial / HEADER).write_text(json.dumps(header, indent=1) + "\n")
        for file in partial.iterdir():
            _sync(file)
        _sync(partial)
        size = sum(file.stat().st_size for file in partial.iterdir())
        partial.rename(path)  # a folder under its name was written to the end
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return size


def load(folder: str | os.PathLike[str], model: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """Gives a model the layers and weights of a stored one, exactly, after checking every byte.

    Args:
        folder: what `save` wrote.
        model: the model that was saved as it was built, dense, or what builds it. Changed in place; its layers become
            those that are stored, its weights take their types.

    Returns:
        The model.

    Raises:
        StorageError: a file is missing, damaged or of a newer form, or the model is another one.
    """
    path = Path(folder)
    header = read_header(path)
    built = model if isinstance(model, nn.Module) else model()
    try:
        for name, entry in header["files"].items():
            _check(path, name, entry)
        tensors = load_file(path / TENSORS)
        state: dict[str, Tensor] = {}
        for name, row in header["layers"].items():
            state |= restore_layer(built, name, row, tensors)
        state |= tensors
        state |= {name: state[first] for name, first in header["tied"].items()}
        _take_types(built, state)
        built.load_state_dict(state)
    except StorageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, IndexError, AssertionError, RuntimeError, StopIteration,
            SafetensorError) as error:  # fmt: skip
        text = " ".join(str(error).split())
        raise StorageError(f"{path}: cannot be loaded into this model: {text or type(error).__name__}") from error
    return built


def read_header(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The header of a stored model, checked; the tensors are not read.

    Raises:
        StorageError: it is missing, damaged or of a newer form.
    """
    path = Path(folder)
    try:
        header = json.loads((path / HEADER).read_bytes())
        version = header["format"]
        if not isinstance(version, int) or version > FORMAT:
            raise StorageError(
                f"{path}: format {version} is newer than {FORMAT}, the newest that this Sparsam reads. Upgrade Sparsam."
            )
        if header["sha256"] != _digest(header):
            raise ValueError(f"{HEADER} is damaged")
        if not (header["files"].keys() >= {TENSORS} and all(map(_plain_name, header["files"]))):
            raise ValueError(f"{HEADER} names other files")
    except FileNotFoundError:
        raise StorageError(
            f"{path}: expected a stored model (with {HEADER} in it), found none. `sparsam export` writes one."
        ) from None
    except StorageError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path}: not a whole stored model ({error}). Export it again.") from error
    found: dict[str, Any] = header
    return found


def _stored(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    rows, tensors, replaced = store_layers(model)
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    # a tied weight goes by the name that has a topology, if any has
    for name, tensor in sorted(model.state_dict(keep_vars=True).items(), key=lambda item: item[0] not in replaced):
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"save: {name}: expected a tensor, got a {type(tensor).__name__}. Leave it out of the state."
            )
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
        elif name not in replaced:
            tensors[name] = tensor.detach()
    # copies where tensors share memory, or are parts of others: each is a file's own bytes
    plain = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    return plain, {"format": FORMAT, "sparsam": metadata.version("sparsam"), "layers": rows, "tied": tied}


def _take_types(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Tensors of a model take the types that are stored: nothing is widened or rounded."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if (stored := state.get(name)) is not None and stored.dtype != tensor.dtype:
            tensor.data = tensor.data.to(stored.dtype)


def _plain_name(name: str) -> bool:
    return Path(name).name == name and not name.startswith(".")


def _digest(header: Mapping[str, Any]) -> str:
    """SHA-256 of a header without its own, as compact JSON with sorted keys."""
    rest = {key: value for key, value in header.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _entry(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    for chunk in _chunks(file):
        digest.update(chunk)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}


def _check(folder: Path, name: str, entry: Mapping[str, Any]) -> None:
    file = folder / name
    if not file.is_file():
        raise StorageError(f"{folder}: {name} is missing. Export the model again.")
    if file.stat().st_size != entry["bytes"]:
        raise StorageError(
            f"{folder}: {name} is damaged: expected {entry['bytes']} bytes, got {file.stat().st_size}. "
            "Export the model again."
        )
    if _entry(file)["sha256"] != entry["sha256"]:
        raise StorageError(f"{folder}: {name} is damaged: its SHA-256 is another one. Export the model again.")


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as handle:
        while chunk := handle.read(_CHUNK_BYTES):
            yield chunk


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
