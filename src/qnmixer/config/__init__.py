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
from qnmixer.config.debug import FewBatchesConfig, ProfileConfig
from qnmixer.config.evaluation import EvaluationConfig
from qnmixer.config.keys import flat_keys, unknown_key
from qnmixer.config.logger import LoggerConfig, WandbConfig
from qnmixer.config.loss import LossConfig, SSIMMixConfig
from qnmixer.config.memory import MemoryConfig, RecomputeConfig
from qnmixer.config.model import LearnedConfig, ModelConfig, UnrolledConfig
from qnmixer.config.noise import FieldNoiseConfig, MixedNoiseConfig, NoiseConfig, PhysicalNoiseConfig
from qnmixer.config.optimizer import AdamWConfig, OptimizerConfig, SGDConfig
from qnmixer.config.run import (
    Config,
    batch_of_replica,
    devices_per_replica,
    effective_batch,
    override,
    parse,
    parse_file,
    section,
    targets_of,
    to_plain,
    validate,
    with_iterations,
)
from qnmixer.config.schedule import ScheduleConfig, StepScheduleConfig
from qnmixer.config.strategy import DDPConfig, FSDPConfig, PipelineConfig
from qnmixer.config.target import Custom, choice_of, keys_of, keys_of_options, options, with_names
from qnmixer.config.trainer import TrainerConfig

__all__ = [
    "DEVICES",
    "AdamWConfig",
    "CompareConfig",
    "Config",
    "Custom",
    "DDPConfig",
    "EvaluateConfig",
    "EvaluationConfig",
    "ExportConfig",
    "FSDPConfig",
    "FewBatchesConfig",
    "FieldNoiseConfig",
    "LearnedConfig",
    "LoggerConfig",
    "LossConfig",
    "MemoryConfig",
    "MixedNoiseConfig",
    "ModelConfig",
    "NoiseConfig",
    "OptimizerConfig",
    "PhysicalNoiseConfig",
    "PipelineConfig",
    "PlanConfig",
    "ProfileConfig",
    "RecomputeConfig",
    "ReconstructConfig",
    "SGDConfig",
    "SSIMMixConfig",
    "ScheduleConfig",
    "StepScheduleConfig",
    "TrainerConfig",
    "UnrolledConfig",
    "WandbConfig",
    "batch_of_replica",
    "choice_of",
    "device_memory",
    "devices_per_replica",
    "effective_batch",
    "flat_keys",
    "keys_of",
    "keys_of_options",
    "needs_root",
    "options",
    "override",
    "parse",
    "parse_compare",
    "parse_doctor",
    "parse_evaluate",
    "parse_export",
    "parse_file",
    "parse_plan",
    "parse_reconstruct",
    "section",
    "targets_of",
    "to_plain",
    "unknown_key",
    "validate",
    "with_iterations",
    "with_names",
]
