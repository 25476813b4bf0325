#!/usr/bin/env bash
# AutoTokenizer of transformers 5 replaces the pre-tokenizer of tokenizer.json for Qwen models.
#
# Versions:  transformers 5.24.0 with tokenizers 0.23.3, and transformers 4.57.6 with tokenizers 0.22.2.
# Belief:    tokenizer.json is the whole tokenizer: AutoTokenizer cuts text as tokenizers.Tokenizer.from_file does,
#            above all where tokenizer_config.json names the plain class PreTrainedTokenizerFast.
# Fact:      4.57.6 behaves so. 5.24.0 replaces the file's pre-tokenizer by the one of the published Qwen models, which
#            takes digits one by one. Naming the plain class prevents this where config.json says "qwen3". Where
#            config.json says "qwen2", AutoTokenizer overrules the name; only the plain class itself keeps the file's.
# Matters:   A Qwen model with a tokenizer of its own (here with digits in threes, as Llama 3 has them) reads other ids
#            after an upgrade than in training. Nothing is reported, and decoding still gives the text back.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

cat >"$folder/cut.py" <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

folder = Path(__file__).parent
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
tokenizer.train_from_iterator(["1234 1235 1236"] * 3, trainer)
tokenizer.save(str(folder / "tokenizer.json"))
print("file", *tokenizer.encode("1234").tokens)

for model_type in ("qwen3", "qwen2"):
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for label, names in (("unnamed", {}), ("named", {"tokenizer_class": "PreTrainedTokenizerFast"})):
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        auto = AutoTokenizer.from_pretrained(folder)
        assert auto.decode(auto.encode("1234")) == "1234"
        print(f"{model_type}_{label}", *auto.tokenize("1234"))
print("plain_class", *PreTrainedTokenizerFast.from_pretrained(folder).tokenize("1234"))
PYTHON

for versions in "4.57.6 0.22.2" "5.24.0 0.23.3"; do
    read -r version tokenizers <<<"$versions"
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/python" -m pip install -q "transformers==$version" "tokenizers==$tokenizers"
    TRANSFORMERS_VERBOSITY=error "$folder/$version/bin/python" "$folder/cut.py" >"$folder/$version.txt"
    echo "transformers $version: the tokens of 1234"
    cat "$folder/$version.txt"
done

cuts() { awk '{ printf "%s%d", separator, NF - 1; separator = " " }' "$folder/$1.txt"; } # tokens in each line
if [ "$(cuts 4.57.6)" = "2 2 2 2 2 2" ] && [ "$(cuts 5.24.0)" = "2 4 2 4 4 2" ]; then
    echo "as found: 5.24.0 cuts 1234 into single digits; a named class prevents this for qwen3, but not for qwen2"
else
    echo "changed"
    exit 1
fi
