"""The dataclass of each option of the groups whose options have a name and no target."""

from qnmixer.config.debug import DebugConfig, FewBatchesConfig, ProfileConfig
from qnmixer.config.evaluation import EvaluationConfig
from qnmixer.config.geometry import GeometryConfig
from qnmixer.config.memory import MemoryConfig, RecomputeConfig
from qnmixer.config.strategy import DDPConfig, FSDPConfig, PipelineConfig, SingleConfig
from qnmixer.config.trainer import TrainerConfig

GROUPS: dict[str, dict[str, type]] = {
    "geometry": {"fan_beam": GeometryConfig},
    "memory": {"keep": MemoryConfig, "recompute": RecomputeConfig, "offload": MemoryConfig},
    "strategy": {"single": SingleConfig, "ddp": DDPConfig, "fsdp": FSDPConfig, "pipeline": PipelineConfig},
    "debug": {
        "off": DebugConfig,
        "overfit": DebugConfig,
        "few_batches": FewBatchesConfig,
        "profile": ProfileConfig,
        "anomaly": DebugConfig,
    },
}


SECTIONS: dict[str, type] = {"trainer": TrainerConfig, "evaluation": EvaluationConfig}
