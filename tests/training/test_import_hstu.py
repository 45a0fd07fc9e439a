"""A checkpoint in the names and shapes of Meta's HSTU against its forward pass, written plainly with padding."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from nestpipe.errors import CheckpointError, ConfigError
from nestpipe.training.import_hstu import import_hstu
from nestpipe.training.loop import train
from nestpipe.training.run_folder import Run
from tests.small_runs import write_log

DIM, HEADS, KEYS, VALUES, BUCKETS, MAX_LEN = 8, 2, 3, 5, 128, 6
N = MAX_LEN + 11
HISTORIES = {user: [1 + (user + 7 * k) % 30 for k in range(3 + user % 9)] for user in range(30)}


def reference_weights(num_blocks=2):
    torch.manual_seed(3)
    weights = {
        "module._embedding_module._item_emb.weight": torch.randn(32, DIM),
        "module._input_features_preproc._pos_emb.weight": torch.randn(N, DIM),
    }
    for block in range(num_blocks):
        name = f"module._hstu._attention_layers.{block}."
        weights |= {
            f"{name}_uvqk": torch.randn(DIM, 2 * HEADS * (KEYS + VALUES)),
            f"{name}_rel_attn_bias._ts_w": torch.randn(BUCKETS + 1),
            f"{name}_rel_attn_bias._pos_w": torch.randn(2 * N - 1),
            f"{name}_o.weight": torch.randn(DIM, HEADS * VALUES),
            f"{name}_o.bias": torch.randn(DIM),
        }
    return weights


def reference_query(weights, items, times):
    """The vector after the last item; `times` has one more entry, the time of the request."""
    get = {name.removeprefix("module."): value.double() for name, value in weights.items()}
    length = len(items)
    rows = get["_embedding_module._item_emb.weight"][torch.tensor(items)]
    x = rows * math.sqrt(DIM) + get["_input_features_preproc._pos_emb.weight"][:length]
    moments = torch.tensor(times)
    gaps = (moments[1:, None] - moments[None, :-1]).abs().clamp(min=1)
    buckets = (gaps.float().log() / 0.301).long().clamp(0, BUCKETS)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    for block in range(2):
        name = f"_hstu._attention_layers.{block}."
        projected = F.silu(F.layer_norm(x, (DIM,), eps=1e-6) @ get[f"{name}_uvqk"])
        u, v, q, k = projected.split([HEADS * VALUES, HEADS * VALUES, HEADS * KEYS, HEADS * KEYS], dim=1)
        bias = get[f"{name}_rel_attn_bias._pos_w"][N - 1 - distance] + get[f"{name}_rel_attn_bias._ts_w"][buckets]
        q, k, v = (part.reshape(length, HEADS, -1) for part in (q, k, v))
        scores = F.silu(torch.einsum("nhd,mhd->hnm", q, k) + bias) / N * (distance >= 0)
        attended = torch.einsum("hnm,mhd->nhd", scores, v).reshape(length, -1)
        gated = u * F.layer_norm(attended, (HEADS * VALUES,), eps=1e-6)
        x = gated @ get[f"{name}_o.weight"].T + get[f"{name}_o.bias"] + x
    return F.normalize(x[-1], dim=0)


@pytest.fixture
def checkpoint(tmp_path):
    torch.save({"epoch": 3, "model_state_dict": reference_weights(), "optimizer_state_dict": {}}, tmp_path / "meta")
    write_log(tmp_path / "log", HISTORIES)
    return tmp_path / "meta"


def test_an_imported_run_ranks_as_the_reference_does(checkpoint, tmp_path):
    found = import_hstu(checkpoint, tmp_path / "log", tmp_path / "run", num_heads=HEADS)
    assert found.num_missing == 0
    run = Run.open(tmp_path / "run")
    assert (run.config.data.max_len, run.config.model.divisor) == (MAX_LEN, N)
    report = run.predictor().evaluate("test")
    weights = reference_weights()
    items = F.normalize(weights["module._embedding_module._item_emb.weight"][1:31].double(), dim=1)
    for user, rank in zip(report.user.tolist(), report.rank.tolist(), strict=True):
        *history, target = HISTORIES[user]
        own = history[-MAX_LEN:]
        times = [1_000_000 + 60 * place for place in range(len(HISTORIES[user]))][-len(own) - 1 :]
        scores = items @ reference_query(weights, own, times)
        scores[torch.tensor(own) - 1] = -2  # seen: those of the input
        assert rank == 1 + int((scores > scores[target - 1]).sum()), user


def test_an_imported_run_trains_further(checkpoint, tmp_path):
    config = import_hstu(checkpoint, tmp_path / "log", tmp_path / "run", num_heads=HEADS).run.config
    config = replace(config, train=replace(config.train, epochs=2))
    train(config, tmp_path / "run", resume=True, quiet=True)
    run = Run.open(tmp_path / "run")
    before, after = (run.load_model(step).model.state_dict() for step in (0, 2))
    assert all(bool((after[name] != value).any()) for name, value in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("module._hstu._attention_layers.0._uvqk"), "not a checkpoint of HSTU"),
        (lambda weights: weights.update({"module._hstu._attention_layers.0._x": torch.ones(1)}), "has no place for"),
    ],
)
def test_other_files_are_refused_by_name(checkpoint, tmp_path, change, message):
    weights = reference_weights()
    change(weights)
    torch.save({"model_state_dict": weights}, checkpoint)
    with pytest.raises(CheckpointError, match=message):
        import_hstu(checkpoint, tmp_path / "log", tmp_path / "run", num_heads=HEADS)
    assert not (tmp_path / "run").exists()


def test_shapes_that_do_not_fit_are_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="--num-heads 4 does not divide"):
        import_hstu(checkpoint, tmp_path / "log", tmp_path / "run", num_heads=4)
    with pytest.raises(ConfigError, match="between 1 and 17"):
        import_hstu(checkpoint, tmp_path / "log", tmp_path / "run", num_heads=HEADS, max_len=18)
    checkpoint.write_bytes(b"no torch file")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_hstu(checkpoint, tmp_path / "log", tmp_path / "run")
