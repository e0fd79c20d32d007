"""Estimate the memory that a training run needs, before it starts. No GPU is needed for it.

python -m qnmixer.plan                                        # the default run, by mode, precision, batch: 15 seconds
python -m qnmixer.plan experiment=paper_aapm device=V100-32   # takes all overrides of qnmixer.train
python -m qnmixer.plan memory=recompute format=json           # one object, for programs
"""

import qnmixer.needs_train  # noqa: F401

from qnmixer.commands import command
from qnmixer.memory.plan_config import PlanConfig


def plan(config: PlanConfig) -> None:
    """Print the plan of one run."""
    from qnmixer.memory.report import print_plan

    print_plan(config)


def main() -> None:
    """Run the command. It is also installed as `qnmixer-plan`, so that a shell can complete its keys."""
    command.run(plan, PlanConfig.parse, PlanConfig)


if __name__ == "__main__":
    main()
