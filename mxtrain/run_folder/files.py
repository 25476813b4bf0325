"""The names of a run's files, and TorchTitan's defaults of settings that a run's config.toml leaves out.

Code that reads a run's folder without TorchTitan needs both.
"""

CONFIG_FILE = "config.toml"
FACTS_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
DATA_FILE = "data.json"
PICTURE_FILE = "loss.png"
NUMERICS_FILE = "numerics.png"
LOG_FILE = "train.log"
CONVERSION_FILE = "conversion.txt"
WORKER_LOGS = "worker_logs"

CHECKPOINT_INTERVAL = 500  # steps
CHECKPOINT_FOLDER = "checkpoint"
LEARNING_RATE = 8e-4
LOG_FREQ = 10  # steps
STEPS = 10_000
SETTING_CHANGES = " changes from "
"""In the event of a run that resumes with another setting, after the setting's name"""

PROCESSES = "the number of processes"
"""In the place of a setting's name"""
