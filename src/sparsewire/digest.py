"""A digest of saved state, which detects files that were corrupted on disk.

Tensors are hashed on their device by the checksum of messages, which detects any single changed
bit. It guards against accidents and not against forgery: whoever can write the file can write a
matching digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .errors import StateError

FORMAT = 3
_WORD = 8  # bytes


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with its format and digest, which `verify` checks."""
    sealed = {**state, "format": FORMAT}
    return {**sealed, "digest": digest(sealed)}


def verify(state: Any) -> None:
    """Raise unless this is a result of `seal` that has not changed since."""
    if not isinstance(state, Mapping) or not isinstance(state.get("format"), int):
        raise StateError(
            "this is not the state of a sparsewire exchange. Pass what state_dict() returned"
        )
    if state["format"] != FORMAT:
        raise StateError(
            f"the saved state has format {state['format']}, and this version of sparsewire reads "
            f"{FORMAT}. Resume with the version that saved it, or start with an empty residual"
        )
    if state.get("digest") != digest(state):
        raise StateError(
            "the saved state has changed since it was saved: its digest does not match, so the "
            "file is corrupt or was edited. Load an older checkpoint, or start with an empty "
            "residual"
        )


def digest(state: Mapping[str, Any]) -> str:
    """Return a 128-bit hash of the state without its digest, in hexadecimal."""
    whole = hashlib.blake2b(digest_size=16)
    for part in _parts({key: value for key, value in state.items() if key != "digest"}):
        whole.update(len(part).to_bytes(_WORD, "little") + part)
    return whole.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    """Yield bytes that identify a value, in an order that does not depend on the file format."""
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)} {value.layout}".encode()
        if value.layout == torch.strided and not value.is_meta:
            yield int(checksum(value)).to_bytes(_WORD, "little", signed=True)
    elif isinstance(value, Mapping):
        yield f"mapping {len(value)}".encode()
        for key in sorted(value, key=_name):
            yield _name(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        yield f"sequence {len(value)}".encode()
        for each in value:
            yield from _parts(each)
    else:
        yield _name(value).encode()


def _name(value: object) -> str:
    """Return a plain value as text. For other objects, such as an optimizer's, return the type."""
    if isinstance(value, (bool, str, bytes)):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, int):
        return f"int {int(value)}"
    return f"float {float(value)!r}" if isinstance(value, float) else type(value).__name__


def checksum(tensor: Tensor) -> Tensor:
    """Return a 64-bit checksum on the tensor's device. It detects any single changed bit."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.itemsize % _WORD:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    end = data.numel() // _WORD * _WORD
    rest = data.new_zeros(_WORD)
    rest[: data.numel() - end] = data[end:]
    if not end:
        return rest.view(torch.int64)[0]
    return kernels.on(data.device).checksum(data[:end], tensor.numel()) ^ rest.view(torch.int64)[0]
