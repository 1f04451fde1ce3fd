"""A model that ranks share: tensor and context parallelism, and pipelines of stages."""
