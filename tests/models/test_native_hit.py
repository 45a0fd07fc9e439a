"""The native hit: scores of the torch operations, whatever the sizes, times and batch mates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nestpipe.models.hstu import HSTUUnit
from nestpipe.models.native_hit import native_hit
from nestpipe.models.prefix_inference import CandidateBatch, Ranker
from nestpipe.models.ranking import build_ranking
from nestpipe.ops.native_library import Native, load
from tests.models.small_ranking import CONFIG, SCHEMA, build, candidates, history, ranker, select, table_rows

TOLERANCE = 3e-6  # scores are of order one; sums over the history are in another order than torch's
WIDE = {"dim": 8, "num_blocks": 2, "num_heads": 3, "qk_dim": 32, "v_dim": 48, "ffn_dim": 17, "head_dim": 33}


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if not isinstance(load(), Native):
        pytest.skip("no C++ compiler")


def wide(backbone: str, *, max_len: int = 300) -> Ranker:
    """Another shape, with a long history: several tiles of keys and candidates, and the last of each in part."""
    config = replace(CONFIG, backbone=backbone, features=(), **WIDE)
    model = build_ranking(config, SCHEMA, max_len=max_len, seed=2)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".position", ".time", "uvqk")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return Ranker(model, lambda lookups: table_rows(lookups, torch.float32), weights="step 1")


def both(own: Ranker, batch, wanted: CandidateBatch) -> tuple[torch.Tensor, torch.Tensor]:
    prefix, suffix = own.split(batch)
    kept = own.prefill(prefix)
    assert own._native is not None
    return own.score(kept, suffix, wanted), own.score(kept, suffix, wanted, native=False)


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
@pytest.mark.parametrize("timed", [True, False])
def test_native_equals_torch_with_features_and_empty_histories(backbone, timed):
    own, batch = ranker(build(backbone, torch.float32)), history([7, 1, 12, 0, 4])
    batch = batch if timed else replace(batch, times=None, query_times=None)
    native, oracle = both(own, batch, candidates([3, 2, 5, 1, 4]))
    assert torch.allclose(native, oracle, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
@pytest.mark.parametrize(("length", "count"), [(2, 1), (97, 16), (96, 65), (98, 33), (300, 130)])
def test_native_equals_torch_over_sizes(backbone, length, count):
    """Lengths around a tile of keys, counts around a tile of candidates, and the longest history the model takes."""
    native, oracle = both(wide(backbone), history([length], asked=1_000_060), candidates([count]))
    assert float(oracle.std()) > 0.01, "candidates must differ, or the tolerance says nothing"
    assert torch.allclose(native, oracle, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("asked", [0, 999_999, 1_000_003, 2**40])
def test_native_equals_torch_at_any_time(asked):
    """The first and the last bucket, a request before its events, and gaps within one bucket."""
    native, oracle = both(wide("hstu"), history([60], asked=asked), candidates([20]))
    assert torch.allclose(native, oracle, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("backbone", ["hstu", "fuxi"])
def test_scores_do_not_depend_on_mates_candidates_or_threads(backbone):
    own, counts = wide(backbone), [40, 7, 90]
    batch, wanted = history([70, 3, 120]), candidates(counts)
    prefix, suffix = own.split(batch)
    kept = own.prefill(prefix)
    together = own.score(kept, suffix, wanted)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(own.score(kept, suffix, wanted), together)
    finally:
        torch.set_num_threads(before)
    first = 0
    for user, count in enumerate(counts):
        _, alone = own.split(batch.select(torch.tensor([user])))
        places = torch.arange(first, first + count)
        found = own.score([kept[user]], alone, select(wanted, places, [count]))
        assert torch.equal(found, together[places]), "bitwise independent of batch mates"
        few = places.flip(0)[: count // 2 + 1]
        found = own.score([kept[user]], alone, select(wanted, few, [len(few)]))
        assert torch.equal(found, together[few]), "bitwise independent of other candidates and their order"
        first += count


def test_a_changed_weight_is_packed_again():
    own, batch, wanted = ranker(build("hstu", torch.float32)), history([9]), candidates([4])
    before, _ = both(own, batch, wanted)
    with torch.no_grad():
        own.model.tasks.down.bias.add_(1.0)
    native, oracle = both(own, batch, wanted)
    assert torch.allclose(native, oracle, rtol=0, atol=TOLERANCE)
    assert torch.allclose(native, before + 1.0, rtol=0, atol=TOLERANCE)


def test_who_computes_otherwise_takes_the_torch_path():
    class OwnUnit(HSTUUnit):
        pass

    assert native_hit(build(dtype=torch.float64)) is None
    model = build(dtype=torch.float32)
    assert native_hit(model) is not None
    model.units[0].__class__ = OwnUnit
    assert native_hit(model) is None
