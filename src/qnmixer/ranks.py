"""Which of several processes this one is, known before torch is."""

import os


def is_rank() -> bool:
    """Whether somebody (our launcher, torchrun, srun) has started this process as one of several."""
    by_slurm = "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return "TORCHELASTIC_RUN_ID" in os.environ or by_slurm


def rank() -> int:
    """Number of this process among all; 0 of a single one."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) if is_rank() else 0
