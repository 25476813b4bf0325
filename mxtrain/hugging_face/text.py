"""Models and tokenizers through transformers, whose errors become one line."""

import importlib.util
from pathlib import Path

import torch

from mxtrain.errors import ConfigError, raised_as
from mxtrain.formats.recipe import FORMATS

AS_TRAINING = {"add_special_tokens": False, "split_special_tokens": True}
"""How training encodes text: the spelling of a special token is plain text"""


def require_transformers() -> None:
    """Raise ConfigError if transformers is not installed. Imports nothing."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError('this command needs transformers, which is not installed; run: pip install "mxtrain[hf]"')


def from_pretrained(kind: str, folder: Path, where: str, **options):
    """Load ``folder`` with a class of transformers, such as "AutoConfig". Runs no code from it, and asks no server."""
    require_transformers()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with raised_as(f"{where}: transformers cannot load it"):
        load = getattr(transformers, kind).from_pretrained
        return load(folder, local_files_only=True, trust_remote_code=False, **options)


def load(folder: Path) -> tuple:
    """Load the model in ``folder`` to the accelerator if there is one, in the dtype that its config.json names.

    Returns the model in evaluation mode, its tokenizer, and a function from a text to its tokens. They begin with bos;
    without a bos token with eos, which in training stands before the next document.
    """
    where = f"RUN = {str(folder)!r}"
    config = from_pretrained("AutoConfig", folder, where)
    stored = (getattr(config, "quantization_config", None) or {}).get("format")
    with_codes = [format.layout.compression for format in FORMATS.values() if format.layout]
    if hasattr(config, "num_experts_per_tok") and stored in with_codes:
        raise ConfigError(
            f"{where}: transformers cannot read experts in {stored!r}; name the run, or an export with --format hf"
        )
    # AutoTokenizer may take the model's own class, which replaces parts of tokenizer.json.
    tokenizer = from_pretrained("PreTrainedTokenizerFast", folder, where)
    options = {"dtype": "auto", "use_safetensors": True, "output_loading_info": True}
    model, info = from_pretrained("AutoModelForCausalLM", folder, where, **options)
    if absent := sorted(info["missing_keys"]):  # transformers would draw these weights at random
        raise ConfigError(f"{where}: {len(absent)} weights are missing, such as {absent[0]}; export it again")
    first = [number for number in (tokenizer.bos_token_id, tokenizer.eos_token_id) if number is not None][:1]

    def encode(text: str) -> list[int]:
        return [*first, *tokenizer(text, verbose=False, **AS_TRAINING)["input_ids"]]

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return model.to(device).eval(), tokenizer, encode
