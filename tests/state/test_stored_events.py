"""`nestpipe data append` takes what a service has stored, from either backend: events, new own ids, content; each event once."""

from __future__ import annotations

import shutil

import pytest

from nestpipe.cli import main
from nestpipe.data.sequences import Sequences
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.serve.state_writer import StateWriter
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import open_state

NOW = 2_000_000


@pytest.mark.parametrize("backend", ["files", "postgres"])
def test_new_ids_and_content_join_the_folder_and_a_second_append_adds_nothing(shop, tmp_path, request, capsys, backend):
    data, log = tmp_path / "data", tmp_path / "serve" / "events.log"
    shutil.copytree(shop.sequences.path, data)
    url = "" if backend == "files" else request.getfixturevalue("server").empty()
    state = open_state(url, log)
    histories = UserHistories(Sequences.open(data), state)
    writer = StateWriter(histories, ServiceIds(lambda: histories.sequences, histories.living))
    events = [
        {"id": "e1", "user": "zoe", "item": "lamp 9", "time": NOW, "page": "search"},
        {"id": "e2", "user": "u03", "item": "lamp 9", "time": NOW + 60},
        {"id": "e3", "user": "gone", "item": "i01", "time": NOW + 60},
    ]
    assert writer.add_events(events, lambda _: None).accepted == 3
    writer.put_items([{"id": "lamp 9", "category": "garden", "price": 7.5}])
    number = histories.living.ids.number_of("item", "lamp 9")
    writer.forget("gone")
    assert main(["data", "append", str(data), "--from", url or str(log)]) == 0
    said = capsys.readouterr().out
    assert "2 events appended" in said
    grown = Sequences.open(data)
    items, users = grown.vocabulary("item"), grown.vocabulary("user")
    assert items.number_of("lamp 9") == number, "as the service numbered it"
    assert users.number_of("gone") is None
    assert users.next_id == users.number_of("zoe") + 2, "the number of the forgotten user is not given out again"
    place = grown.catalogue.tolist().index(number)
    category = grown.item_features["category"]
    assert grown.vocabulary("category").own_ids(category.values[category.offsets[place] :][:1]) == ["garden"]
    assert grown.item_features["price"].values[place] == 7.5
    histories.refresh()
    assert [histories.num_events(users.number_of(user)) for user in ("zoe", "u03")] == [1, 5]
    assert main(["data", "append", str(data), "--from", url or str(log)]) == 0
    assert "0 events appended, 2 were in the folder already" in capsys.readouterr().out
    assert Sequences.open(data).digest == grown.digest
    state.close()
