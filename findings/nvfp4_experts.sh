#!/usr/bin/env bash
# transformers loads the experts of an NVFP4 checkpoint without their global scale, so they are far too large.
#
# Versions:  transformers 5.24.0, compressed-tensors 0.20.1, torch 2.13.0, on a CPU (transformers' issue 48371).
# Belief:    A checkpoint in the format nvfp4-pack-quantized gives the weights that compressed-tensors decompresses from
#            it. The loading info names the tensors that the loader does not use.
# Fact:      A dense Qwen3 model behaves so, to the bit. In a mixture of experts the loader drops each expert's
#            weight_global_scale. The weights come out over 10,000 times too large; the loading info names nothing.
#            The norms hide the size: the logits stay finite, but their error is larger than their spread.
# Matters:   An evaluation through transformers calls a right checkpoint broken. Loading info without a complaint does
#            not prove that every tensor was used; the logits of the decompressed weights do.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT

cat >"$folder/load.py" <<'PYTHON'
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor as Compressor
from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])
FORMAT = dict(format="nvfp4-pack-quantized", quantization_status="compressed", ignore=["lm_head", "re:.*gate$"])
SIZES = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
torch.manual_seed(0)
dense, experts = Qwen3Config(**SIZES), Qwen3MoeConfig(**SIZES, num_experts=16)
for weight_name, config in ("mlp.down_proj.weight", dense), ("mlp.experts.down_proj", experts):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained("right")
    model.config.quantization_config = QuantizationConfig(config_groups={"all": SCHEME}, **FORMAT).to_dict()
    model.config.save_pretrained("packed")
    right, packed = load_file("right/model.safetensors"), load_file("right/model.safetensors")
    for name in [name for name in right if name.endswith("_proj.weight")]:
        weight = packed.pop(name)
        blocks, scale = weight.unflatten(1, (-1, 16)), generate_gparam(weight.min(), weight.max())
        scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, scale)
        parts = Compressor.compress({"weight": weight, "weight_scale": scales, "weight_global_scale": scale}, SCHEME)
        right[name] = Compressor.decompress(parts, SCHEME)["weight"]
        packed |= {name.replace("weight", part): tensor for part, tensor in parts.items()}
    save_file(right, "right/model.safetensors", {"format": "pt"})
    save_file(packed, "packed/model.safetensors", {"format": "pt"})
    logits, sizes = [], []
    for path in "right", "packed":
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype="bfloat16", output_loading_info=True)
        logits.append(model(torch.arange(64)[None]).logits.detach().double())  # decompresses dense layers, too
        sizes.append(model.model.layers[0].get_parameter(weight_name).norm().item())
    error, complaints = (logits[1] - logits[0]).std() / logits[0].std(), sum(map(len, info.values()))
    print(f"{weight_name} x{sizes[1] / sizes[0]:.1f}, error of the logits {error:.2g}, {complaints} complaints")
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.1
(cd "$folder" && TRANSFORMERS_VERBOSITY=error venv/bin/python load.py) | tee "$folder/seen"
if [ "$(grep -cE "down_proj.weight x1.0, .* 0, 0 |experts.* x[0-9]{5}.* [1-9].[0-9], 0 " "$folder/seen")" = 2 ]; then
    echo "as found: the experts' weights are too large by their global scales"
else
    echo "changed"; exit 1
fi
