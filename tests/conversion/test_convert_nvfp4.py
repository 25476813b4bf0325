"""What conversion to NVFP4 adds: blocks left in high precision, switches, and numbers from seed and name."""

import re

import pytest
import torch

from mxtrain import ConfigError, convert
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask
from tests.support.conversion_models import llama


def test_layers_take_their_numbers_from_seed_and_fqn():
    model, cpu = llama(), torch.device("cpu")
    convert(model, recipe="nvfp4", mode="reference", seed=5)
    fqns = ["layers.0.attention_norm", "layers.1.ffn_norm", "layers.0.attention.wo", "layers.1.feed_forward.w2"]
    for fqn in fqns:
        assert model.get_submodule(fqn).signs(cpu) == sign_mask(hadamard_signs(5, fqn))
    for fqn in ("layers.0.attention.wq", "layers.1.feed_forward.w2"):
        assert model.get_submodule(fqn).draws(cpu)[0] == rounding_key(5, fqn)
    for seed in ("5", True):
        with pytest.raises(ConfigError, match=f"seed = {seed!r} is not an integer"):
            convert(llama(), recipe="nvfp4", seed=seed)


def numbers_of(model):
    """FQN of every layer with random bits -> the numbers that these follow from."""
    return {fqn: module._numbers for fqn, module in model.named_modules() if isinstance(module, RecipeModule)}


def test_parts_with_a_prefix_have_the_numbers_of_the_whole():
    settings = dict(recipe="nvfp4", mode="reference", high_precision_share=0, seed=5)
    whole, parts, unnamed = llama(), llama(), llama()
    convert(whole, **settings)
    for i in range(2):
        inputs = (torch.zeros(1, 8, 64),)
        plan = convert(parts.layers[i], example_inputs=inputs, prefix=f"layers.{i}", **settings)
        convert(unnamed.layers[i], example_inputs=inputs, **settings)
        assert "attention.wo" in plan.linears, "names of the plan are those within the part"
    assert numbers_of(parts) == numbers_of(whole)
    first, second = (numbers_of(unnamed)[f"layers.{i}.attention.wo"] for i in range(2))
    assert first == second, "without a prefix"


def test_a_prefix_that_is_no_name_is_refused():
    for prefix in (None, ".", "layers.0.", "layers..0"):
        model = llama()
        with pytest.raises(ConfigError, match=f"^prefix = {re.escape(repr(prefix))} is not the FQN of a module"):
            convert(model, prefix=prefix)
        assert not numbers_of(model)
