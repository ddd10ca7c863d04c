"""The sections of the configuration, each checked as it is built. Free of JAX."""

from trainers.config.checkpoint import CheckpointConfig, SnapshotConfig
from trainers.config.data import DataConfig
from trainers.config.evaluation import EvaluationConfig, PreviewConfig, ScoreConfig, UnitConfig
from trainers.config.frozen import FrozenConfig, LoraConfig
from trainers.config.mesh import MeshConfig
from trainers.config.model import ModelConfig
from trainers.config.monitoring import AnomalyConfig, DistributionConfig, MetricsConfig, ProfileConfig
from trainers.config.optimizer import LossScaleConfig, OptimizerConfig, ParameterGroup, PruningConfig, ScheduleConfig
from trainers.config.tasks import ClassificationConfig, DistillationConfig, LossConfig, PreferenceConfig
from trainers.config.vision import VisionConfig
from trainers.config.weights import InitConfig

__all__ = [
    "AnomalyConfig",
    "CheckpointConfig",
    "ClassificationConfig",
    "DataConfig",
    "DistillationConfig",
    "DistributionConfig",
    "EvaluationConfig",
    "FrozenConfig",
    "InitConfig",
    "LoraConfig",
    "LossConfig",
    "LossScaleConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParameterGroup",
    "PreferenceConfig",
    "PreviewConfig",
    "ProfileConfig",
    "PruningConfig",
    "ScheduleConfig",
    "ScoreConfig",
    "SnapshotConfig",
    "UnitConfig",
    "VisionConfig",
]
