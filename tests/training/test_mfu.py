"""The arithmetic that utilisation is measured by, against torch's own counter and against sums written out."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import FuXiConfig, HSTUConfig, LossConfig, ModelConfig, SASRecConfig
from nestpipe.models.retrieval import build_retrieval
from nestpipe.training import mfu
from nestpipe.training.mfu import Utilisation, measure_peak, work_of

CONFIGS = [
    SASRecConfig(dim=24, num_heads=3, hidden_dim=40, dropout=0.0),
    SASRecConfig(dim=24, num_heads=3, hidden_dim=40, dropout=0.0, block="ligr"),
    HSTUConfig(dim=24, num_heads=2, qk_dim=5, v_dim=7, dropout=0.0),
    FuXiConfig(dim=24, num_heads=2, qk_dim=5, v_dim=7, hidden_dim=11, dropout=0.0),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_linear_work_is_what_torch_counts(config: ModelConfig) -> None:
    """Products with weights in forward and backward; the attention op is opaque to torch's counter."""
    lengths = [5, 9, 1]
    batch = Batch(
        cursor=Cursor(0, 0), sample_ids=torch.arange(3), items=Jagged.from_rows([list(range(n)) for n in lengths])
    )
    backbone = build_retrieval(config, LossConfig(), catalogue=torch.arange(9), max_len=9, seed=0).backbone
    vectors = torch.ones(15, 24, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        backbone(vectors, batch, None).sum().backward()
    linear = (
        work_of(config).effective(torch.tensor(lengths))
        - work_of(config).effective(torch.zeros(3))
        - attention(config, lengths)
    )
    assert counter.get_total_flops() == pytest.approx(linear)


def attention(config: ModelConfig, lengths: list[int]) -> float:
    """2 FLOP per multiply-add, causal pairs; scores: forward, again, d_q, d_k; values: forward, d_weights, d_v."""
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    if isinstance(config, SASRecConfig):
        return 2 * 2 * pairs * (4 + 3) * config.dim
    channels = 3 if isinstance(config, FuXiConfig) else 1
    return 2 * 2 * pairs * config.num_heads * (4 * config.qk_dim + 3 * channels * config.v_dim)


def test_recomputed_attention_counts_three_and_a_half_times_forward() -> None:
    work = work_of(HSTUConfig(dim=8, num_heads=1, qk_dim=8, v_dim=8))
    one = torch.tensor([1])
    assert work.effective(one) - 3 * work.per_token == 3.5 * (work.per_score + work.per_value)


def test_padding_is_work_by_the_published_convention_only() -> None:
    work = work_of(CONFIGS[1])
    assert work.padded(2, 100) == 2 * work.padded(1, 100)
    assert work.effective(torch.tensor([100, 0])) < work.padded(2, 100) / 2


def test_utilisation_is_work_over_time_over_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    times, lengths = iter([10.0, 10.5, 11.5]), torch.tensor([30, 2])
    monkeypatch.setattr(mfu, "measure_peak", lambda: 1e9)
    used = Utilisation(CONFIGS[1], clock=lambda: next(times))
    work = work_of(CONFIGS[1]).effective(lengths)
    used.add(lengths)
    assert used.take() == {"mfu_effective": pytest.approx(work / 0.5e9)}
    used.add(lengths)
    used.add(lengths)
    assert used.take() == {"mfu_effective": pytest.approx(2 * work / 1e9)}


def test_the_peak_is_measured() -> None:
    assert measure_peak(seconds=0.01) > 1e8
