"""The prefix contract: kept keys and values give the scores of full inference, and wrong ways of keeping are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from nestpipe.errors import PrefixError
from nestpipe.jagged import Jagged
from nestpipe.models.kv_prefix import KVPrefix, same_events
from nestpipe.models.prefix_inference import cut_events
from nestpipe.models.ranking import Ranking
from tests.models.small_ranking import MAX_LEN, build, candidates, history, item_features, ranker, select

LENGTHS = [7, 1, 12, 0, 4]
COUNTS = [3, 2, 5, 1, 4]
TOLERANCES = [(torch.float64, 1e-10), (torch.float32, 1e-5)]  # scores are of order one


def cached(own, batch, wanted):
    prefix, suffix = own.split(batch)
    return own.score(own.prefill(prefix), suffix, wanted)


def close(a, b, tolerance):
    return torch.allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("timed", [True, False])
def test_cached_equals_full(backbone, dtype, tolerance, timed):
    own, batch = ranker(build(backbone, dtype)), history(LENGTHS)
    if not timed:
        batch = replace(batch, times=None, query_times=None)
    full = own.full(batch, candidates(COUNTS))
    assert full.shape == (15, 3)
    assert 0.05 < float(full.abs().mean()) < 20, "scores of order one, or the tolerance says nothing"
    assert close(cached(own, batch, candidates(COUNTS)), full, tolerance)


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_one_prefix_serves_requests_at_two_times_and_extends_by_an_event(backbone, dtype, tolerance):
    """Append one event: the former last one joins the prefix with the time of the new one; nothing else is computed."""
    own, lengths, counts = ranker(build(backbone, dtype)), [7, 2, 12, 4], [3, 2, 5, 4]
    after = history(lengths)
    sizes = after.items.lengths()
    before = cut_events(after, torch.zeros_like(sizes), sizes - 1)
    prefix, _ = own.split(before)
    kept = own.prefill(prefix)
    found = []
    for asked in (1_500_000, 3_000_000_000):  # the last event answers for the request, so its time is the request's
        moved = asked_at(before, asked)
        found.append(own.score(kept, own.split(moved)[1], candidates(counts)))
        assert close(found[-1], own.full(moved, candidates(counts)), tolerance)
    assert not close(found[0], found[1], 1e-3), "the request's time must matter"
    new = cut_events(after, sizes - 2, sizes - 1)
    longer = own.extend(kept, new)
    for asked in (2_000_000, 3_000_000_000):
        moved = asked_at(after, asked)
        suffix = own.split(moved)[1]
        assert [one.key for one in longer] == list(suffix.follows), "an extended prefix has the key of a filled one"
        assert close(own.score(longer, suffix, candidates(counts)), own.full(moved, candidates(counts)), tolerance)


def asked_at(batch, asked):
    values = batch.query_times.values.index_fill(0, batch.items.offsets[1:] - 1, asked)
    return replace(batch, query_times=batch.query_times.with_values(values))


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_extending_event_by_event_equals_filling(dtype, tolerance):
    own, batch = ranker(build(dtype=dtype)), history([9])
    prefix, suffix = own.split(batch)
    kept = own.prefill(cut_events(prefix, torch.tensor([0]), torch.tensor([0])))
    for place in range(8):
        kept = own.extend(kept, cut_events(prefix, torch.tensor([place]), torch.tensor([place + 1])))
    assert close(own.score(kept, suffix, candidates([6])), own.full(batch, candidates([6])), tolerance)
    assert kept[0].num_bytes == sum(one.nbytes for one in (*kept[0].keys, *kept[0].values)) + kept[0].times.nbytes


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_micro_batches_order_and_batch_mates_change_nothing(backbone, dtype, tolerance):
    own, batch = ranker(build(backbone, dtype)), history(LENGTHS)
    wanted = candidates(COUNTS)
    whole = cached(own, batch, wanted)
    for row in range(len(LENGTHS)):
        alone = batch.select(torch.tensor([row]))
        places = torch.arange(*wanted.items.offsets[row : row + 2].tolist())
        for part in (places, places.flip(0), *places.split(1)):
            found = cached(own, alone, select(wanted, part, [len(part)]))
            assert close(found, whole[part], tolerance)


def test_full_equals_the_formula_written_out():
    """HSTU with one user, dense matrices: candidates see history and themselves at one place, actions are added."""
    from tests.models.small_ranking import table_rows

    model, batch, wanted = build(), history([5]), candidates([3])
    lookups = model.event_lookups(batch) | model.candidate_lookups(wanted.items, wanted.features, batch.sample_features)
    rows = table_rows(lookups)
    got = ranker(model).full(batch, wanted)
    dim, n, c = 8, 5, 3
    price = lambda use, values: F.linear(values.double().unsqueeze(1), use.floats.weight)  # noqa: E731
    seconds = F.linear(batch.event_features["seconds"].values.double().unsqueeze(1), model.actions.numbers.weight)
    event = rows["history/item"].gather() + rows["history/hour"].gather() + rows["history/tags"].gather()
    event = (
        event + price(model.history, batch.event_features["price"].values) + rows["history/action"].gather() + seconds
    )
    asked = rows["candidate/item"].gather() + rows["candidate/tags"].gather()
    asked = asked + price(model.candidate, wanted.features["price"].values) + rows["user/age"].gather()
    places = torch.tensor([*range(n), *[n] * c])
    x = torch.cat([event, asked]) * dim**0.5 + model.place[places]
    sees = torch.ones(n + c, n + c).tril().bool()
    sees[n:, n:] = torch.eye(c).bool()
    times = torch.cat([batch.times.values, torch.full((c,), 2_000_000)])
    queries = torch.cat([batch.query_times.values, torch.full((c,), 2_000_000)])
    bucket = ((queries[:, None] - times).abs().clamp(min=1).double().log() / 0.301).floor().long().clamp(0, 60)
    distance = (places[:, None] - places).clamp(min=0)
    for unit in model.units:
        u, v, q, k = F.silu(F.layer_norm(x, (dim,), eps=1e-6) @ unit.uvqk).split([10, 10, 6, 6], dim=1)
        heads = []
        for h in range(2):
            scores = q[:, 3 * h : 3 * h + 3] @ k[:, 3 * h : 3 * h + 3].T + unit.position[distance] + unit.time[bucket]
            heads.append((F.silu(scores) / MAX_LEN * sees) @ v[:, 5 * h : 5 * h + 5])
        x = x + unit.out(u * F.layer_norm(torch.cat(heads, 1), (10,), eps=1e-6))
    expected = model.tasks(F.layer_norm(x[n:], (dim,), eps=1e-6))
    assert close(got, expected, 1e-12)


def test_training_scores_are_those_of_requests():
    """Target p of a training batch is the candidate of a request with the events up to p."""
    from tests.models.small_ranking import table_rows

    for backbone in ("hstu", "fuxi"):
        model, batch = build(backbone), history([6, 3])
        targets = torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(2))
        trained = replace(batch, targets=batch.items.with_values(targets), target_features=item_features(targets))
        scores = model.target_scores(table_rows(model.target_lookups(trained)), trained, None)
        own = ranker(model)
        for row, length in enumerate((6, 3)):
            for place in range(length):
                user = batch.select(torch.tensor([row]))
                request = cut_events(user, torch.tensor([0]), torch.tensor([place + 1]))
                where = int(batch.items.offsets[row]) + place
                wanted = candidates([1])
                wanted = replace(wanted, items=Jagged(targets[where : where + 1], torch.tensor([0, 1]), 1))
                wanted = replace(wanted, features=item_features(wanted.items.values))
                assert close(own.full(request, wanted)[0], scores[where], 1e-12)


# Wrong ways of keeping a prefix: each is refused, and each would have been wrong.


def refused(own, kept, suffix, *named):
    with pytest.raises(PrefixError) as error:
        own.score(kept, suffix, candidates([4]))
    assert all(name in str(error.value) for name in named), str(error.value)


def forced(own, kept, suffix):
    """What a cache without keys would have answered."""
    wrong = [replace(one, key=wanted) for one, wanted in zip(kept, suffix.follows, strict=True)]
    return own.score(wrong, suffix, candidates([4]))


@pytest.mark.parametrize("change", ["item", "time", "action", "feature", "next time"])
def test_a_stale_history_is_refused(change):
    own, batch = ranker(build()), history([8])
    kept = own.prefill(own.split(batch)[0])
    edited = {
        "item": lambda: replace(batch, items=batch.items.with_values(batch.items.values.index_fill(0, _at(2), 39))),
        "time": lambda: replace(batch, times=batch.times.with_values(batch.times.values.index_fill(0, _at(2), 1))),
        "next time": lambda: replace(
            batch, query_times=batch.query_times.with_values(batch.query_times.values.index_fill(0, _at(6), 1_999_999))
        ),
        "action": lambda: _with(batch, "hated", batch.event_features["hated"].values.index_fill(0, _at(2), torch.nan)),
        "feature": lambda: _with(batch, "hour", batch.event_features["hour"].values.index_fill(0, _at(2), 77)),
    }[change]()
    if change == "action":
        kept = own.prefill(own.split(_with(batch, "hated", torch.ones(8)))[0])
    suffix = own.split(edited)[1]
    refused(own, kept, suffix, "digest: cached")
    assert not close(forced(own, kept, suffix), own.full(edited, candidates([4])), 1e-4)


def _at(place):
    return torch.tensor([place])


def _with(batch, name, values):
    return replace(batch, event_features={**batch.event_features, name: Jagged.singles(values)})


def test_a_slid_window_is_refused_and_so_are_sliced_keys():
    own, batch = ranker(build()), history([9])
    kept = own.prefill(own.split(batch)[0])
    slid = cut_events(batch, torch.tensor([1]), torch.tensor([9]))
    suffix = own.split(slid)[1]
    refused(own, kept, suffix, "digest: cached", "length: cached 8, needed 7")
    cut = {"keys": tuple(k[1:] for k in kept[0].keys), "values": tuple(v[1:] for v in kept[0].values)}
    with pytest.raises(PrefixError, match="cannot be shortened"):
        replace(kept[0], **cut)
    sliced = replace(kept[0], **cut, times=kept[0].times[1:], key=suffix.follows[0])
    wrong = own.score([sliced], suffix, candidates([4]))
    assert not close(wrong, own.full(slid, candidates([4])), 1e-4), "sliced keys still know the event cut off"


def test_a_history_beyond_max_len_is_not_extended():
    own, batch = ranker(build()), history([MAX_LEN])
    prefix, suffix = own.split(batch)
    kept = own.extend(own.prefill(prefix), suffix.batch)
    with pytest.raises(PrefixError, match=f"longer than max_len {MAX_LEN}"):
        own.extend(kept, _at_time(suffix.batch, 2_000_000))


def _at_time(batch, time):
    return replace(batch, times=batch.times.with_values(torch.full_like(batch.times.values, time)))


def test_old_weights_other_types_and_other_users_are_refused():
    """Keys and values of old weights keep the order of many candidates, so only the key can tell."""
    batch = history([8])
    old, new = ranker(build(), weights="step 1", seed=5), ranker(build(), weights="step 2", seed=6)
    kept, suffix = old.prefill(old.split(batch)[0]), new.split(batch)[1]
    refused(new, kept, suffix, "weights: cached 'step 1', needed 'step 2'")
    assert not close(forced(new, kept, suffix), new.full(batch, candidates([4])), 1e-4)
    with pytest.raises(PrefixError, match="weights: cached"):
        new.extend(kept, suffix.batch)
    half = ranker(build(dtype=torch.float32))
    refused(half, kept, half.split(batch)[1], "dtype: cached 'float64', needed 'float32'")
    refused(old, kept, old.split(replace(batch, sample_ids=torch.tensor([7])))[1], "another user")
    other = ranker(build("fuxi"))
    refused(other, kept, other.split(batch)[1], "model: cached")


def test_an_event_that_is_not_the_next_one_is_refused():
    own, batch = ranker(build()), history([8])
    prefix, suffix = own.split(batch)
    with pytest.raises(PrefixError, match="the history has changed"):
        own.extend(own.prefill(prefix), _at_time(suffix.batch, 5))


class Reverse(Ranking):
    """Places count from the end, so every row of a prefix moves when an event is appended."""

    anchored = True

    def place_of(self, event, num_events):
        return num_events - event

    def anchor(self, num_events):
        return f"{num_events} events"


class BatchNorm(Ranking):
    """Attention is divided by the longest history of the batch."""

    anchored = True
    longest = 8

    def blocks(self):
        units = super().blocks()
        for unit in units:
            unit.norm = float(self.longest)
        return units

    def anchor(self, num_events):
        return f"divisor {self.longest}"


def test_reverse_places_are_anchored_and_not_extended():
    own, batch = ranker(build(kind=Reverse)), history([8])
    prefix, suffix = own.split(batch)
    kept = own.prefill(prefix)
    assert close(own.score(kept, suffix, candidates([4])), own.full(batch, candidates([4])), 1e-10)
    with pytest.raises(PrefixError, match=r"Reverse is anchored.*Prefill the longer prefix from its start"):
        own.extend(kept, suffix.batch)
    shorter = own.prefill(cut_events(prefix, torch.tensor([0]), torch.tensor([6])))
    refused(own, shorter, suffix, "anchor: cached '7 events', needed '8 events'")


def test_reverse_places_that_do_not_say_so_fail_the_contract():
    """The test that `extend` must pass finds a model that lies about its rows."""

    class Lying(Reverse):
        anchored = False

        def anchor(self, num_events):
            return ""

    own, batch = ranker(build(kind=Lying)), history([8])
    prefix, suffix = own.split(batch)
    kept = own.prefill(cut_events(prefix, torch.tensor([0]), torch.tensor([6])))
    longer = own.extend(kept, cut_events(prefix, torch.tensor([6]), torch.tensor([7])))
    assert not close(own.score(longer, suffix, candidates([4])), own.full(batch, candidates([4])), 1e-4)


def test_a_divisor_that_depends_on_the_batch_is_part_of_the_key():
    """FuXi, because HSTU normalises what it attended to, which takes most of any divisor away again."""
    model, batch = build("fuxi", kind=BatchNorm), history([8])
    own = ranker(model)
    prefix, suffix = own.split(batch)
    kept = own.prefill(prefix)
    assert close(own.score(kept, suffix, candidates([4])), own.full(batch, candidates([4])), 1e-10)
    with pytest.raises(PrefixError, match="is anchored"):
        own.extend(kept, suffix.batch)
    BatchNorm.longest = 11  # a longer mate joins the batch
    try:
        later = own.split(batch)[1]
        refused(own, kept, later, "anchor: cached 'divisor 8', needed 'divisor 11'")
        assert not close(forced(own, kept, later), own.full(batch, candidates([4])), 1e-4)
    finally:
        BatchNorm.longest = 8


def test_a_prefix_owns_its_memory():
    own = ranker(build())
    kept: list[KVPrefix] = own.prefill(own.split(history([5, 11]))[0])
    assert all(k.untyped_storage().nbytes() == k.nbytes for one in kept for k in (*one.keys, *one.values))


def test_requests_with_the_same_events_share_a_digest_and_no_others():
    """The digest of a hint serves its request: a later query time is the same prefix, a changed event or feature is not."""
    own, batch = ranker(build()), history([9])
    _, suffix = own.split(batch)
    later = asked_at(batch, 3_000_000_000)
    assert same_events(batch, later)
    moved, wanted = suffix.at(later), own.split(later)[1]
    assert moved.follows == wanted.follows
    assert torch.equal(moved.batch.query_times.values, wanted.batch.query_times.values)
    assert moved.batch.sample_features is later.sample_features
    others = [replace(batch, items=batch.items.with_values(batch.items.values + 1)), history([8])]
    others += [replace(batch, sample_ids=batch.sample_ids + 1), replace(batch, times=None, query_times=None)]
    others.append(replace(batch, times=batch.times.with_values(batch.times.values + 1)))
    middle = batch.query_times.values.index_fill(0, torch.tensor([4]), 77)
    others.append(replace(batch, query_times=batch.query_times.with_values(middle)))
    for name, feature in batch.event_features.items():
        values = feature.values.clone()
        values[3] = values[3] + 1 if not values[3].isnan() else 0.0
        others.append(replace(batch, event_features={**batch.event_features, name: feature.with_values(values)}))
    for other in others:
        assert not same_events(batch, other)
        assert own.split(other)[1].follows != suffix.follows
    unobserved = batch.event_features["hated"].values.isnan()
    assert bool(unobserved.any()), "a missing value equals itself"
    assert same_events(batch, history([9]))
