"""Paceline: fine-tune Hugging Face models as DeepSpeed pipelines that follow the cluster they run on."""

__version__ = "0.1.0"
