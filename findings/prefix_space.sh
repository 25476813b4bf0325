#!/usr/bin/env bash
# transformers 4 takes the prefix space out of a tokenizer.json whose pre-tokenizer is a plain ByteLevel.
#
# Versions:  transformers 4.57.6 with tokenizers 0.22.2 (transformers 5.24.0 keeps the space).
# Belief:    PreTrainedTokenizerFast is the plain wrapper around a tokenizer.json and cuts text as the file says.
# Fact:      The wrapper takes a missing add_prefix_space as False and overwrites the pre-tokenizer's own value, whether
#            the tokenizer comes from a folder, a file or an object. tokenizer_config.json has to repeat the value. The
#            same ByteLevel inside a Sequence keeps its value, even where tokenizer_config.json says otherwise.
# Matters:   The first word of each text gets another id than in training, and nothing is reported. save_pretrained
#            writes the changed value into tokenizer.json, so the original is lost for other libraries, too.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

cat >"$folder/wrap.py" <<'PYTHON'
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = "to be"
folder = Path(__file__).parent
file = folder / "tokenizer.json"
byte_level = pre_tokenizers.ByteLevel(add_prefix_space=True)
trainer = trainers.BpeTrainer(vocab_size=270, initial_alphabet=byte_level.alphabet(), show_progress=False)

for kind, pre_tokenizer in (("plain", byte_level), ("sequence", pre_tokenizers.Sequence([byte_level]))):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(["to be or not to be"] * 3, trainer)
    tokenizer.save(str(file))
    print(f"{kind}_itself", *tokenizer.encode(TEXT).tokens)
    print(f"{kind}_from_object", *PreTrainedTokenizerFast(tokenizer_object=tokenizer).tokenize(TEXT))
    print(f"{kind}_from_file", *PreTrainedTokenizerFast(tokenizer_file=str(file)).tokenize(TEXT))
    for label, said in (("silent", {}), ("true", {"add_prefix_space": True}), ("false", {"add_prefix_space": False})):
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
        wrapped = PreTrainedTokenizerFast.from_pretrained(folder)
        print(f"{kind}_config_{label}", *wrapped.tokenize(TEXT))
        if label == "silent":
            wrapped.save_pretrained(folder / "saved")
            print(f"{kind}_saved", *Tokenizer.from_file(str(folder / "saved/tokenizer.json")).encode(TEXT).tokens)
PYTHON

python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q transformers==4.57.6 tokenizers==0.22.2
TRANSFORMERS_VERBOSITY=error "$folder/venv/bin/python" "$folder/wrap.py" | tee "$folder/seen.txt"

lost="$(awk '$2 == "to" { printf "%s ", $1 }' "$folder/seen.txt")" # lines whose first token has no space
if [ "$lost" = "plain_from_object plain_from_file plain_config_silent plain_saved plain_config_false " ]; then
    echo "as found: a plain ByteLevel loses its prefix space unless the configuration repeats it; a Sequence keeps it"
else
    echo "changed"
    exit 1
fi
