"""Texts of items in runs of the command line: compared with instructions, in every mode and after a resume."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from nestpipe.cli.demo import differing_tensors
from nestpipe.config import Config
from nestpipe.generative.text_encoder import hashed_words
from nestpipe.jagged import Cursor
from nestpipe.models.build_model import inputs_of
from nestpipe.training.loop import train_to_end
from nestpipe.training.rollouts import ContextLoader
from nestpipe.training.run_state import load_state
from tests.serve.small_generative import KINDS, NUM_ITEMS, make_run

IGR = {"queries": "last", "igr": "query", "igr_recent": 2, "igr_related": 2, "igr_refresh_steps": 3, "q2i": 0.1}


def config_of(run, *, steps, mode="sequential", **settings):
    config = run.config
    return replace(
        config,
        model=replace(config.model, **{**IGR, **settings}),
        data=replace(config.data, group_size=4, batch_size=12),
        pipeline=config.pipeline.changed(mode=mode, micro_batches=2),
        train=replace(config.train, steps=steps, epochs=0),
    )


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("texts"))


def test_instructions_are_compared_with_texts_in_every_mode_and_after_a_resume(shop, tmp_path):
    calm = train_to_end(config_of(shop, steps=6), tmp_path / "calm", quiet=True).run
    model = load_state(calm)[0].model
    titles = [f"{KINDS[item % 5]} number{item}" for item in range(NUM_ITEMS)]
    torch.testing.assert_close(model.igr.text, hashed_words(titles))
    assert model.igr.item.weight.shape[1] == model.config.dim + 512
    train_to_end(config_of(shop, steps=3, mode="nested"), tmp_path / "run", quiet=True)
    train_to_end(config_of(shop, steps=6, mode="nested"), tmp_path / "run", resume=True, quiet=True)
    assert not differing_tensors(calm.folder, tmp_path / "run")
    # The model that answers has them too.
    served = calm.load_model().model
    torch.testing.assert_close(served.igr_vectors(torch.arange(3)), model.igr_vectors(torch.arange(3)))
    assert calm.predictor().evaluate(progress=False).num_users > 0
    plain = train_to_end(config_of(shop, steps=1, igr_texts=False), tmp_path / "plain", quiet=True).run
    assert load_state(plain)[0].model.igr.text.shape[1] == 0


def test_a_run_of_format_1_reads_no_texts(shop):
    content = json.loads(config_of(shop, steps=1).to_json())
    content.pop("format")
    content["model"].pop("igr_texts")
    assert not Config.from_json(json.dumps(content)).model.igr_texts
    content["model"] |= {"igr": "off", "q2i": 0.0}
    assert Config.from_json(json.dumps(content)).model.igr_texts


def test_each_epoch_trains_another_event_of_a_history(shop):
    """With `queries last` a sample has one target: without this, all but the last training event would never be one."""
    config = config_of(shop, steps=1)
    loader = ContextLoader(shop.instructed, shop.split, config.data, seed=0, inputs=inputs_of(config, shop.instructed))
    sequences, split = shop.sequences, shop.split
    for epoch in (0, 1, 2, 9):
        batch = loader.batch_of(loader.samples, Cursor(epoch, 4))
        assert batch.cursor == Cursor(epoch, 4)
        lengths = loader.lengths().numpy()
        kept = lengths - epoch % lengths
        assert batch.items.lengths().tolist() == kept.tolist()
        ends = batch.items.offsets[1:] - 1
        first = sequences.offsets[loader.samples.numpy()] + split.train_end[loader.samples.numpy()] - 1 - lengths
        assert batch.targets.values[ends].tolist() == sequences.items[first + kept].tolist()
