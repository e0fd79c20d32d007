import os
import signal
import subprocess
import sys
import time

import pytest

from qnmixer.runs.processes.process import by_srun, is_rank, rank, world_size

AGENT = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4"}
SBATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
SRUN = SBATCH | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5"}


@pytest.mark.parametrize(("environment", "found"), [
    ({}, (False, False, 0, 1)), (AGENT, (True, False, 3, 4)), (SBATCH, (False, False, 0, 1)),
    (SBATCH | AGENT, (True, False, 3, 4)), (SRUN, (True, True, 5, 8)), (SRUN | AGENT, (True, False, 3, 4)),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (False, False, 0, 1)),
], ids=["plain", "torchrun", "sbatch", "our launcher in sbatch", "srun", "torchrun under srun", "salloc"])  # fmt: skip
def test_who_is_a_rank(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], found: tuple[bool, bool, int, int]
) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_rank(), by_srun(), rank(), world_size()) == found


def begin(body: str) -> subprocess.Popen[str]:
    """A process that runs a body, after it has said that it is about to."""
    code = f"""
import ctypes, os, signal, sys, time
from qnmixer.errors import Stopped
from qnmixer.runs.processes import process
process._SECONDS_TO_LEAVE = process._SECONDS_TO_BE_SECOND = 0.3
{body}
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_hangs_outside_python_is_ended_all_the_same() -> None:
    """As in a collective that waits for a rank that is gone; here in a mutex that is locked twice."""
    process = begin("""
process.end_after_sigterm()
mutex = ctypes.create_string_buffer(256)
with process.stop_signals():
    print("ready", flush=True)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
""")
    assert said(process) == "ready"
    time.sleep(0.3)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_forks_end_with_their_rank() -> None:
    process = begin("""
process.end_with_parent()
child = os.fork()
if not child:
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
""")
    child = int(said(process))
    process.kill()
    deadline = time.monotonic() + 10
    while alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.communicate()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_parent_that_died_before_is_noticed() -> None:
    process = begin(f"process.end_with_parent({os.getppid()}); print('alive')")
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 1


@pytest.mark.parametrize(("ended", "line"), [("pass", "error: rank 0: NCCL error"), ("signal.raise_signal(15)", "")])
def test_a_rank_that_lost_contact_speaks_if_nobody_ends_it(ended: str, line: str) -> None:
    """As under srun, where no launcher shows an error of all ranks, such as a network that does not work."""
    process = begin(f"""
sys.stderr = sys.stdout
with process.stop_signals():
    process.defer_stop(True)
    {ended}
process.leave(RuntimeError("NCCL error: unhandled system error"), "NCCL error", say=True)
""")
    assert process.communicate(timeout=30)[0].strip() == line
    assert process.returncode == 1
