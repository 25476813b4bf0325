import pytest
import torch
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import FeedForward, Transformer

from mxtrain import convert
from mxtrain.titan.v02.models.llama3 import Llama3, Llama3Adapter, Llama3Args, hidden_dim

SMALL = dict(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=96, max_seq_len=32)


def model(**changes):
    module = Llama3(Llama3Args(**SMALL, **changes))
    with torch.no_grad():
        module.init_weights()
    return module


@pytest.mark.parametrize("dim", [64, 100, 576, 2048, 3072, 4096, 8191, 16384])
def test_any_hidden_size_is_exact(dim):
    args = Llama3Args(dim=dim)
    for size in (1, 2, 3, 31, 32, 1536, 8192, 8193, 11008, 14336, 28672, 53248, 8 * dim + 7):
        args.hidden_dim = size
        with torch.device("meta"):
            built = FeedForward(dim, 4 * dim, args.multiple_of, args.ffn_dim_multiplier)
        assert built.w2.in_features == size == args.hidden_dim


def test_the_hidden_size_of_titans_own_arguments():
    args = TransformerModelArgs(dim=4096, ffn_dim_multiplier=1.3, multiple_of=1024)
    assert hidden_dim(args) == Llama3Args.of(args).hidden_dim == 14336


def test_without_tying_it_is_titans_model():
    torch.manual_seed(0)
    ours = model()
    torch.manual_seed(0)
    theirs = Transformer(TransformerModelArgs(**SMALL))
    with torch.no_grad():
        theirs.init_weights()
    assert ours.output.weight is not ours.tok_embeddings.weight
    assert all(torch.equal(ours.state_dict()[name], weight) for name, weight in theirs.state_dict().items())


def test_a_tied_head_is_the_embedding():
    tied = model(enable_weight_tying=True)
    assert tied.output.weight is tied.tok_embeddings.weight
    # Drawn as a head: TorchTitan's embedding has a standard deviation of 1, and its head 1 / sqrt(dim).
    assert tied.output.weight.std().item() == pytest.approx(64**-0.5, rel=0.1)
    assert {"output.weight", "tok_embeddings.weight"} <= tied.state_dict().keys()


def test_memory_that_is_given_later_is_shared_too():
    with torch.device("meta"):
        tied = Llama3(Llama3Args(**SMALL, enable_weight_tying=True))
    tied.to_empty(device="cpu")
    with torch.no_grad():
        tied.init_weights(buffer_device=torch.device("cpu"))
    assert tied.output.weight is tied.tok_embeddings.weight and not tied.output.weight.is_meta


def test_the_shared_weight_gets_both_gradients():
    tied, tokens = model(enable_weight_tying=True), torch.arange(16)[None]
    separate = model()
    separate.load_state_dict(tied.state_dict())
    for module in (tied, separate):
        torch.nn.functional.cross_entropy(module(tokens)[0], tokens[0].flip(0)).backward()
    expected = separate.output.weight.grad + separate.tok_embeddings.weight.grad
    assert separate.tok_embeddings.weight.grad.any() and separate.output.weight.grad.any()
    torch.testing.assert_close(tied.output.weight.grad, expected)


@pytest.mark.parametrize("filter_fqns", [None, []])
def test_conversion_leaves_the_shared_weight_in_high_precision(filter_fqns):
    tied = model(enable_weight_tying=True)
    report = convert(tied, "mx_linear", filter_fqns=filter_fqns)
    assert type(tied.output) is torch.nn.Linear and "output" in report.skipped
    assert tied.output.weight is tied.tok_embeddings.weight
    (in_high_precision,) = [name for name, use in report.weights.items() if not use.quantized]
    assert in_high_precision == "output.weight"


def test_hugging_face_has_one_name_for_the_shared_weight():
    tied = model(enable_weight_tying=True)
    adapter = Llama3Adapter(tied.model_args, None)
    theirs = adapter.to_hf(tied.state_dict())
    assert "model.embed_tokens.weight" in theirs and "lm_head.weight" not in theirs
    back = adapter.from_hf(theirs)
    assert all(torch.equal(back[name], weight) for name, weight in tied.state_dict().items())
    assert "lm_head.weight" in Llama3Adapter(Llama3Args(**SMALL), None).to_hf(model().state_dict())
