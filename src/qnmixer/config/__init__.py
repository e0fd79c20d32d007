"""What a config may say: a file for each folder of conf/, with the same name, and what belongs to all.

No torch here: a wrong override is answered in a moment.
"""

from qnmixer.config.commands import (
    DEVICES,
    CompareConfig,
    EvaluateConfig,
    ExportConfig,
    PlanConfig,
    ReconstructConfig,
    device_memory,
    needs_root,
    parse_compare,
    parse_doctor,
    parse_evaluate,
    parse_export,
    parse_plan,
    parse_reconstruct,
)
from qnmixer.config.custom import Custom, keys_of
from qnmixer.config.debug import FewBatchesConfig, ProfileConfig
from qnmixer.config.evaluation import EvaluationConfig
from qnmixer.config.groups import GROUPS
from qnmixer.config.keys import flat_keys, unknown_key
from qnmixer.config.logger import LightningLoggerConfig, LoggerConfig, WandbConfig
from qnmixer.config.loss import CustomLossConfig, LossConfig, SSIMMixConfig
from qnmixer.config.memory import MemoryConfig, RecomputeConfig
from qnmixer.config.model import CustomConfig, LearnedConfig, QNMixerConfig, RegFormerConfig, UnrolledConfig
from qnmixer.config.noise import (
    CustomNoiseConfig,
    FieldNoiseConfig,
    MixedNoiseConfig,
    NoNoiseConfig,
    PhysicalNoiseConfig,
    check_noise,
)
from qnmixer.config.optimizer import AdamWConfig, CustomOptimizerConfig, OptimizerConfig, SGDConfig
from qnmixer.config.run import (
    Config,
    batch_of_replica,
    devices_per_replica,
    effective_batch,
    override,
    parse,
    parse_file,
    sources_of,
    targets_of,
    to_plain,
    validate,
    with_iterations,
)
from qnmixer.config.schedule import CustomScheduleConfig, ScheduleConfig, StepScheduleConfig
from qnmixer.config.strategy import DDPConfig, FSDPConfig, PipelineConfig
from qnmixer.config.trainer import TrainerConfig

__all__ = [
    "DEVICES",
    "GROUPS",
    "AdamWConfig",
    "CompareConfig",
    "Config",
    "Custom",
    "CustomConfig",
    "CustomLossConfig",
    "CustomNoiseConfig",
    "CustomOptimizerConfig",
    "CustomScheduleConfig",
    "DDPConfig",
    "EvaluateConfig",
    "EvaluationConfig",
    "ExportConfig",
    "FSDPConfig",
    "FewBatchesConfig",
    "FieldNoiseConfig",
    "LearnedConfig",
    "LightningLoggerConfig",
    "LoggerConfig",
    "LossConfig",
    "MemoryConfig",
    "MixedNoiseConfig",
    "NoNoiseConfig",
    "OptimizerConfig",
    "PhysicalNoiseConfig",
    "PipelineConfig",
    "PlanConfig",
    "ProfileConfig",
    "QNMixerConfig",
    "RecomputeConfig",
    "ReconstructConfig",
    "RegFormerConfig",
    "SGDConfig",
    "SSIMMixConfig",
    "ScheduleConfig",
    "StepScheduleConfig",
    "TrainerConfig",
    "UnrolledConfig",
    "WandbConfig",
    "batch_of_replica",
    "check_noise",
    "device_memory",
    "devices_per_replica",
    "effective_batch",
    "flat_keys",
    "keys_of",
    "needs_root",
    "override",
    "parse",
    "parse_compare",
    "parse_doctor",
    "parse_evaluate",
    "parse_export",
    "parse_file",
    "parse_plan",
    "parse_reconstruct",
    "sources_of",
    "targets_of",
    "to_plain",
    "unknown_key",
    "validate",
    "with_iterations",
]
