import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.embedding.buckets import Owners
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.embedding.lookup import Lookup, TableSpec
from nestpipe.embedding.routing import route
from nestpipe.embedding.row_optimizer import OPTIMIZERS
from nestpipe.embedding.table import Table
from nestpipe.embedding.unique_ids import dedupe
from tests.embedding.one_batch_table import Plain

INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.one_of(st.integers(-20, 20), INT64, st.sampled_from([-(2**63), 2**63 - 1, 0, -1]))
KINDS = sorted({*OPTIMIZERS} - {"adam"})  # a row of exact adam also depends on how many batches there were


def table(kind="lazy_adam", seed=0, dim=6, buffered=False, **settings):
    config = EmbeddingConfig(optimizer=kind, **settings)
    return Plain(Table(TableSpec(name="item", dim=dim), OPTIMIZERS[kind](config), seed=seed), buffered=buffered)


def grads_of(ids, dim, step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(len(ids), dim, generator=generator)


@given(st.lists(IDS, max_size=60))
def test_dedupe_is_unique_and_its_inverse(ids):
    values = torch.tensor(ids, dtype=torch.int64)
    unique, index = dedupe(values)
    assert unique.tolist() == sorted(set(ids))
    assert torch.equal(unique.index_select(0, index), values)


@given(st.lists(st.integers(0, 30), min_size=5, max_size=60))
def test_dedupe_of_dense_ids_takes_the_bitmap_and_agrees(ids):
    values = torch.tensor(ids, dtype=torch.int64)
    unique, inverse = torch.unique(values, return_inverse=True)
    fast_unique, fast_inverse = dedupe(values)
    assert torch.equal(unique, fast_unique)
    assert torch.equal(inverse, fast_inverse)


@given(st.sampled_from(KINDS), st.lists(st.sets(IDS, max_size=12), max_size=8))
def test_a_table_is_a_dictionary_of_rows_each_updated_alone(kind, batches):
    """A row updated together with others is bitwise identical to one alone in its table."""
    whole, alone = table(kind, weight_decay=0.01), {}
    for number, batch in enumerate(batches):
        ids = torch.tensor(sorted(batch), dtype=torch.int64)
        rows = whole.fetch(ids)
        grads = grads_of(ids, 6, number)
        for place, one in enumerate(ids.tolist()):
            single = alone.setdefault(one, table(kind, weight_decay=0.01))
            assert torch.equal(single.fetch(ids[place : place + 1])[0], rows[place])
            single.update(ids[place : place + 1], grads[place : place + 1], 0.1)
        whole.update(ids, grads, 0.1)
    exported = whole.export()
    assert exported["ids"].tolist() == sorted(alone)
    for place, one in enumerate(exported["ids"].tolist()):
        single = alone[one].export()
        assert all(torch.equal(values[place], single[name][0]) for name, values in exported.items())


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "lazy_adam"])
def test_optimizers_equal_torchs_when_every_row_is_touched(kind):
    ids = torch.arange(50)
    ours = table(kind, lr=0.05, beta2=0.98, eps=1e-8)
    weight = torch.nn.Parameter(ours.fetch(ids))
    adam = torch.optim.Adam([weight], lr=0.05, betas=(0.9, 0.98), eps=1e-8)
    theirs = {
        "sgd": lambda: torch.optim.SGD([weight], lr=0.05),
        "adagrad": lambda: torch.optim.Adagrad([weight], lr=0.05, eps=1e-8),
        "adam": lambda: adam,
        "lazy_adam": lambda: adam,
    }[kind]()
    for step in range(20):
        weight.grad = grads_of(ids, 6, step)
        ours.update(ids, weight.grad.clone(), 0.05)
        theirs.step()
    # torch folds the bias corrections into the step size, ours divides the moments: 20 steps of fp32 rounding.
    assert torch.allclose(ours.peek(ids), weight, rtol=2e-5, atol=1e-6)


def test_lazy_adam_counts_steps_per_row():
    one = table("lazy_adam")
    for ids in map(torch.tensor, ([1], [1, 2], [1])):
        one.fetch(ids)
        one.update(ids, torch.ones(len(ids), 6), 0.1)
    assert one.export()["state.step"].flatten().tolist() == [3, 1]


def test_rowwise_adagrad_has_one_number_per_row():
    one = table("rowwise_adagrad", eps=0.0)
    ids = torch.tensor([4])
    before = one.fetch(ids)
    one.update(ids, torch.tensor([[3.0, 0, 0, 0, 0, 0]]), 0.5)
    assert one.export()["state.sum"].tolist() == [[1.5]]
    assert torch.allclose(before - one.peek(ids), torch.tensor([[0.5 * 3 / 1.5**0.5, 0, 0, 0, 0, 0]]))


def test_first_values_depend_on_seed_table_and_id_only():
    ids = torch.tensor([5, 2**63 - 1, -(2**63)])
    first = table().fetch(ids.sort().values)
    grown = table()
    grown.fetch(torch.arange(5000))
    assert torch.equal(grown.fetch(ids.sort().values), first)
    assert torch.equal(table().peek(ids)[0], table().fetch(ids[:1])[0])
    assert not torch.equal(table(seed=1).fetch(ids[:1]), table().fetch(ids[:1]))
    assert 0.015 < float(grown.peek(torch.arange(5000)).std()) < 0.025


def test_peek_admits_nothing():
    one = table()
    one.peek(torch.tensor([3, 1, 3]))
    assert len(one) == 0


def test_export_and_load_keep_every_bit():
    one = table()
    ids = torch.tensor([-4, 7, 2**62])
    one.fetch(ids)
    one.update(ids, grads_of(ids, 6, 0), 0.1)
    other = table()
    other.load(one.export())
    for micro_batch in (one, other):
        micro_batch.fetch(torch.tensor([-4, 0, 7]))
        micro_batch.update(torch.tensor([-4, 0, 7]), grads_of([0] * 3, 6, 1), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(one.export().values(), other.export().values(), strict=True))


def rows_of(lookups, leaves):
    plan = route([lookups], list(leaves), Owners(1, 1))
    assert all(torch.equal(table.ids, table.ids.sort().values) for table in plan.tables.values())
    return plan, plan.rows(0, leaves)


def test_lookups_of_one_table_share_their_rows():
    leaf = torch.arange(6.0).reshape(3, 2).requires_grad_()
    lookups = {
        "a": Lookup(table="item", ids=torch.tensor([7, 3, 7])),
        "b": Lookup(table="item", ids=torch.tensor([3, 9]), offsets=torch.tensor([0, 2, 2]), pool="mean"),
        "c": Lookup(table="user", ids=torch.tensor([-5])),
    }
    plan, rows = rows_of(lookups, {"item": leaf, "user": torch.zeros(1, 2), "unused": torch.zeros(0, 2)})
    assert {name: table.ids.tolist() for name, table in plan.tables.items()} == {
        "item": [3, 7, 9],
        "user": [-5],
        "unused": [],
    }
    assert rows["a"].gather().tolist() == [[2, 3], [0, 1], [2, 3]]
    assert rows["b"].gather().tolist() == [[2, 3], [0, 0]]
    (rows["a"].gather().sum() + rows["b"].gather().sum()).backward()
    assert leaf.grad.tolist() == [[1.5, 1.5], [2, 2], [0.5, 0.5]]


def test_pooling_with_weights():
    lookup = Lookup(
        table="t", ids=torch.tensor([1, 2]), offsets=torch.tensor([0, 2]), weights=torch.tensor([2.0, 3.0]), pool="sum"
    )
    _, rows = rows_of({"x": lookup}, {"t": torch.tensor([[1.0], [10.0]])})
    assert rows["x"].gather().tolist() == [[32.0]]


def test_a_lookup_refuses_other_id_types_and_missing_offsets():
    with pytest.raises(ValueError, match="ids are int64"):
        Lookup(table="t", ids=torch.tensor([1.5]))
    with pytest.raises(ValueError, match="offsets if and only if"):
        Lookup(table="t", ids=torch.tensor([1]), pool="sum")
