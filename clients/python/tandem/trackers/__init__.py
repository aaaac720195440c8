"""TensorBoard, wandb and MLflow, in addition to metrics.jsonl."""
