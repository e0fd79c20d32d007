import json
import math
import random
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from qnmixer.errors import PluginError, Stopped
from qnmixer.fit import fit
from qnmixer.module import ReconstructionModule
from qnmixer.runs.run import Run
from qnmixer.training.checkpointing import AtomicCheckpointIO, Checkpointing

from ..conftest import assert_equal, last_checkpoint, rows_without_times, tiny_config

# Four steps an epoch with n_train=8; validations after 3 and 6 of 7 steps, and at the end.
RUN = [
    "trainer.max_steps=7", "trainer.val_every_n_steps=3", "test_after_training=false", "noise=field", "callbacks=none",
]  # fmt: skip


class FromFinaliser:
    """A signal while an object is thrown away, where Python drops every exception; drawing pictures throws many."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


MEASURE = ReconstructionModule.measure


def signal_at(
    monkeypatch: pytest.MonkeyPatch, stream: str, step: int, number: int = signal.SIGTERM, dropped: bool = True
) -> None:
    """One signal in the middle of a step, or of a validation; and training draws from all random generators.

    `dropped`: in a step Python drops what the signal raises.
    """
    sent: list[int] = []

    def measure(self: ReconstructionModule, batch: Any, of: str) -> torch.Tensor:
        y = MEASURE(self, batch, of)  # type: ignore[arg-type]
        if (of, self.global_step) == (stream, step) and not sent:
            sent.append(step)
            if of == "train" and dropped:
                FromFinaliser(number)
            else:
                signal.raise_signal(number)
        if of == "train":
            y = torch.nn.functional.dropout(y, 0.1) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())  # noqa: NPY002
        return y

    monkeypatch.setattr(ReconstructionModule, "measure", measure)


@pytest.mark.parametrize(("stop", "kept_at", "more"), [
    (("train", 4, signal.SIGUSR1), 5, ["trainer.accumulate_grad_batches=2", "data.batch_size=1"]),
    (("val", 3, signal.SIGTERM), 3, ["callbacks=ema", "callbacks.ema.decay=0.5"]),
    # At the end of an epoch, between two rows, and after training.
    (("val", 4, signal.SIGTERM), 4, ["trainer.val_every_n_steps=null", "trainer.log_every_n_steps=3"]),
    (("val", 7, signal.SIGTERM), 7, []),
])  # fmt: skip
def test_a_stopped_run_resumes_as_if_it_had_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: Any, kept_at: int, more: list[str]
) -> None:
    before = [signal.getsignal(it) for it in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    signal_at(monkeypatch, "none", 0)
    fit(tiny_config(*RUN, *more), Run(tmp_path / "whole"))
    signal_at(monkeypatch, *stop)
    folder = tmp_path / "stopped"
    with pytest.raises(Stopped, match=f"interrupted after step {kept_at}, to resume: .*resume=") as stopped:
        fit(tiny_config(*RUN, *more), Run(folder))
    assert stopped.value.code == 143
    assert last_checkpoint(folder)["global_step"] == kept_at
    assert json.loads((folder / "results.json").read_text())["status"] == "interrupted"
    fit(tiny_config(*RUN, *more, f"resume={folder}"), Run(folder, resume=str(folder)))
    ours, theirs = last_checkpoint(folder), last_checkpoint(tmp_path / "whole")
    assert ours["global_step"] == 7
    for part in {"state_dict", "trained_weights"} & theirs.keys():  # the mean of callbacks=ema, and the weights
        assert_equal(ours[part], theirs[part])
    assert ("trained_weights" in theirs) == ("callbacks=ema" in more)
    for key in ("best", "random"):
        assert_equal(ours["qnmixer_run"][key], theirs["qnmixer_run"][key])
    assert rows_without_times(folder) == rows_without_times(tmp_path / "whole")
    record = json.loads((folder / "results.json").read_text())
    assert record["status"] == "done"
    assert [entry["step"] for entry in record["resumed"]] == [kept_at]
    assert [signal.getsignal(it) for it in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_run_that_was_stopped_after_training_comes_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its steps and its last validation are kept: there is nothing left to train."""
    overrides = [*RUN, "test_after_training=true", "trainer.max_steps=6"]

    def stop(*_: Any) -> None:
        raise Stopped(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr("qnmixer.training.steps.evaluate", stop)
        with pytest.raises(Stopped):
            fit(tiny_config(*overrides), Run(tmp_path))
    path = tmp_path / "results.json"
    before = json.loads(path.read_text())
    fit(tiny_config(*overrides, f"resume={tmp_path}"), Run(tmp_path, resume=str(tmp_path)))
    record = json.loads(path.read_text())
    assert (record["status"], record["steps"]) == ("done", 6)
    assert record["memory"]["measured_step"] == before["memory"]["measured_step"] is not None
    assert record["test"]["QN-Mixer"]["psnr"] > 0
    last = rows_without_times(tmp_path)[-1]
    assert (last["step"], float(last["samples"])) == ("6", 12)  # epochs of 8
    assert float(last["test/psnr"]) == pytest.approx(record["test"]["QN-Mixer"]["psnr"])


@pytest.mark.parametrize(
    ("mode", "scores", "best"), [("max", [1, 3, 2, math.nan], [0, 1]), ("min", [math.nan, 3, 1, 2], [0, 1, 2])]
)
def test_the_best_is_by_its_mode_and_never_nan(tmp_path: Path, mode: str, scores: list[float], best: list[int]) -> None:
    """A NaN at the first validation is the best until another value comes, so a run always has a best.ckpt."""
    checkpointing, saved = Checkpointing(tmp_path, "val/x", None, mode), list[tuple[str, str]]()
    strategy = SimpleNamespace(reduce_boolean_decision=bool)
    trainer: Any = SimpleNamespace(strategy=strategy, callback_metrics={}, fast_dev_run=False, is_global_zero=True)
    trainer.lightning_module = None
    (tmp_path / "checkpoints").mkdir()
    trainer.save_checkpoint = lambda path, **_: path.write_text(str(trainer.global_step))
    for trainer.global_step, score in enumerate(scores):
        trainer.callback_metrics["val/x"] = torch.tensor(score)
        checkpointing.save_validated(trainer)
        saved.append(tuple((tmp_path / "checkpoints" / f"{name}.ckpt").read_text() for name in ("best", "last")))
    assert sorted({int(step) for step, _ in saved}) == best
    assert [int(step) for _, step in saved] == [0, 1, 2, 3]


def test_a_signal_to_one_rank_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(asked: torch.Tensor, op: Any, group: object) -> None:  # with a rank that has a signal
        asked.copy_(torch.maximum(asked, torch.ones(())) if op == dist.ReduceOp.MAX else asked)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda backend: object())
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    trainer: Any = SimpleNamespace(global_step=0, lr_scheduler_configs=[])
    module: Any = None
    checkpointing = Checkpointing(tmp_path, "val/psnr", None, "max")
    checkpointing.on_fit_start(trainer, module)
    with pytest.raises(Stopped):
        checkpointing.on_train_end(trainer, module)


@pytest.mark.parametrize(("compiles", "step", "kept_at"), [(True, 0, None), (True, 2, 3), (False, 0, 1)])
def test_a_first_step_that_compiles_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles: bool, step: int, kept_at: Any
) -> None:
    """It takes minutes on a CPU. Every other step ends first, and has a checkpoint."""
    signal_at(monkeypatch, "train", step, signal.SIGINT, dropped=False)
    monkeypatch.setattr("qnmixer.training.steps.compile_blocks", lambda _: None)  # only the time matters
    config = tiny_config(*RUN, f"compile={compiles}")
    with pytest.raises(Stopped, match="to resume"):
        fit(config, Run(tmp_path))
    assert (last_checkpoint(tmp_path)["global_step"] if (tmp_path / "checkpoints").exists() else None) == kept_at


NESTED: list[Any] = []
for _ in range(40):  # deeper than a file may be
    NESTED = [NESTED]


@pytest.mark.parametrize(("entry", "message"), [
    ({"callbacks": {"Best": {"best": [1.0, Path("slices")]}}},
     r"^checkpoint\['callbacks'\]\['Best'\]\['best'\]\[1\] is a "),
    ({"mine": np.zeros(2)}, r"^checkpoint\['mine'\] is a numpy.ndarray that nothing could read back: give plain"),
    ({"state_dict": {"network._extra_state": {"n": 1}}}, r"^checkpoint\['state_dict'\]\['network._extra_state'\] is a"),
    ({"history": NESTED}, r"^checkpoint\['history'\] is a builtins.list that nothing could read back"),
])  # fmt: skip
def test_what_nothing_could_read_back_is_not_written(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    """The whole run trained, and then nothing could read its checkpoint."""
    path = tmp_path / "last.ckpt"
    weights = {"state_dict": {"network.w": torch.ones(2)}}
    AtomicCheckpointIO().save_checkpoint(
        weights | {"callbacks": {"Best": {"best": np.float64(2), 3: (np.int32(1),)}}}, path
    )
    before = path.read_bytes()
    assert AtomicCheckpointIO().load_checkpoint(path)["callbacks"] == {"Best": {"best": 2.0, 3: (1,)}}
    with pytest.raises(PluginError, match=message):
        AtomicCheckpointIO().save_checkpoint(weights | entry, path)
    assert path.read_bytes() == before
