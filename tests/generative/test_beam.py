"""The tree and the search: the exact facts that hold for every model."""

from __future__ import annotations

from itertools import chain

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from nestpipe.errors import DataError
from nestpipe.generative.beam import Beams, expand, path_scores, search
from nestpipe.generative.trie import Trie
from nestpipe.jagged import Jagged
from tests.generative.known_trees import TableDecoder, exhaustive, plain_search, random_trie

SIZES = (4, 3, 5)


def every_leaf(trie):
    return torch.ones(trie.num_leaves, dtype=torch.bool)


@pytest.mark.parametrize("softmax", ["legal", "full"])
@hypothesis.given(st.integers(1, 40), st.integers(0, 10**6), st.floats(0.1, 1.0))
@hypothesis.settings(max_examples=8)
def test_a_beam_as_wide_as_the_live_leaves_gives_the_exhaustive_ranking(softmax, num_items, seed, share):
    trie = random_trie(num_items, SIZES, seed=seed)
    live = torch.arange(trie.num_leaves) % 7 < 7 * share
    live[seed % trie.num_leaves] = True
    width = int(live.sum())
    found = search(TableDecoder(2, SIZES), trie, width=width, pool=trie.pool(live), softmax=softmax)
    for request in range(2):
        every = exhaustive(trie, TableDecoder(2, SIZES), request, every_leaf(trie), softmax)
        truth = [one for one in every if live[one[0]]]
        assert found.leaves[request].tolist() == [leaf for leaf, _ in truth]
        torch.testing.assert_close(found.scores[request], torch.tensor([one for _, one in truth], dtype=torch.float64))
    if softmax == "legal" and live.all():
        # Sums of rounded logarithms of up to 40 leaves in double precision.
        assert found.scores.exp().sum(1).tolist() == pytest.approx([1.0, 1.0], abs=1e-12)


@pytest.mark.parametrize("softmax", ["legal", "full"])
@pytest.mark.parametrize("sizes", [SIZES, (6,), (3, 2)])
def test_scores_of_given_items_are_those_of_the_exhaustive_ranking(softmax, sizes):
    trie = random_trie(20, sizes, seed=5, unique=False)
    positions = torch.tensor([7, 0, 19, 7, 3])  # in any order, and twice
    found = path_scores(TableDecoder(3, sizes), trie, positions, softmax=softmax)
    for request in range(3):
        truth = dict(exhaustive(trie, TableDecoder(3, sizes), request, every_leaf(trie), softmax))
        wanted = [truth[int(trie.item_nodes[place, -1])] for place in positions]
        torch.testing.assert_close(found[request], torch.tensor(wanted, dtype=torch.float64))


@pytest.mark.parametrize("num_live", [30, 9])
def test_narrow_beams_take_the_best_prefixes_of_all_beams_and_never_leave_the_tree(num_live):
    trie, width = random_trie(30, SIZES), 3
    live = every_leaf(trie)
    live[torch.randperm(30, generator=torch.Generator().manual_seed(1))[num_live:]] = False
    found = search(TableDecoder(4, SIZES), trie, width=width, pool=trie.pool(live))
    for request in range(4):
        truth = plain_search(trie, TableDecoder(4, SIZES), request, live, width)
        assert found.leaves[request].tolist() == [leaf for leaf, _ in truth]
        torch.testing.assert_close(found.scores[request], torch.tensor([one for _, one in truth], dtype=torch.float64))


def test_a_pool_does_not_change_the_probability_of_what_it_leaves():
    trie = random_trie(25, SIZES)
    live = torch.zeros(2, trie.num_leaves, dtype=torch.bool)
    live[0, 7] = live[1, 3] = live[1, 4] = True
    found = search(TableDecoder(2, SIZES), trie, width=5, pool=trie.pool(live))
    truth = dict(exhaustive(trie, TableDecoder(2, SIZES), 0, every_leaf(trie), "legal"))
    assert found.leaves[0].tolist() == [7, -1]
    assert found.scores[0].tolist() == pytest.approx([truth[7], -torch.inf])
    assert sorted(found.leaves[1].tolist()) == [3, 4]


def test_ties_go_to_the_lower_code_sequence():
    codes = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0]])
    trie = Trie(torch.arange(4), codes, (2, 2), version="v1")
    for width in (1, 2, 3, 4):
        found = search(TableDecoder(1, (2, 2), flat=True), trie, width=width)
        assert trie.leaf_codes(found.leaves[0]).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]][:width]


def test_pools_per_request_equal_pools_one_at_a_time():
    trie = random_trie(30, SIZES)
    allowed = torch.arange(90).view(3, 30) % torch.tensor([[2], [3], [5]]) == 0
    together = search(TableDecoder(3, SIZES), trie, width=4, pool=trie.pool_of_items(allowed))
    for request in range(3):
        alone = search(TableDecoder(3, SIZES), trie, width=4, pool=trie.pool_of_items(allowed[request]))
        assert together.leaves[request].tolist() == alone.leaves[request].tolist()
        positions = expand(trie, together, 4).positions[request]
        assert bool(allowed[request][positions[positions >= 0]].all())


def test_what_is_refused():
    trie = random_trie(20, SIZES)
    with pytest.raises(DataError, match="no live leaf"):
        trie.pool(~every_leaf(trie))
    with pytest.raises(DataError, match="pool of request 1 has no live leaf"):
        trie.pool(torch.stack([every_leaf(trie), ~every_leaf(trie)]))
    with pytest.raises(DataError, match="mask over 3 leaves, but the trie has 20"):
        trie.pool(torch.ones(3, dtype=torch.bool))
    with pytest.raises(DataError, match="the model belongs to semantic ids of version v2"):
        search(TableDecoder(1, SIZES, version="v2"), trie, width=2)
    other = Trie(trie.items, trie.item_codes, SIZES, version="v2")
    with pytest.raises(DataError, match="the pool belongs to semantic ids of version v2"):
        search(TableDecoder(1, SIZES), trie, width=2, pool=other.pool(every_leaf(other)))
    fewer = Trie(trie.items[1:], trie.item_codes[1:], SIZES, version="v1")
    with pytest.raises(DataError, match="another catalogue of the same semantic ids"):
        search(TableDecoder(1, SIZES), trie, width=2, pool=fewer.pool(every_leaf(fewer)))
    with pytest.raises(DataError, match="has code 5 at level 2, which has 5 codes"):
        Trie(torch.tensor([1]), torch.tensor([[0, 0, 5]]), SIZES, version="v1")
    with pytest.raises(DataError, match=r"item 10000 has no semantic id"):
        trie.positions(torch.tensor([10_000]))


def test_the_tree_knows_every_item_and_which_codes_follow():
    trie = random_trie(60, SIZES, unique=False)
    assert len({tuple(row) for row in trie.item_codes.tolist()}) == trie.num_leaves < 60
    reached = [
        trie.leaf_items[trie.first[-1][leaf] : trie.first[-1][leaf + 1]].tolist() for leaf in range(trie.num_leaves)
    ]
    assert sorted(chain(*reached)) == list(range(60))
    for level in range(3):
        before = torch.zeros(60, dtype=torch.int64) if level == 0 else trie.item_nodes[:, level - 1]
        children, places = trie.children(level, before)
        assert trie.codes[level][children].tolist() == (places % SIZES[level]).tolist()
        mask = torch.zeros(60 * SIZES[level], dtype=torch.bool).index_fill_(0, places, True).view(60, -1)
        for item in range(60):
            prefix = trie.item_codes[item, :level]
            same = (trie.item_codes[:, :level] == prefix).all(1)
            assert mask[item].nonzero().flatten().tolist() == trie.item_codes[same, level].unique().tolist()


def test_the_number_of_a_prefix_does_not_depend_on_other_items():
    trie = random_trie(60, SIZES, unique=False)
    fewer = Trie(trie.items[::2], trie.item_codes[::2], SIZES, version="v1")
    for level in range(3):
        here, there = (one.prefixes(level, one.item_nodes[:, level]) for one in (trie, fewer))
        assert here[::2].tolist() == there.tolist()
        assert len(here.unique()) == len(trie.codes[level])


def test_expansion_keeps_the_order_of_a_leaf_and_leaves_out_what_was_seen():
    codes = torch.tensor([[0, 0], [1, 0], [0, 0], [0, 1], [0, 0]])
    trie = Trie(torch.arange(10, 15), codes, (2, 2), version="v1")
    beams = Beams(
        torch.tensor([[2, 0, 1], [0, -1, -1]]), torch.tensor([[-0.1, -0.5, -2.0], [-0.3, -torch.inf, -torch.inf]])
    )
    assert expand(trie, beams, 5).positions.tolist() == [[1, 0, 2, 4, 3], [0, 2, 4, -1, -1]]
    assert expand(trie, beams, 3, per_leaf=1).positions.tolist() == [[1, 0, 3], [0, -1, -1]]
    found = expand(trie, beams, 3, seen=Jagged.from_rows([[0, 1], [4]]))
    assert found.positions.tolist() == [[2, 4, 3], [0, 2, -1]]
    assert found.scores[0].tolist() == pytest.approx([-0.5, -0.5, -2.0])
    allowed = torch.tensor([True, False, False, True, True])
    assert expand(trie, beams, 3, allowed=allowed).positions.tolist() == [[0, 4, 3], [0, 4, -1]]
    # A leaf with one item in stock is live for that item alone.
    pool = trie.pool_of_items(torch.stack([allowed, ~allowed]))
    assert expand(trie, beams, 3, allowed=pool.items).positions.tolist() == [[0, 4, 3], [2, -1, -1]]
