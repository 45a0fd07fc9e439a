"""TorchRec's side of train_step.py: a row-wise sharded EmbeddingCollection with exact AdaGrad, dense part by DDP.

Runs in the peers' environment. Its best working configuration on CPU with gloo: TrainPipelineSparseDist, or the plain
TrainPipelineBase. Fused, prefetching and semi-synchronous pipelines and index dedup do not run there (torchrec 1.8.0).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.distributed.types import ShardingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.streamable import Pipelineable


@dataclass
class PeerBatch(Pipelineable):
    """Ids and whatever the dense part needs."""

    ids: KeyedJaggedTensor
    batch: Any

    def to(self, device: torch.device, non_blocking: bool = False) -> PeerBatch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass

    def pin_memory(self) -> PeerBatch:
        return self


class PeerModel(nn.Module):
    """The same dense part behind TorchRec's embeddings."""

    def __init__(self, embeddings: EmbeddingCollection, dense: nn.Module, loss: Callable[..., Tensor]):
        super().__init__()
        self.embeddings, self.dense = embeddings, dense
        self._loss = loss

    def forward(self, batch: PeerBatch) -> tuple[Tensor, Tensor]:
        vectors = self.embeddings(batch.ids)["item"].values()
        loss = self._loss(self.dense, vectors, batch.batch) / batch.batch.num_samples
        return loss, loss.detach()


def peer_steps(
    dense: nn.Module,
    loss: Callable[..., Tensor],
    batches: Callable[[], Iterator[Any]],
    *,
    num_rows: int,
    dim: int,
    lr: float,
    pipelined: bool,
) -> Callable[[int], None]:
    """A function that trains so many steps."""
    world_size = dist.get_world_size()
    table = EmbeddingConfig(name="item", embedding_dim=dim, num_embeddings=num_rows, feature_names=["item"])
    embeddings = EmbeddingCollection(tables=[table], device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, embeddings.parameters(), {"lr": lr, "eps": 1e-8})
    model = PeerModel(embeddings, dense, loss)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"),
        constraints={"item": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])},
    )
    sharders = [EmbeddingCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    parameters = [parameter for name, parameter in sharded.named_parameters() if name.startswith("dense.")]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    kind = TrainPipelineSparseDist if pipelined else TrainPipelineBase
    pipeline = kind(sharded, optimizer, torch.device("cpu"))

    def stream() -> Iterator[PeerBatch]:
        for batch in batches():
            lengths = batch.items.lengths().to(torch.int32)
            yield PeerBatch(KeyedJaggedTensor(keys=["item"], values=batch.items.values, lengths=lengths), batch)

    endless = stream()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            pipeline.progress(endless)

    return run
