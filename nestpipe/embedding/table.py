"""The rows of one embedding table on one rank: ids -> slots -> weights with optimizer state.

Slots are an implementation detail: checkpoints, sums and decisions go by id. Rows are created at
their first lookup, or as the admission rules allow (admission.py). Initial values are a function of
(seed, table, id), so the order of arrival has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from nestpipe.embedding.admission import Admission
from nestpipe.embedding.buckets import Owners, num_table_buckets
from nestpipe.embedding.changed_rows import ChangedRows
from nestpipe.embedding.config import EmbeddingConfig, OptimizerConfig
from nestpipe.embedding.device_rows import DeviceColumns, HostBelow, device_capacity
from nestpipe.embedding.id_index import make_index
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.row_adam import Adam, State
from nestpipe.embedding.row_buffer import RowBuffer
from nestpipe.embedding.row_file import RowFile
from nestpipe.embedding.row_ops import ArrivedGrads, row_bytes
from nestpipe.embedding.row_optimizer import RowOptimizer, gather_slots, update_slots
from nestpipe.embedding.row_snapshot import RowSnapshot, TableSnapshot, by_section
from nestpipe.embedding.row_store import RowStore
from nestpipe.rng import Rng, bell

_INIT_ROWS = 1024  # rows initialised at a time: their random integers take eight times the memory
WEIGHTS = "rows"  # the column of weights; the others are optimizer state
_STATE = "state."
_SECTION_BYTES = 16 << 20  # at most, of rows that a save holds in memory at a time
_MIN_SECTIONS = 256  # of a large table; smaller sections than this gives are at least _MIN_SECTION_BYTES
_MIN_SECTION_BYTES = 256 << 10
_NO_LIMITS = EmbeddingConfig()
_HOST = torch.device("cpu")


class Table:
    """Rows of one table. `advance` takes distinct ids, ascending in each bucket, as owners have them."""

    def __init__(
        self,
        spec: TableSpec,
        optimizer: RowOptimizer,
        *,
        seed: int,
        config: EmbeddingConfig = _NO_LIMITS,
        dtype: torch.dtype = torch.float32,
        num_buckets: int | None = None,
        native: bool | None = None,
        device: torch.device = _HOST,
        num_tables: int = 1,
    ):
        """`num_buckets` divides the limits of `config` [default: `num_table_buckets`].

        With a `device` rows in use are there, in a buffer; `num_tables` share its memory.
        """
        self.spec, self.config, self.device = spec, config, device
        self.num_buckets = num_table_buckets(config) if num_buckets is None else num_buckets
        self._optimizer = optimizer
        self._lr_factor = spec.optimizer.lr / config.lr if spec.optimizer else 1.0  # step rates are those of `config`
        self._seed = seed
        self._dtype = dtype
        self._admission = Admission(config, self.num_buckets, native=native) if config.has_limits else None
        self._index = self._admission.rows.index if self._admission else make_index(native=native)
        columns = {WEIGHTS: self.empty_rows(0), **self._new_state(0)}
        self.buffer: RowBuffer | None = None  # in front of rows in files
        if config.tier == "files":
            file = RowFile(columns, Path(config.files_folder), append_bytes=config.buffer_bytes // 64, native=native)
            self.buffer = RowBuffer(spec.name, columns, file, config.buffer_bytes, native=native)
        self._rows: RowStore | RowBuffer = RowStore(columns) if self.buffer is None else self.buffer
        if device.type != "cpu":
            capacity = device_capacity(spec.name, columns, device, config.device_bytes, num_tables=num_tables)
            on_device, below = DeviceColumns(columns, device, capacity), HostBelow(self._rows, device)
            self._rows = self.buffer = RowBuffer(spec.name, columns, below, 0, native=native, on_device=on_device)
        self._changed: ChangedRows | None = None
        self._snapshot: RowSnapshot | None = None  # that reads the rows while they change
        self._decaying = optimizer if isinstance(optimizer, Adam) and optimizer.config.weight_decay else None
        self.num_batches = 0  # done, skipped ones included

    def __len__(self) -> int:
        return len(self._index)

    def decayed(self, rows: Tensor, batch: int) -> Tensor:
        """What a batch reads of ids without a row, from their initial values [n, D]: the same, or less weight decay."""
        if self._decaying is None or not len(rows):
            return rows
        state = {
            name: values.to(self._dtype) if values.is_floating_point() else values
            for name, values in self._decaying.new_state(len(rows), self.spec.dim).items()
        }
        return gather_slots(self._decaying, rows, state, torch.arange(len(rows)), batch=batch)

    def decays_like(self, optimizer: Adam, num_batches: int) -> None:
        """For a table that is only read: ids without a row decay as in the training that wrote its rows."""
        self._decaying, self.num_batches = (optimizer if optimizer.config.weight_decay else None), num_batches

    def initial(self, ids: Tensor) -> Tensor:
        """The initial rows [n, D] of these ids."""
        if not len(ids):
            return self.empty_rows(0)  # common for a warm table
        keys = Rng(self._seed, 0).keys(f"init/{self.spec.name}", ids)
        rows = torch.empty(len(ids), self.spec.dim, dtype=self._dtype)
        for chunk, own in zip(rows.split(_INIT_ROWS), keys.split(_INIT_ROWS), strict=True):
            chunk.copy_(bell(own, self.spec.dim).mul_(self.spec.init_std))
        return rows

    def new_rows(self, ids: Tensor) -> dict[str, Tensor]:
        """Initial weights and optimizer state of these ids."""
        return {WEIGHTS: self.initial(ids), **self._new_state(len(ids))}

    def empty_rows(self, num_rows: int) -> Tensor:
        """An uninitialised buffer for rows [n, D]."""
        return torch.empty(num_rows, self.spec.dim, dtype=self._dtype)

    def message_rows(self, num_rows: int) -> Tensor:
        """An uninitialised buffer for rows [n, D] where batches use them: on the device, if the table has one."""
        return torch.empty(num_rows, self.spec.dim, dtype=self._dtype, device=self.device)

    def advance(self, ids: Tensor, step: int) -> Tensor:
        """Admits and evicts ids for batch `step`; returns the slots [n] of its ids, -1 for an id without a row.

        Called once per batch, in order, before any row of the batch is read; a skipped update does not undo it. A slot
        keeps its id until that is evicted, not before `protect_steps` more batches.
        """
        if self._admission:
            change = self._admission.advance(ids, step)
            self._rows.drop(change.evicted.slots)  # before new ids start in their slots
            self._start(change.admitted, change.admitted_slots)
            slots = change.slots
        else:
            slots, added = self._index.find_or_add(ids)
            if len(added):
                self._start(ids.index_select(0, added), slots.index_select(0, added))
        if self._changed:
            self._changed.mark(slots, self._index.num_slots)
        return slots

    def gather(self, slots: Tensor, out: Tensor | None = None, *, batch: int | None = None) -> Tensor:
        """A copy of the weights [n, D] in slots, as a batch reads them [default: the next one]; in `out` if given."""
        batch = self.num_batches if batch is None else batch
        if isinstance(self._rows, RowStore):
            return self.gather_from(self._rows, slots, out, batch=batch)
        if not isinstance(self._optimizer, Adam):
            return self._rows.gather(WEIGHTS, slots, out)
        return self._current(self._rows.read(slots), torch.arange(len(slots)), batch, out)

    def gather_from(
        self, columns: RowStore | DeviceColumns, slots: Tensor, out: Tensor | None = None, *, batch: int
    ) -> Tensor:
        """`gather` from columns in memory."""
        return self._current(columns.columns, slots, batch, out)

    def _current(self, columns: Mapping[str, Tensor], slots: Tensor, batch: int, out: Tensor | None = None) -> Tensor:
        return gather_slots(self._optimizer, columns[WEIGHTS], _state_of(columns), slots, out, batch=batch)

    def record_rate(self, batch: int, lr: float) -> None:
        """Notes the learning rate of a batch, before rows of the next one are read; exact Adam needs all of them."""
        if isinstance(self._optimizer, Adam):
            self._optimizer.steps(self._dtype).record(batch, lr * self._lr_factor)

    def finish(self, batch: int) -> None:
        """A batch is done: its rows are updated, or it was skipped."""
        self.num_batches = max(self.num_batches, batch + 1)

    @property
    def adam(self) -> OptimizerConfig | None:
        """The constants of exact Adam, if that is the optimizer."""
        return self._optimizer.config if isinstance(self._optimizer, Adam) else None

    def rates(self, num_batches: int) -> Tensor:
        """The learning rates of so many batches, for a checkpoint; empty if the optimizer needs none."""
        if not isinstance(self._optimizer, Adam):
            return torch.empty(0, dtype=torch.float64)
        return self._optimizer.steps(self._dtype).rates(num_batches)

    def load_rates(self, rates: Tensor | None, num_batches: int) -> None:
        """Continues after `num_batches`, with the learning rates of a checkpoint."""
        self.num_batches = num_batches
        if isinstance(self._optimizer, Adam) and rates is not None:
            self._optimizer.steps(self._dtype).load(rates, num_batches)

    def read(self, slots: Tensor) -> dict[str, Tensor]:
        """A copy of weights and optimizer state, per column."""
        return self._rows.read(slots)

    def write(self, slots: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Overwrites weights and optimizer state."""
        if snapshot := self._snapshot:
            snapshot.preserve(slots)
        self._rows.write(slots, {name: values.to(self._columns[name].dtype) for name, values in rows.items()})

    def pin(self) -> None:
        """Forbids moving rows from now on, because several threads use them."""
        if isinstance(self._rows, RowStore):
            self._rows.pinned = True

    def resize_on_device(self, num_rows: int) -> None:
        """Makes room for so many rows on the device, at a barrier."""
        assert self.buffer is not None
        self.buffer.resize_on_device(num_rows)

    def peek(self, ids: Tensor) -> Tensor:
        """A copy of the rows [n, D] of any ids; those without a row show their initial value and get none."""
        slots = self._index.find(ids)
        unknown = (slots < 0).nonzero().flatten()
        if not len(unknown):
            return self.gather(slots)
        initial = self.decayed(self.initial(ids.index_select(0, unknown)), self.num_batches)
        rows = self.empty_rows(len(ids)).index_copy_(0, unknown, initial)
        known = (slots >= 0).nonzero().flatten()
        return rows.index_copy_(0, known, self.gather(slots.index_select(0, known)))

    def update(self, slots: Tensor, grads: Tensor | ArrivedGrads, lr: float, *, batch: int | None = None) -> None:
        """One optimizer step of a batch [default: the next one] on the rows in distinct slots; slots of -1 are skipped."""
        batch = self.num_batches if batch is None else batch
        if isinstance(self._rows, RowStore):
            if snapshot := self._snapshot:
                snapshot.preserve(slots)
            self.step(self._rows, slots, grads, lr, batch=batch)
            return
        positions = self._rows.hold(slots)
        self.step(self._rows.rows, positions, grads, lr, batch=batch)
        self._rows.mark_dirty(positions)
        self._rows.release(positions)

    def step(
        self, columns: RowStore | DeviceColumns, slots: Tensor, grads: Tensor | ArrivedGrads, lr: float, *, batch: int
    ) -> None:
        """`update` in place on columns in memory."""
        own, rate = columns.columns, lr * self._lr_factor
        update_slots(self._optimizer, own[WEIGHTS], _state_of(own), slots, grads, rate, batch=batch)

    def export(self) -> dict[str, Tensor]:
        """The whole table by ascending id; `pending.*`, if any, has its own ids."""
        ids, slots = self._index.export()
        return {"ids": ids, **self.read(slots), **(self._admission.export() if self._admission else {})}

    def track_changes(self) -> None:
        """Records from now on what changes, so that `snapshot` can be a delta."""
        self._changed = ChangedRows()
        self._changed.reset(self._index.export()[0], self._admission.export() if self._admission else {})

    def snapshot(
        self,
        owners: Owners,
        buckets: range,
        *,
        extra: Mapping[str, Tensor],
        delta: bool = False,
        concurrent: bool = False,
    ) -> TableSnapshot:
        """The rows of these buckets, or with `delta` what has changed since the last snapshot, with `extra` columns.

        With `concurrent` training may continue while it is read; `end_snapshot` must follow.
        """
        ids, slots = self._index.export()
        usage = self._admission.export() if self._admission else {}
        content = {"ids": ids, "slots": slots, **usage}
        if self._changed:
            content = self._changed.only(ids, slots, usage) if delta else content
            self._changed.reset(ids, usage)
        content.update(extra)
        del ids, slots  # so that `by_section` can free them
        rows_per_section = max(self._section_bytes(len(content["ids"])) // self.row_bytes, 1)
        sections = by_section(content, owners, buckets, rows_per_section=rows_per_section)
        slots = torch.cat([torch.empty(0, dtype=torch.int64), *(index.pop("slots") for _, index in sections)])
        rows = RowSnapshot(self._rows, slots, concurrent=concurrent)
        if concurrent:
            self._snapshot = rows
        return TableSnapshot(rows, sections)

    def changed_bytes(self) -> int:
        """Size of the rows that have changed since the last snapshot."""
        return self._changed.num_rows * self.row_bytes if self._changed else 0

    def _section_bytes(self, num_rows: int) -> int:
        """Size of the sections of a snapshot: a small part of the table, so that saving needs little memory."""
        return min(max(num_rows * self.row_bytes // _MIN_SECTIONS, _MIN_SECTION_BYTES), _SECTION_BYTES)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its optimizer state."""
        return sum(row_bytes(column) for column in self._columns.columns.values())

    @property
    def _columns(self) -> RowStore | DeviceColumns:
        """The columns in memory: of all rows, or of those in the buffer."""
        return self._rows.rows if isinstance(self._rows, RowBuffer) else self._rows

    def end_snapshot(self) -> None:
        """Ends a concurrent snapshot, read or not."""
        if snapshot := self._snapshot:
            self._snapshot = None
            snapshot.close()

    def load(self, content: Mapping[str, Tensor]) -> None:
        """Replaces the content by an exported one; ids in any order."""
        self.load_index(content)
        self.load_rows(content)

    def load_index(self, content: Mapping[str, Tensor]) -> None:
        """The first half of `load`: ids without rows. `load_rows` must follow for all of them, in any chunks."""
        self._rows.drop(self._index.export()[1])
        if self._admission:
            self._admission.load(content)
        else:
            self._index.load(content["ids"], torch.arange(len(content["ids"])))
        self._rows.grow(self._index.num_slots)

    def load_rows(self, content: Mapping[str, Tensor]) -> None:
        """Overwrites the rows of known ids and their optimizer state."""
        self.write(self._index.find(content["ids"]), {name: content[name] for name in self._rows})

    def _new_state(self, num_rows: int) -> State:
        """Optimizer state of new rows, under its names in an export."""
        state = self._optimizer.new_state(num_rows, self.spec.dim)
        return {
            _STATE + name: values.to(self._dtype) if values.is_floating_point() else values
            for name, values in state.items()
        }

    def _start(self, ids: Tensor, slots: Tensor) -> None:
        """Initialises new ids, overwriting what evicted rows left in their slots."""
        self._rows.grow(self._index.num_slots)
        self.write(slots, self.new_rows(ids))


def _state_of(rows: Mapping[str, Tensor]) -> State:
    """The optimizer state among the columns."""
    return {name.removeprefix(_STATE): values for name, values in rows.items() if name.startswith(_STATE)}
