"""Named runs. A recipe is a function that returns a configuration; the command line overrides single values.

nestpipe train ml1m_hstu --train.minutes 15 --model.num-blocks 4
"""

from __future__ import annotations

from collections.abc import Callable

from nestpipe.config import Config
from nestpipe.data.config import DataConfig
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.evaluate import EvalConfig
from nestpipe.models.config import HSTUConfig, LossConfig, SASRecConfig
from nestpipe.train_config import TrainConfig


def tiny() -> Config:
    """SASRec on generated data with a known optimum; about a minute on two cores."""
    return Config(
        data=DataConfig(path="data/tiny", max_len=64, batch_size=128),
        model=SASRecConfig(dim=64, num_blocks=1, hidden_dim=256, dropout=0.1),
        loss=LossConfig(kind="full", normalise=False, temperature=1.0),
        embedding=EmbeddingConfig(lr=4e-3),
        dense=DenseConfig(lr=2e-3),
        train=TrainConfig(epochs=20, save_steps=200),
    )


def ml1m_sasrec() -> Config:
    """SASRec with full softmax on MovieLens-1M, protocol of Meta's generative-recommenders."""
    return Config(
        data=_ml1m(),
        model=SASRecConfig(),
        loss=LossConfig(kind="full", normalise=False, temperature=1.0),
        train=TrainConfig(epochs=101),
        eval=EvalConfig(seen="input"),
    )


def ml1m_hstu() -> Config:
    """HSTU with sampled softmax on MovieLens-1M: 2 blocks, 1 head, 128 negatives per event."""
    return Config(
        data=_ml1m(),
        model=HSTUConfig(),
        loss=LossConfig(),
        train=TrainConfig(epochs=101),
        eval=EvalConfig(seen="input"),
    )


def ml1m_hstu_large() -> Config:
    """HSTU-large on MovieLens-1M: 8 blocks, 2 heads."""
    return Config(
        data=_ml1m(),
        model=HSTUConfig(num_blocks=8, num_heads=2, qk_dim=25, v_dim=25),
        loss=LossConfig(),
        train=TrainConfig(epochs=101),
        eval=EvalConfig(seen="input"),
    )


def beauty_sasrec() -> Config:
    """SASRec with full softmax on Amazon Beauty (5-core, order only)."""
    return Config(
        data=DataConfig(path="data/beauty", max_len=50, batch_size=256, validation=True),
        model=SASRecConfig(dim=64, num_heads=2, dropout=0.5),
        loss=LossConfig(kind="full", normalise=False, temperature=1.0),
        train=TrainConfig(epochs=200, patience=10, eval_epochs=2),
    )


def _ml1m() -> DataConfig:
    return DataConfig(path="data/ml1m", max_len=200, batch_size=128)


RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe for recipe in (tiny, ml1m_sasrec, ml1m_hstu, ml1m_hstu_large, beauty_sasrec)
}
