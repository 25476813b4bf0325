import pytest
import torch

from mxtrain.data.documents import Progress
from mxtrain.data.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The folder of a Llama with random weights, and of a tokenizer that mxtrain trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny") / "model"
    text = ["def main():\n    return 'naïve café'\n" * 5, "import sys  # 😀\n"]
    train_tokenizer(text, 320, folder, Progress(lambda line: None))
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=48,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from uniform
    model.save_pretrained(folder)
    return folder
