"""The sections of the configuration, each checked as it is built. Free of JAX."""

from trainers.config.evaluation import CheckpointConfig, EvaluationConfig, PreviewConfig, ScoreConfig, UnitConfig
from trainers.config.model import DataConfig, LossConfig, MeshConfig, ModelConfig
from trainers.config.monitoring import AnomalyConfig, DistributionConfig, MetricsConfig, ProfileConfig
from trainers.config.optimizer import LossScaleConfig, OptimizerConfig, ParameterGroup, PruningConfig, ScheduleConfig

__all__ = [
    "AnomalyConfig",
    "CheckpointConfig",
    "DataConfig",
    "DistributionConfig",
    "EvaluationConfig",
    "LossConfig",
    "LossScaleConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "PreviewConfig",
    "ProfileConfig",
    "PruningConfig",
    "ScheduleConfig",
    "ScoreConfig",
    "UnitConfig",
]
