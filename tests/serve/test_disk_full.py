"""A full disk: what was acknowledged stays, what was refused may be sent again, and readiness says so until there is room."""

from __future__ import annotations

import os
import subprocess

import httpx
import pytest

from nestpipe.serve.request_errors import without_paths
from nestpipe.serve.user_history import UserHistories
from nestpipe.state.service_state import FileState
from tests.serve.small_services import NOW, serving


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of its own, of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=False, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("mounting a file system is refused here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder):
    """A file that takes all the room."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


def test_a_full_disk_refuses_writes_loses_nothing_and_recovers(runs_of, small_disk):
    with serving("next item", runs_of, small_disk) as service:
        own, url = service.run.sequences, str(service.http.base_url)
        user, item = int(own.users[0]), int(own.catalogue[0])

        def post(first, count):
            events = [
                {"id": f"{n:0100}", "user": user, "item": item, "time": NOW - 10} for n in range(first, first + count)
            ]
            return service.http.post("/v1/events", json={"events": events})

        assert post(0, 3).status_code == 200
        ballast = fill(small_disk)
        for _ in range(2):
            refused = post(3, 500)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "disk_full"), refused.text
            assert str(small_disk) not in refused.text
        assert httpx.get(f"{url}/readyz").status_code == 503
        assert service.recommend(user=user, k=1)["items"], "what is known is still answered"
        ballast.unlink()
        assert httpx.get(f"{url}/readyz").status_code == 200
        assert post(0, 503).status_code == 200
        known = UserHistories(own, FileState(small_disk / "events.log"))
        assert known.num_events(user) == len(own.items[slice(*own.offsets[:2].tolist())]) + 503


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("the catalogue of /srv/data/shop (12 items) lacks it", "the catalogue of shop (12 items) lacks it"),
        ("'/srv/runs/x/events.log' is damaged at byte 7", "'events.log' is damaged at byte 7"),
        (
            "ask http://127.0.0.1:8700/v1/rank or and/or 3/4 of it",
            "ask http://127.0.0.1:8700/v1/rank or and/or 3/4 of it",
        ),
    ],
)
def test_callers_see_no_folders_of_the_server(message, shown):
    assert without_paths(message) == shown
    assert os.sep not in shown.replace("http://127.0.0.1:8700/v1/rank", "").replace("and/or 3/4", "")
