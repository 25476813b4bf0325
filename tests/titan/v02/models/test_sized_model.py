from dataclasses import replace

import pytest

from mxtrain.errors import ConfigError
from mxtrain.titan.hugging_face.models import require_computed_alike
from tests.support.saved_runs import sized


@pytest.mark.parametrize("name, value", {"num_shared_experts": 1, "score_func": "sigmoid", "gate_bias": True}.items())
def test_experts_that_transformers_lacks_are_refused(name, value):
    model = sized("qwen3", "small_experts")
    model = replace(model, args=replace(model.args, moe_args=replace(model.args.moe_args, **{name: value})))
    with pytest.raises(ConfigError, match=f"^RUN = 'a': a qwen3 with {name} = {value!r} has no counterpart"):
        require_computed_alike(model, "RUN = 'a'")
