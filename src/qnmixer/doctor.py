"""Check a machine and a configuration before training. Each check prints one line; a failed one says how to fix it.

python -m qnmixer.doctor trainer.devices=4 strategy=ddp   # takes all overrides of qnmixer.train
python -m qnmixer.doctor format=json                      # one object, for programs

The exit code is 0 if no check failed, 1 otherwise.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Literal

import qnmixer.needs_train  # noqa: F401

from hydra.core.hydra_config import HydraConfig

from qnmixer.commands import command
from qnmixer.errors import say
from qnmixer.settings.run import WithRunConfig


class DoctorConfig(WithRunConfig):
    """The checked config of one checkup."""

    command: ClassVar[str] = "doctor"

    format: Literal["table", "json"]


def doctor(config: DoctorConfig) -> None:
    """Run all checks, print each one when it is done, and exit with 1 if one failed."""
    from qnmixer.commands.checkup.checks import checkup

    checks = []
    for check in checkup(config.run, Path(HydraConfig.get().runtime.output_dir)):
        checks.append(check)
        if config.format == "table":
            say(check.line())
    ok = all(check.status != "FAIL" for check in checks)
    if config.format == "json":
        print(json.dumps({"checks": [asdict(check) for check in checks], "ok": ok}))
    if not ok:
        sys.exit(1)


def main() -> None:
    """Run the command. It is also installed as `qnmixer-doctor`, so that a shell can complete its keys."""
    command.run(doctor, DoctorConfig.parse, DoctorConfig)


if __name__ == "__main__":
    main()
