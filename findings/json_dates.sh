#!/usr/bin/env bash
# A JSON text that looks like a time is no text any more once ``datasets`` has read it, and its time zone is gone.
#
# Versions:  datasets 5.2.0, pyarrow 26.0.1.
# Belief:    load_dataset("json") gives the strings of a JSON file back as they stand there.
# Fact:      where all strings of a column are ISO 8601 times, the column becomes a timestamp: "2021-03-04T05:06:07+02:00"
#            is read as 03:06:07 without a zone. One other string in the file, and all stay strings.
# Matters:   a tokenizer gets datetime objects, or after str() other characters than the file has. Short records, such
#            as logs or synthetic data, are read by what else is in their file.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q datasets==5.2.0 pyarrow==26.0.1

cat >"$folder/read.py" <<'PYTHON'
import json
import sys
from pathlib import Path

import datasets

datasets.disable_progress_bars()
folder = Path(sys.argv[1])
TIMES = ["2021-03-04T05:06:07Z", "2021-03-04T05:06:07+02:00"]
for name, texts in {"times": TIMES, "mixed": [*TIMES, "plain words"]}.items():
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    read = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(folder / "cache"))
    print(name, read.features["text"].dtype, [str(text) for text in read["text"]] == texts, str(read["text"][1]))
PYTHON

HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore "$folder/read.py" "$folder" | tee "$folder/seen.txt"
if diff - "$folder/seen.txt" <<'TEXT'; then
times timestamp[s] False 2021-03-04 03:06:07
mixed string True 2021-03-04T05:06:07+02:00
TEXT
    echo "as found: a file of times alone is read as timestamps"
else
    echo "changed"
    exit 1
fi
