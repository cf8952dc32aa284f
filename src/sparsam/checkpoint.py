"""One training state as a folder on disk: safetensors + JSON, hashed, renamed into place when whole. Never pickle.

A folder holds one `NAME.safetensors` per group of tensors (model, optimizer, session, ...), `state.json` for everything
that is not a tensor, and `manifest.json` with the size and SHA-256 of each. A folder that exists under its final name
was written to the end: the manifest is written last and the rename comes after every byte has reached the disk.

Of a run over several ranks it is one folder too: rank 0 writes what all have in common, and each rank what it has for
itself, as `rank-NNNNN.safetensors` and `rank-NNNNN.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from sparsam.ranks import ALONE, Ranks

__all__ = [
    "CheckpointError",
    "load_optimizer",
    "optimizer_state",
    "pack",
    "read",
    "read_own",
    "rng_state",
    "seed_all",
    "set_rng_state",
    "unpack",
    "write",
    "write_json",
]

FORMAT = 1
_CHUNK_BYTES = 1 << 24
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or that is not what was written; the message is one line for a person."""


def write(folder: Path, state: Mapping[str, Any], own: Any = None, ranks: Ranks = ALONE) -> int:
    """Writes a state under a temporary name, makes sure that it is on the disk, and renames it to `folder`.

    Args:
        folder: where it goes; must not exist. Its parent must exist, and be the same for all ranks.
        state: group name -> nested dicts, lists, tuples, numbers, strings, None and tensors (see `pack`). Rank 0's.
        own: what this rank has for itself; None where there is one rank.
        ranks: that write together; where one of them fails, nothing is written.

    Returns:
        Bytes written, by all ranks.

    Raises:
        OSError: the disk is full or not writable. Nothing under the final name, nothing left under the temporary one.
    """
    partial = folder.parent / f".partial-{folder.name}"
    try:
        with ranks.together():
            if ranks.first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
        files: dict[str, Any] = {}
        with ranks.together():
            if ranks.first:
                files |= _write_groups(partial, state)
            if own is not None:
                files |= _write_own(partial, _name_of(ranks.rank), own)
        files = {name: entry for one in ranks.all_of(files) for name, entry in one.items()}
        with ranks.together():
            if ranks.first:
                _write_file(partial / "manifest.json", iter([_json({"format": FORMAT, "files": files})]))
                _sync_folder(partial)
                partial.rename(folder)
                _sync_folder(folder.parent)
    except BaseException:
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(entry["bytes"] for entry in files.values())


def read(folder: Path, groups: Collection[str] | None = None, check_ranks: bool = True) -> dict[str, Any]:
    """Reads what `write` wrote, after checking every file that it reads against the manifest.

    Args:
        folder: what was written.
        groups: the groups to read; None is all of them, and checks what ranks have for themselves too.
        check_ranks: False leaves that to another rank.

    Raises:
        CheckpointError: a file is missing, changed, or of a newer format.
    """
    try:
        manifest = _manifest(folder)
        for name, entry in manifest["files"].items():
            if name.startswith("rank-"):
                if groups is None and check_ranks:
                    _check_file(folder / name, entry)
            elif groups is None or name == "state.json" or name.removesuffix(".safetensors") in groups:
                _check_file(folder / name, entry)
        trees = json.loads((folder / "state.json").read_bytes())
        return {
            group: unpack(
                _read_safetensors(folder / name) if (name := f"{group}.safetensors") in manifest["files"] else {}, tree
            )
            for group, tree in trees.items()
            if groups is None or group in groups
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: not a whole checkpoint ({error}).") from error


def read_own(folder: Path, rank: int) -> Any:
    """What a rank had for itself.

    Raises:
        CheckpointError: see `read`.
    """
    name = _name_of(rank)
    try:
        files = _manifest(folder)["files"]
        for one in (f"{name}.json", f"{name}.safetensors"):
            if one in files:
                _check_file(folder / one, files[one])
        tensors = _read_safetensors(folder / f"{name}.safetensors") if f"{name}.safetensors" in files else {}
        return unpack(tensors, json.loads((folder / f"{name}.json").read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: not a whole checkpoint ({error}).") from error


def pack(value: Any) -> tuple[dict[str, Tensor], Any]:
    """Splits a nested state into named tensors and a tree that JSON can hold exactly; `unpack` is the inverse.

    Tensors that share storage and view (tied weights) are kept once. Integer keys, tuples, and floats survive.

    Raises:
        TypeError: a value of a type that JSON and safetensors cannot hold, named by its path.
    """
    tensors: dict[str, Tensor] = {}
    seen: dict[tuple[Any, ...], str] = {}

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, Tensor):
            key = (node.data_ptr(), node.dtype, tuple(node.shape), node.stride()) if node.numel() else (path,)
            if key not in seen:
                seen[key] = path
                tensors[path] = node.detach()
            return {"$tensor": seen[key]}
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, Mapping):
            if all(isinstance(key, str) and not key.startswith("$") for key in node):
                return {key: walk(item, _join(path, key)) for key, item in node.items()}
            return {"$items": [[walk(key, path), walk(item, _join(path, key))] for key, item in node.items()]}
        if isinstance(node, list):
            return [walk(item, _join(path, index)) for index, item in enumerate(node)]
        if isinstance(node, tuple):
            return {"$tuple": [walk(item, _join(path, index)) for index, item in enumerate(node)]}
        raise TypeError(
            f"{path or 'state'}: expected tensors, numbers, text, lists or dicts, got {type(node).__name__}."
        )

    tree = walk(value, "")
    return tensors, tree


def unpack(tensors: Mapping[str, Tensor], tree: Any) -> Any:
    """Puts a packed state together again."""
    if isinstance(tree, dict):
        if "$tensor" in tree:
            return tensors[tree["$tensor"]]
        if "$items" in tree:
            return {unpack(tensors, key): unpack(tensors, item) for key, item in tree["$items"]}
        if "$tuple" in tree:
            return tuple(unpack(tensors, item) for item in tree["$tuple"])
        return {key: unpack(tensors, item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [unpack(tensors, item) for item in tree]
    return tree


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimiser's state keyed by parameter name, so that it does not depend on the order of parameters."""
    names = _parameter_names(model)
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[p] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {"state": {names[p]: dict(entry) for p, entry in optimizer.state.items()}, "groups": groups}


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Gives an optimiser over the same parameters the state that `optimizer_state` took.

    Raises:
        ValueError: the optimiser's groups hold other parameters than the state's.
    """
    names = _parameter_names(model)
    ours = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    theirs = [group["params"] for group in state["groups"]]
    if ours != theirs:
        odd = sorted({n for g in ours for n in g} ^ {n for g in theirs for n in g}) or ["their order"]
        raise ValueError(
            f"expected the optimiser state of this model's parameters, got others ({', '.join(odd[:3])} differ)."
        )
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    parameters = {name: parameter for parameter, name in names.items()}
    optimizer.state.clear()
    for name, entry in state["state"].items():
        parameter = parameters[name]
        # Not through Optimizer.load_state_dict: it casts by its own rules, and here every bit must come back as it was.
        optimizer.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
            for key, value in entry.items()
        }


def seed_all(seed: int) -> None:
    """Seeds the global generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 (the global generator: libraries and models of users draw from it)


def rng_state() -> dict[str, Any]:
    """The global random states of torch, Python and NumPy."""
    generator = numpy.random.get_state(legacy=False)  # noqa: NPY002
    assert isinstance(generator, dict)
    key = torch.from_numpy(generator["state"]["key"].astype("int64"))
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {
            "key": key,
            "pos": int(generator["state"]["pos"]),
            "has_gauss": int(generator["has_gauss"]),
            "gauss": float(generator["gauss"]),
        },
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Puts back what `rng_state` took."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    saved = state["numpy"]
    numpy.random.set_state(  # noqa: NPY002
        ("MT19937", saved["key"].numpy().astype("uint32"), saved["pos"], saved["has_gauss"], saved["gauss"])
    )


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that a reader sees the old file or the new one, never a part."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        _write_file(partial, iter([_json(value)]))
        partial.replace(path)
        _sync_folder(path.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _name_of(rank: int) -> str:
    return f"rank-{rank:05d}"


def _manifest(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{folder}: checkpoint format {manifest['format']} is newer than {FORMAT}, "
            "the newest that this Sparsam reads. Upgrade Sparsam."
        )
    return manifest


def _write_groups(folder: Path, state: Mapping[str, Any]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    trees: dict[str, Any] = {}
    for group, value in state.items():
        tensors, trees[group] = pack(value)
        if tensors:
            name = f"{group}.safetensors"
            files[name] = _write_file(folder / name, _safetensors(tensors))
    files["state.json"] = _write_file(folder / "state.json", iter([_json(trees)]))
    return files


def _write_own(folder: Path, name: str, own: Any) -> dict[str, Any]:
    tensors, tree = pack(own)
    files = {f"{name}.json": _write_file(folder / f"{name}.json", iter([_json(tree)]))}
    if tensors:
        files[f"{name}.safetensors"] = _write_file(folder / f"{name}.safetensors", _safetensors(tensors))
    return files


def _parameter_names(model: nn.Module) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _join(path: str, key: object) -> str:
    return f"{path}/{key}" if path else str(key)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor at a time: saving takes no copy of the state."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for tensor in tensors.values():
        if tensor.numel():
            yield memoryview(_as_bytes(tensor))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            tensor = torch.empty(entry["shape"], dtype=_TORCH_DTYPES[entry["dtype"]])
            start, end = entry["data_offsets"]
            if start != end and file.readinto(_as_bytes(tensor)) != end - start:
                raise ValueError(f"{path.name} ends inside {name}")
            tensors[name] = tensor
    return tensors


def _as_bytes(tensor: Tensor) -> Any:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _write_file(path: Path, chunks: Iterator[bytes | memoryview]) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                part = view[start : start + _CHUNK_BYTES]
                written = 0
                while written < len(part):  # an unbuffered file may take less than it is given
                    written += file.write(part[written:])
                digest.update(part)
            size += len(view)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _check_file(path: Path, entry: Mapping[str, Any]) -> None:
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    if size != entry["bytes"]:
        raise ValueError(f"{path.name}: expected {entry['bytes']} bytes, found {size}")
    if digest.hexdigest() != entry["sha256"]:
        raise ValueError(f"{path.name}: its content is not what was written")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
