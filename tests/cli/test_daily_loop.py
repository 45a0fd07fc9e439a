"""The daily loop by its commands: events by HTTP, append, train from the served run, swap, all under load."""

from __future__ import annotations

import shutil
import threading
import time

import httpx
import polars as pl
import pytest

from nestpipe import train
from nestpipe.cli import main
from nestpipe.data.append import append_log
from nestpipe.data.sequences import Sequences
from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.training.run_folder import Run
from tests.serve.test_swap_kinds import World
from tests.small_content import FEATURES, content_config, content_log

NEW_USER, NEW_ITEM, NOW = 5000, 40, 1_800_000_000


class Load:
    """Users who ask for recommendations until it is closed; `failed` has the answers that were none."""

    def __init__(self, url, users):
        self._url, self._users, self._is_over = url, users, threading.Event()
        self.failed, self.models = [], []
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over.set()
        self._thread.join()

    def _ask(self):
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._is_over.is_set():
                for user in self._users:
                    answer = http.post("/v1/recommend", json={"user": user, "k": 5})
                    if answer.status_code != 200 or len(answer.json()["items"]) != 5:
                        self.failed.append(answer.text)
                    else:
                        self.models.append(answer.json()["model"])


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("daily")
    data = content_log(folder / "data", num_users=60)
    return train(content_config(data.path, epochs=2), folder / "monday", quiet=True)


def events(prefix, *rows, start=NOW):
    return [
        {"id": f"{prefix}{place}", "user": user, "item": item, "time": start + 60 * place}
        for place, (user, item) in enumerate(rows)
    ]


def test_events_are_appended_trained_and_swapped_in_under_load(first, tmp_path, capsys):
    data, log = first.sequences.path, first.folder / "serve" / "events.log"
    price = first.load_model().model.items.content.statistics["price"]
    before, tuesday = len(first.sequences.items), tmp_path / "tuesday"
    with World(first).start() as world, Load(str(world.http.base_url), [0, 7, NEW_USER]) as load:
        sent = events("a", (0, 3), (7, 11), (NEW_USER, 5), (NEW_USER, 9), (NEW_USER, 11))
        assert world.http.post("/v1/events", json={"events": sent}).json()["accepted"] == 5
        item = {"id": NEW_ITEM, "brand": 2, "category": 0, "tags": [1, 2], "price": 3.5, "look": [0.5] * 8}
        assert world.http.put("/v1/items", json={"items": [item]}).json()["results"][0]["result"] == "created"
        assert main(["data", "append", str(data), "--from", str(log)]) == 0
        assert "5 events appended, 0 were in the folder already, 5 removed" in capsys.readouterr().out
        late = events("b", (0, 12), (NEW_USER, 13), start=NOW + 3600)
        reply = world.http.post("/v1/events", json={"events": [*sent, *late]}).json()
        assert (reply["accepted"], reply["duplicates"]) == (2, 5)
        histories = world.engine.histories
        histories.refresh()
        assert histories.of(NEW_USER).items.tolist() == [5, 9, 11, 13]

        flags = ["--data.path", str(data), "--model.item-features", *FEATURES, "--model.id-dropout", "0.3"]
        flags += ["--model.text-encoder", "words", "--train.epochs", "1", "--data.max-len", "8"]
        config = first.config
        shape = ["--model.dim", str(config.model.dim), "--model.num-heads", str(config.model.num_heads)]
        shape += [
            "--model.num-blocks",
            str(config.model.num_blocks),
            "--model.hidden-dim",
            str(config.model.hidden_dim),
        ]
        start = ["--init-from", str(first.folder), "--run", str(tuesday)]
        assert main(["train", "tiny", *flags, *shape, *start]) == 0
        assert "grew" in capsys.readouterr().err
        assert main(["swap", str(first.folder), str(tuesday), "--admin-port", str(world.admin_port)]) == 0
        seen = len(load.models)
        while len(load.models) < seen + 6 and not load.failed:
            time.sleep(0.01)
        answer = world.http.post("/v1/recommend", json={"user": NEW_USER, "k": 40}).json()
        assert NEW_ITEM in answer["items"]
        assert answer["model"].startswith("tuesday/")
        assert histories.of(NEW_USER).items.tolist() == [5, 9, 11, 13]  # each once
    assert not load.failed
    assert {model.split("/")[0] for model in load.models} == {"monday", "tuesday"}
    grown = Sequences.open(data)
    assert len(grown.items) == before + 5
    assert NEW_USER in grown.users.tolist()
    yesterday = Run.open(first.folder)  # it still opens, and reads items as it was trained
    assert yesterday.load_model().model.items.content.statistics["price"] == price
    assert yesterday.predictor().recommend(0, 3).items
    with pytest.raises(CheckpointError, match=r"has grown.*--init-from"):
        train(first.config, first.folder, resume=True, quiet=True)


def test_a_run_on_another_folder_is_swapped_in_if_the_folder_has_grown(first, tmp_path):
    grown, own = tmp_path / "grown", first.sequences.path
    shutil.copytree(own, grown)
    rows = pl.DataFrame({"user": [777, 777, 777], "item": [1, 2, 3], "time": [NOW, NOW + 1, NOW + 2]})
    append_log(grown, log=rows)
    later = train(content_config(grown, epochs=1), tmp_path / "later", quiet=True)
    unrelated = content_log(tmp_path / "unrelated", num_users=60, seed=5)  # its ids are those of the first log
    fewer = train(content_config(unrelated.path, epochs=1), tmp_path / "other", quiet=True)
    with World(first).start() as world:
        histories = world.engine.histories
        assert histories.num_events(777) == 0
        world.load(later.folder, None)
        assert (histories.sequences.path, histories.num_events(777)) == (grown, 3)
        assert world.load(first.folder, None).name.startswith("monday")  # back, with the histories of now
        assert histories.num_events(777) == 3
        with pytest.raises(ConfigError, match=r"lacks .* users, so it cannot serve.*data append"):
            world.load(fewer.folder, None)
        assert histories.sequences.path == grown
