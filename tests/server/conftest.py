"""The server that most tests of a file share."""

import pytest
from http_servers import Served, tiny_file


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_file(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def served(path):
    with Served(path) as made:
        yield made
