"""Packed files: many blobs in one file, each a safetensors file with a digest of its own, so that any of them can be read alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_blob
from torch import Tensor

from nestpipe.checkpoint.manifest import DENSE, INDEX, ROWS, STATE, Blob, move_away_advice
from nestpipe.checkpoint.places import Place, read_range, size_of
from nestpipe.embedding.row_snapshot import TableSection
from nestpipe.embedding.table import WEIGHTS
from nestpipe.errors import CheckpointError

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


class PackWriter:
    """Appends blobs to an open file and lists them."""

    def __init__(self, file: BinaryIO, name: str):
        self._file, self._name, self._offset = file, name, 0
        self.blobs: list[Blob] = []

    def add_dense(self, tensors: Mapping[str, Tensor]) -> None:
        self._add(tensors, DENSE)

    def add_section(self, table: str, section: TableSection) -> None:
        """Index, weights and optimizer state of a range of buckets."""
        weights = {WEIGHTS: section.rows[WEIGHTS]}
        state = {name: values for name, values in section.rows.items() if name != WEIGHTS}
        place = table, section.buckets.start, section.buckets.stop, len(section.index["ids"])
        self._add(section.index, INDEX, *place)
        self._add(weights, ROWS, *place)
        if state:
            self._add(state, STATE, *place)

    def _add(self, tensors: Mapping[str, Tensor], kind: str, *place: str | int) -> None:
        digest, num_bytes = hashlib.sha256(), 0
        for piece in _pieces(tensors):
            digest.update(piece)
            self._file.write(piece)
            num_bytes += len(piece)
        found = self._name, self._offset, num_bytes, digest.hexdigest()
        self.blobs.append(Blob(*found, kind, *place))  # type: ignore[arg-type]
        self._offset += num_bytes


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file of these tensors, piece by piece; `safetensors.torch.save` would copy all of them twice."""
    header: dict[str, object] = {}
    offset = 0
    for name, one in tensors.items():
        header[name] = {
            "dtype": _DTYPES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [offset, offset + one.nbytes],
        }
        offset += one.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for one in tensors.values():
        if one.numel():
            yield one.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def read_blob(folder: Place, blob: Blob) -> dict[str, Tensor]:
    """The tensors of a blob; raises CheckpointError if it is missing or does not match its digest."""
    path = folder / blob.file
    try:
        data = read_range(path, blob.offset, blob.num_bytes)
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} lacks {blob.file}, which its manifest lists. {move_away_advice(folder)}"
        ) from None
    if len(data) != blob.num_bytes or hashlib.sha256(data).hexdigest() != blob.sha256:
        raise CheckpointError(
            f"{path} is not what was saved: the digest of its {blob.title} differs from the manifest's. "
            f"{move_away_advice(folder)}"
        )
    try:
        return load_blob(data)
    except SafetensorError as error:
        raise CheckpointError(f"{path} cannot be read: {blob.title} ({error}).") from error


def blob_shapes(folder: Place, blob: Blob) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a blob, from its header alone."""
    path = folder / blob.file
    advice = f"'nestpipe checkpoint verify {folder}' lists all damage"
    try:
        size = int.from_bytes(read_range(path, blob.offset, 8), "little")
        header = json.loads(read_range(path, blob.offset + 8, min(size, blob.num_bytes)))
        return {name: list(one["shape"]) for name, one in sorted(header.items()) if name != "__metadata__"}
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {advice}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); {advice}.") from error


def check_size(folder: Place, file: str, num_bytes: int) -> None:
    """Raises CheckpointError if a packed file has another size than its blobs together."""
    if (size := size_of(folder / file)) != num_bytes:
        raise CheckpointError(
            f"{folder / file} is not what was saved: it has {size:,} bytes instead of {num_bytes:,}. "
            f"{move_away_advice(folder)}"
        )
