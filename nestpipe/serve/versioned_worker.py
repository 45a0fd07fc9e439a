"""A worker whose models can be switched while it serves: every request is answered by one model, which its answer names."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

from nestpipe.rng import GOLDEN, hash_text, mix64
from nestpipe.serve.config import EngineConfig
from nestpipe.serve.user_history import UserHistories
from nestpipe.serve.worker_thread import WorkerThread


class NamedModel(Protocol):
    """A model in use; its name says which weights it has."""

    @property
    def name(self) -> str: ...


Served = TypeVar("Served", bound=NamedModel)


@dataclass(frozen=True, slots=True)
class ModelVersions(Generic[Served]):
    """The model of new requests, and of a comparison the model for a share of the users."""

    main: Served
    other: Served | None = None
    share: float = 0.0

    def of(self, user: int | None) -> Served:
        """The same for a user on every instance, and independent of which instance owns the user."""
        if self.other is None or user is None:
            return self.main
        place = mix64(mix64(user + GOLDEN) ^ hash_text("two models")) / 2**64
        return self.other if place < self.share else self.main


class VersionedWorker(WorkerThread, Generic[Served]):
    """Answers new requests with its current models. `models` has old ones too, as long as something refers to them."""

    def __init__(
        self,
        name: str,
        served: Served,
        histories: UserHistories,
        *,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ):
        super().__init__(name, histories, config=config, clock=clock)
        self.versions, self.models = ModelVersions(served), WeakSet([served])

    def use(self, versions: ModelVersions[Served]) -> None:
        """Switches models for new requests; requests in flight keep theirs. From any thread."""
        self.models = WeakSet([*self.models, versions.main, versions.other or versions.main])
        self.versions = versions

    def describe_versions(self) -> dict[str, Any]:
        """The models of new requests, for /state."""
        main, other = self.versions.main, self.versions.other
        return {"model": main.name, "compared": other.name if other else None, "share": self.versions.share}
