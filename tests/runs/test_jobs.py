"""Which jobs run at the same time, and on which devices. A short program replaces the training."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from qnmixer.errors import ConfigError
from qnmixer.machine import threads_each
from qnmixer.runs.records import read_results
from qnmixer.runs.sweeps import Job, objective, run_jobs
from qnmixer.runs.trained_settings import digest_of_training
from qnmixer.settings.compose import compose
from qnmixer.settings.plugins import digests_of_code
from qnmixer.settings.run import parse

PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[-1].partition("=")[2])
begin = time.monotonic()
(folder / "begun").touch()
partners = folder.parent / f"partners_of_{{folder.name}}"  # jobs that must have begun before this one ends
names = partners.read_text().split() if partners.exists() else []
while not all((folder.parent / name / "begun").exists() for name in names) and time.monotonic() < begin + 60:
    time.sleep(0.01)
time.sleep(0.1)
(folder / "results.json").write_text(json.dumps({{
    "status": "done", "overrides": sys.argv[3:-1], "best": {{"val/psnr": 30.0}}, "seconds": 1,
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "threads": os.environ.get("OMP_NUM_THREADS"),
    "where": sys.argv[-1], "begin": begin, "end": time.monotonic(),
}}))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "program"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def job(folder: Path, number: int, *overrides: str) -> Job:
    return Job(folder / str(number), list(overrides), compose("train", list(overrides)))


def meet(*jobs: Job) -> None:
    """Let each of these jobs wait until the others have begun."""
    for job in jobs:
        job.folder.parent.mkdir(exist_ok=True)
        (job.folder.parent / f"partners_of_{job.folder.name}").write_text(" ".join(each.folder.name for each in jobs))


def overlap(first: Job, second: Job) -> bool:
    a, b = read_results(first.folder), read_results(second.folder)
    return a["begin"] < b["end"] and b["begin"] < a["end"]


@pytest.mark.usefixtures("program")
def test_every_job_has_gpus_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-7")
    ddp = ["strategy=ddp", "trainer.accelerator=cuda"]
    jobs = [
        job(tmp_path, 0, *ddp, "trainer.devices=2"),
        job(tmp_path, 1, "strategy=single"),
        job(tmp_path, 2, *ddp),  # all of them
        job(tmp_path, 3, *ddp, "trainer.devices=4"),  # more than there are
    ]
    meet(jobs[0], jobs[1])
    assert run_jobs(jobs, at_once=None, check=parse) == [30.0] * 4
    assert [read_results(it.folder)["gpus"] for it in jobs] == ["4,5", "GPU-7", "4,5,GPU-7", "4,5,GPU-7"]
    assert overlap(jobs[0], jobs[1])
    assert not any(overlap(jobs[2], other) for other in (*jobs[:2], jobs[3]))
    assert (jobs[0].folder / "output.log").exists()
    shared = [job(tmp_path / "shared", n, "trainer.accelerator=cuda", f"seed={n}") for n in range(4)]
    meet(*shared)  # else the fourth would take the GPU of one that has ended
    run_jobs(shared, at_once=4, check=parse)  # more jobs than GPUs share them
    assert [read_results(it.folder)["gpus"] for it in shared] == ["4", "5", "GPU-7", "4"]
    assert overlap(shared[0], shared[3])


@pytest.mark.usefixtures("program")
def test_jobs_on_a_cpu_run_one_at_a_time_by_default(tmp_path: Path) -> None:
    jobs = [job(tmp_path, n, "trainer.accelerator=cpu", f"seed={n}") for n in range(2)]
    run_jobs(jobs, at_once=None, check=parse)
    assert not overlap(*jobs)
    assert read_results(jobs[0].folder)["threads"] is None

    jobs = [job(tmp_path / "more", n, "trainer.accelerator=cpu", f"seed={n}") for n in range(2)]
    meet(*jobs)
    run_jobs(jobs, at_once=2, check=parse)
    assert overlap(*jobs)
    assert read_results(jobs[0].folder)["threads"] == str(threads_each(2))


@pytest.mark.usefixtures("program")
def test_finished_jobs_are_skipped_and_others_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cpu = "trainer.accelerator=cpu"
    jobs = [job(tmp_path, n, cpu, f"seed={n}") for n in range(3)]
    for it, status in zip(jobs, ("done", "interrupted"), strict=False):
        it.folder.mkdir()
        record = {"status": status, "overrides": it.overrides, "best": {"val/psnr": 20.0}, "seconds": 7}
        (it.folder / "results.json").write_text(json.dumps(record))
    assert run_jobs(jobs, at_once=None, check=parse) == [20.0, 30.0, 30.0]
    with pytest.raises(ConfigError, match=r"0 has another job \(.*seed=0\): give another hydra.sweep.dir"):
        run_jobs([job(tmp_path, 0, "seed=2")], at_once=None, check=parse)
    assert "job 0: already done, val/psnr 20 in 7 s" in capsys.readouterr().out
    assert read_results(jobs[1].folder)["where"] == f"hydra.run.dir={jobs[1].folder}"  # the resumed folder


@pytest.mark.usefixtures("program")
def test_a_job_that_is_done_with_other_settings_is_refused(tmp_path: Path) -> None:
    """As after an edit of a config file, with equal words. What changes no weight may differ."""
    words = ["trainer.accelerator=cpu", "seed=1"]
    (tmp_path / "0").mkdir()
    record = {"status": "done", "overrides": words, "best": {"val/psnr": 20.0}}
    for then, now, is_refused in (
        (["model.n_iterations=1"], ["model.n_iterations=3"], True),
        (["optimizer.lr=0.002"], ["optimizer.lr=0.001"], True),
        ([], ["seed=2"], True),
        (["optimizer.lr=1e-3"], ["optimizer.lr=0.001"], False),
        ([], ["data.num_workers=1", "logger=csv", "tags=[a]", "callbacks=lr_monitor"], False),
        (["strategy=ddp", "trainer.devices=2"], ["strategy=ddp"], False),  # before a machine has said how many
        (["finetune=pretrained"], [], False),  # as a run that was resumed
    ):
        settings = digest_of_training(parse(compose("train", [*words, *then])))
        (tmp_path / "0" / "results.json").write_text(json.dumps(record | {"settings": settings}))
        it = Job(tmp_path / "0", words, compose("train", [*words, *now]))
        if is_refused:
            with pytest.raises(ConfigError, match="0 was trained with other settings, so a config file has changed"):
                run_jobs([it], parse)
        else:
            assert run_jobs([it], parse) == [20.0]


@pytest.mark.usefixtures("program")
def test_a_job_that_is_done_with_other_code_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_net.py").write_text("import my_part")
    (tmp_path / "my_part.py").write_text("")
    it = job(tmp_path, 0, "trainer.accelerator=cpu")
    it.folder.mkdir()
    record = {"status": "done", "overrides": it.overrides, "code": digests_of_code(["my_net"])}
    (it.folder / "results.json").write_text(json.dumps(record))
    for text, words in (
        ("", "job 0: already done, "),
        ("x = 1", "job 0: already done, before your code has changed, "),
    ):
        (tmp_path / "my_part.py").write_text(text)
        run_jobs([it], parse)
        assert words in capsys.readouterr().out


def test_a_job_without_a_record_of_its_end_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    begins = 'for it; do :; done; echo \'{"status": "running"}\' > ${it#*=}/results.json'  # the last argument
    killed = "was killed by SIGKILL"
    for number, (body, error) in enumerate(
        {"kill -9 $$": killed, f"{begins}; kill -9 $$": killed, "exit 3": "ended with exit code 3"}.items()
    ):
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        it = job(tmp_path, number, "trainer.accelerator=cpu")
        assert run_jobs([it], at_once=None, check=parse) == [None]
        assert objective(it.folder) is None
        assert read_results(it.folder)["status"] == "failed"
        assert read_results(it.folder)["error"] == f"the job {error}: see output.log"


def test_a_bad_job_is_not_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    it = job(tmp_path, 0, "data.image_size=18", "trainer.accelerator=cpu")
    assert run_jobs([it], at_once=None, check=parse) == [None]
    assert read_results(it.folder)["error"].startswith("ConfigError: data.image_size=18 is not divisible by")
    assert "job 0: failed: data.image_size=18" in capsys.readouterr().out


@pytest.mark.usefixtures("program")
def test_a_job_that_is_queued_again_ends_by_the_handler_that_queues_it(tmp_path: Path) -> None:
    """As submitit has it: its own handler of SIGUSR2 leaves."""

    def queue_again(number: int, _: object) -> None:
        raise SystemExit(7)

    it = job(tmp_path, 0, "trainer.accelerator=cpu")

    def signal_when_begun() -> None:
        while not (it.folder / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, queue_again)
    threading.Thread(target=signal_when_begun, daemon=True).start()
    try:
        with pytest.raises(SystemExit, match="7"):
            run_jobs([it], parse)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert read_results(it.folder)["status"] == "interrupted"
