import pytest

from normalnorm.checks.layers.sync import a_group_of_one


@pytest.fixture
def exchanging():
    "Synchronized layers go through their exchanges, in a group of one process."
    with a_group_of_one():
        yield
