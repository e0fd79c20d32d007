"""The dataclass of each option of each group."""

from qnmixer.config.data import CustomData, DeepLesionData, DicomData, MixedData, NumpyData, PhantomData
from qnmixer.config.debug import DebugConfig, FewBatchesConfig, ProfileConfig
from qnmixer.config.evaluation import EvaluationConfig
from qnmixer.config.geometry import GeometryConfig
from qnmixer.config.logger import LightningLoggerConfig, LoggerConfig, WandbConfig
from qnmixer.config.loss import CustomLossConfig, LossConfig, SSIMMixConfig
from qnmixer.config.memory import MemoryConfig, RecomputeConfig
from qnmixer.config.model import (
    CustomConfig,
    FBPConfig,
    FBPConvNetConfig,
    LEARNConfig,
    LearnedPrimalDualConfig,
    QNMixerConfig,
    RegFormerConfig,
    TVConfig,
)
from qnmixer.config.noise import (
    CustomNoiseConfig,
    FieldNoiseConfig,
    MixedNoiseConfig,
    NoNoiseConfig,
    PhysicalNoiseConfig,
)
from qnmixer.config.optimizer import AdamWConfig, CustomOptimizerConfig, OptimizerConfig, SGDConfig
from qnmixer.config.schedule import CustomScheduleConfig, ScheduleConfig, StepScheduleConfig
from qnmixer.config.strategy import DDPConfig, FSDPConfig, PipelineConfig, StrategyConfig
from qnmixer.config.trainer import TrainerConfig

GROUPS: dict[str, dict[str, type]] = {
    "geometry": {"fan_beam": GeometryConfig},
    "noise": {
        "none": NoNoiseConfig,
        "field": FieldNoiseConfig,
        "physical": PhysicalNoiseConfig,
        "mixed": MixedNoiseConfig,
        "custom": CustomNoiseConfig,
    },
    "model": {
        "qn_mixer": QNMixerConfig,
        "fbp": FBPConfig,
        "tv": TVConfig,
        "fbpconvnet": FBPConvNetConfig,
        "learn": LEARNConfig,
        "learned_primal_dual": LearnedPrimalDualConfig,
        "regformer": RegFormerConfig,
        "custom": CustomConfig,
    },
    "data": {
        "phantoms": PhantomData,
        "dicom": DicomData,
        "deeplesion": DeepLesionData,
        "numpy": NumpyData,
        "custom": CustomData,
        "mixed": MixedData,
    },
    "loss": {"mse": LossConfig, "l1": LossConfig, "ssim_mix": SSIMMixConfig, "custom": CustomLossConfig},
    "optimizer": {
        "adamw": AdamWConfig,
        "sgd": SGDConfig,
        "adafactor": OptimizerConfig,
        "custom": CustomOptimizerConfig,
    },
    "schedule": {
        "constant": ScheduleConfig,
        "cosine": ScheduleConfig,
        "step": StepScheduleConfig,
        "custom": CustomScheduleConfig,
    },
    "memory": {"keep": MemoryConfig, "recompute": RecomputeConfig, "offload": MemoryConfig},
    "strategy": {"single": StrategyConfig, "ddp": DDPConfig, "fsdp": FSDPConfig, "pipeline": PipelineConfig},
    "logger": {
        "wandb": WandbConfig,
        "csv": LoggerConfig,
        "tensorboard": LightningLoggerConfig,
        "mlflow": LightningLoggerConfig,
        "custom": LightningLoggerConfig,
    },
    "debug": {
        "off": DebugConfig,
        "overfit": DebugConfig,
        "few_batches": FewBatchesConfig,
        "profile": ProfileConfig,
        "anomaly": DebugConfig,
    },
}


SECTIONS: dict[str, type] = {"trainer": TrainerConfig, "evaluation": EvaluationConfig}
