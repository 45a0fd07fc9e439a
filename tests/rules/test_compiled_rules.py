"""Compiled rules over a catalogue that grows, changes and withdraws items, and what is kept of them."""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe.rules.compiled_rules import RuleCompiler
from nestpipe.rules.item_attributes import FolderSource
from nestpipe.rules.rule_set import RuleError, Rules, parse_rules
from nestpipe.rules.selection import best_by_vector, select
from tests.rules.rule_oracle import Catalogue
from tests.serve.small_generative import make_data

RECORDS = [
    {"category": "lamp", "price": 3.0, "tags": ["red", "red", "oak"], "year": 2020},
    {"category": "sofa", "price": 9.0, "tags": [], "year": 2021},
    {"category": "lamp", "price": None, "tags": ["new"], "year": None},
    {"category": None, "price": 0.1, "tags": ["oak"], "year": 2020},
]


def compiled(catalogue, content, items=None):
    compiler = RuleCompiler(lambda: catalogue)
    return compiler.compile(parse_rules(content), catalogue.items if items is None else items)


@pytest.mark.parametrize(
    ("filters", "allowed"),
    [
        ({"category": "lamp"}, [0, 2]),
        ({"category": ["sofa", "lamp"], "price": {"gte": 4}}, [1]),
        ({"tags": ["oak", "new"]}, [0, 2, 3]),
        ({"year": 2020}, [0, 3]),
        ({"price": {"lte": 0.1}}, [3]),  # as 32 bits have it
        ({"price": 0.1}, [3]),
        ({"price": [3, 9, 1, 2, 4, 5]}, [0, 1]),
        ({"price": {"gte": None, "lte": 3}}, [0, 3]),
        ({}, [0, 1, 2, 3]),
    ],
)
def test_filters(filters, allowed):
    rules = compiled(Catalogue(RECORDS), {"filter": filters})
    assert rules.num_allowed == len(allowed)
    mask = np.ones(4, bool) if rules.allowed is None else rules.allowed
    assert np.flatnonzero(mask).tolist() == allowed


@pytest.mark.parametrize("num_known", [2, 6])
def test_a_model_may_know_fewer_or_more_items_than_have_attributes(num_known):
    """An item without attributes passes no filter, gets no boost and is in no group."""
    catalogue, items = Catalogue(RECORDS), 10 + 3 * np.arange(num_known)
    content = {
        "filter": {"category": ["lamp", "sofa"]},
        "boost": [{"filter": {"category": "lamp"}, "add": 2}],
        "pin": ["p1", "p3"],
    }
    rules = compiled(catalogue, content, items)
    assert np.flatnonzero(rules.allowed).tolist() == ([0, 1] if num_known == 2 else [0, 1, 2])
    assert rules.bias.tolist() == [2, 0, 2, 0, 0, 0][:num_known]
    assert rules.pins.tolist() == ([1] if num_known == 2 else [1, 3])
    assert rules.unknown == (["p3"] if num_known == 2 else [])
    capped = compiled(catalogue, {"max_per": {"category": 1}}, items)
    found = select(-np.arange(float(num_known)), capped, 6, removed=np.empty(0, np.int64))
    assert found.positions.tolist() == ([0, 1] if num_known == 2 else [0, 1, 3, 4, 5])


def test_withdrawn_items_are_never_shown_without_rules_either():
    for num_withdrawn in (1, 1500):  # as positions, and as a mask
        catalogue = Catalogue([RECORDS[0]] * 2000, np.arange(2000) < num_withdrawn)
        rules = compiled(catalogue, {"pin": ["p0", "p1999"]})
        assert (rules.allowed is None) == (num_withdrawn == 1)
        removed = rules.removed(np.array([1999]), keeps_seen=False)
        found = select(np.zeros(2000), rules, 3000, removed=removed)
        assert rules.num_left(removed) == found.num_left == 2000 - num_withdrawn - 1
        assert found.positions.tolist() == [1999, *range(num_withdrawn, 1999)]


def test_a_new_version_is_compiled_anew_and_an_old_one_is_kept():
    catalogue = Catalogue(RECORDS)
    compiler = RuleCompiler(lambda: catalogue)
    rules, items = parse_rules({"filter": {"category": "lamp"}}), catalogue.items
    first = compiler.compile(rules, items)
    assert compiler.compile(rules, items).allowed is first.allowed
    catalogue = Catalogue([*RECORDS[1:], RECORDS[0]], version="2")
    assert np.flatnonzero(compiler.compile(rules, items).allowed).tolist() == [1, 3]
    small = RuleCompiler(lambda: catalogue, cache_bytes=1)
    assert small.compile(rules, items).num_allowed == 2
    assert len(small._cache._kept) == 1


def test_rules_on_top_of_a_named_set():
    base = parse_rules({"filter": {"a": 1, "b": 2}, "exclude": [1], "diversity": 0.2, "unseen": True, "pin": [9]})
    own = parse_rules({"filter": {"b": 3}, "exclude": [2], "unseen": False, "pin": [8]})
    merged = own.over(base)
    assert merged.filter == {"a": (1,), "b": (3,)}
    assert (merged.exclude, merged.pin, merged.diversity, merged.unseen) == ((2, 1), (8, 9), 0.2, False)
    assert Rules().over(base) == base


def test_diversity_needs_vectors():
    rules = compiled(Catalogue(RECORDS), {"diversity": 0.5})
    with pytest.raises(RuleError, match="diversity needs item vectors"):
        select(np.zeros(4), rules, 2, removed=np.empty(0, np.int64))


def test_zero_vectors_are_near_nothing():
    rules = compiled(Catalogue(RECORDS), {"diversity": 0.75})
    vectors = np.array([[1, 0], [1, 0], [0, 0], [1, 0]], np.float32)
    found = best_by_vector(vectors, np.array([1, 0], np.float32), rules, 2, removed=np.empty(0, np.int64))
    assert found.positions.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "rules are a list of 0"),
        ({"filter": {"look": 1}}, "filter.look is a vector, which no rule reads"),
        ({"filter": {str(place): 1 for place in range(40)}}, "filter has 40 entries; there may be 32"),
        ({"boost": [{"filter": {}, "add": float("inf")}]}, r"boost\[0\].add is inf; it must be a finite number"),
        ({"filter": {"category": 1.5}}, "is 1.5, but the field holds ids"),
        ({"exclude": "p1"}, "exclude is 'p1'; it must be a list"),
    ],
)
def test_what_is_not_understood_is_named(content, message):
    with pytest.raises(RuleError, match=message):
        compiled(Catalogue(RECORDS), content)


def test_attributes_of_a_folder_keep_no_file_open(tmp_path):
    """A mapped file that stays open could not be forgotten."""
    sequences = make_data(tmp_path)
    attributes = FolderSource(lambda: sequences)()
    column = attributes.column("kind")
    for array in (attributes.items, column.values, column.offsets, attributes.column("shelf").values):
        assert not isinstance(array, np.memmap)
        assert array.base is None or not isinstance(array.base, np.memmap)
    assert attributes.items.tolist() == sequences.catalogue.tolist()
    assert attributes.vocabulary("kind").own_ids(column.values[:2]) == ["red lamp", "oak chair"]
    assert not len(attributes._folder.items)
