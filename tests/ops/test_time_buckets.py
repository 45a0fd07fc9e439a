"""Time buckets of all pairs, which the native plan writes in runs: equal to a search for each pair."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.jagged import Jagged, offsets_of
from nestpipe.ops import attention_native, native_library
from nestpipe.ops.attention import attention_layout
from nestpipe.ops.kernel_args import buckets_of, gaps

pytestmark = pytest.mark.skipif(native_library.library() is None, reason="no C++ compiler")


def wanted(layout, number):
    """Buckets of the pairs that each query of a sequence sees."""
    (first, last), (begin, end) = (
        one[number : number + 2].tolist() for one in (layout.query_offsets, layout.key_offsets)
    )
    query_times, keys = layout.times[0][first:last], layout.times[1][begin:end]
    num_history = len(keys) - int(layout.num_targets[number])
    for query, asked in enumerate(query_times):
        place = len(keys) - len(query_times) + query
        seen = keys[: min(place + 1, num_history)]
        if place >= num_history:
            seen = torch.cat([seen, keys[place : place + 1]])
        yield buckets_of(gaps(asked, seen), layout.num_buckets)


def check(lengths, times, query_times, *, num_targets=None, num_queries=None, num_buckets=64):
    keys = Jagged(times, offsets_of(torch.tensor(lengths)), max(lengths))
    rows = num_queries or lengths
    queries = Jagged(query_times, offsets_of(torch.tensor(rows)), max(rows))
    layout = attention_layout(
        queries,
        keys=keys,
        times=keys,
        query_times=queries,
        num_targets=None if num_targets is None else torch.tensor(num_targets),
        num_buckets=num_buckets,
    )
    starts, buckets, _ = attention_native.plan(layout)
    query = 0
    for number in range(len(lengths)):
        for own in wanted(layout, number):
            start, end = starts[query : query + 2].tolist()
            assert buckets[start : start + len(own)].tolist() == own.tolist(), (number, query)
            assert not buckets[start + len(own) : end].any(), "the padding of a row is read as bucket 0"
            query += 1


def sorted_times(random, lengths, span):
    return torch.from_numpy(np.concatenate([np.sort(random.integers(0, span, one)) for one in lengths]))


@pytest.mark.parametrize("span", [1, 5, 1000, 10**9, 2**62])
def test_runs_of_sorted_keys_equal_a_search_for_each_pair(span):
    random, lengths = np.random.default_rng(span), [1, 2, 0, 17, 40, 3]
    times = sorted_times(random, lengths, span)
    check(lengths, times, times)
    check(lengths, times, times + span // 3 + 1)
    following = torch.cat([times[1:], times[-1:]])  # of the next event, as in training; the next user's may be earlier
    check(lengths, times, following)


@pytest.mark.parametrize("num_buckets", [1, 2, 128])
def test_any_number_of_buckets(num_buckets):
    random, lengths = np.random.default_rng(0), [30, 5]
    times = sorted_times(random, lengths, 10**6)
    check(lengths, times, times + 10, num_buckets=num_buckets)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_times(seed):
    """Keys out of order, queries that go back in time, and queries before keys that they see."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 30, 6).tolist()
    total, span = sum(lengths), int(10 ** random.integers(1, 10))
    ordered = sorted_times(random, lengths, span)
    anything = torch.from_numpy(random.integers(0, span, total))
    nearly = ordered + torch.from_numpy(random.integers(0, span, total) * (random.random(total) < 0.2))
    for keys, asked in ((anything, anything), (ordered, anything), (ordered, nearly), (nearly, ordered + span)):
        check(lengths, keys, asked)


def test_targets_and_queries_of_the_last_events_only():
    random, lengths, num_targets, num_queries = np.random.default_rng(1), [20, 9, 5], [4, 0, 5], [7, 9, 5]
    times = sorted_times(random, lengths, 10**5)
    asked = sorted_times(random, num_queries, 10**5) + 10**5
    check(lengths, times, asked, num_targets=num_targets, num_queries=num_queries)
    same = torch.full_like(asked, 3 * 10**5)  # candidates of one request
    check(lengths, times, same, num_targets=num_targets, num_queries=num_queries)
