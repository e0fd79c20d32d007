"""Schema of `strategy`: how a run uses several devices."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qnmixer.config.model import LearnedConfig, UnrolledConfig
from qnmixer.config.option import number, one_of
from qnmixer.config.trainer import TrainerConfig
from qnmixer.errors import ConfigError

if TYPE_CHECKING:
    from qnmixer.config.run import Config


@dataclass(kw_only=True)
class StrategyConfig:
    """How a run uses several devices.

    Attributes:
        planned_as: what the plan counts on a device: a `replica` of the whole network, one of its `shards`, or a part
            of a `pipeline`. None: the plan refuses the strategy.
    """

    planned_as: ClassVar[str | None] = None

    name: str

    def devices_per_replica(self, trainer: TrainerConfig) -> int:
        """The number of devices that work on the same samples."""
        return 1

    def check(self, run: "Config") -> None:
        """Check the devices: strategy=single needs one device, and all others need a network with weights."""
        trainer = run.trainer
        if self.name != "single" and not isinstance(run.model, LearnedConfig):
            raise ConfigError(
                f"strategy={self.name} trains on several devices, but model={run.model.name} has no weights to "
                "train: use strategy=single"
            )
        if self.name == "single" and (trainer.devices not in (None, 1) or trainer.num_nodes > 1):
            several = trainer.num_nodes > 1
            given = f"trainer.num_nodes={trainer.num_nodes}" if several else f"trainer.devices={trainer.devices}"
            raise ConfigError(f"{given} does not work with strategy=single: choose strategy=ddp, fsdp or pipeline")


@dataclass(kw_only=True)
class SingleConfig(StrategyConfig):
    """One device."""

    planned_as: ClassVar[str | None] = "replica"

    name: str = "single"


@dataclass(kw_only=True)
class DDPConfig(StrategyConfig):
    """The whole network on every device; each gets a part of the batch."""

    planned_as: ClassVar[str | None] = "replica"

    name: str = "ddp"
    static_graph: bool

    def check(self, run: "Config") -> None:
        """Check static_graph: torch's static graph allows one backward pass per step."""
        super().check(run)
        if self.static_graph and run.trainer.accumulate_grad_batches > 1:
            raise ConfigError(
                "strategy.static_graph=true does not work with trainer.accumulate_grad_batches above 1 (a limit of "
                "torch): set static_graph=false, or accumulate_grad_batches=1"
            )


@dataclass(kw_only=True)
class FSDPConfig(StrategyConfig):
    """As ddp, with weights, gradients and optimizer state in shards."""

    planned_as: ClassVar[str | None] = "shards"

    name: str = "fsdp"
    reshard_after_forward: bool
    sharded_checkpoint: bool


@dataclass(kw_only=True)
class PipelineConfig(StrategyConfig):
    """The T iterations in stages, which run one after the other on the devices."""

    planned_as: ClassVar[str | None] = "pipeline"

    name: str = "pipeline"
    schedule: str = one_of("1f1b", "gpipe", "interleaved", "sequential")
    microbatch_size: int = number(at_least=1)
    devices_per_pipeline: int | None = number(at_least=2)  # None: all of a node
    stages_per_device: int = number(at_least=1)
    cut: list[int] | None  # iterations of each stage; None: balanced by measured cost

    def devices_per_replica(self, trainer: TrainerConfig) -> int:
        """The devices of one pipeline."""
        return self.devices_per_pipeline or trainer.devices or 1

    def check(self, run: "Config") -> None:
        """Check that stages, devices and micro-batches fit together."""
        super().check(run)
        T = run.model.T
        if not isinstance(run.model, UnrolledConfig):
            raise ConfigError(
                f"strategy=pipeline cuts the iterations of a network into stages, but model={run.model.name} has {T}: "
                "use strategy=ddp or fsdp"
            )
        if (self.schedule == "interleaved") != (self.stages_per_device > 1):
            raise ConfigError(
                f"strategy.schedule={self.schedule} does not work with strategy.stages_per_device="
                f"{self.stages_per_device}: interleaved takes 2 or more, every other schedule 1"
            )
        if self.cut is not None and (sum(self.cut) != T or min(self.cut, default=0) < 1):
            raise ConfigError(
                f"strategy.cut={self.cut} is wrong: each stage needs at least 1 iteration, and their sum must be "
                f"model.n_iterations={T}"
            )
        if run.trainer.devices is not None:  # else this is checked again when the devices are counted
            self._check_devices(run, run.trainer.devices)

    def _check_devices(self, run: "Config", n_devices: int) -> None:
        T, size, devices = run.model.T, self.microbatch_size, self.devices_per_replica(run.trainer)
        if devices == 1:
            raise ConfigError(
                "strategy=pipeline needs at least two devices: give trainer.devices=…, or strategy=single"
            )
        if n_devices % devices:
            raise ConfigError(
                f"strategy.devices_per_pipeline={devices} does not divide trainer.devices={n_devices}: "
                "a pipeline stays on one node"
            )
        stages = devices * self.stages_per_device
        if stages > T:
            raise ConfigError(
                f"{stages} stages are more than model.n_iterations={T}: lower strategy.devices_per_pipeline or "
                "strategy.stages_per_device, or raise model.n_iterations"
            )
        if self.cut is not None and len(self.cut) != stages:
            raise ConfigError(f"strategy.cut={self.cut} has {len(self.cut)} stages, but the devices have {stages}")
        n, rest = divmod(run.data.batch_size * devices, size)
        if rest:
            raise ConfigError(
                f"the batch of a pipeline, data.batch_size={run.data.batch_size} × {devices} devices, does not divide "
                f"into strategy.microbatch_size={size}: choose data.batch_size={size}"
            )
        if self.schedule == "1f1b" and n < devices:
            raise ConfigError(
                f"strategy.schedule=1f1b needs as many micro-batches as devices, {devices}, and has {n}: "
                f"set data.batch_size={size} or strategy.microbatch_size={run.data.batch_size}"
            )
        if self.schedule == "interleaved" and n % max(1, n // devices):
            raise ConfigError(
                f"strategy.schedule=interleaved takes micro-batches in equal rounds of at least {devices}, not {n}: "
                f"make data.batch_size={run.data.batch_size} a multiple of strategy.microbatch_size={size}"
            )
