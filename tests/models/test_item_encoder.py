"""Items by id and content: sums by definition, id dropout alike in every use, zero rows for ids that were not trained."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch

from nestpipe.data.item_feature_rows import catalogue_texts, item_feature_rows
from nestpipe.data.loader import Loader
from nestpipe.data.splits import make_split, train_mask
from nestpipe.embedding.lookup import Lookup, Rows
from nestpipe.errors import ConfigError
from nestpipe.jagged import Cursor
from nestpipe.models.build_model import build_model
from nestpipe.rng import Rng
from tests.small_content import SmallCatalogue, content_config, content_log


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return content_log(tmp_path_factory.mktemp("content") / "log")


TEXTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))


def build(log, loss="sampled", **changed):
    config = content_config(log.path, "sasrec", loss)
    config = replace(config, model=replace(config.model, **changed))
    return build_model(config, log, texts={"title": TEXTS}, dtype=torch.float64)


def batch_of(log, loss="sampled"):
    config = content_config(log.path, "sasrec", loss)
    loader = Loader(log, make_split(log, config.data), replace(config.data, group_size=1), seed=0)
    batch = next(islice(loader.iterate(Cursor(0, 0)), 1))
    return replace(batch, groups=torch.arange(batch.num_samples))


def rows_for(lookups, tables):
    """Rows [n, D] of each table, a function of the id; leaves of one table are shared."""
    found = {}
    for table in {lookup.table for lookup in lookups.values()}:
        own = {name: lookup for name, lookup in lookups.items() if lookup.table == table}
        ids, places = torch.cat([lookup.ids.flatten() for lookup in own.values()]).unique(return_inverse=True)
        leaf = tables(table, ids).requires_grad_()
        cuts = places.split([lookup.ids.numel() for lookup in own.values()])
        for (name, lookup), index in zip(own.items(), cuts, strict=True):
            found[name] = Rows(leaf, index.reshape(lookup.ids.shape), lookup)
    return found


def table(name, ids):
    scale = 1.0 + len(name)
    return torch.sin(ids.to(torch.float64).unsqueeze(1) * torch.arange(1, 9) * scale + scale) / 3


def by_hand(model, log, item, *, keep):
    """The vector of one item, feature by feature."""
    encoder, place = model.items, int(np.searchsorted(log.catalogue, item))
    stored = log.item_features
    total = encoder.base.clone()
    if keep:
        total = total + table("item", torch.tensor([item]))[0]
    for name in ("brand", "category", "tags"):
        offsets = stored[name].offsets
        ids = torch.tensor(stored[name].values[offsets[place] : offsets[place + 1]].tolist())
        total = total + table(f"feature_{name}", ids).mean(0)
    price, stats = float(stored["price"].values[place]), encoder.content.statistics["price"]
    scaled = 0.0 if np.isnan(price) else (np.log1p(price) - stats.mean) / stats.std
    floats = torch.tensor([scaled, *stored["look"].values[place].tolist(), *TEXTS[place].tolist()], dtype=torch.float64)
    return total + encoder.features.floats(floats)


def test_a_vector_is_the_sum_of_row_and_projections(log):
    model, items = build(log), torch.tensor([3, 38, 0, 17])
    found = model.items.item_vectors(rows_for(model.item_lookups(items), table))
    for item, vector in zip(items.tolist(), found, strict=True):
        assert torch.allclose(vector, by_hand(model, log, item, keep=True), atol=1e-6)


def kept_items(model, log, rows, joined):
    """Whether each item kept its id row; fails if its uses in a step differ."""
    drawn = {}
    for name in ("history", "targets", "negatives", "catalogue"):
        if name not in rows:
            continue
        ids, vectors = rows[name].lookup.ids.flatten(), joined[name].gather().flatten(0, -2)
        for item in set(ids.tolist()):
            kept, dropped = (by_hand(model, log, item, keep=keep) for keep in (True, False))
            for vector in vectors[ids == item]:
                is_kept = torch.allclose(vector, kept, atol=5e-3)  # negatives may be sent in 16 bits
                assert is_kept or torch.allclose(vector, dropped, atol=1e-6)
                assert drawn.setdefault(item, is_kept) == is_kept, f"item {item} is dropped in some of its uses"
    return list(drawn.values())


@pytest.mark.parametrize("loss", ["sampled", "full", "sample", "pool", "in batch"])
def test_the_id_row_of_an_item_is_dropped_in_all_its_uses_or_in_none(log, loss):
    model, batch, rng = build(log, loss), batch_of(log, loss), Rng(0, 5)
    rows = rows_for(model.lookups(batch, rng), table)
    assert 0.1 < 1 - np.mean(kept_items(model, log, rows, model.items.joined(rows, rng))) < 0.6


def test_dropping_rows_of_targets_alone_would_be_seen(log):
    model, batch, rng = build(log), batch_of(log), Rng(0, 5)
    rows = rows_for(model.lookups(batch, rng), table)
    wrong = {**model.items.joined(rows, None), "targets": model.items.joined(rows, rng)["targets"]}
    with pytest.raises(AssertionError, match="dropped in some of its uses"):
        kept_items(model, log, rows, wrong)


def test_the_draw_depends_on_step_and_item_alone(log):
    encoder, items = build(log).items, torch.arange(2000)
    first, second = (encoder._kept(items, Rng(0, step)) for step in (1, 2))
    assert torch.equal(first[500:], encoder._kept(items[500:], Rng(0, 1)))
    assert abs(float(first.float().mean()) - 0.7) < 0.05
    assert 0.3 < float((first != second).float().mean()) < 0.55


def test_a_dropped_row_has_no_gradient_and_content_has(log):
    model, batch, rng = build(log, id_dropout=0.5), batch_of(log), Rng(0, 2)
    rows = rows_for(model.lookups(batch, rng), table)
    model(rows, batch, rng).loss_sum.backward()
    leaf, ids = rows["history"].unique, rows["item/distinct"].lookup.ids
    kept = model.items._kept(ids, rng)[rows["item/distinct"].index.argsort()]
    assert (leaf.grad.abs().sum(1) > 0).eq(kept).all()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.items.parameters())
    assert rows["item/brand"].unique.grad.abs().sum() > 0


def test_inference_drops_nothing_and_negatives_have_training_events(log):
    config = content_config(log.path)
    model, batch = build(log), batch_of(log)
    joined = model.items.joined(rows_for(model.encode_lookups(batch), table), None)
    item = int(batch.items.values[0])
    assert torch.allclose(joined["history"].gather()[0], by_hand(model, log, item, keep=True), atol=1e-6)
    trained = np.unique(log.items[train_mask(log, make_split(log, config.data))])
    assert torch.equal(model.catalogue, torch.from_numpy(trained))
    assert len(trained) < len(log.catalogue)
    assert model.tables[0].init_std == 0.0


def test_an_unknown_item_has_the_base_vector_and_a_later_one_its_content(log):
    model = build(log)
    content, unknown = model.items.content, torch.tensor([77, 3])
    vectors = model.items.item_vectors(rows_for(model.item_lookups(unknown), lambda name, ids: table(name, ids) * 0))
    mean = content.statistics["price"].mean
    price = (mean - mean) / content.statistics["price"].std
    assert torch.allclose(vectors[0], model.items.base + model.items.features.floats.weight[:, 0] * price)
    place = int(np.searchsorted(log.catalogue, 3))
    tags = log.item_features["tags"]
    same = {
        "brand": int(log.item_features["brand"].values[place]),
        "category": int(log.item_features["category"].values[place]),
        "tags": tags.values[tags.offsets[place] : tags.offsets[place + 1]].tolist(),
        "price": float(log.item_features["price"].values[place]),
        "look": log.item_features["look"].values[place].tolist(),
        "text": "as item 3",
    }
    content.live, content.embed = SmallCatalogue(), lambda texts: TEXTS[[place] * len(texts)]
    content.live.put(77, **same)
    content.live.put(500)
    lookups = model.item_lookups(unknown)
    assert isinstance(lookups["item/brand"], Lookup)
    without_rows = rows_for(lookups, lambda name, ids: table(name, ids) * (name != "item"))
    copied, own = model.items.item_vectors(without_rows)
    assert torch.allclose(copied, own, rtol=1e-12)
    content.live.records.pop(77)
    bare = content.rows(np.array([77, 500, 3]))
    assert bare["tags"].lengths().tolist()[:2] == [0, 0]
    assert bare["tags"].lengths().tolist()[2] == len(same["tags"])


def test_a_feature_that_the_log_lacks_is_named(log):
    with pytest.raises(ConfigError, match=r"'colour'.*has only .*brand.*--model\.item-features"):
        item_feature_rows(log, ["brand", "colour"])
    with pytest.raises(
        ConfigError, match=r"neither an item feature of .*brand.* nor a column .* it has \['item', 'title'\]"
    ):
        catalogue_texts(log, "colour")
