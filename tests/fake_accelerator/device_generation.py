"""Trainings of models with semantic ids for the fake accelerator, as functions of a world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from nestpipe.distributed.process_group import World
from nestpipe.embedding.config import EmbeddingConfig
from nestpipe.generative.config import AlignedConfig
from nestpipe.generative.policy_model import GAINS, LEAVES, LOG_PROBS, build_policy_model
from nestpipe.jagged import Batch, Cursor, Jagged
from nestpipe.models.config import EncDecConfig
from nestpipe.models.encdec import build_encdec
from nestpipe.pipeline.build_state import build_state
from nestpipe.pipeline.channels import Channels
from nestpipe.pipeline.config import PipelineConfig
from tests.fake_accelerator.device_training import Content, DeviceCase, history_batches, trained
from tests.generative.known_trees import random_trie

_TRIE = random_trie(40, (5, 4, 4))
_TEXT = torch.linspace(-1, 1, 40 * 6).view(40, 6)
_PATHS = 3  # of each context
_SMALL: dict[str, Any] = {
    **{"dim": 8, "num_encoder": 1, "num_decoder": 1, "num_heads": 2, "dropout": 0.2},
    **{"num_scenarios": 3, "reasoning_dim": 6, "reasoning_dropout": 0.3, "past_scenarios": True},
}
_QUERIES: dict[str, Any] = {**_SMALL, "queries": "last", "igr_recent": 2, "igr_related": 2, "igr_dim": 4}
CONFIGS = {
    # Users, behaviours, prefix vectors and label smoothing over the legal codes: the recipe `beauty_sid`, and more.
    "codes": EncDecConfig(
        **_SMALL, user_rows=True, behaviour="kind", prefix_vectors=7, label_smoothing=0.1, placement="all"
    ),
    # Selected events and the query-to-item loss: the recipe `scenarios`.
    "selected": EncDecConfig(**_QUERIES, igr="query", q2i=0.5, softmax="full", igr_refresh_steps=2),
    "aligned": AlignedConfig(**_SMALL),
}


def train_generation(world: World, case: DeviceCase, kind: str) -> Content:
    """Trains a small model with semantic ids."""
    config = CONFIGS[kind]
    build: Any = build_policy_model if isinstance(config, AlignedConfig) else build_encdec
    state = build_state(
        build(config, _TRIE, max_len=8, seed=0, text=_TEXT),
        embedding=EmbeddingConfig(device_bytes=case.device_bytes),
        pipeline=PipelineConfig(micro_batches=2),
        channels=Channels.of(world),
    )
    return trained(state, case, _batches(world.rank))


def _batches(rank: int) -> Iterator[Batch]:
    """The histories of retrieval with users, behaviours, instructions and groups of drawn paths."""
    for number, batch in enumerate(history_batches(rank)):
        num, samples = batch.num_tokens, batch.num_samples
        assert batch.targets is not None
        places = torch.arange(num) * 3 % 40
        given = {
            "reasoning": Jagged(_TEXT[places], torch.arange(num + 1), 1),
            "trigger": Jagged.singles(_TRIE.items[places]),
            "scenario": Jagged.singles(places % 3),
            "kind": Jagged.singles(torch.where(places % 5 == 0, torch.nan, places % 3)),
        }
        drawn = torch.arange(samples * _PATHS) * (number + 5) % _TRIE.num_leaves
        groups = {
            LEAVES: drawn,
            LOG_PROBS: torch.linspace(-2, -1, samples * _PATHS * 3),
            GAINS: torch.linspace(-1, 1, samples * _PATHS),
        }
        yield replace(
            batch,
            cursor=Cursor(0, number),
            items=batch.items.with_values(_TRIE.items[batch.items.values]),
            targets=batch.targets.with_values(_TRIE.items[batch.targets.values]),
            event_features={name: given[name] for name in ("kind", "scenario")},
            target_features=given,
            sample_features={
                "user": Jagged.singles(batch.sample_ids % 7),
                **{name: _per_sample(values, samples) for name, values in groups.items()},
            },
        )


def _per_sample(values: torch.Tensor, num_samples: int) -> Jagged:
    size = len(values) // num_samples
    return Jagged(values, torch.arange(num_samples + 1) * size, size)
