"""Recipes: functions that return the configuration of a run. Flags override single settings.

nestpipe train ml1m_hstu --train.minutes 15 --model.num-blocks 4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nestpipe.config import Config
from nestpipe.data.config import CLICKS_SPLIT_TIME, DataConfig
from nestpipe.embedding.config import DenseConfig, EmbeddingConfig
from nestpipe.eval.config import EvalConfig
from nestpipe.models.config import (
    DCNConfig,
    EncDecConfig,
    FuXiConfig,
    HSTUConfig,
    LossConfig,
    RankingConfig,
    SASRecConfig,
)
from nestpipe.training.config import TrainConfig


def tiny() -> Config:
    """SASRec on synthetic data with a known optimum; about a minute on two cores."""
    return Config(
        data=DataConfig(path="data/tiny", max_len=64, batch_size=128),
        model=SASRecConfig(dim=64, num_blocks=1, hidden_dim=256, dropout=0.1),
        loss=LossConfig(kind="full", normalise=False, temperature=1.0),
        embedding=EmbeddingConfig(lr=4e-3),
        dense=DenseConfig(lr=2e-3),
        train=TrainConfig(epochs=20, save_steps=200),
    )


def sasrec() -> Config:
    """SASRec for any log of users, items and times: full softmax, stops when validation no longer improves."""
    return Config(
        data=DataConfig(path="data/log", max_len=64, batch_size=128, validation=True),
        model=SASRecConfig(dim=64, num_blocks=2, hidden_dim=256, dropout=0.2),
        loss=LossConfig(kind="full", normalise=False, temperature=1.0),
        embedding=EmbeddingConfig(lr=4e-3),
        dense=DenseConfig(lr=2e-3),
        train=TrainConfig(epochs=50, patience=5),
    )


def hstu() -> Config:
    """HSTU for any log: the recipe `sasrec` with attention that reads the times of events."""
    return replace(sasrec(), model=HSTUConfig(dim=64))


def fuxi() -> Config:
    """FuXi for any log: the recipe `sasrec` with channels for time, position and content."""
    return replace(sasrec(), model=FuXiConfig(dim=64))


def ranker() -> Config:
    """A ranker for any log that has labels: predicts all of them for candidates, from the history."""
    return Config(
        data=DataConfig(path="data/log", max_len=128, truncate_block=64, windows="all", batch_size=32),
        model=RankingConfig(dim=32, num_blocks=1, num_heads=1),
        embedding=EmbeddingConfig(lr=1e-2),
        dense=DenseConfig(lr=3e-3),
        train=TrainConfig(epochs=12, decay_epochs=12, save_steps=1000),
    )


def dcn() -> Config:
    """DCN-v2 for any log that has labels: crosses user, item and further features of single events."""
    return Config(
        data=DataConfig(path="data/log", max_len=100, truncate_block=100, windows="all", batch_tokens=2048),
        model=DCNConfig(features=("user", "item")),
        embedding=EmbeddingConfig(lr=2e-3),
        train=TrainConfig(epochs=5, save_steps=1000),
    )


def generative() -> Config:
    """Generative retrieval for any log with item texts; needs ids from 'nestpipe sid build'."""
    return Config(
        data=DataConfig(path="data/log", max_len=64, batch_size=64, validation=True),
        model=EncDecConfig(
            ids="data/log-ids",
            dim=64,
            num_encoder=1,
            num_decoder=1,
            num_heads=2,
            hidden_dim=256,
            placement="sum",
            prefix_vectors=4096,
            beam=30,
        ),
        embedding=EmbeddingConfig(lr=4e-3),
        dense=DenseConfig(lr=2e-3),
        train=TrainConfig(epochs=30, patience=5, warmup_steps=20),
        eval=EvalConfig(ks=(1, 5, 10, 20)),
    )


def ml1m_sasrec() -> Config:
    """Our SASRec on MovieLens-1M: pre-norm blocks, full softmax, no cosine; not the block or the loss that Meta publishes."""
    return Config(
        data=_ml1m(),
        model=SASRecConfig(),
        loss=LossConfig(kind="full", normalise=False, temperature=1.0),
        train=TrainConfig(epochs=101),
        eval=EvalConfig(seen="input"),
    )


def ml1m_sasrec_meta() -> Config:
    """Meta's SASRec on MovieLens-1M: its block, cosine scores, temperature 0.05, 128 negatives per event."""
    return replace(ml1m_hstu(), model=SASRecConfig(block="meta"))


def ml1m_esasrec() -> Config:
    """eSASRec on MovieLens-1M: gated LiGR blocks and sampled softmax with 256 negatives per event."""
    return replace(
        ml1m_hstu(),
        model=SASRecConfig(dim=64, num_heads=2, hidden_dim=256, block="ligr"),
        loss=LossConfig(num_negatives=256),
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


def ml1m_hstu_meta() -> Config:
    """Meta's HSTU on MovieLens-1M: `ml1m_hstu` with Meta's divisor, initial positions, and Adam on the whole table."""
    base = ml1m_hstu()
    # 211: 200 events, 10 places for output and one more. 0.0875: Xavier normal of 211 positions of width 50.
    model = HSTUConfig(divisor=211, position_std=0.0875)
    return replace(base, model=model, embedding=replace(base.embedding, optimizer="adam"))


def ml1m_hstu_large() -> Config:
    """HSTU-large on MovieLens-1M: 8 blocks, 2 heads."""
    return replace(ml1m_hstu(), model=HSTUConfig(num_blocks=8, num_heads=2, qk_dim=25, v_dim=25))


def beauty_sasrec() -> Config:
    """SASRec with full softmax on Amazon Beauty (5-core, order only)."""
    return Config(
        data=DataConfig(path="data/beauty", max_len=50, batch_size=256, validation=True),
        model=SASRecConfig(dim=64, num_heads=2, dropout=0.5),
        loss=LossConfig(kind="full", normalise=False, temperature=1.0),
        train=TrainConfig(epochs=200, patience=10, eval_epochs=2),
    )


def beauty_esasrec() -> Config:
    """eSASRec on Amazon Beauty: gated LiGR blocks and full softmax over cosines, chosen on validation."""
    sasrec = beauty_sasrec()
    return replace(
        sasrec,
        model=SASRecConfig(dim=64, num_heads=2, hidden_dim=256, dropout=0.5, block="ligr"),
        loss=LossConfig(kind="full", normalise=True, temperature=0.07),
        train=replace(sasrec.train, epochs=60, patience=8),
    )


def beauty_sid() -> Config:
    """Generative retrieval on Amazon Beauty: encoder-decoder over semantic ids; needs ids from 'nestpipe sid build'."""
    return Config(
        data=DataConfig(path="data/beauty", max_len=50, batch_size=128, validation=True),
        # The log has no scenarios, triggers or reasoning, so the instruction needs no token of its own.
        model=EncDecConfig(
            ids="data/beauty-ids",
            dim=64,
            num_decoder=1,
            num_heads=2,
            hidden_dim=256,
            dropout=0.3,
            placement="sum",
            prefix_vectors=32768,
            tied=True,
            beam=30,
        ),
        embedding=EmbeddingConfig(lr=4e-3),
        dense=DenseConfig(lr=2e-3),
        train=TrainConfig(epochs=15, eval_epochs=5, warmup_steps=100, decay_epochs=15),
        eval=EvalConfig(ks=(1, 5, 10, 20)),
    )


def scenarios() -> Config:
    """Generative retrieval, conditioned on the scenario, trigger item and reasoning vector of each event in the log."""
    return Config(
        data=DataConfig(path="data/scenarios", max_len=32, batch_size=32),
        model=EncDecConfig(
            ids="data/scenarios-ids",
            dim=64,
            num_encoder=1,
            num_decoder=1,
            num_heads=2,
            hidden_dim=128,
            num_scenarios=3,
            reasoning_dim=512,
            prefix_vectors=4096,
            beam=32,
        ),
        embedding=EmbeddingConfig(lr=4e-3),
        dense=DenseConfig(lr=2e-3),
        train=TrainConfig(epochs=15, save_steps=1000),
        eval=EvalConfig(ks=(1, 5, 10, 20)),
    )


def ml1m_fuxi_alpha() -> Config:
    """FuXi-alpha on MovieLens-1M as published, time by buckets, with the settings of `ml1m_hstu`: 2 blocks, 1 head, 128 negatives per event."""
    return replace(ml1m_hstu(), model=FuXiConfig(time="buckets", feed_dropout="input"))


def ml1m_fuxi_hybrid() -> Config:
    """Our hybrid on MovieLens-1M: FuXi-alpha with the time channel of FuXi-gamma, with the settings of `ml1m_hstu`."""
    return replace(ml1m_hstu(), model=FuXiConfig(time="decay"))


@dataclass(frozen=True, slots=True)
class RecipeSize:
    """Model size: width, blocks, heads, longest history and batch size."""

    dim: int
    num_blocks: int
    num_heads: int
    max_len: int
    batch_size: int


SIZES = {
    "tiny": RecipeSize(dim=64, num_blocks=2, num_heads=2, max_len=200, batch_size=128),
    "small": RecipeSize(dim=128, num_blocks=4, num_heads=4, max_len=512, batch_size=64),
    "medium": RecipeSize(dim=256, num_blocks=8, num_heads=4, max_len=1024, batch_size=32),
    "large": RecipeSize(dim=512, num_blocks=12, num_heads=8, max_len=2048, batch_size=16),
    "long": RecipeSize(dim=1024, num_blocks=16, num_heads=8, max_len=2048, batch_size=8),
}


def hstu_tiny() -> Config:
    """HSTU on KuaiRand, size tiny: 55k dense parameters."""
    return _hstu(SIZES["tiny"])


def fuxi_tiny() -> Config:
    """FuXi-alpha with the time channel of FuXi-gamma on KuaiRand, size tiny: 112k dense parameters."""
    return _fuxi(SIZES["tiny"])


def hstu_small() -> Config:
    """HSTU on KuaiRand, size small: 0.4M dense parameters."""
    return _hstu(SIZES["small"])


def fuxi_small() -> Config:
    """FuXi-alpha with the time channel of FuXi-gamma on KuaiRand, size small: 0.9M dense parameters."""
    return _fuxi(SIZES["small"])


def hstu_medium() -> Config:
    """HSTU on KuaiRand, size medium: 2.9M dense parameters."""
    return _hstu(SIZES["medium"])


def fuxi_medium() -> Config:
    """FuXi-alpha with the time channel of FuXi-gamma on KuaiRand, size medium: 6.6M dense parameters."""
    return _fuxi(SIZES["medium"])


def hstu_large() -> Config:
    """HSTU on KuaiRand, size large: 17M dense parameters."""
    return _hstu(SIZES["large"])


def fuxi_large() -> Config:
    """FuXi-alpha with the time channel of FuXi-gamma on KuaiRand, size large: 39M dense parameters."""
    return _fuxi(SIZES["large"])


def hstu_long() -> Config:
    """HSTU on KuaiRand, size long: 86M dense parameters."""
    return _hstu(SIZES["long"])


def fuxi_long() -> Config:
    """FuXi-alpha with the time channel of FuXi-gamma on KuaiRand, size long: 0.2B dense parameters."""
    return _fuxi(SIZES["long"])


def _hstu(size: RecipeSize) -> Config:
    width = size.dim // size.num_heads
    model = HSTUConfig(dim=size.dim, num_blocks=size.num_blocks, num_heads=size.num_heads, qk_dim=width, v_dim=width)
    return _kuairand(model, size)


def _fuxi(size: RecipeSize) -> Config:
    width = size.dim // size.num_heads
    model = FuXiConfig(dim=size.dim, num_blocks=size.num_blocks, num_heads=size.num_heads, qk_dim=width, v_dim=width)
    return _kuairand(model, size)


def _kuairand(model: HSTUConfig | FuXiConfig, size: RecipeSize) -> Config:
    return Config(
        data=DataConfig(path="data/kuairand", max_len=size.max_len, batch_size=size.batch_size),
        model=model,
        train=TrainConfig(epochs=10),
    )


def ml1m_ranking() -> Config:
    """Ranking on MovieLens-1M with a time split; labels: rating >= 4, rating = 5, stars; every training event is a target."""
    return Config(
        data=DataConfig(
            path="data/ml1m",
            split="time",
            split_time="2000-12-01",
            max_len=128,
            truncate_block=64,
            windows="all",
            batch_size=32,
        ),
        model=RankingConfig(
            dim=32, num_blocks=1, num_heads=1, features=("genres", "year", "gender", "age", "occupation")
        ),
        embedding=EmbeddingConfig(lr=1e-2),
        dense=DenseConfig(lr=3e-3),
        train=TrainConfig(epochs=12, decay_epochs=12, save_steps=1000),
    )


def clicks_dcn() -> Config:
    """DCN-v2 on a synthetic click log with a known best AUC; about a minute on two cores."""
    return Config(
        data=DataConfig(
            path="data/clicks",
            split="time",
            split_time=str(CLICKS_SPLIT_TIME),
            max_len=100,
            truncate_block=100,
            windows="all",
            batch_tokens=2048,
        ),
        model=DCNConfig(features=("item", "device", "hour", "category", "tags", "price", "segment")),
        embedding=EmbeddingConfig(lr=2e-3),
        train=TrainConfig(epochs=5, save_steps=1000),
    )


def _ml1m() -> DataConfig:
    return DataConfig(path="data/ml1m", max_len=200, batch_size=128)


RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (
        tiny,
        sasrec,
        hstu,
        fuxi,
        ranker,
        dcn,
        generative,
        ml1m_sasrec,
        ml1m_sasrec_meta,
        ml1m_esasrec,
        ml1m_hstu,
        ml1m_hstu_meta,
        ml1m_hstu_large,
        ml1m_fuxi_alpha,
        ml1m_fuxi_hybrid,
        ml1m_ranking,
        clicks_dcn,
        beauty_sasrec,
        beauty_esasrec,
        beauty_sid,
        scenarios,
        hstu_tiny,
        hstu_small,
        hstu_medium,
        hstu_large,
        hstu_long,
        fuxi_tiny,
        fuxi_small,
        fuxi_medium,
        fuxi_large,
        fuxi_long,
    )
}
