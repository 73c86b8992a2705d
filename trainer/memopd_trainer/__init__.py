"""The reference trainer (extra `train`): PPO and full-vocabulary distillation on recorded states."""

from memopd_trainer.config import TrainConfig, load_config, parse_config
from memopd_trainer.student import evaluate_kl
from memopd_trainer.train import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "evaluate_kl", "load_config", "parse_config", "train"]
