"""Drawn paths follow the model's probabilities; given paths have those that training and search give them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nestpipe.errors import DataError
from nestpipe.generative.logged_reward import ItemMeans, LoggedColumn
from nestpipe.generative.policy_optimisation import Rollout, draw_paths, path_log_probs
from nestpipe.generative.rewards import (
    RewardContext,
    Rewards,
    diversity_reward,
    format_reward,
    ranking_reward,
    relative_reward,
)
from nestpipe.generative.trie import Trie
from nestpipe.rng import Rng
from tests.generative.known_trees import TableDecoder, exhaustive, random_trie
from tests.models.test_encdec import TRIE as MODEL_TRIE
from tests.models.test_encdec import batch_of, losses_of, model_of, rows_of

SIZES = (4, 3, 5)
TRIE = random_trie(12, SIZES)


def pool_of(kind):
    if kind == "all":
        return None, torch.ones(2, TRIE.num_leaves, dtype=torch.bool)
    masks = torch.arange(TRIE.num_leaves) % 3 != torch.tensor([[0], [1]])
    return (TRIE.pool(masks), masks) if kind == "each" else (TRIE.pool(masks[0]), masks[:1].expand(2, -1))


@pytest.mark.parametrize("kind", ["all", "one", "each"])
@pytest.mark.parametrize("softmax", ["legal", "full"])
def test_given_paths_have_the_probabilities_of_the_search(kind, softmax):
    pool, masks = pool_of(kind)
    decoder = TableDecoder(2, SIZES)
    for request in range(2):
        for leaf, expected in exhaustive(TRIE, decoder, request, masks[request], softmax):
            leaves = torch.full((2, 1), int(masks[1 - request].nonzero()[0]))
            leaves[request] = leaf
            found = path_log_probs(TableDecoder(2, SIZES), TRIE, leaves, pool=pool, softmax=softmax)
            assert float(found[request].sum()) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["all", "each"])
def test_paths_are_drawn_as_often_as_they_are_likely(kind):
    pool, masks = pool_of(kind)
    num, samples = 4000, torch.tensor([3, 8])
    drawn = draw_paths(TableDecoder(2, SIZES), TRIE, num=num, rng=Rng(1, 2), samples=samples, pool=pool)
    again = path_log_probs(TableDecoder(2, SIZES), TRIE, drawn.leaves, pool=pool)
    torch.testing.assert_close(drawn.log_probs, again)
    decoder = TableDecoder(2, SIZES)
    for request in range(2):
        chances = torch.zeros(TRIE.num_leaves, dtype=torch.float64)
        for leaf, log in exhaustive(TRIE, decoder, request, masks[request], "legal"):
            chances[leaf] = torch.tensor(log).exp()
        share = torch.bincount(drawn.leaves[request], minlength=TRIE.num_leaves).double() / num
        # A share of 4,000 draws has a standard deviation of at most 0.008.
        assert float((share - chances).abs().max()) < 0.04
        assert not share[~masks[request]].any()


def test_draws_belong_to_the_request():
    def drawn(samples, step=0):
        decoder = TableDecoder(len(samples), SIZES, flat=True)
        return draw_paths(decoder, TRIE, num=50, rng=Rng(0, step), samples=torch.tensor(samples)).leaves

    assert torch.equal(drawn([4, 9])[1], drawn([9])[0])
    assert not torch.equal(drawn([4, 9])[0], drawn([4, 9])[1])
    assert not torch.equal(drawn([4]), drawn([4], step=1))


def test_the_model_is_drawn_from_and_learns_through_its_paths():
    model, history = model_of(prefix_vectors=16), [0, 5, 9]
    asked = batch_of([history], targets=False, scenario=1, reasoning=0.5)

    def decoding():
        return model.decoding(rows_of(model.encode_lookups(asked)), asked)

    with torch.no_grad():
        drawn = draw_paths(decoding(), MODEL_TRIE, num=6, rng=Rng(0, 0), samples=torch.tensor([0]))
    found = path_log_probs(decoding(), MODEL_TRIE, drawn.leaves)
    torch.testing.assert_close(found.detach(), drawn.log_probs)
    items = MODEL_TRIE.leaf_items[MODEL_TRIE.first[-1][drawn.leaves[0]]].tolist()
    trained = losses_of(model, batch_of([[*history, items[2]]], scenario=1, reasoning=0.5))[-1]
    torch.testing.assert_close(found[0, 2].detach(), -trained)
    found.sum().backward()
    grads = [one.grad for name, one in model.named_parameters() if "behaviour" not in name and "no_" not in name]
    assert all(one is not None and one.isfinite().all() for one in grads)


def test_another_version_of_ids_is_refused():
    with pytest.raises(DataError, match="version"):
        draw_paths(TableDecoder(1, SIZES, version="v2"), TRIE, num=2, rng=Rng(0, 0), samples=torch.zeros(1, dtype=int))


def test_a_pool_of_another_catalogue_is_refused():
    """Its numbers name other leaves here: what it forbids would be drawn."""
    other = random_trie(11, SIZES)
    pool = other.pool(torch.ones(other.num_leaves, dtype=torch.bool))
    leaves = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(DataError, match="another catalogue"):
        draw_paths(TableDecoder(1, SIZES), TRIE, num=2, rng=Rng(0, 0), samples=leaves[0, :1], pool=pool)
    with pytest.raises(DataError, match="another catalogue"):
        path_log_probs(TableDecoder(1, SIZES), TRIE, leaves, pool=pool)


def test_rewards_are_what_they_say():
    codes = torch.tensor([[0, 0], [0, 1], [1, 0]])
    trie = Trie(torch.arange(3), codes, (2, 2), version="v1")
    leaves = torch.tensor([[0, 0, 1, 2]])
    # Of the others, leaf 0 shares all with one, half with one and nothing with one.
    assert diversity_reward(trie, leaves)[0].tolist() == pytest.approx([0.5, 0.5, 2 / 3, 1.0])
    assert diversity_reward(trie, torch.tensor([[1, 1]]))[0].tolist() == [0.0, 0.0]
    pool = trie.pool(torch.tensor([True, False, True]))
    assert format_reward(torch.tensor([[0, 1, 2, -1]]), pool)[0].tolist() == [1, 0, 1, 0]
    reference = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert ranking_reward(torch.tensor([[0.5, 1.0, 2.5, 9.0]]), reference)[0].tolist() == [0, 0.25, 0.5, 1]
    q, h = torch.tensor([[1.0, 0.0]]), torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]])
    assert relative_reward(q, h)[0].tolist() == [1, 0.5, 0]
    against = diversity_reward(trie, torch.tensor([[2]]), group=torch.tensor([[0, 2]]))
    assert against.tolist() == [[0.5]]
    weights = [{"ranking": 2.0, "format": 0.5, "diversity": 0.0}, {"price": 1.0}]
    rewards = Rewards(
        model_of(),
        trie,
        weights,
        columns={"price": torch.tensor([0.1, 0.2, 0.3])},
        ranking=lambda _, items: 0.5 + items,
    )
    users, paths = torch.arange(2).numpy(), Rollout(torch.tensor([[0, 2], [0, 2]]), torch.zeros(2, 2, 2))
    context = RewardContext(users=users, ends=users, scenarios=torch.tensor([0, 1]), given={})
    torch.testing.assert_close(rewards.of(context, paths), torch.tensor([[1.5, 5.5], [0.1, 0.3]]))


def test_a_logged_reward_knows_what_items_are_worth_and_where_they_fit():
    """Events whose number is known exactly: worth of the item in the scenario, plus how probable its first code was."""
    rng = np.random.default_rng(0)
    worth, size = rng.random((2, 6)), 4000
    items, scenarios = rng.integers(0, 6, size), rng.integers(0, 2, size)
    logs = np.log(rng.random((size, 2)))
    values = worth[scenarios, items] + 0.3 * logs[:, 0]
    means = ItemMeans.of(items, scenarios, values, num_items=6, num_scenarios=2)
    found = LoggedColumn(values, means).fit(np.arange(size), items, scenarios, logs)
    np.testing.assert_allclose(found.weights[:, 2:].numpy(), [[0.3, 0.0]] * 2, atol=0.02)
    asked = torch.tensor([[-0.5, -1.0]]).expand(2, 6, 2)
    paid = found.of(torch.tensor([0, 1]), torch.arange(6).expand(2, 6), asked).numpy() * (found.high - found.low)
    np.testing.assert_allclose(paid + found.low, worth - 0.15, atol=0.05)
    one = means.without(items[:1], scenarios[:1], values[:1])[0]
    same = (items == items[0]) & (scenarios == scenarios[0])
    same[0] = False
    assert one == pytest.approx(values[same].mean(), abs=0.01)
