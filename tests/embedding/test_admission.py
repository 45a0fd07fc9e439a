"""Which ids have rows: a table against the rules in plain Python, and what a resumed table remembers."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding import admission
from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import TableSpec
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.row_snapshot import by_section
from nestpipe.embedding.table import Table
from tests.embedding.one_batch_table import Plain

DIM = 3
IDS = st.one_of(st.integers(-6, 12), st.integers(-6, 12), st.sampled_from([-(2**63), 2**63 - 1]))
BATCHES = st.lists(st.tuples(st.sets(IDS, max_size=8), st.booleans()), min_size=1, max_size=16)
CONFIGS = st.builds(
    EmbeddingConfig,
    optimizer=st.sampled_from(["sgd", "lazy_adam"]),
    num_buckets=st.integers(1, 3),
    admit_after=st.integers(1, 3),
    max_rows=st.integers(0, 12),
    evict=st.sampled_from(["lru", "lfu"]),
    protect_steps=st.integers(2, 4),
)


def table(config, buffered=False, **settings):
    optimizer = OPTIMIZERS[config.optimizer](config)
    return Plain(
        Table(
            TableSpec(name="item", dim=DIM),
            optimizer,
            seed=0,
            config=config,
            num_buckets=config.num_buckets,  # whatever `num_table_buckets` says: a few ids fill small buckets
            **settings,
        ),
        buffered=buffered,
    )


def tensor(ids):
    return torch.tensor(sorted(ids), dtype=torch.int64)


def grads_of(ids, step):
    return torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(step))


@cache
def bucket_of(one, num_buckets):
    return int(Owners(num_buckets, 1).bucket_of(tensor([one])))


def share_of(total, bucket, num_buckets):
    """The first buckets get the remainder."""
    return total // num_buckets + (bucket < total % num_buckets)


class Oracle:
    """The rules, one id at a time."""

    def __init__(self, config):
        self.config, self.optimizer = config, OPTIMIZERS[config.optimizer](config)
        self.initial = table(config).initial
        self.rows = {}  # id -> row [1, D], optimizer state
        self.frequency, self.last_step = {}, {}  # of ids that have a row
        self.pending = {}  # id -> (last step, count)

    def bucket_of(self, one):
        return bucket_of(one, self.config.num_buckets)

    def advance(self, batch, step):
        for one in batch & self.rows.keys():
            self.frequency[one] += 1
            self.last_step[one] = step
        for one in batch - self.rows.keys():
            self.pending[one] = (step, self.pending.get(one, (0, 0))[1] + 1)
        asking = [one for one in sorted(batch - self.rows.keys()) if self.pending[one][1] >= self.config.admit_after]
        for bucket in range(self.config.num_buckets):
            self.admit([one for one in asking if self.bucket_of(one) == bucket], bucket, step)
            self.forget(bucket)

    def admit(self, asking, bucket, step):
        if self.config.max_rows:
            limit = share_of(self.config.max_rows, bucket, self.config.num_buckets)
            own = [one for one in self.rows if self.bucket_of(one) == bucket]
            missing = max(0, len(own) + len(asking) - limit) if asking else 0
            old = [one for one in own if self.last_step[one] < step - self.config.protect_steps]
            victims = sorted(old, key=self.age)[:missing]
            for one in victims:
                del self.rows[one], self.last_step[one], self.frequency[one]
            asking = asking[: max(0, limit - len(own) + len(victims))]
        for one in asking:
            self.rows[one] = (self.initial(tensor([one])), self.optimizer.new_state(1, DIM))
            self.last_step[one], self.frequency[one] = self.pending.pop(one)

    def age(self, one):
        """The first by this are evicted first."""
        return (self.frequency[one] if self.config.evict == "lfu" else 0, self.last_step[one], one)

    def forget(self, bucket):
        own = [one for one in self.pending if self.bucket_of(one) == bucket]
        most = share_of(4 * self.config.max_rows or 1 << 22, bucket, self.config.num_buckets)
        if self.config.admit_after == 1:
            most = 0  # a count says nothing if the first sight is enough
        for one in sorted(own, key=lambda one: (self.pending[one][0], one))[: max(0, len(own) - most)]:
            del self.pending[one]

    def peek(self, one):
        return self.rows[one][0][0] if one in self.rows else self.initial(tensor([one]))[0]

    def update(self, ids, grads):
        for place, one in enumerate(ids.tolist()):
            if one in self.rows:
                self.optimizer.update(*self.rows[one], grads[place : place + 1], 0.1)


def check_same(ours, oracle):
    exported = ours.export()
    ids = sorted(oracle.rows)
    assert exported["ids"].tolist() == ids
    assert len(ours) == len(ids)
    if oracle.config.has_limits:
        assert exported["index.last_step"].tolist() == [oracle.last_step[one] for one in ids]
        assert exported["index.frequency"].tolist() == [oracle.frequency[one] for one in ids]
    if oracle.config.admit_after > 1:
        waiting = sorted(oracle.pending)
        assert exported["pending.ids"].tolist() == waiting
        assert exported["pending.last_step"].tolist() == [oracle.pending[one][0] for one in waiting]
        assert exported["pending.frequency"].tolist() == [oracle.pending[one][1] for one in waiting]
    for place, one in enumerate(ids):
        row, state = oracle.rows[one]
        assert torch.equal(exported["rows"][place], row[0])
        assert all(torch.equal(exported[f"state.{name}"][place], values[0]) for name, values in state.items())


def reloaded(old, config, **settings):
    """A new table with the content of an old one, over bucket files as a checkpoint has them, in another order."""
    owners = Owners(config.num_buckets, 1)
    buckets = [own for _, own in by_section(old.export(), owners, owners.buckets_of(0), rows_per_section=1)][::-1]
    new = table(config, **settings)
    new.load({name: torch.cat([bucket[name] for bucket in buckets]) for name in buckets[0]})
    return new


def same_content(one, other):
    a, b = one.export(), other.export()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@given(CONFIGS, BATCHES)
def test_a_table_follows_the_rules_with_either_index_and_when_resumed(config, batches):
    """The second of each pair says whether the resumed table is reloaded after the batch, and an update skipped."""
    native, plain, resumed, buffered = (
        table(config),
        table(config, native=False),
        table(config),
        table(config, buffered=True),
    )
    oracle = Oracle(config)
    for step, (batch, marked) in enumerate(batches):
        ids = tensor(batch)
        oracle.advance(batch, step)
        grads = grads_of(ids, step)
        for one in (native, plain, resumed, buffered):
            one.advance(ids, step)
            rows = one.fetch(ids)
            assert all(torch.equal(rows[place], oracle.peek(id_)) for place, id_ in enumerate(ids.tolist()))
            if not (marked and step % 3 == 0):  # a skipped batch has been counted all the same
                one.update(ids, grads, 0.1)
        if not (marked and step % 3 == 0):
            oracle.update(ids, grads)
        check_same(native, oracle)
        if marked:
            resumed = reloaded(resumed, config)
        buffered.release()
        for one in (plain, resumed, buffered):
            same_content(one, native)


def test_every_row_of_a_large_table_is_the_oracles(scale):
    """Many ids, so that slots have been handed out, freed and taken again in an order that is not that of ids."""
    config = EmbeddingConfig(optimizer="adagrad", num_buckets=4, admit_after=2, max_rows=37, evict="lfu")
    ours, oracle = table(config), Oracle(config)
    generator = torch.Generator().manual_seed(1)
    for step in range(scale(60, 1000)):
        batch = set(torch.randint(0, 90, (25,), generator=generator).square().tolist())
        ids = tensor(batch)
        ours.advance(ids, step)
        oracle.advance(batch, step)
        grads = grads_of(ids, step)
        ours.update(ids, grads, 0.1)
        oracle.update(ids, grads)
    check_same(ours, oracle)
    assert len(ours) == 37


def advance(ours, *batches):
    """Counts batches of ids; returns the ids that have a row after each."""
    seen = []
    for step, batch in enumerate(batches):
        ours.advance(tensor(batch), step)
        seen.append(ours.export()["ids"].tolist())
    return seen


def test_an_id_waits_for_its_row_and_its_gradient_is_dropped():
    ours = table(EmbeddingConfig(admit_after=2))
    ids = tensor([7])
    ours.advance(ids, 0)
    assert torch.equal(ours.fetch(ids), ours.initial(ids))
    ours.update(ids, torch.ones(1, DIM), 0.1)
    assert torch.equal(ours.fetch(ids), ours.initial(ids))
    ours.advance(ids, 1)
    ours.update(ids, torch.ones(1, DIM), 0.1)
    assert not torch.equal(ours.fetch(ids), ours.initial(ids))
    assert ours.export()["state.step"].tolist() == [[1]]


def test_rows_of_the_last_batches_are_not_evicted():
    config = EmbeddingConfig(num_buckets=1, max_rows=2, protect_steps=2)
    # 1 and 2 are of batch 0; batch 1 and 2 are too early to take their place, batch 3 is not, and takes the lowest ids.
    assert advance(table(config), {1, 2}, {3}, {4}, {6, 5, 7}) == [[1, 2], [1, 2], [1, 2], [5, 6]]


def test_an_evicted_row_starts_again():
    config = EmbeddingConfig(num_buckets=1, max_rows=1)
    ours = table(config)
    for step, one in enumerate([1, 1, 2, 2, 2, 1, 1, 1]):
        ours.advance(tensor([one]), step)
        ours.update(tensor([one]), torch.ones(1, DIM), 0.1)
    exported = ours.export()
    assert exported["ids"].tolist() == [1]
    assert exported["state.step"].tolist() == [[1]]
    assert exported["index.frequency"].tolist() == [1]


@pytest.mark.parametrize(("evict", "left"), [("lru", [1, 9]), ("lfu", [2, 9])])
def test_the_oldest_or_the_rarest_goes(evict, left):
    config = EmbeddingConfig(num_buckets=1, max_rows=2, evict=evict)
    assert advance(table(config), {2}, {2}, {1}, set(), set(), {9})[-1] == left


def test_counts_of_ids_without_a_row_are_bounded(monkeypatch):
    """Of the table, divided over its buckets."""
    monkeypatch.setattr(admission, "_MAX_PENDING", 5)
    ours = table(EmbeddingConfig(num_buckets=1, admit_after=3))
    advance(ours, {1, 2, 3, 4}, {1, 5}, {6, 7})
    assert ours.export()["pending.ids"].tolist() == [1, 4, 5, 6, 7]
    ours = table(EmbeddingConfig(num_buckets=4096, admit_after=3))
    advance(ours, *({one} for one in range(99)))
    kept = ours.export()["pending.ids"].tolist()
    assert len(kept) <= 5
    assert kept == [one for one in range(99) if bucket_of(one, 4096) < 5]


def test_rows_of_one_batch_tie_by_id_whether_they_are_old_or_new():
    """Row 9 was there before row 1, but both were last used in batch 1."""
    config = EmbeddingConfig(num_buckets=1, max_rows=2)
    assert advance(table(config), {9}, {1, 9}, set(), set(), {20})[-1] == [9, 20]


def test_rarely_used_rows_tie_by_their_last_step():
    """Rows 1 and 2 were used in two batches each, row 1 later."""
    config = EmbeddingConfig(num_buckets=1, max_rows=2, evict="lfu")
    assert advance(table(config), {1, 2}, {2}, {1}, set(), set(), {9})[-1] == [1, 9]


def test_batches_are_counted_in_order():
    ours = table(EmbeddingConfig(admit_after=2))
    ours.advance(tensor([1]), 4)
    with pytest.raises(ValueError, match="batch 4 is counted after batch 4"):
        ours.advance(tensor([1]), 4)


def test_rows_of_a_table_without_limits_can_be_limited_later():
    """A warm start: they come without index state, and go first."""
    free = table(EmbeddingConfig())
    free.fetch(tensor([1, 2]))
    ours = table(EmbeddingConfig(num_buckets=1, max_rows=2))
    ours.load(free.export())
    assert advance(ours, {2}, {3}, {3}) == [[1, 2], [1, 2], [2, 3]]


@pytest.mark.parametrize(("setting", "value"), [("admit_after", 0), ("max_rows", -1), ("protect_steps", 1)])
def test_impossible_limits_are_problems(setting, value):
    (problem,) = EmbeddingConfig(**{setting: value}).problems()
    assert problem.startswith(f"{setting} is {value}")
