"""Tests on the fake accelerator: skipped as a whole without a compiler; their ranks end with the run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_accelerator.build import NO_COMPILER, has_compiler
from tests.fake_accelerator.fake_ranks import close_fake_ranks


@pytest.fixture(scope="session", autouse=True)
def _device() -> Iterator[None]:
    if not has_compiler():
        pytest.skip(NO_COMPILER)
    yield
    close_fake_ranks()
