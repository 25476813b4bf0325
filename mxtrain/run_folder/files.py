"""The names of a run's files, and words in its events that are read back."""

CONFIG_FILE = "config.toml"
FACTS_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
DATA_FILE = "data.json"
PICTURE_FILE = "loss.png"
NUMERICS_FILE = "numerics.png"
LOG_FILE = "train.log"
CONVERSION_FILE = "conversion.txt"
WORKER_LOGS = "worker_logs"

SETTING_CHANGES = " changes from "
"""In the event of a run that resumes with another setting, after the setting's name"""

PROCESSES = "the number of processes"
"""In the place of a setting's name"""
