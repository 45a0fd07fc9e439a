"""Grids of ranks, the sums of groups against their definition, and how many groups a model of traffic chooses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.autotune.group_choice import LinkModel, LinkModels, TableTraffic, choose_groups, cost
from nestpipe.embedding.replica_groups import GroupUnion, RankGrid, _by_last_micro_batch, divisors
from nestpipe.embedding.routing import own_requests
from nestpipe.embedding.row_ops import ArrivedGrads
from nestpipe.errors import ConfigError
from tests.embedding.test_unique_ids import needs_compiler


def test_every_rank_is_in_one_group_and_one_row_of_replicas():
    for num_ranks in (1, 6, 8):
        for groups in divisors(num_ranks):
            grid = RankGrid(num_ranks, groups)
            for rank in range(num_ranks):
                own, others = set(grid.group_of(rank)), set(grid.replicas_of(rank))
                assert own & others == {rank}
                assert (len(own), len(others)) == (grid.num_shards, groups)
                assert all(set(grid.group_of(one)) == own for one in own)
                assert all(set(grid.replicas_of(one)) == others for one in others)


@pytest.mark.parametrize("groups", [3, 16, -1])
def test_groups_of_unequal_size_are_refused(groups):
    with pytest.raises(ConfigError, match=rf"8 ranks do not make {groups} groups.*one of 1, 2, 4, 8, or to 0"):
        RankGrid(8, groups)


requests = st.lists(  # [requester][...] = (id, micro-batch with which its sum arrives)
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=6, unique_by=lambda one: one[0]),
    min_size=2,
    max_size=2,
)


@given(requested=st.lists(requests, min_size=1, max_size=4))
def test_sums_go_by_micro_batch_and_rank_in_a_group_and_then_by_group(requested):
    """Sums of strings, which say in which order they were made."""
    owned = [of_group(group) for group in requested]
    lists = [_by_last_micro_batch(one) for one in owned]
    ids = torch.cat([one.ids.index_select(0, order) for one, (order, _) in zip(owned, lists, strict=True)])
    counts = [counts for _, counts in lists]
    unions = [
        GroupUnion.of(one, ids, counts, order, group=group)
        for group, (one, (order, _)) in enumerate(zip(owned, lists, strict=True))
    ]
    sent = []  # of each group: a word for each id of its list
    for group, union in enumerate(unions):
        by_id = union.requests.arrivals.split(union.requests.starts.diff().tolist())
        words = arrivals(requested[group], group)
        sent += [" ".join(words[number] for number in numbers.tolist()) for numbers in by_id]
        assert len(by_id) == sum(counts[group])
    for union in unions:
        assert union.requests.ids.tolist() == sorted(
            {one for group in requested for requester in group for one, _ in requester}
        )
        by_id = union.order.split(union.starts.diff().tolist())
        found = [", ".join(sent[number] for number in numbers.tolist()) for numbers in by_id]
        assert found == [defined(requested, one) for one in union.requests.ids.tolist()]
    for group, union in zip(requested, unions, strict=True):  # each requester's rows are found in the union
        flat = [one for requester in group for one, _ in requester]
        assert union.requests.ids.index_select(0, union.requests.places).tolist() == flat


def of_group(group):
    flat = [one for requester in group for one in requester]
    ids, last = (torch.tensor([one[place] for one in flat], dtype=torch.int64) for place in (0, 1))
    return own_requests(ids, last.to(torch.uint8), [[len(requester), 0, 0] for requester in group])


def arrivals(group, number):
    """A word for each arrival, in (micro-batch, requester) order."""
    return [
        f"{number}{micro_batch}{requester}:{one}"
        for micro_batch in range(3)
        for requester, own in enumerate(group)
        for one, last in own
        if last == micro_batch
    ]


def defined(requested, wanted):
    """How the gradient of an id is added up, in words."""
    words = (
        [word for word in arrivals(group, number) if word.endswith(f":{wanted}")]
        for number, group in enumerate(requested)
    )
    return ", ".join(" ".join(one) for one in words if one)


@needs_compiler
def test_native_sums_have_the_bits_of_torch():
    generator = torch.Generator().manual_seed(0)
    segments = [torch.randn(size, 7, generator=generator) for size in (5, 0, 11)]
    segments[0][3] = -0.0
    order, starts = torch.randperm(16, generator=generator), torch.tensor([0, 1, 4, 5, 12, 16])
    arrived = ArrivedGrads(segments, starts, order)
    out = torch.empty(5, 7)
    assert arrived.total(out) is out
    assert out.numpy().tobytes() == arrived.total(native=False).numpy().tobytes()
    alone = ArrivedGrads(segments, torch.tensor([0, 1]), torch.tensor([3]))
    assert bool(alone.total().signbit().all())


FAST, SLOW = LinkModel(1e-4, 1e9), LinkModel(1e-4, 1e8)
TABLE = TableTraffic(256, {1: 10_000, 2: 18_000, 4: 30_000, 8: 50_000})
FLAT = dict.fromkeys(divisors(8), LinkModels(SLOW, SLOW))


def chosen(wires=FLAT, table=TABLE, *, num_micro_batches=1, row_s=1e-7):
    return choose_groups(8, [table], wires, num_micro_batches=num_micro_batches, row_s=row_s)


def test_what_a_step_sends():
    found = cost(8, 2, [TABLE], LinkModels(LinkModel(0.0, 1.0), LinkModel(0.0, 1.0)), num_micro_batches=3, row_s=1.0)
    assert found.inside_s == 2 * 10_000 * 256 * 3 / 4
    assert found.between_s == 30_000 / 4 * (256 + 8)
    assert found.update_s == 50_000 / 4
    found = cost(
        8, 2, [TABLE] * 3, LinkModels(LinkModel(1.0, 1e18), LinkModel(10.0, 1e18)), num_micro_batches=3, row_s=0.0
    )
    assert (round(found.inside_s), round(found.between_s)) == (3 * 8, 3 * 40)
    alone = cost(8, 8, [TABLE], LinkModels(LinkModel(1.0, 1.0), SLOW), num_micro_batches=3, row_s=0.0)
    assert alone.inside_s == 0.0
    assert cost(8, 1, [TABLE], LinkModels(SLOW, LinkModel(1.0, 1.0)), num_micro_batches=3, row_s=0.0).between_s == 0.0


def test_on_a_network_that_is_the_same_everywhere_groups_do_not_pay():
    number, why = chosen()
    assert number == 1
    assert why.startswith("1 group of 8 ranks: ")
    assert "inside groups" in why
    assert [f"with {other}" in why for other in (2, 4, 8)] == [True] * 3


def test_groups_are_as_large_as_what_is_close_together():
    two_machines = {
        1: LinkModels(SLOW, SLOW),
        2: LinkModels(FAST, SLOW),
        4: LinkModels(FAST, SLOW),
        8: LinkModels(FAST, SLOW),
    }
    assert chosen(two_machines)[0] == 2
    alike = TableTraffic(256, {1: 10_000, 2: 10_000, 4: 10_000, 8: 10_000})
    assert chosen({**FLAT, 4: LinkModels(FAST, SLOW)}, alike)[0] == 4
    # Where messages themselves take the time, an exchange of few ranks is what counts.
    started = {
        number: LinkModels(LinkModel(8e-2 / number, 1e12), LinkModel(1e-2 * number, 1e12)) for number in divisors(8)
    }
    assert chosen(started, num_micro_batches=4)[0] in (2, 4)


def test_work_on_rows_speaks_against_groups():
    two_machines = {1: LinkModels(SLOW, SLOW), 2: LinkModels(FAST, SLOW)}
    assert [chosen(two_machines, row_s=row_s)[0] for row_s in (1e-7, 1e-5)] == [2, 1]


def test_more_groups_must_be_worth_their_memory():
    table = replace(TABLE, distinct=dict.fromkeys(divisors(8), 10_000))
    for rate, gain, number in ((1.03e8, 0.016, 1), (1.05e8, 0.032, 2)):
        faster = {1: LinkModels(SLOW, SLOW), 2: LinkModels(LinkModel(1e-4, rate), SLOW)}
        one, two = (
            cost(8, groups, [table], faster[groups], num_micro_batches=1, row_s=0.0).total_s for groups in (1, 2)
        )
        assert 1 - two / one == pytest.approx(gain, abs=1e-3)
        assert chosen(faster, table, row_s=0.0)[0] == number
