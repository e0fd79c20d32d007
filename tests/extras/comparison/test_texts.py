"""Texts of a sweep that somebody else made reach a terminal without what would rule it."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from qnmixer.errors import ConfigError
from qnmixer.extras.comparison import compare as comparing
from qnmixer.extras.comparison.methods import ComparedJob, ComparedMethod

from ...settings.test_texts import ODD, is_plain


@pytest.mark.parametrize("odd", [*ODD, "a\nerror: b"])
def test_compare_shows_a_job_of_somebody_elses_sweep_in_a_line(
    odd: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ComparedJob(Path(odd), {}, None)  # type: ignore[arg-type]  # it is shown, and then the test ends
    monkeypatch.setattr(comparing, "methods_of", lambda *_: [ComparedMethod(odd, [job], 1)])

    def end(*_: object) -> None:
        raise ConfigError("end")

    monkeypatch.setattr(comparing, "on_test", end)
    config = OmegaConf.create({"checkpoint": "best", "trust": [], "accelerator": "cpu", "seed": 1})
    with pytest.raises(ConfigError, match="end"):
        comparing.compare(config, [], [])  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert is_plain(told)
    assert told.count("\n") == 1
