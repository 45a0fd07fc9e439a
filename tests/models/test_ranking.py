"""Ranking and DCN as the engine trains them: sums over samples, labels that count or do not, gradients everywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from nestpipe.data.schema import Label, Schema
from nestpipe.errors import ConfigError
from nestpipe.jagged import Jagged
from nestpipe.models.config import DCNConfig, RankingConfig
from nestpipe.models.dcn import build_dcn
from nestpipe.models.heads import LabelHeads
from nestpipe.models.item_encoder import kept_ids
from nestpipe.models.ranking import build_ranking
from nestpipe.rng import Rng
from tests.models.small_ranking import CONFIG, MAX_LEN, SCHEMA, build, events, history, item_features, table_rows

DCN = DCNConfig(dim=8, num_cross=2, hidden=(6, 5), features=("user", "item", "hour", "tags", "price", "age"))


def training(lengths, seed=0):
    """Histories with a target for every event; some labels are unobserved."""
    batch = history(lengths, seed=seed)
    targets = events(batch.num_tokens, torch.Generator().manual_seed(seed + 50))
    labels = {name: Jagged.singles(targets[name]) for name in ("hated", "level", "seconds")}
    return replace(
        batch,
        targets=batch.items.with_values(targets["items"]),
        target_features={**item_features(targets["items"]), **labels},
        sample_features={**batch.sample_features, "user": Jagged.singles(batch.sample_ids)},
    )


def models():
    yield "hstu", build("hstu")
    yield "fuxi", build("fuxi")
    yield "dcn", build_dcn(DCN, SCHEMA, seed=1, dtype=torch.float64)
    yield "dcn of low rank", build_dcn(replace(DCN, rank=3), SCHEMA, seed=1, dtype=torch.float64)


MODELS = dict(models())


def loss_of(model, batch, step=3, leaves=None):
    rng = Rng(0, step)
    return model(table_rows(model.lookups(batch, rng), leaves=leaves), batch, rng)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_of_a_batch_is_the_sum_over_its_samples(name):
    model, batch = MODELS[name], training([5, 12, 1, 7])
    whole = loss_of(model, batch)
    parts = [batch.select(torch.tensor([place])) for place in range(4)]
    assert torch.allclose(whole.loss_sum, sum(loss_of(model, part).loss_sum for part in parts), rtol=1e-12)
    assert model.weight(batch) == pytest.approx(sum(model.weight(part) for part in parts))
    assert torch.allclose(sum(whole.logs.values()), whole.loss_sum, rtol=1e-12)
    if "dcn" not in name:
        assert not torch.allclose(whole.loss_sum, loss_of(model, batch, step=4).loss_sum, rtol=1e-6), "no dropout"


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_and_row_in_use_gets_a_gradient(name):
    model, leaves = MODELS[name], {}
    model.zero_grad()
    loss_of(model, training([5, 12, 9]), leaves=leaves).loss_sum.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.abs().sum() > 0), parameter_name
    assert {spec.name for spec in model.tables} == set(leaves)
    for table, rows in leaves.items():
        assert bool((rows.grad.abs().sum(1) > 0).any()), table


@pytest.mark.parametrize("name", MODELS)
def test_unobserved_labels_add_nothing(name):
    model, batch = MODELS[name], training([6, 6])
    given = batch.target_features if batch.targets is not None and "dcn" not in name else batch.event_features
    hidden = {label: Jagged.singles(torch.full((12,), torch.nan)) for label in ("hated", "seconds")}
    key = "event_features" if "dcn" in name else "target_features"
    found = loss_of(model, replace(batch, **{key: {**given, **hidden}}))
    assert float(found.logs["loss/hated"]) == float(found.logs["loss/seconds"]) == 0.0
    assert model.weight(replace(batch, **{key: {**given, **hidden}})) == 12 * 0.5, "twelve levels of weight 1/2"
    nothing = {**hidden, "level": hidden["hated"]}
    assert model.weight(replace(batch, **{key: {**given, **nothing}})) == 0.0
    assert loss_of(model, replace(batch, **{key: {**given, **nothing}})).loss_sum.item() == 0.0


def test_losses_are_their_formulas():
    labels = (*SCHEMA.labels[:2], replace(SCHEMA.labels[2], weights="watch"))
    tasks = LabelHeads(labels, dim=4, hidden=3).double()
    with torch.no_grad():
        tasks.cuts["level"].copy_(torch.tensor([-1.0, 0.3, -2.0, 1.5]))
    scores = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    hated = torch.tensor([0.0, 1.0, torch.nan, 1.0, 0.0, 0.0])
    level = torch.tensor([0.0, 4.0, 2.0, torch.nan, 3.0, 1.0])
    seconds = torch.tensor([0.5, torch.nan, 1.0, 2.0, 0.0, 3.0])
    weights = torch.tensor([1.0, 5.0, 0.0, 2.0, 1.0, 1.0])
    given = {"hated": hated, "level": level, "seconds": seconds, "seconds.weights": weights}
    _, logs = tasks.loss(scores, {name: Jagged.singles(values) for name, values in given.items()})
    seen = ~hated.isnan()
    chance = scores[seen, 0].sigmoid()
    expected = -(hated[seen] * chance.log() + (1 - hated[seen]) * (1 - chance).log()).sum()
    assert float(logs["loss/hated"]) == pytest.approx(float(expected))
    cuts = torch.tensor([-1.0, 0.3, -2.0, 1.5]).double()
    cuts = torch.cat([cuts[:1], F.softplus(cuts[1:])]).cumsum(0)
    total = 0.0
    for row in range(6):
        if not level[row].isnan():
            above = (scores[row, 1] - cuts).sigmoid()
            answers = torch.arange(4) < level[row]
            total -= float(torch.where(answers, above.log(), (1 - above).log()).sum()) * 0.5
    assert float(logs["loss/level"]) == pytest.approx(total)
    errors = torch.where(seconds.isnan(), 0.0, (scores[:, 2] - seconds.nan_to_num()) ** 2 * weights)
    assert float(logs["loss/seconds"]) == pytest.approx(float(errors.sum()))
    predicted = tasks.predict(scores)
    assert torch.allclose(predicted[:, 1], (scores[:, 1:2] - cuts).sigmoid().sum(1))
    assert bool(((predicted[:, 1] > 0) & (predicted[:, 1] < 4)).all())


def test_a_dislike_in_the_history_is_another_event_than_a_like():
    """Same items, same times, other actions: other scores, and an unobserved action is a third thing."""
    model, batch = build(), training([6])
    found = []
    for value in (0.0, 1.0, torch.nan):
        hated = {"hated": Jagged.singles(torch.full((6,), value))}
        changed = replace(batch, event_features={**batch.event_features, **hated})
        found.append(model.target_scores(table_rows(model.target_lookups(changed)), changed, None)[-1])
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.allclose(found[a], found[b], atol=1e-3)


def test_the_answer_of_a_target_is_not_seen_by_its_score():
    model, batch = build(), training([6])
    rows = table_rows(model.target_lookups(batch))
    scores = model.target_scores(rows, batch, None)
    flipped = {"hated": Jagged.singles(1 - batch.target_features["hated"].values)}
    other = replace(batch, target_features={**batch.target_features, **flipped})
    assert torch.equal(model.target_scores(table_rows(model.target_lookups(other)), other, None), scores)


def test_dcn_equals_its_formula():
    model, batch = MODELS["dcn"], training([4, 3])
    rows = table_rows(model.event_lookups(batch))
    user = batch.items.row_of_value()
    parts = [
        rows["event/hour"].gather(),
        rows["event/tags"].gather(),
        batch.event_features["price"].values.double().unsqueeze(1) @ model.event.floats.weight.T,
        rows["item"].gather(),
        rows["user/age"].gather()[user],
        rows["user"].gather()[user],
    ]
    x0 = torch.cat(parts, 1) * 8**0.5
    x, deep = x0, x0
    for layer in model.cross:
        x = x0 * (x @ layer.wide.weight.T + layer.wide.bias) + x
    for layer in model.deep:
        deep = F.relu(layer(deep))
    assert torch.allclose(model.event_scores(rows, batch), model.tasks(torch.cat([x, deep], 1)), rtol=1e-12)


def test_models_that_cannot_be_built_say_why():
    with pytest.raises(ConfigError, match=r"no label, so there is nothing to predict.*--label"):
        build_ranking(RankingConfig(), Schema(), max_len=4, seed=0)
    assert len(list(RankingConfig(dim=0, dropout=1.0, features=("a", "a")).problems())) == 3
    assert len(list(DCNConfig(num_cross=0, rank=-1, hidden=(), features=()).problems())) == 4


def test_initial_weights_are_a_function_of_the_seed():
    one, again, other = (build_ranking(CONFIG, SCHEMA, max_len=MAX_LEN, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["units.0.uvqk"], other["units.0.uvqk"])


def test_ordinal_cuts_start_evenly_around_zero():
    cuts = LabelHeads((Label(name="x", kind="ordinal", feature="y", num_levels=5),), dim=2, hidden=2).cuts["x"]
    steps = torch.cat([cuts[:1], F.softplus(cuts[1:])]).cumsum(0)
    assert torch.allclose(steps, torch.tensor([-1.5, -0.5, 0.5, 1.5]))


def test_id_dropout_drops_an_item_in_history_and_candidates_alike():
    config = replace(CONFIG, id_dropout=0.4, dropout=0.0)
    model = build_ranking(config, SCHEMA, max_len=MAX_LEN, seed=1, dtype=torch.float64)
    assert model.tables[0].init_std == 0.0
    batch, rng, leaves = training([9, 12, 7]), Rng(0, 3), {}
    found = model(table_rows(model.lookups(batch, rng), leaves=leaves), batch, rng)
    found.loss_sum.backward()
    ids = torch.cat([batch.items.values, batch.targets.values]).unique()
    kept = kept_ids(ids, rng, 0.4)
    assert 0 < int(kept.sum()) < len(ids)
    assert (leaves["item"].grad.abs().sum(1) > 0).eq(kept).all()
    assert any("features is empty" in problem for problem in replace(config, features=()).problems())
