"""TorchTitan 0.2.2's validator over mxtrain's held-out text."""

from dataclasses import replace

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.components.validate import build_validator as build_titan_validator

from mxtrain.data.loader import Loader
from mxtrain.titan.data import build_validation_loader, opening, validation_dataset
from mxtrain.titan.v02.repairs.context_parallel import share_of_validation_loss


def build_validator(
    job_config, dp_world_size: int, dp_rank: int, tokenizer: HuggingFaceTokenizer, **parts
) -> BaseValidator:
    """Return a validator over held-out text. Takes the arguments of TorchTitan's ``build_validator``.

    Raises ConfigError as ``build_validation_loader``.
    """
    parts["loss_fn"] = share_of_validation_loss(parts["loss_fn"], parts["parallel_dims"].cp)
    loader = build_validation_loader(job_config, tokenizer, (dp_rank, dp_world_size))
    if loader is not None:
        return LoaderValidator(job_config, loader, tokenizer=tokenizer, **parts)
    validation = replace(job_config.validation, dataset=validation_dataset(job_config))
    with opening("validation", validation.dataset, validation.dataset_path):
        return build_titan_validator(
            replace(job_config, validation=validation), dp_world_size, dp_rank, tokenizer, **parts
        )


class LoaderValidator(Validator):
    """TorchTitan's Validator over a given loader, with the attributes that TorchTitan's ``__init__`` stores."""

    def __init__(self, job_config, loader: Loader, **parts):
        BaseValidator.__init__(self, job_config)
        self.validation_dataloader = loader
        self.pp_schedule = self.pp_has_first_stage = self.pp_has_last_stage = None
        vars(self).update(parts)

    def post_dataloading_process(self, input_dict, labels, model_parts):
        # DeepSeek V3 and Llama 4 make a mask for every attention, and then their "sdpa" attention refuses the mask.
        args = getattr(model_parts[0], "model_args", None)
        if getattr(args, "attn_type", "sdpa") not in ("flex", "varlen"):
            model_parts = [_ModelWithoutMasks]
        return super().post_dataloading_process(input_dict, labels, model_parts)


class _ModelWithoutMasks:
    @staticmethod
    def get_attention_masks(**inputs):
        raise TypeError("attention takes no mask")  # TorchTitan's validator expects this error
