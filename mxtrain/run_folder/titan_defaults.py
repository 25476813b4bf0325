"""TorchTitan's defaults of settings that a run's config.toml leaves out, for code that reads it without TorchTitan."""

CHECKPOINT_INTERVAL = 500  # steps
CHECKPOINT_FOLDER = "checkpoint"
LEARNING_RATE = 8e-4
LOG_FREQ = 10  # steps
STEPS = 10_000
