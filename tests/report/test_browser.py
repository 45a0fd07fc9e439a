"""The report in a real browser, as somebody on a phone and somebody at a desk see it."""

from __future__ import annotations

import shutil

import pytest

from nestpipe.cli.report import write_report
from nestpipe.report.page import SECTIONS
from tests.report.browser import browser, is_there
from tests.report.reported_runs import on_two_ranks

NAME = '<script>document.title="owned"<img src=x onerror=alert(1)>'
_OVERFLOW = """
const page = document.documentElement, wide = page.clientWidth;
const free = one => !one.closest('.scroll') && !one.closest('svg');
return [page.scrollWidth - wide, ...[...document.body.querySelectorAll('*')]
  .filter(one => free(one) && one.getBoundingClientRect().right > wide + 1).map(one => one.outerHTML.slice(0, 120))];
"""
_SHOWN = (
    "return [...document.querySelectorAll('section')].map(one => [one.id, one.getBoundingClientRect().height > 60])"
)
_PALE = """
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const parse = text => text.match(/[\\d.]+/g).map(Number);
const behind = one => { for (; one; one = one.parentElement) {
  const colour = parse(getComputedStyle(one).backgroundColor); if (colour.length < 4 || colour[3] > 0) return colour } return [255, 255, 255] };
return [...document.querySelectorAll('p,dt,dd,th,td,h1,h2,h3,figcaption,a,small,b,svg:not(.timeline) text')].map(one => {
  const style = getComputedStyle(one), ink = parse(one instanceof SVGElement ? style.fill : style.color);
  const [a, b] = [light(ink), light(behind(one))].sort((x, y) => y - x);
  return [(a + .05) / (b + .05), one.textContent.slice(0, 60)] }).filter(([ratio]) => ratio < 4.5);
"""


@pytest.fixture(scope="module")
def reports(runs, tmp_path_factory):
    """Reports of a run that retrieves, with an ugly name, of one that ranks, of one on two ranks, and of nearly nothing."""
    if not is_there():
        pytest.skip("no chromium with its driver, or no selenium")
    folder = tmp_path_factory.mktemp("browser")
    bare = folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((runs["retrieval"] / "config.json").read_text())
    found = {
        "retrieval": shutil.copytree(runs["retrieval"], folder / NAME),
        "ranking": runs["ranking"],
        "two ranks": on_two_ranks(runs["retrieval"], folder / "two"),
        "bare": bare,
    }
    return {name: write_report(run, folder / f"{name}.html") for name, run in found.items()}


def test_it_reads_well_on_a_phone_and_at_a_desk(reports, tmp_path):
    with browser(tmp_path / "profile") as window:
        for name, path in reports.items():
            for width, scheme in ((360, "light"), (1280, "dark")):
                window.open(path, width=width, scheme=scheme)
                where = f"{name} at {width} px, {scheme}"
                assert window.run(_OVERFLOW) == [0], where
                assert window.run(_SHOWN) == [[key, True] for key in SECTIONS], where
                assert window.run(_PALE) == [], f"text that is hard to read: {where}"
                background = window.run("return getComputedStyle(document.body).backgroundColor")
                assert (sum(map(int, background[4:-1].split(","))) > 600) == (scheme == "light"), background
            assert window.run("return document.scripts.length") == 0
            assert window.said() == [], name
            assert set(window.requested()) <= {path.as_uri(), "data:,"}, name
        window.open(reports["retrieval"], width=360, scheme="light")
        assert window.run("return document.querySelector('h1').textContent") == NAME
        assert window.run("return document.title").startswith(NAME)
