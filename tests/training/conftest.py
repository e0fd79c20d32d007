import pytest


@pytest.fixture(autouse=True)
def plans(plans_are_kept: None) -> None:
    """Most runs here are of one network."""
