import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain import (
    ConfigError,
    DecomposeKRouter,
    FusedRMSNorm,
    MXLinear,
    MXNorm,
    MXNormLinear,
    convert,
    set_rounding_step,
)
from mxtrain.conversion import matches
from mxtrain.recipe import get_recipe
from mxtrain.seeds import hadamard_signs, rounding_key, sign_mask

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


def test_mxnorm_swaps_what_the_norms_feed_and_the_other_linears():
    model = llama()
    report = convert(model)
    assert report.norms == {
        f"layers.{i}.{norm}": [f"layers.{i}.{linear}" for linear in linears]
        for i in range(2)
        for norm, linears in {
            "attention_norm": ("attention.wq", "attention.wk", "attention.wv"),
            "ffn_norm": ("feed_forward.w1", "feed_forward.w3"),
        }.items()
    }
    assert report.linears == [f"layers.{i}.{w}" for i in range(2) for w in ("attention.wo", "feed_forward.w2")]
    assert report.skipped == {
        "norm": "feeds output, named in filter_fqns",
        "output": "named in filter_fqns",
    }
    layer = model.layers[1]
    assert type(layer.attention_norm) is MXNorm and layer.attention_norm.estimate.eps == 1e-5
    assert type(layer.ffn_norm) is MXNorm and layer.ffn_norm.estimate.eps == 1e-6
    assert type(layer.attention.wk) is MXNormLinear and type(layer.attention.wo) is MXLinear
    assert type(model.norm) is nn.RMSNorm and type(model.output) is nn.Linear
    assert "swapped 4 norms with the 10 linears they feed, and 4 other linears; left 2" in str(report)
    assert "layers.0.ffn_norm -> layers.0.feed_forward.w1, layers.0.feed_forward.w3" in str(report)


def test_mx_linear_swaps_every_linear_and_no_norm():
    model = llama()
    report = convert(model, "mx_linear")
    assert report.norms == {} and len(report.linears) == 14 and report.skipped == {"output": "named in filter_fqns"}
    assert type(model.layers[0].attention_norm) is nn.RMSNorm and type(model.layers[0].attention.wq) is MXLinear


def test_fused_rmsnorm_swaps_every_norm_and_no_linear():
    model = llama()
    before = kinds(model)
    report = convert(model, "fused_rmsnorm", when_compiled="kernel")
    norms = [f"layers.{i}.{norm}" for i in range(2) for norm in ("attention_norm", "ffn_norm")] + ["norm"]
    assert report.fused_norms == norms and not (report.norms or report.linears or report.skipped)
    assert kinds(model) == before | dict.fromkeys(norms, FusedRMSNorm)
    assert [model.get_submodule(fqn).eps for fqn in norms] == [1e-5, 1e-6, 1e-5, 1e-6, 1e-5]
    assert model.norm.when_compiled == "kernel"
    assert str(report).splitlines() == [
        "swapped 5 norms for fused ones; left 0 as they were",
        *(f"  {norm}" for norm in norms),
    ]


def kinds(model):
    return {fqn: type(module) for fqn, module in model.named_modules()}


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
@pytest.mark.parametrize("filters", [["output"], []])
def test_fused_rmsnorm_goes_before_or_after_the_others(converter, filters):
    """Also where the other leaves it nothing to do."""
    first, last = llama(), llama()
    convert(first, "fused_rmsnorm")
    convert(first, converter, mode="reference", filter_fqns=filters)
    convert(last, converter, mode="reference", filter_fqns=filters)
    convert(last, "fused_rmsnorm")
    assert kinds(first) == kinds(last) and repr(first) == repr(last)
    assert nn.RMSNorm not in kinds(first).values()
    assert (MXNorm in kinds(first).values()) == (converter == "mxnorm")
    assert torch.equal(loss(first), loss(last))


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear", "fused_rmsnorm"])
def test_parameters_and_their_names_stay(converter):
    model = llama()
    before = dict(model.named_parameters())
    convert(model, converter)
    after = dict(model.named_parameters())
    assert list(before) == list(after) and all(after[name] is p for name, p in before.items())
    fresh = llama()
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict(fresh.state_dict())


@pytest.mark.parametrize(("converter", "kwargs"), [("mxnorm", {}), ("mxnorm", {"p": 1}), ("mx_linear", {})])
def test_converted_model_computes_nearly_the_same(converter, kwargs):
    model = llama()
    converted = copy.deepcopy(model)
    convert(converted, converter, mode="reference", **kwargs)
    losses = []
    for m in (model, converted):
        value = loss(m)
        value.backward()
        losses.append(value.item())
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)
    for (name, p), q in zip(model.named_parameters(), converted.parameters()):
        cosine = F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0)
        assert cosine > 0.9, name


def test_fused_norms_compute_the_same():
    model = llama()
    converted = copy.deepcopy(model)
    convert(converted, "fused_rmsnorm")
    losses = [loss(model), loss(converted)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-6)
    for value in losses:
        value.backward()
    for p, q in zip(model.parameters(), converted.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_exact_and_unquantized_is_the_model_itself():
    model = llama()
    converted = copy.deepcopy(model)
    convert(converted, estimator="exact", recipe="unquantized", mode="reference")
    torch.testing.assert_close(loss(converted), loss(model), rtol=1e-6, atol=1e-6)


def test_meta_device_and_train_mode():
    with torch.device("meta"):
        model = Llama().eval()
    convert(model)
    assert model.layers[0].attention.wq.weight.is_meta and not model.layers[0].attention_norm.training


def test_forward_methods_are_as_before():
    model = llama()
    calls = []
    original = model.layers[0].attention.forward
    model.layers[0].attention.forward = lambda x: calls.append(1) or original(x)
    convert(model)
    assert all("forward" not in m.__dict__ for m in model.modules() if m is not model.layers[0].attention)
    calls.clear()
    model(TOKENS)
    assert calls == [1]


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        (["output", "layers.1"], {"layers.1.attention_norm", "layers.1.ffn_norm", "layers.1.attention.wq"}),
        (["output", "wo"], {"layers.0.attention.wo", "layers.1.attention.wo"}),
        (["output", "layers.*.feed_forward.w2"], {"layers.0.feed_forward.w2", "layers.1.feed_forward.w2"}),
    ],
)
def test_filters(filters, left):
    report = convert(llama(), filter_fqns=filters)
    assert left <= report.skipped.keys()
    assert not left & {*report.linears, *report.norms, *(x for xs in report.norms.values() for x in xs)}


def test_filtered_norms_are_not_fused():
    model = llama()
    report = convert(model, "fused_rmsnorm", filter_fqns=["layers.1", "norm"])
    assert report.fused_norms == ["layers.0.attention_norm", "layers.0.ffn_norm"]
    left = ("layers.1.attention_norm", "layers.1.ffn_norm", "norm")
    assert report.skipped == dict.fromkeys(left, "named in filter_fqns")
    assert all(type(model.get_submodule(fqn)) is nn.RMSNorm for fqn in left)


def test_norms_that_are_not_fused():
    model = nn.ModuleDict(
        {"square": nn.RMSNorm((DIM, DIM)), "other": OnePlusRMSNorm(DIM, 1e-3), "own": HomeMadeRMSNorm(DIM, 1e-3)}
    )
    weight = model["own"].weight
    report = convert(model, "fused_rmsnorm")
    assert report.fused_norms == ["own"] and report.skipped == {
        "square": "normalizes more than one dimension",
        "other": "is a OnePlusRMSNorm that does not compute what nn.RMSNorm does",
    }
    assert type(model["own"]) is FusedRMSNorm and model["own"].weight is weight and model["own"].eps == 1e-3


def test_filtering_one_linear_of_a_group_keeps_its_norm_exact():
    model = llama()
    report = convert(model, filter_fqns=["output", "layers.0.attention.wk"])
    assert report.skipped["layers.0.attention_norm"] == "feeds layers.0.attention.wk, named in filter_fqns"
    assert type(model.layers[0].attention_norm) is nn.RMSNorm
    assert type(model.layers[0].attention.wq) is MXLinear and type(model.layers[0].attention.wk) is nn.Linear
    loss(model).backward()


def test_no_filter_converts_output_too():
    model = llama()
    assert convert(model, filter_fqns=[]).norms["norm"] == ["output"]
    loss(model).backward()


@pytest.mark.parametrize(
    ("fqn", "pattern", "expected"),
    [
        ("layers.1.attention.wq", "layers.1", True),
        ("layers.10.attention.wq", "layers.1", False),
        ("layers.10.attention.wq", "layers.1*", True),
        ("layers.3.attention.wq", "layers.[0-3]", True),
        ("layers.3.attention.wq", "wq", True),
        ("layers.3.attention.wq", "w", False),
        ("layers.3.attention.wq", "attention.*", True),
        ("layers.3.attention", "attention.*", False),
        ("output", "out", False),
        ("output", "output", True),
    ],
)
def test_matches_whole_segments(fqn, pattern, expected):
    assert matches(fqn, pattern) is expected


class UsesNormTwice(nn.Module):
    """The norm's output is also added to the residual stream, so it must stay a tensor."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.other = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        normed = self.norm(x)
        return self.other(self.linear(normed) + normed)


class ReturnsNorm(UsesNormTwice):
    def forward(self, x):
        normed = self.norm(x)
        return self.other(self.linear(normed)), normed


class CallsLinearTwice(UsesNormTwice):
    def forward(self, x):
        return self.other(self.linear(self.norm(x)) + self.linear(x))


class MultipliesTheWeightItself(UsesNormTwice):
    def forward(self, x):
        return self.other(F.linear(self.norm(x), self.linear.weight))


class CannotRunOnMeta(UsesNormTwice):
    """Half-way it needs a value, which meta tensors do not have; what follows cannot be seen."""

    def forward(self, x):
        y = self.linear(self.norm(x))
        return self.other(y) if y.sum().item() > 0 else y


class TiedWeights(UsesNormTwice):
    def __init__(self):
        super().__init__()
        self.other.weight = self.linear.weight

    def forward(self, x):
        return self.other(self.linear(self.norm(x)))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (UsesNormTwice, "its output is used by add"),
        (ReturnsNorm, "its output is used by the caller of the model"),
        (CallsLinearTwice, "which is called more than once"),
        (TiedWeights, "its output is used by linear"),
        (MultipliesTheWeightItself, "its output is used by linear"),
    ],
)
def test_norms_that_cannot_be_proven_are_left_alone(module, reason):
    inner = nn.Sequential(module(), nn.RMSNorm(DIM), nn.Linear(DIM, DIM)) if module is not ReturnsNorm else module()
    fqn = "norm" if module is ReturnsNorm else "0.norm"
    if module is ReturnsNorm:
        with pytest.raises(ConfigError, match=f"nothing to convert.*\n  norm: {reason}"):
            convert(inner, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
        return
    report = convert(inner, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
    assert reason in report.skipped[fqn]
    assert report.norms == {"1": ["2"]}
    inner(torch.randn(3, DIM)).sum().backward()


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
def test_a_shared_weight_stays_in_high_precision(converter):
    model = llama()
    model.output.weight = model.tok_embeddings.weight
    report = convert(model, converter, filter_fqns=[])
    assert report.skipped["output"] == "shares its weight with another module"
    assert type(model.output) is nn.Linear and "output" not in report.linears


def test_a_module_that_cannot_run_on_meta_is_stepped_over():
    model = nn.Sequential(CannotRunOnMeta(), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    report = convert(model, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
    assert "0, which fails on the meta device" in report.skipped["0.norm"]
    assert report.norms == {"1": ["2"]}
    assert type(model[0].norm) is nn.RMSNorm


def test_inputs_of_the_wrong_shape():
    model = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    with pytest.raises(ConfigError, match="not followed: 0, which fails on the meta device"):
        convert(model, filter_fqns=[], example_inputs=(torch.zeros(1, 4),))


def unchanged(model):
    return not any(isinstance(m, (MXNorm, MXLinear, MXNormLinear, FusedRMSNorm)) for m in model.modules())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"converter": "mxnorms"}, "converter = 'mxnorms' is not one of: 'mxnorm', 'mx_linear', 'fused_rmsnorm', 'dec"),
        (
            {"converter": "decompose_k_router"},
            "converter = 'decompose_k_router' finds nothing to convert in this Llama",
        ),
        ({"converter": "fused_rmsnorm", "when_compiled": "no"}, "when_compiled = 'no' is not one of"),
        ({"converter": "fused_rmsnorm", "filter_fqns": ["norms"]}, "filter_fqns: 'norms' matches no module"),
        (
            {"converter": "fused_rmsnorm", "filter_fqns": ["layers", "norm"]},
            "converter = 'fused_rmsnorm' finds nothing to convert in this Llama\n",
        ),
        ({"recipe": "mx"}, "recipe = 'mx' is not one of"),
        ({"p": 0}, "p = 0 is not one of: 1, 2"),
        ({"estimator": "rms"}, "estimator = 'rms' is not one of"),
        ({"mode": "slow"}, "mode = 'slow' is not one of"),
        ({"eps": -1.0}, "eps = -1.0"),
        ({"filter_fqns": ["lm_head"]}, "filter_fqns: 'lm_head' matches no module; the top-level modules are: tok_emb"),
        ({"filter_fqns": "output"}, r"filter_fqns = 'output' is not a list: write \['output'\]"),
        ({"filter_fqns": ["out"]}, "filter_fqns: 'out' matches no module"),
        ({"filter_fqns": ["layers", "output"]}, "nothing to convert in this Llama\n"),
        ({"filter_fqns": ["layers", "output"], "converter": "mx_linear"}, "nothing to convert"),
        ({"example_inputs": ()}, "one forward pass on the meta device failed with TypeError"),
    ],
)
def test_mistakes_leave_the_model_unchanged(kwargs, message):
    model = llama()
    with pytest.raises(ConfigError, match=message):
        convert(model, **kwargs)
    assert unchanged(model)


class HomeMadeRMSNorm(nn.Module):
    """As many model files define it."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).type_as(x)


class OnePlusRMSNorm(HomeMadeRMSNorm):
    def forward(self, x):
        return super().forward(x) + x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def test_an_rms_norm_of_the_models_own_is_recognised_by_what_it_computes():
    model = llama()
    for i, layer in enumerate(model.layers):
        layer.attention_norm = HomeMadeRMSNorm(DIM, 1e-3)
        layer.ffn_norm = OnePlusRMSNorm(DIM, 1e-3) if i else HomeMadeRMSNorm(DIM, 1e-6)
    weight = model.layers[0].attention_norm.weight
    report = convert(model, mode="reference")
    assert list(report.norms) == ["layers.0.attention_norm", "layers.0.ffn_norm", "layers.1.attention_norm"]
    assert report.skipped["layers.1.ffn_norm"] == "is a OnePlusRMSNorm that does not compute what nn.RMSNorm does"
    norm = model.layers[0].attention_norm
    assert type(norm) is MXNorm and norm.weight is weight and norm.estimate.eps == 1e-3
    assert model.layers[0].ffn_norm.estimate.eps == 1e-6
    loss(model).backward()


def test_features_that_no_block_divides():
    model = llama(vocab=100)
    with pytest.raises(
        ConfigError, match="^output: out_features = 100 is not a multiple of the block size 32.*filter_fqns"
    ):
        convert(model, filter_fqns=[])
    assert unchanged(model)


def test_a_model_without_norms():
    with pytest.raises(ConfigError, match="nothing to convert in this Sequential"):
        convert(nn.Sequential(nn.Linear(DIM, DIM)), filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))


def test_the_model_itself_is_not_swapped():
    with pytest.raises(ConfigError, match="nothing to convert in this RMSNorm"):
        convert(nn.RMSNorm(DIM), "fused_rmsnorm")


class TokenRouter(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.gate, self.other = nn.Linear(DIM, 4, bias=bias), nn.Linear(4, 4)

    def forward(self, x):
        return self.other(torch.sigmoid(self.gate(x).float()))


class MixtureLayer(Layer):
    """A layer whose ffn_norm feeds a router and nothing but linears, the router's gate among them."""

    def __init__(self, bias=False):
        super().__init__()
        self.router, self.gate = TokenRouter(bias), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        h = self.ffn_norm(x)
        return x + self.gate(h) * self.router(h).sum(-1, keepdim=True)


def mixture():
    torch.manual_seed(0)
    model = Llama()
    model.layers = nn.ModuleList([Layer(), MixtureLayer(), MixtureLayer(bias=True)])
    return model


GATES = ["layers.1.router.gate", "layers.2.router.gate"]


def test_decompose_k_router_swaps_gates_of_routers_only():
    model = mixture()
    before, state = kinds(model), dict(model.named_parameters())
    expected = loss(model)
    report = convert(model, "decompose_k_router")
    assert report.gates == GATES and not (report.norms or report.linears or report.fused_norms or report.skipped)
    assert kinds(model) == before | dict.fromkeys(GATES, DecomposeKRouter)
    after = dict(model.named_parameters())
    assert list(after) == list(state) and all(after[name] is state[name] for name in state)
    assert str(report).splitlines() == ["swapped 2 gates of routers; left 0 as they were", *(f"  {g}" for g in GATES)]
    torch.testing.assert_close(loss(model), expected, rtol=1e-5, atol=1e-5)
    loss(model).backward()
    assert all(model.get_submodule(gate).weight.grad.any() for gate in GATES)


def test_filtered_gates_and_those_of_another_class_stay():
    model = mixture()
    report = convert(model, "decompose_k_router", filter_fqns=["layers.1"])
    assert report.gates == GATES[1:] and report.skipped == {GATES[0]: "named in filter_fqns"}
    report = convert(model, "decompose_k_router")
    assert report.gates == GATES[:1] and report.skipped == {GATES[1]: "is a DecomposeKRouter"}
    with pytest.raises(ConfigError, match=f"nothing to convert in this Llama\n  {GATES[0]}: is a DecomposeKRouter"):
        convert(model, "decompose_k_router")


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear", "fused_rmsnorm"])
def test_decompose_k_router_goes_before_or_after_the_others(converter):
    """Which leave the gates alone, swapped or not, and the norms that feed them."""
    kwargs = {} if converter == "fused_rmsnorm" else {"mode": "reference", "filter_fqns": ["output", "other"]}
    first, last = mixture(), mixture()
    convert(first, "decompose_k_router")
    of_first = convert(first, converter, **kwargs)
    of_last = convert(last, converter, **kwargs)
    convert(last, "decompose_k_router")
    assert kinds(first) == kinds(last) and repr(first) == repr(last)
    assert all(kinds(first)[gate] is DecomposeKRouter for gate in GATES)
    for report in (of_first, of_last):
        assert converter == "fused_rmsnorm" or all("router" in report.skipped[gate].lower() for gate in GATES)
    if converter == "mxnorm":
        assert "layers.1.ffn_norm" in of_first.skipped and "layers.1.ffn_norm" in of_last.skipped
        assert of_last.skipped["layers.1.ffn_norm"] == f"feeds {GATES[0]}, the gate of a router"
    loss(first).backward()


def test_a_gate_without_a_router_is_a_linear_like_others():
    model = mixture()
    report = convert(model, "mx_linear", filter_fqns=["output", "other"])
    assert "layers.1.gate" in report.linears
    assert report.skipped[GATES[0]] == "is the gate of a router, whose choices are sensitive to rounding"


def test_a_router_that_is_the_model_itself():
    router = TokenRouter(False)
    assert convert(router, "decompose_k_router").gates == ["gate"]
    assert type(router.gate) is DecomposeKRouter


def test_the_last_share_of_the_blocks_stays_in_high_precision():
    model = llama(layers=6)
    report = convert(model, recipe="nvfp4", mode="reference")
    assert len(report.norms) == 10 and len(report.linears) == 10
    assert [type(layer.attention_norm) for layer in model.layers] == [MXNorm] * 5 + [nn.RMSNorm]
    assert {type(m) for m in model.layers[5].modules()} <= {Layer, Attention, FeedForward, nn.Linear, nn.RMSNorm}
    reason = "in the last 1 of 6 blocks (high_precision_share = 0.15)"
    assert report.skipped["layers.5.ffn_norm"] == report.skipped["layers.5.attention.wo"] == reason
    assert report.skipped["output"] == "named in filter_fqns"


@pytest.mark.parametrize(
    ("share", "layers", "left"), [(0.15, 12, 2), (0.15, 32, 5), (0.15, 3, 0), (0.5, 3, 2), (0, 4, 0), (0.34, 3, 1)]
)
@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
def test_how_many_blocks_a_share_is(converter, share, layers, left):
    model = llama(layers=layers)
    convert(model, converter, high_precision_share=share, mode="reference")
    kept = [type(layer.attention.wo) is nn.Linear for layer in model.layers]
    assert kept == [False] * (layers - left) + [True] * left


def test_filters_and_the_share_add_up():
    model = llama(layers=4)
    report = convert(model, high_precision_share=0.25, filter_fqns=["layers.0", "output"], mode="reference")
    assert {fqn.split(".")[1] for fqn in report.norms} == {"1", "2"}
    assert report.skipped["layers.0.ffn_norm"] == "named in filter_fqns"
    assert "last 1 of 4 blocks" in report.skipped["layers.3.ffn_norm"]


def test_blocks_of_blocks_are_not_counted_again():
    """Experts in a block's own list are no blocks of the model."""

    class Branched(Layer):
        def __init__(self):
            super().__init__()
            self.more = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(9))

    model = nn.ModuleList([Branched(), Branched()])
    report = convert(model, "mx_linear", high_precision_share=0.5, filter_fqns=[], mode="reference")
    assert {fqn.split(".")[0] for fqn in report.linears} == {"0"}
    assert len(report.linears) == 16


def test_the_switches_of_nvfp4_reach_every_layer():
    switches = dict(tensor_scale="dynamic", weight_tiles=False, hadamard=False, stochastic_rounding=False)
    model = llama()
    convert(model, recipe="nvfp4", mode="reference", **switches, high_precision_share=0)
    modules = [m for m in model.modules() if isinstance(m, (MXNorm, MXLinear, MXNormLinear))]
    assert len(modules) == 18 and {m.recipe for m in modules} == {
        get_recipe("nvfp4", **switches, high_precision_share=0)
    }


def test_layers_take_their_numbers_from_seed_and_fqn():
    model, cpu = llama(), torch.device("cpu")
    convert(model, recipe="nvfp4", mode="reference", seed=5)
    fqns = ["layers.0.attention_norm", "layers.1.ffn_norm", "layers.0.attention.wo", "layers.1.feed_forward.w2"]
    for fqn in fqns:
        assert model.get_submodule(fqn).signs(cpu) == sign_mask(hadamard_signs(5, fqn))
    for fqn in ("layers.0.attention.wq", "layers.1.feed_forward.w2"):
        keys = model.get_submodule(fqn).draws(cpu)[:2].tolist()
        assert keys == [rounding_key(5, fqn, "dgrad"), rounding_key(5, fqn, "wgrad")]
    for seed in ("5", True):
        with pytest.raises(ConfigError, match=f"seed = {seed!r} is not an integer"):
            convert(llama(), recipe="nvfp4", seed=seed)


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
def test_a_model_learns_in_nvfp4(converter):
    model = llama()
    convert(model, converter, recipe="nvfp4", mode="reference")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(25):
        set_rounding_step(step)
        optimizer.zero_grad()
        losses.append(loss(model))
        losses[-1].backward()
        optimizer.step()
    set_rounding_step(None)
    assert losses[-1] < losses[0] - 2
