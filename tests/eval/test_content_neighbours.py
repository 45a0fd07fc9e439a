"""Content kNN against the definition, and cold targets of a log with content."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nestpipe.data.item_feature_rows import item_feature_rows
from nestpipe.data.splits import make_split
from nestpipe.eval.baselines import evaluate_baselines, has_content
from nestpipe.eval.content_neighbours import content_neighbours
from nestpipe.eval.list_metrics import with_list_metrics
from tests.small_content import content_config, content_log
from tests.small_runs import small_config, small_log


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return content_log(tmp_path_factory.mktemp("neighbours") / "log", num_users=120)


def test_neighbours_have_the_highest_mean_cosine_of_their_tags_and_brands(log):
    catalogue = np.array(log.catalogue)
    found = content_neighbours(item_feature_rows(log, ["brand", "tags"]), catalogue, num_neighbours=7)
    sets = {}
    for name in ("brand", "tags"):
        stored = log.item_features[name]
        sets[name] = [
            set(stored.values[stored.offsets[place] : stored.offsets[place + 1]].tolist()) for place in range(40)
        ]

    def cosine(name, a, b):
        counts = {one: sum(one in own for own in sets[name]) for own in sets[name] for one in own}
        idf = {one: math.log(40 / count) + 1 for one, count in counts.items()}
        shared = sum(idf[one] ** 2 for one in sets[name][a] & sets[name][b])
        norms = [math.sqrt(sum(idf[one] ** 2 for one in sets[name][place])) for place in (a, b)]
        return shared / (norms[0] * norms[1])

    for place in (0, 13, 39):
        likeness = {other: (cosine("brand", place, other) + cosine("tags", place, other)) / 2 for other in range(40)}
        del likeness[place]
        wanted = sorted(sorted(likeness.values(), reverse=True)[:7], reverse=True)
        own = slice(found.offsets[place], found.offsets[place + 1])
        assert found.weights[own] == pytest.approx([one for one in wanted if one > 0], abs=1e-5)
        assert [likeness[other] for other in found.items[own]] == pytest.approx(found.weights[own], abs=1e-5)


def test_cold_targets_are_found_by_content_and_by_no_other_baseline(log, tmp_path):
    config = content_config(log.path)
    split = make_split(log, config.data)
    names = ["popularity", "transitions", "content_knn"]
    cold = {}
    for name, report in evaluate_baselines(log, split, config, names=names).items():
        part = with_list_metrics(report, log, split, config).slices[-2]
        assert (part.name, part.low, part.high) == ("cold", 0, 0)
        cold[name] = part.metrics["hr@10"].mean
    assert cold["popularity"] == cold["transitions"] == 0
    assert cold["content_knn"] > 0.25
    bare = small_log(tmp_path / "bare")
    assert not has_content(bare, small_config(bare.path))
