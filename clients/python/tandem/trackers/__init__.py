"""TensorBoard, wandb and MLflow beside metrics.jsonl."""
