"""What a run tells: terminal, metrics.jsonl, run.json, wandb."""
