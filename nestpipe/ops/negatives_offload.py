"""Sampled softmax (negatives.py) on a device, of rows that stay in host memory: uploaded segment by segment.

    host       gather a segment's distinct rows into pinned memory              add its row gradients to the sums
    uploads          └─▶ copy to the device                                          ▲
    compute                     └─▶ loss and gradients of the segment                │
    downloads                                  └─▶ copy row gradients to pinned memory

There are two buffers of each kind, so a segment is gathered and uploaded while the one before it is computed. The device
holds the rows of two segments, whatever their number in all. The host waits for the segment before last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.embedding.row_ops import add_rows, gather_rows
from nestpipe.embedding.unique_ids import dedupe
from nestpipe.ops.device_memory import upload, used_here
from nestpipe.ops.negatives_torch import LossAndGrads, LossTask

Inner = Callable[[Tensor, Tensor, Tensor, LossTask], LossAndGrads]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A segment: its distinct rows, and the task in terms of them."""

    tokens: slice
    unique: Tensor  # [u] row numbers
    positives: Tensor  # [C] places in `unique`
    negatives: Tensor  # [C, n]

    def task(self, device: torch.device) -> LossTask:
        """On the device; every token has its own block."""
        bounds = torch.arange(len(self.positives) + 1)
        own, negatives = upload(bounds[:-1].unsqueeze(1), device), upload(self.negatives, device)
        return LossTask(upload(self.positives, device), negatives, own, bounds, bounds, max(len(self.positives), 1))


class _Room:
    """Buffers of one segment in flight: pinned and device memory for its rows, pinned memory for their gradients."""

    def __init__(self, rows: Tensor, device: torch.device):
        self._rows, self._device = rows, device
        self._host = self._grads = torch.empty(0, *rows.shape[1:], dtype=rows.dtype)
        self._on_device = torch.empty(0, *rows.shape[1:], dtype=rows.dtype, device=device)
        self._unique: Tensor | None = None
        self._done: torch.Event | None = None

    def upload(self, part: _Part, stream: torch.Stream) -> Tensor:
        """The part's rows on the device, for the current stream. The last part must have been collected."""
        num = len(part.unique)
        if num > len(self._host):
            shape = (num + num // 4, *self._rows.shape[1:])
            self._host, self._grads = (torch.empty(shape, dtype=self._rows.dtype, pin_memory=True) for _ in range(2))
            with stream:
                self._on_device = torch.empty(shape, dtype=self._rows.dtype, device=self._device)
        gather_rows(self._rows, part.unique, self._host[:num])
        with stream:
            self._on_device[:num].copy_(self._host[:num], non_blocking=True)
        torch.accelerator.current_stream(self._device).wait_event(stream.record_event())
        used_here(self._on_device)
        self._unique = part.unique
        return self._on_device[:num]

    def download(self, grads: Tensor, stream: torch.Stream) -> None:
        """Launches the copy of the part's row gradients to the host."""
        stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with stream:
            used_here(grads)
            self._grads[: len(grads)].copy_(grads, non_blocking=True)
            self._done = stream.record_event()

    def collect(self, sums: Tensor) -> None:
        """Waits for the gradients of the last part, if there is one, and adds them to the sums."""
        if self._done is not None and self._unique is not None:
            self._done.synchronize()
            add_rows(sums, self._unique, self._grads[: len(self._unique)].to(sums.dtype))
        self._done = self._unique = None


def run(inner: Inner, queries: Tensor, rows: Tensor, positive_rows: Tensor, task: LossTask) -> LossAndGrads:
    """Loss and the queries' gradients on the device of the queries, gradients of rows on the host.

    `inner` computes a segment on the device. `rows`, `positive_rows` and the task are on the host.
    """
    device, same = queries.device, positive_rows is rows
    uploads, downloads = torch.Stream(device), torch.Stream(device)
    tables = [rows.detach()] if same else [rows.detach(), positive_rows.detach()]
    sums = [torch.zeros(one.shape, dtype=torch.float32) for one in tables]
    rooms = [[_Room(one, device) for one in tables] for _ in range(2)]
    loss, d_queries = queries.new_zeros((), dtype=torch.float64), torch.zeros_like(queries)
    num_parts = 0
    for part in _parts(len(queries), task):
        room = rooms[num_parts % 2]
        num_parts += 1
        for own, total in zip(room, sums, strict=True):
            own.collect(total)
        on_device = [own.upload(part, uploads) for own in room]
        part_loss, d_part, *grads = inner(queries[part.tokens], on_device[0], on_device[-1], part.task(device))
        loss += part_loss
        d_queries[part.tokens] = d_part
        for own, grad in zip(room, grads, strict=False):  # with one table both gradients are the same
            own.download(grad, downloads)
    for room in (rooms[num_parts % 2], rooms[(num_parts + 1) % 2]):  # the older one first
        for own, total in zip(room, sums, strict=True):
            own.collect(total)
    d_rows, d_positive_rows = sums[0].to(rows.dtype), sums[-1].to(rows.dtype)
    return loss, d_queries, d_rows, d_rows if same else d_positive_rows


def _parts(num_tokens: int, task: LossTask) -> Iterator[_Part]:
    for tokens in task.segments(0, num_tokens):
        negatives, positives = task.negatives_of(tokens), task.positives[tokens]
        unique, places = dedupe(torch.cat([positives, negatives.flatten()]))
        split = places.split([len(positives), negatives.numel()])
        yield _Part(tokens, unique, split[0], split[1].reshape(negatives.shape))
