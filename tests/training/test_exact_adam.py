"""Runs with exact Adam on rows: what evaluation, serving and `checkpoint` see, and runs of earlier versions."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from nestpipe.checkpoint import folders as checkpoint_folders
from nestpipe.checkpoint.difference import table_differences
from nestpipe.checkpoint.reader import load_checkpoint
from nestpipe.config import Config
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.training.loop import train
from nestpipe.training.run_folder import Run
from nestpipe.training.run_state import load_state
from tests.small_runs import small_config, small_log


def config_of(log, **embedding):
    config = small_config(log, epochs=0, steps=6, save_steps=5)
    return replace(config, embedding=replace(config.embedding, weight_decay=0.1, **embedding))


def test_a_loaded_model_and_a_diff_see_the_rows_of_the_step(tmp_path):
    log = small_log(tmp_path / "log", num_users=60, num_items=400).path
    run = train(config_of(log, optimizer="adam"), tmp_path / "run", quiet=True)
    ids = torch.arange(450)  # some without a row
    trained = load_state(run)[0].embedding.tables["item"]
    served = Run.open(tmp_path / "run").load_model().rows
    assert torch.equal(trained.peek(ids), served.peek("item", ids))
    latest = checkpoint_folders.checkpoint_folder(run.checkpoints, None)
    stored = load_checkpoint(latest)[1]["item"]
    behind = stored["state.num_batches"].flatten() < 6
    assert behind.any()
    assert not torch.equal(stored["rows"][behind], served.peek("item", stored["ids"][behind]))
    # A row that neither checkpoint updates has moved all the same.
    first = checkpoint_folders.checkpoint_folder(run.checkpoints, 5)
    (found,) = table_differences(first, latest)
    changed = found.changed["rows"]
    assert changed > found.changed["state.num_batches"]


def test_a_run_of_an_earlier_version_resumes_with_lazy_adam(tmp_path):
    log = small_log(tmp_path / "log").path
    config = config_of(log, optimizer="lazy_adam")
    run = train(config, tmp_path / "run", quiet=True)
    path = run.folder / "config.json"
    content = json.loads(path.read_text())
    assert content.pop("format") == 2
    content["embedding"]["optimizer"] = "adam"  # as format 1 called it
    path.write_text(json.dumps(content))
    assert Run.open(run.folder).config.embedding.optimizer == "lazy_adam"
    more = replace(config, train=replace(config.train, steps=8))
    resumed = train(more, tmp_path / "run", resume=True, quiet=True)
    assert resumed.checkpoint()[1].step == 8
    Run.open(run.folder).load_model()


def test_adam_keeps_its_name_when_a_configuration_is_written_and_read():
    config = Config(embedding=EmbeddingConfig(optimizer="adam"))
    assert Config.from_json(config.to_json()) == config
    assert Config().embedding.optimizer == "lazy_adam"
