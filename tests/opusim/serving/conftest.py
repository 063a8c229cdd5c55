"""A laboratory with two users; tests are Alice."""

from collections.abc import Iterator

import pytest

from tests.support.served import Laboratory, new_laboratory


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    with pytest.MonkeyPatch.context() as patch:
        found = new_laboratory(tmp_path_factory.mktemp("lab"), "alice", "bob")
        found.become("alice", patch)
        yield found
