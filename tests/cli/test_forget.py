"""`nestpipe forget` beside another one, and after one that was cut off at any place."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import httpx
import pytest
from starlette.applications import Starlette

from nestpipe import train
from nestpipe.cli import forget as command
from nestpipe.cli.forget import forget
from nestpipe.cli.serve_fleet import fleet_retriever, keep_fresh
from nestpipe.config import Config, DataConfig
from nestpipe.data import array_files as folders
from nestpipe.errors import DataError
from nestpipe.serve.open_service import open_histories
from nestpipe.serve.operator_page import OperatorPage
from nestpipe.serve.own_ids import ServiceIds
from nestpipe.training.run_folder import Run
from tests.eval.test_catalogue_predictor import named_log
from tests.gateway.fake_instances import Served
from tests.small_runs import files_naming, small_config, small_log, write_log

DEAD = 2**22 + 1  # no process has this number: it is above what Linux gives


@pytest.fixture
def untrained(tmp_path):
    """Two runs on one log, which were never trained: forgetting does not look at weights."""
    write_log(tmp_path / "log", {user: [4, 5, 6, user] for user in range(1, 9)})
    config = Config(data=DataConfig(path=str(tmp_path / "log")))
    found = [tmp_path / name for name in ("one", "two")]
    for one in found:
        (one / "eval").mkdir(parents=True)
        Run(one, config).write(statistics={}, facts={})
    return found


def users_of(runs):
    """Who is left, after everything was found to be in order."""
    for one in runs:
        run = Run.open(one)
        run.sequences.verify()
        assert json.loads((one / "run.json").read_text())["data_digest"] == run.sequences.digest
        assert "next_digest" not in (one / "run.json").read_text()
        assert not (one / "eval").exists()
    path = Path(run.config.data.path)
    assert sorted(one.name for one in path.parent.iterdir()) == [".log.lock", "log", "one", "two"]
    return run.sequences.users.tolist()


def test_two_at_once_take_turns(untrained, monkeypatch):
    barrier, forget_user = Barrier(2), command.forget_user

    def forget_together(sequences, user, **options):
        """Without turns both would have mapped the folder before either replaces it."""
        with suppress(BrokenBarrierError):
            barrier.wait(0.2)
        return forget_user(sequences, user, **options)

    monkeypatch.setattr(command, "forget_user", forget_together)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda user: forget(untrained, user), (3, 6))) == [(4, 0), (4, 0)]
    assert users_of(untrained) == [1, 2, 4, 5, 7, 8]


@pytest.mark.parametrize("place", ["before the swap", "inside the swap", "after the swap", "after one run"])
@pytest.mark.parametrize("again", [3, 99])
def test_what_was_cut_off_is_finished_by_the_next(untrained, tmp_path, monkeypatch, place, again):
    runs = untrained

    class Cut(BaseException):
        pass

    note = command._note

    def cut_swap(draft, out):
        if place == "before the swap":
            raise Cut
        out.rename(out.parent / f".{out.name}.old-{DEAD}")
        if place != "inside the swap":
            draft.rename(out)
        raise Cut

    def cut_note(run, **digests):
        if run.name == "two" and "data_digest" in digests:
            raise Cut
        note(run, **digests)

    monkeypatch.setattr(command, "_note", cut_note) if place == "after one run" else monkeypatch.setattr(
        folders, "_swap", cut_swap
    )
    with pytest.raises(Cut):
        forget(runs, 3)
    monkeypatch.undo()
    if place != "inside the swap":  # then there is no folder until somebody puts it back
        for one in runs:
            Run.open(one)
    is_done = place in ("after the swap", "after one run")
    assert forget(runs, again) == (0 if is_done or again == 99 else 4, 0)
    if is_done or again == 3:
        assert users_of(runs) == [1, 2, 4, 5, 6, 7, 8]
    else:
        assert 3 in Run.open(runs[0]).sequences.users
        assert not [one for one in tmp_path.iterdir() if str(DEAD) in one.name]


def test_a_gateway_lets_go_of_a_forgotten_user_while_nobody_asks(runs, log, tmp_path):
    shutil.copytree(log.path, tmp_path / "log")
    shutil.copytree(runs("hstu").folder, tmp_path / "run")
    config = runs("hstu").config
    moved = replace(config, data=replace(config.data, path=str(tmp_path / "log")))
    (tmp_path / "run" / "config.json").write_text(moved.to_json())
    run = Run.open(tmp_path / "run")
    histories = open_histories(run, tmp_path / "events.log")
    retriever = fleet_retriever(run, histories)
    del run
    page = OperatorPage(histories, ServiceIds(lambda: histories.sequences), lambda: None)
    server = Served(Starlette(routes=page.routes()))
    users = server.url + "/page/users"
    longest = httpx.get(users).json()["users"][0]

    async def forget_meanwhile():
        fresh = asyncio.create_task(keep_fresh(histories, every_s=0.01))
        await asyncio.to_thread(forget, [tmp_path / "run"], int(longest))
        async with asyncio.timeout(60):
            while not histories.num_removals:
                await asyncio.sleep(0.01)
        fresh.cancel()

    asyncio.run(forget_meanwhile())
    assert longest not in httpx.get(users).json()["users"]
    server.close()
    assert not len(retriever.past_of(int(longest)).items)
    gc.collect()
    mapped = Path("/proc/self/maps")
    assert not mapped.exists() or str(tmp_path / ".log.old") not in mapped.read_text()


def test_a_gateway_with_a_retrieval_run_keeps_no_folder_of_before(tmp_path):
    small_log(tmp_path / "log")
    train(small_config(tmp_path / "log", epochs=1), tmp_path / "run", quiet=True)
    run = Run.open(tmp_path / "run")
    histories = open_histories(run, tmp_path / "events.log")
    retriever = fleet_retriever(run, histories)
    del run
    past = retriever.past_of(3)
    before = retriever.retrieve(past, 5).places
    forget([tmp_path / "run"], 3)
    assert not len(retriever.past_of(3).items)
    assert (retriever.retrieve(past, 5).places == before).all(), "it retrieves as before"
    gc.collect()
    mapped = Path("/proc/self/maps")
    assert not mapped.exists() or str(tmp_path / ".log.old") not in mapped.read_text()


def test_an_interrupted_erasure_is_finished_by_the_next_one_without_the_name(tmp_path, monkeypatch):
    """The folder loses the name before the instructions are erased; the run keeps the number until then, and no name."""
    log = named_log(tmp_path / "log")
    run = tmp_path / "run"
    (run / "eval").mkdir(parents=True)
    Run(run, Config(data=DataConfig(path=str(log.path)))).write(statistics={}, facts={})
    number, erased = log.vocabulary("user").number_of("Zoë 3"), []

    def cut_off(folder, user):
        raise KeyboardInterrupt

    assert files_naming(tmp_path, "Zoë 3")

    monkeypatch.setattr(command, "_forget_derived", cut_off)
    with pytest.raises(KeyboardInterrupt):
        forget([run], "Zoë 3")
    assert Run.open(run).sequences.vocabulary("user").number_of("Zoë 3") is None
    assert not files_naming(tmp_path, "Zoë 3")
    monkeypatch.setattr(command, "_forget_derived", lambda folder, user: erased.append(user))
    other = log.vocabulary("user").number_of("Zoë 4")
    assert forget([run], "Zoë 4")[0] == 7
    assert erased[0] == number
    assert set(erased) == {number, other}
    assert "forgetting" not in (run / "run.json").read_text()
    with pytest.raises(DataError, match="user 'Zoë 3' is not in"):
        forget([run], "Zoë 3")
