"""Recommendations in own ids equal plain scoring, for every kind of model; a user without history gets popular items."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import polars as pl
import pytest
import torch

from nestpipe import train
from nestpipe.data.ingest import write_sequences
from nestpipe.data.schema import Schema
from nestpipe.data.splits import train_mask
from nestpipe.data.synthetic_clicks import ClicksConfig, ingest_clicks
from nestpipe.embedding.lookup import Lookup
from nestpipe.embedding.row_reader import read_rows
from nestpipe.errors import ConfigError, DataError
from nestpipe.eval.catalogue_predictor import Recommendation
from nestpipe.eval.predictor import RetrievalPredictor, make_predictor
from nestpipe.eval.ranking_eval import RankingPredictor
from nestpipe.generative.trie import Trie
from nestpipe.models.encdec import EncDec
from nestpipe.training.run_folder import Run
from tests.eval.ranking_ranks import ranking_config
from tests.serve import small_generative
from tests.serve.small_rankers import evaluated
from tests.small_runs import small_config


def named_log(out: Path, encoding: str = "dictionary"):
    """40 users and 30 items with names; items follow a rule."""
    rows = [
        (f"Zoë {user}", f"p{(user + 7 * step) % 30}", 1_000_000 + 60 * step)
        for user in range(40)
        for step in range(3 + user % 13)
    ]
    log = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    return write_sequences(out, schema=Schema(user_encoding=encoding, item_encoding=encoding), log=log)


@pytest.fixture(scope="module", params=["dictionary", "hash"])
def run(request, tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    return train(small_config(named_log(folder / "log", request.param).path, epochs=1), folder / "run", quiet=True)


def names(run: Run, column: str, numbers) -> list[str]:
    """Own ids from the table of the folder, by a plain dictionary."""
    known = dict(pl.read_parquet(run.sequences.path / f"texts.{column}.parquet").iter_rows())
    return [known[int(number)] for number in numbers]


def test_next_item_recommendations_are_the_best_scores_of_unseen_items(run: Run) -> None:
    predictor = run.predictor()
    assert isinstance(predictor, RetrievalPredictor)
    sequences, items = run.sequences, names(run, "item", run.sequences.catalogue)
    for row, user in enumerate(names(run, "user", sequences.users)):
        query = predictor.encode(predictor.request_of(np.array([row])).batch)[0]
        scores = {item: float(query @ vector) for item, vector in zip(items, predictor.item_vectors, strict=True)}
        had = names(run, "item", sequences.items[sequences.offsets[row] : sequences.offsets[row + 1]])
        wanted = sorted((item for item in items if item not in had), key=lambda item: -scores[item])[:7]
        found = predictor.recommend(user, 7)
        assert found.items == wanted
        assert found.path == "model"
        np.testing.assert_allclose(
            found.scores, [scores[item] for item in wanted], atol=1e-6
        )  # fp32, another order of sums


def test_batches_do_not_change_what_is_recommended(run: Run) -> None:
    users = names(run, "user", run.sequences.users)
    asked = [users[3], "nobody", *users]  # some twice, one without history in between
    loaded, config = run.load_model(), replace(run.config, eval=replace(run.config.eval, batch_size=3))
    alone = make_predictor(loaded.model, loaded.rows, run.sequences, run.split, config)
    several = run.predictor().recommend_all(asked, 5)
    for user, found in zip(asked, several, strict=True):
        assert found.items == alone.recommend(user, 5).items


def test_a_user_without_history_gets_what_is_popular(run: Run) -> None:
    trained = run.sequences.items[train_mask(run.sequences, run.split)]
    counts = {item: int((trained == item).sum()) for item in run.sequences.catalogue.tolist()}
    best = sorted(counts, key=lambda item: (-counts[item], item))[:4]  # ties: the lower catalogue position
    found = run.predictor().recommend("nobody", 4)
    assert found == Recommendation(names(run, "item", best), [float(counts[item]) for item in best], "popular")


def test_similar_items_by_cosine(run: Run) -> None:
    predictor = run.predictor()
    vectors = predictor.item_vectors.double()
    items = names(run, "item", run.sequences.catalogue)
    own = items.index("p7")
    cosines = {
        item: float(vectors[own] @ vector / vectors[own].norm() / vector.norm())
        for item, vector in zip(items, vectors, strict=True)
    }
    wanted = sorted(set(items) - {"p7"}, key=lambda item: -cosines[item])[:5]
    found = predictor.similar("p7", 5)
    assert found.items == wanted
    np.testing.assert_allclose(found.scores, [cosines[item] for item in wanted], atol=1e-6)
    with pytest.raises(DataError, match="no item 'p77'; its catalogue has 30 items"):
        predictor.similar("p77")


def test_no_items_are_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match="k is 0"):
        run.predictor().recommend("nobody", 0)


def clicks(tmp_path: Path):
    return ingest_clicks(tmp_path / "log", ClicksConfig(num_users=40, num_items=24, num_events=1200))


def test_a_ranker_recommends_by_its_first_label(tmp_path: Path) -> None:
    log = clicks(tmp_path)
    run = train(ranking_config(log.path, "hstu"), tmp_path / "run", quiet=True)
    predictor = run.predictor()
    assert isinstance(predictor, RankingPredictor)
    for row in (0, 17):
        request = predictor.request_of(np.array([row]))
        scores = evaluated(predictor, request.batch)  # by the code of evaluation, event by event
        seen = set(request.removed[0].tolist())
        wanted = [place for place in np.argsort(-scores, kind="stable").tolist() if place not in seen]
        found = predictor.recommend(int(log.users[row]), 24)
        assert sorted(found.items) == sorted(wanted)
        np.testing.assert_allclose(found.scores, scores[wanted], rtol=1e-5, atol=1e-6)  # another order of sums


def test_a_model_without_histories_recommends_by_its_first_label(tmp_path: Path) -> None:
    log = clicks(tmp_path)
    config = ranking_config(log.path, "dcn")
    config = replace(config, model=replace(config.model, features=("user", "item", "category", "segment")))
    predictor = train(config, tmp_path / "run", quiet=True).predictor()
    assert isinstance(predictor, RankingPredictor)
    held_out = predictor.predict()
    for event, row, score in zip(held_out.event[:9], held_out.user, held_out.scores, strict=False):
        batch = predictor.request_of(np.array([row])).batch
        place = int(np.searchsorted(log.catalogue, log.items[event]))
        # No feature of the event itself is read, so a candidate is scored like the event that came.
        assert float(predictor._catalogue_scores(batch)[place]) == pytest.approx(float(score[0]), rel=1e-5)


@pytest.mark.parametrize("item_rows", [True, False])
def test_a_generative_run_recommends_what_it_generates(tmp_path: Path, item_rows: bool) -> None:
    run = small_generative.make_run(tmp_path, item_rows=item_rows)
    predictor = run.predictor()
    items, model = torch.from_numpy(np.array(run.sequences.catalogue)), cast(EncDec, predictor._model)
    rows = read_rows(predictor._rows, {"history": Lookup(table="item", ids=items)})["history"]
    read = model._item_vectors(rows if item_rows else None, items)  # as the encoder reads a history
    torch.testing.assert_close(predictor.item_vectors, read.detach())
    request = predictor.request_of(np.array([4]))
    unseen = ~torch.isin(torch.arange(len(items)), torch.from_numpy(request.removed[0]))
    wanted = predictor.generate(request.batch, 5, pool=cast(Trie, model.ids).pool_of_items(unseen))
    found = predictor.recommend(int(run.sequences.users[4]), 5)
    assert found.items == run.sequences.catalogue[wanted.positions[0].numpy()].tolist()
    assert found.scores == wanted.scores[0].tolist()
