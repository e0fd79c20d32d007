import pytest
from hydra.errors import HydraException

from qnmixer.errors import ConfigError
from qnmixer.settings.error_lines import explain

from ..conftest import config_of


def refusal(*overrides: str) -> str:
    """The line that says why a run cannot have these words."""
    with pytest.raises((ConfigError, HydraException)) as error:
        config_of(*overrides)
    (line,) = str(explain(error.value, "train")).splitlines()
    assert len(line) < 250
    return line
