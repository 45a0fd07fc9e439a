"""One log and two trained rankers for all tests of serving, an engine whose clock stands still, and a browser."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import replace
from functools import cache

import pytest

from nestpipe import train
from nestpipe.serve.model import open_served
from nestpipe.serve.prefix_store import PrefixStore
from nestpipe.serve.stored_prefixes import StoredPrefixes
from tests.serve import small_generative
from tests.serve.small_rankers import BEHIND, ON, Clock, costs, make_engine, make_log, make_run
from tests.serve.small_services import make_runs


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    return make_log(tmp_path_factory.mktemp("serve"))


@pytest.fixture(scope="session")
def runs(log, tmp_path_factory):
    """Trained when they are first asked for."""
    found = {}

    def of(backbone):
        if backbone not in found:
            found[backbone] = make_run(log, tmp_path_factory.mktemp("serve") / backbone, backbone)
        return found[backbone]

    return of


@pytest.fixture(scope="session")
def runs_of(log, runs, tmp_path_factory):
    """A run of each kind; see small_services.KINDS."""
    return make_runs(log.path, runs("hstu"), tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="session")
def second_of(runs_of, tmp_path_factory):
    """Another run of a kind on the same sequence folder; not for rankers, of which `runs` has two."""

    @cache
    def of(kind):
        first = runs_of(kind)
        if kind == "generative":
            return small_generative.make_run(first.folder.parent, name="second", hidden_dim=32)
        return train(replace(first.config, seed=7), tmp_path_factory.mktemp("second") / "second", quiet=True)

    return of


@pytest.fixture(scope="session")
def served(runs, tmp_path_factory):
    found = {}

    def of(backbone="hstu"):
        if backbone not in found:
            found[backbone] = open_served(runs(backbone), folder=tmp_path_factory.mktemp("tables"))
        return found[backbone]

    return of


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine(runs, served, tmp_path, clock):
    return make_engine(runs("hstu"), tmp_path, clock=clock, served=served())


@pytest.fixture
def opened(runs, served, tmp_path, clock):
    """Engines on one store; a new one takes it over, with empty memory tiers."""
    engines = []

    def of(backbone="hstu", *, cap=1 << 20, trigger=ON, **options):
        if engines:
            engines[-1].tiers.stored.close()
        kept = StoredPrefixes(PrefixStore(tmp_path / "store", cap=cap), behind=BEHIND)
        own = {"clock": clock, "served": served(backbone), "known": costs(), **options}
        own["known"].observe = lambda *_: None  # a busy machine would make other paths the better ones
        engines.append(make_engine(runs(backbone), tmp_path, trigger=trigger, stored=kept, **own))
        return engines[-1]

    yield of
    if engines:
        engines[-1].tiers.stored.close()


@pytest.fixture
def driver(tmp_path):
    """A real browser."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs or importlib.util.find_spec("selenium") is None:
        pytest.skip("no chromium with its driver, or no selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(programs[0])
    flags = ("headless", "no-sandbox", "disable-gpu", "no-first-run", "disable-background-networking")
    for flag in (*flags, "disable-component-update", "disable-dev-shm-usage", f"user-data-dir={tmp_path}/profile"):
        options.add_argument(f"--{flag}")
    found = webdriver.Chrome(options=options, service=Service(programs[1]))
    yield found
    found.quit()
