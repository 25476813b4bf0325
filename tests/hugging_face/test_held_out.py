"""Which tokens a loss on held-out text is computed on."""

import numpy as np
import pytest
import torch

from mxtrain.hugging_face.held_out import HeldOutText

IDS = np.arange(1000, dtype="<u2")


def test_sequences_are_spread_over_the_text():
    text = HeldOutText(IDS, tokens=45, seq_len=9)
    rows = torch.cat(list(text.batches()))
    assert text.tokens == 45 and rows.shape == (5, 10) and rows.dtype == torch.int64
    assert rows[:, 0].tolist() == [0, 200, 400, 600, 800]


@pytest.mark.parametrize(
    "tokens, seq_len, expected", [(10**6, 5000, (1, 1000)), (7, 50, (1, 8)), (10**6, 99, (10, 100))]
)
def test_no_text_is_too_short_for_a_sequence(tokens, seq_len, expected):
    text = HeldOutText(IDS, tokens, seq_len)
    rows = torch.cat(list(text.batches()))
    assert rows.shape == expected and text.tokens == rows[:, 1:].numel()


@pytest.mark.parametrize("head", [torch.nn.Linear(4, 1000), torch.nn.Sequential(torch.nn.Linear(4, 1000))])
def test_the_loss_is_the_mean_over_all_tokens(head):
    """A plain head multiplies parts of a batch; another one stays in its model."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.output = torch.nn.Embedding(1000, 4), head

        def forward(self, tokens):
            return self.output(self.embedding(tokens))

    model, text = Model(), HeldOutText(IDS, tokens=900, seq_len=300)
    rows = torch.cat(list(text.batches()))
    with torch.no_grad():
        logits = model(rows[:, :-1]).double().flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
    assert text.loss(model, torch.device("cpu")) == pytest.approx(expected.item(), rel=1e-6)
