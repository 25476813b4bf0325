"""What a resumed run may change: every setting in one of four classes.

A name may be a pattern for a whole table, where every setting that the table may get belongs to the same class.
"""

from enum import Enum
from fnmatch import fnmatchcase


class ResumeClass(Enum):
    FREE = "free"
    """
    Changes nothing but the order of sums: logging, folders, layout, compilation. Or another file compares it: the hash
    of a tokenizer
    """
    APPLIED = "applied"
    """Changes the curve from the next step on, as one expects of it; it is applied and reported"""
    DATA = "data"
    """Says which text is read: free where the text has a hash, which is compared; refused where it is streamed"""
    REFUSED = "refused"
    """Makes the rest of the curve another experiment; refused unless checkpoint.may_change names it"""


CLASSES = {
    ResumeClass.FREE: """
        job.* profiling.* comm.* memory_estimation.* compile.* activation_checkpoint.* validation.* checkpoint.*
        metrics.* parallelism.* training.dataloader.*
        training.local_batch_size training.gc_freq training.gc_debug training.enable_cpu_offload
        model.print_after_conversion debug.deterministic debug.deterministic_warn_only
        data.cache_dir data.prepared data.unseparated model.hf_assets_path model.tokenizer_path
        fused_norm.* fused_rmsnorm.*
        mxnorm.mode mxnorm.diagnostics.* mxnorm.gather mxnorm.cache_weights mxnorm.group_linears mxnorm.graph_passes
        model_args.max_seq_len
    """,
    ResumeClass.APPLIED: """
        lr_scheduler.* optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay
        optimizer.implementation training.steps training.max_norm
        experimental.* fault_tolerance.*
    """,
    ResumeClass.DATA: """
        training.dataset training.dataset_path
        data.installed data.other_files data.max_bytes data.package_share data.validation_share data.seed data.text_key
        data.hf_config
    """,
    ResumeClass.REFUSED: """
        model.name model.flavor model.converters model_args.* data.vocab_size quantize.*
        decompose_k_router.*
        mxnorm.p mxnorm.recipe mxnorm.recipes mxnorm.estimator mxnorm.scale_rounding mxnorm.tensor_scale
        mxnorm.weight_tiles mxnorm.hadamard mxnorm.stochastic_rounding mxnorm.high_precision_share mxnorm.eps
        mxnorm.filter_fqns mxnorm.schedule mxnorm.guard.*
        optimizer.name optimizer.early_step_in_backward
        training.global_batch_size training.seq_len training.dtype training.mixed_precision_param
        training.mixed_precision_reduce debug.seed debug.moe_force_load_balance
    """,
}


def classes_of(name: str) -> list[ResumeClass]:
    """Return the classes whose lists hold a setting: one, or none for a setting of the user's own module.

    A setting that a list names is not looked for among the patterns.
    """
    named = [resume_class for resume_class, patterns in CLASSES.items() if name in patterns.split()]
    return named or [
        resume_class
        for resume_class, patterns in CLASSES.items()
        if any(fnmatchcase(name, pattern) for pattern in patterns.split())
    ]


def class_of(name: str) -> ResumeClass:
    """Return the class of a setting. A setting of the user's own module is applied and reported."""
    return next(iter(classes_of(name)), ResumeClass.APPLIED)
