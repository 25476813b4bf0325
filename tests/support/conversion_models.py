"""Models to convert, which know nothing of TorchTitan."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain import set_rounding_step

DIM = 64


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, 2, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 128, bias=False), nn.Linear(DIM, 128, bias=False)
        self.w2 = nn.Linear(128, DIM, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM, eps=1e-5), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(DIM, eps=1e-6), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, layers=2, vocab=96):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.output = nn.Linear(DIM, vocab, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def llama(**kwargs):
    torch.manual_seed(0)
    return Llama(**kwargs)


TOKENS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))


def loss(model):
    return F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(-1, 1).flatten())


def kinds(model):
    return {fqn: type(module) for fqn, module in model.named_modules()}


def trained(model, steps=12):
    """Losses of so many steps of AdamW, each with its own random bits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    losses = []
    for step in range(steps):
        set_rounding_step(step)
        optimizer.zero_grad()
        losses.append(loss(model))
        losses[-1].backward()
        optimizer.step()
    set_rounding_step(None)
    return [step_loss.item() for step_loss in losses]
