"""Text of the commands of extras is taken as typed, as that of the others."""

import pytest

from qnmixer.settings.options import CONF
from qnmixer.settings.typed_text import with_texts

from ..schemas import SCHEMAS


@pytest.mark.parametrize(("command", "keys"), [
    ("robustness", "run noises logger.wandb.entity"),
    ("compare", "sweep output"),
    ("export", "run output"),
    ("calibrate", "input output air"),
])  # fmt: skip
def test_every_key_of_text(command: str, keys: str) -> None:
    texts = with_texts([f"{key}=1.10" for key in keys.split()], SCHEMAS[command])
    assert texts == [f'{key}="1.10"' for key in keys.split()]


def test_every_command_has_a_class() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} - {"wandb_sweep"} == SCHEMAS.keys()
