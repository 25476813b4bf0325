"""Every mistake in the settings is one line and exit status 2, at once, and leaves nothing behind."""

import sys
import time

import pytest
import tomli_w

from mxtrain import cli
from mxtrain.errors import ConfigError
from mxtrain.settings.read import places, read_settings

# Flags -> the beginning of the message.
FLAGS = [
    # Numbers out of range
    ("--training.steps=-5", "training.steps = -5 should be greater than or equal to 1"),
    ("--mxnorm.diagnostics.every=-1", "mxnorm.diagnostics.every = -1 should be greater than or equal to 0"),
    ("--mxnorm.diagnostics.tokens=0", "mxnorm.diagnostics.tokens = 0 should be greater than or equal to 32"),
    ("--mxnorm.diagnostics.tokens=100", "mxnorm.diagnostics.tokens = 100 should be a multiple of 32"),
    ("--training.steps=0", "training.steps = 0 should be greater than or equal to 1"),
    ("--training.seq_len=0", "training.seq_len = 0 should be greater than or equal to 1"),
    ("--training.seq_len=-8", "training.seq_len = -8 should be greater than or equal to 1"),
    ("--training.local_batch_size=0", "training.local_batch_size = 0 should be greater"),
    ("--training.local_batch_size=-1", "training.local_batch_size = -1 should be greater"),
    ("--training.global_batch_size=0", "training.global_batch_size = 0 should be -1 or at least 1"),
    ("--training.global_batch_size=-2", "training.global_batch_size = -2 should be -1 or at least 1"),
    ("--training.max_norm=0", "training.max_norm = 0.0 should be greater than 0"),
    ("--training.max_norm=nan", "training.max_norm = nan should be greater than 0"),
    ("--training.gc_freq=0", "training.gc_freq = 0 should be greater"),
    ("--training.dataloader.num_workers=-1", "training.dataloader.num_workers = -1 should be greater"),
    ("--training.dataloader.prefetch_factor=0", "training.dataloader.prefetch_factor = 0 should be greater"),
    ("--checkpoint.interval=0", "checkpoint.interval = 0 should be greater than or equal to 1"),
    ("--checkpoint.keep_latest_k=1", "checkpoint.keep_latest_k = 1 should be 0 (keep all) or at least 2"),
    ("--checkpoint.keep_latest_k=-1", "checkpoint.keep_latest_k = -1 should be 0 (keep all) or at least 2"),
    ("--checkpoint.load_step=-2", "checkpoint.load_step = -2 should be greater than or equal to -1"),
    ("--metrics.log_freq=0", "metrics.log_freq = 0 should be greater than or equal to 1"),
    ("--metrics.log_freq=-1", "metrics.log_freq = -1 should be greater"),
    ("--optimizer.lr=-1", "optimizer.lr = -1.0 should be greater than or equal to 0"),
    ("--optimizer.lr=inf", "optimizer.lr = inf should be a finite number"),
    ("--optimizer.lr=nan", "optimizer.lr = nan should be a finite number"),
    ("--optimizer.beta1=1", "optimizer.beta1 = 1.0 should be less than 1"),
    ("--optimizer.beta2=-0.1", "optimizer.beta2 = -0.1 should be greater than or equal to 0"),
    ("--optimizer.eps=-1e-8", "optimizer.eps = -1e-08 should be greater"),
    ("--optimizer.weight_decay=-0.1", "optimizer.weight_decay = -0.1 should be greater"),
    ("--lr_scheduler.warmup_steps=-1", "lr_scheduler.warmup_steps = -1 should be greater"),
    ("--lr_scheduler.total_steps=0", "lr_scheduler.total_steps = 0 should be greater"),
    ("--lr_scheduler.decay_ratio=1.5", "lr_scheduler.decay_ratio = 1.5 should be less than or equal to 1"),
    ("--lr_scheduler.min_lr_factor=2", "lr_scheduler.min_lr_factor = 2.0 should be less than or equal to 1"),
    ("--validation.enable --validation.freq=0", "validation.freq = 0 should be greater"),
    ("--validation.enable --validation.steps=0", "validation.steps = 0 should be -1 or at least 1"),
    ("--validation.seq_len=0", "validation.seq_len = 0 should be greater"),
    ("--validation.local_batch_size=0", "validation.local_batch_size = 0 should be greater"),
    ("--profiling.profile_freq=0", "profiling.profile_freq = 0 should be greater"),
    ("--profiling.profiler_active=0", "profiling.profiler_active = 0 should be greater"),
    ("--comm.init_timeout_seconds=0", "comm.init_timeout_seconds = 0 should be greater"),
    ("--comm.train_timeout_seconds=-1", "comm.train_timeout_seconds = -1 should be greater"),
    ("--debug.seed=-1", "debug.seed = -1 should be greater than or equal to 0"),
    (f"--debug.seed={2**64}", f"debug.seed = {2**64} should be less than {2**64}"),
    ("--activation_checkpoint.memory_budget=2", "activation_checkpoint.memory_budget = 2.0 should be less"),
    ("--parallelism.tensor_parallel_degree=0", "parallelism.tensor_parallel_degree = 0 should be greater"),
    ("--parallelism.context_parallel_degree=-1", "parallelism.context_parallel_degree = -1 should be greater"),
    ("--parallelism.pipeline_parallel_degree=0", "parallelism.pipeline_parallel_degree = 0 should be greater"),
    ("--parallelism.expert_parallel_degree=0", "parallelism.expert_parallel_degree = 0 should be greater"),
    ("--parallelism.data_parallel_shard_degree=0", "parallelism.data_parallel_shard_degree = 0 should be -1 or at"),
    ("--parallelism.data_parallel_replicate_degree=0", "parallelism.data_parallel_replicate_degree = 0 should be"),
    ("--data.vocab_size=-1", "data.vocab_size = -1 should be greater than or equal to 0"),
    ("--data.vocab_size=10000000000", "data.vocab_size = 10000000000 should be less than or equal to 16777216"),
    ("--data.max_bytes=-1", "data.max_bytes = -1 should be greater"),
    ("--data.package_share=0", "data.package_share = 0.0 should be greater than 0"),
    ("--data.package_share=1.1", "data.package_share = 1.1 should be less than or equal to 1"),
    ("--data.validation_share=1", "data.validation_share = 1.0 should be less than 1"),
    ("--data.validation_share=nan", "data.validation_share = nan should be"),
    ("--data.seed=-1", "data.seed = -1 should be greater"),
    ("--mxnorm.eps=-1", "mxnorm.eps = -1.0 should be greater than or equal to 0"),
    ("--mxnorm.eps=inf", "mxnorm.eps = inf should be a finite number"),
    ("--mxnorm.high_precision_share=1", "mxnorm.high_precision_share = 1.0 should be less than 1"),
    # Values of another type
    ("--training.steps=3.5", "training.steps = '3.5' should be a valid integer"),
    ("--training.steps=many", "training.steps = 'many' should be a valid integer"),
    ("--training.steps=", "training.steps = '' should be a valid integer"),
    ("--training.steps=True", "training.steps = 'True' should be a valid integer"),
    ("--optimizer.lr=fast", "optimizer.lr = 'fast' should be a valid number"),
    ("--training.max_norm=big", "training.max_norm = 'big' should be a valid number"),
    ("--checkpoint.enable=maybe", "checkpoint.enable = 'maybe' should be a valid boolean"),
    ("--debug.seed=1.5", "debug.seed = '1.5' should be a valid integer"),
    ("--mxnorm.p=True", "mxnorm.p = 'True' should be a valid integer"),
    ("--mxnorm.p=2.5", "mxnorm.p = '2.5' should be a valid integer"),
    ("--mxnorm.eps=small", "mxnorm.eps = 'small' should be a valid number"),
    ("--mxnorm.hadamard=perhaps", "mxnorm.hadamard = 'perhaps' should be a valid boolean"),
    ("--data.vocab_size=None", "data.vocab_size = 'None' should be a valid integer"),
    # Values that are not among the allowed ones
    ("--mxnorm.p=3", "mxnorm.p = 3 should be 1 or 2"),
    ("--mxnorm.estimator=mean", "mxnorm.estimator = 'mean' should be 'pre_round', 'post_round' or 'exact'"),
    ("--mxnorm.recipe=mxfp3", "mxnorm.recipe = 'mxfp3' is not one of: 'mxfp8', 'unquantized'"),
    ("--mxnorm.recipe=fprop=nvfp4", "mxnorm.recipe = 'fprop=nvfp4' says nothing of dgrad and wgrad"),
    ("--mxnorm.recipe=fprop=mxfp8,dgrad=mx,wgrad=bf16", "mxnorm.recipe = 'fprop=mxfp8,dgrad=mx,wgrad=bf16': dgrad"),
    ("--mxnorm.recipes wo fprob=bf16", "mxnorm.recipes.'wo' = 'fprob=bf16': GEMM = 'fprob' is not"),
    ("--mxnorm.recipes wo", "mxnorm.recipes takes pairs of a name and a value, not: wo"),
    ("--mxnorm.scale_rounding=up", "mxnorm.scale_rounding = 'up' should be 'rceil' or 'floor'"),
    ("--mxnorm.tensor_scale=both", "mxnorm.tensor_scale = 'both' should be 'static' or 'dynamic'"),
    ("--mxnorm.tensor_scale=static", "mxnorm.tensor_scale = 'static' needs recipe 'nvfp4'"),
    ("--mxnorm.hadamard", "mxnorm.hadamard = True needs recipe 'nvfp4'"),
    ("--mxnorm.recipe=nvfp4 --mxnorm.scale_rounding=floor", "mxnorm.scale_rounding = 'floor' does not apply to"),
    ("--mxnorm.recipe=nvfp4 --mxnorm.estimator=post_round", "mxnorm.estimator = 'post_round' reads rounded block"),
    ("--mxnorm.mode=warp", "mxnorm.mode = 'warp' should be 'auto', 'native', 'emulated' or 'reference'"),
    ("--fused_rmsnorm.when_compiled=never", "fused_rmsnorm.when_compiled = 'never' should be 'auto', 'kernel' or"),
    ("--metrics.on_nonfinite_loss=maybe", "metrics.on_nonfinite_loss = 'maybe' should be 'stop' or 'continue'"),
    ("--optimizer.name=Lion", "optimizer.name = 'Lion' should be 'Adam' or 'AdamW'"),
    ("--optimizer.implementation=slow", "optimizer.implementation = 'slow' should be 'for-loop', 'foreach' or 'fused'"),
    ("--lr_scheduler.decay_type=wave", "lr_scheduler.decay_type = 'wave' should be 'linear', 'sqrt' or 'cosine'"),
    ("--training.dtype=float16", "training.dtype = 'float16' should be 'bfloat16' or 'float32'"),
    ("--training.mixed_precision_param=float16", "training.mixed_precision_param = 'float16' should be"),
    ("--activation_checkpoint.mode=some", "activation_checkpoint.mode = 'some' should be 'selective', 'full'"),
    ("--activation_checkpoint.selective_ac_option=0", "activation_checkpoint.selective_ac_option = '0' should be 'op'"),
    ("--activation_checkpoint.determinism_check=x", "activation_checkpoint.determinism_check = 'x' should be"),
    ("--checkpoint.async_mode=later", "checkpoint.async_mode = 'later' should be 'disabled'"),
    ("--checkpoint.exclude_from_loading=optim", "checkpoint.exclude_from_loading[0] = 'optim' should be 'model'"),
    ("--compile.components=model,los", "compile.components[1] = 'los' should be 'model' or 'loss'"),
    ("--parallelism.pipeline_parallel_schedule=2F", "parallelism.pipeline_parallel_schedule = '2F' is not one of"),
    ("--model.name=llama9", "model.name = 'llama9' is not one of: llama3"),
    ("--model.flavor=9B", "model.flavor = '9B' is not one of: debugmodel"),
    ("--model.converters=mxnrom", "model.converters = ['mxnrom'] has 'mxnrom', which is not one of: mxnorm"),
    ("--model.converters=mxnorm,mxnorm", "model.converters = ['mxnorm', 'mxnorm'] has 'mxnorm' twice: name it once"),
    ("--model.converters=mxnorm,mx_linear", "model.converters = ['mxnorm', 'mx_linear'] choose one of"),
    ("--model.converters=fused_norm,fused_rmsnorm", "model.converters = ['fused_norm', 'fused_rmsnorm'] choose one of"),
    ("--training.dataset=wiki", "training.dataset = 'wiki' is not one of: python, files, hf"),
    ("--validation.enable --validation.dataset=wiki", "validation.dataset = 'wiki' is not one of"),
    # Addresses where a local path belongs, which would be folders called "s3:"
    *(
        (f"--{name}=s3://bucket/run", f"{name} = 's3://bucket/run' is an address, and mxtrain reads and writes paths")
        for name in (
            "job.dump_folder",
            "checkpoint.folder",
            "checkpoint.initial_load_path",
            "data.cache_dir",
            "data.prepared",
            "model.hf_assets_path",
            "metrics.save_tb_folder",
            "profiling.save_traces_folder",
            "profiling.save_memory_snapshot_folder",
            "comm.save_traces_folder",
        )
    ),
    # Names that do not exist, and words that are no flags
    ("--mxnorm.q=2", "mxnorm.q is not a setting; the closest is mxnorm.p"),
    ("--mxnrom.p=2", "mxnrom.p is not a setting; the closest is mxnorm.p"),
    ("--training.lr=1e-3", "training.lr is not a setting; the closest is optimizer.lr"),
    ("--training.step=5", "training.step is not a setting; the closest is training.steps"),
    ("--trainig.steps=5", "trainig.steps is not a setting; the closest is training.steps"),
    ("--steps=5", "steps is not a setting; the closest is training.steps"),
    ("--checkpoint.not-enable", "checkpoint.not_enable is not a setting; the closest is checkpoint.enable"),
    ("--training.no-steps", "training.no_steps is not a setting; the closest is training.steps"),
    ("--xyzzy", "xyzzy is not a setting"),
    ("training.steps=5", "'training.steps=5' belongs to no flag: write --section.name value"),
    ("-x", "'-x' belongs to no flag"),
    ("--training.steps", "training.steps needs a value"),
    ("--training.steps 5 6", "training.steps takes one value, not: 5 6"),
    (
        "--model.converters mxnorm fused_norm",
        "model.converters takes one word with commas, such as mxnorm,fused_norm, not: mxnorm fused_norm",
    ),
    ("--comm.mode=fake_backend", "comm.mode = 'fake_backend' should be 'default'"),
    (
        "--memory_estimation.enable",
        "memory_estimation.enable = True has no effect in TorchTitan 0.2.2: 'mxtrain doctor",
    ),
    ("--compile.enable --compile.components=", "compile.components = [] is empty, so nothing would be compiled"),
    ("--checkpoint.no-enable yes", "checkpoint.enable takes no value after --checkpoint.no-enable"),
    ("--training.steps 5 --training.seq_len", "training.seq_len needs a value"),
    ("--job.config_file=other.toml", "--job.config_file: the first argument of 'mxtrain train' already names"),
    # Settings that do not go together
    ("--validation.enable --training.seq_len=51 --validation.seq_len=64", "validation.seq_len = 64 is more than"),
    ("--training.dataset=hf", "training.dataset_path = None is missing: training.dataset = 'hf' needs the id of a"),
    ("--training.dataloader.prefetch_factor=2", "training.dataloader.prefetch_factor = 2 needs training.dataloader."),
    ("--validation.dataloader.persistent_workers", "validation.dataloader.persistent_workers = True needs validation."),
    ("--activation_checkpoint.mode=memory_budget", "activation_checkpoint.mode = 'memory_budget' needs torch.compile"),
    ("--profiling.profile_freq=3", "profiling.profile_freq = 3 is less than profiling.profiler_warmup = 3 plus"),
    ("--checkpoint.load_step=7", "checkpoint.load_step = 7 has no effect without checkpoint.enable = true"),
    ("--checkpoint.create_seed_checkpoint", "checkpoint.create_seed_checkpoint = True has no effect without"),
    ("--checkpoint.initial_load_path=a", "checkpoint.initial_load_path = 'a' has no effect without checkpoint.enable"),
    ("--checkpoint.exclude_from_loading=model", "checkpoint.exclude_from_loading = ['model'] has no effect without"),
    ("--checkpoint.initial_load_in_hf_quantized", "checkpoint.initial_load_in_hf_quantized = True needs"),
    ("--checkpoint.enable --checkpoint.last_save_in_hf", "checkpoint.last_save_in_hf = True is not supported: it"),
    (
        "--mxnorm.diagnostics.every=5 --optimizer.early_step_in_backward",
        "mxnorm.diagnostics.every = 5 needs optimizer.early_step_in_backward = false: its extra backward would change",
    ),
    (
        "--optimizer.early_step_in_backward",
        "training.max_norm = 1.0 has no effect with optimizer.early_step_in_backward = true, which uses up every",
    ),
    (
        "--checkpoint.may_change=mxnorm.p",
        "checkpoint.may_change = ['mxnorm.p'] has no effect without checkpoint.enable",
    ),
    (
        "--checkpoint.enable --checkpoint.may_change=mxnorm.p,mxnorm.q",
        "checkpoint.may_change = ['mxnorm.p', 'mxnorm.q'] has a name that does not exist: mxnorm.q is not a setting; "
        "the closest is mxnorm.p",
    ),
    (
        "--checkpoint.export_dtype=bfloat16",
        "checkpoint.export_dtype = 'bfloat16' needs checkpoint.last_save_model_only",
    ),
    (
        "--lr_scheduler.total_steps=5 --training.steps=6",
        "lr_scheduler.total_steps = 5 is less than training.steps = 6: the learning rate would fall below zero",
    ),
    (
        "--checkpoint.enable --checkpoint.initial_load_in_hf --checkpoint.no-initial_load_model_only",
        "checkpoint.initial_load_in_hf = True needs checkpoint.initial_load_model_only = true",
    ),
    (
        "--parallelism.pipeline_parallel_first_stage_less_layers=-2",
        "parallelism.pipeline_parallel_first_stage_less_layers = -2 should be greater than or equal to 0",
    ),
    (
        "--parallelism.expert_parallel_comm_backend=deepep",
        "parallelism.expert_parallel_comm_backend = 'deepep' should be 'standard'",
    ),
    # Schedules and guards
    ("--mxnorm.schedule 0.9", "mxnorm.schedule[0] = '0.9' should be a valid dictionary"),
    ("--mxnorm.schedule {from_step=", "mxnorm.schedule[0] = '{from_step=' is not an inline table of TOML"),
    (
        '--mxnorm.schedule {from_step=3,p=1} {from_step=3,modulez=["wo"]}',
        "mxnorm.schedule[1] = '{from_step=3,modulez=[\"wo\"]}' has the key modulez, which does not exist; the closest "
        "is modules",
    ),
    ("--mxnorm.schedule {from_step=3,p=7}", "mxnorm.schedule[0].p = 7 should be 1 or 2"),
    (
        '--mxnorm.schedule {from_step=3,modules="wo,w2"}',
        'mxnorm.schedule[0].modules = \'wo,w2\' should be a list: ["wo", "w2"]',
    ),
    ("--mxnorm.schedule {from_step=3}", "mxnorm.schedule[0] changes nothing"),
    (
        "--training.steps=9 --mxnorm.schedule {from_step=10,p=1}",
        "mxnorm.schedule[0].from_step = 10 is not a step of this run: allowed is 1 to 9",
    ),
    (
        '--mxnorm.schedule {from_share=1.1,recipe="bf16"}',
        "mxnorm.schedule[0].from_share = 1.1 is not a share of the run",
    ),
    (
        "--model.converters=mx_linear --mxnorm.schedule {from_step=1,p=1}",
        "mxnorm.schedule[0].p = 1 needs the converter",
    ),
    (
        "--model.converters=mx_linear --mxnorm.guard.norm=rmsnorm",
        "mxnorm.guard.norm = 'rmsnorm' needs the converter 'm",
    ),
    ("--mxnorm.guard.recipe=fp4", "mxnorm.guard.recipe = 'fp4' is not one of: 'mxfp8'"),
    (
        "--mxnorm.diagnostics.tokens=64",
        "mxnorm.diagnostics.tokens = 64 has no effect without mxnorm.diagnostics.every: ",
    ),
    ("--mxnorm.diagnostics.fqns=wo", "mxnorm.diagnostics.fqns = ['wo'] has no effect without mxnorm.diagnostics.every"),
    ("--mxnorm.diagnostics.every=1 --mxnorm.diagnostics.fqns=", "mxnorm.diagnostics.fqns = [] measures nothing: "),
    ("--mxnorm.guard.window=1", "mxnorm.guard.window = 1 should be greater than or equal to 2"),
    (
        "--mxnorm.guard.window=5",
        "mxnorm.guard.window = 5 has no effect without a guard: set one of mxnorm.guard.recipe, ",
    ),
    ("--model.converters=mx_linear --mxnorm.guard.steps=9", "mxnorm.guard.steps = 9 has no effect without a guard"),
    (
        "--mxnorm.guard.norm=rmsnorm --mxnorm.guard.p=1",
        'mxnorm.guard.p = 1 has no meaning beside norm = "rmsnorm", which leaves the norm and the linears that it '
        "feeds in high precision: set one of the two",
    ),
    # Settings that do not fit this machine: one process, no GPU
    ("--training.global_batch_size=3", "training.global_batch_size = 3 is not a multiple of training.local_batch_size"),
    ("--parallelism.tensor_parallel_degree=2", "parallelism.data_parallel_shard_degree = -1 does not fit 1 process"),
    ("--parallelism.data_parallel_shard_degree=4", "parallelism.data_parallel_shard_degree = 4 does not fit 1 process"),
    ("--profiling.enable_profiling", "profiling.enable_profiling = True needs a GPU; this machine has none"),
    ("--profiling.enable_memory_snapshot", "profiling.enable_memory_snapshot = True needs a GPU"),
    ("--training.enable_cpu_offload", "training.enable_cpu_offload = True needs a GPU; this machine has none"),
    *(
        (
            f"--optimizer.early_step_in_backward --{degree}=2",
            f"optimizer.early_step_in_backward = True does not work with {degree} = 2 in TorchTitan 0.2.2",
        )
        for degree in ("parallelism.pipeline_parallel_degree", "parallelism.expert_parallel_degree")
    ),
    ("--checkpoint.enable --checkpoint.load_step=7", "checkpoint.load_step = 7 is not among the steps in"),
    *(
        (f"--checkpoint.enable --checkpoint.folder={out}", f"checkpoint.folder = '{out}' leads out of the run's folder")
        for out in ("/scratch/checkpoints", "..", "a/../../b")
    ),
    (
        "--checkpoint.enable --checkpoint.exclude_from_loading=train_state,dataloader",
        "checkpoint.exclude_from_loading = ['train_state', 'dataloader'] needs 'lr_scheduler' beside 'train_state'",
    ),
    ("--checkpoint.enable --checkpoint.initial_load_path=/no/such", "checkpoint.initial_load_path = '/no/such' is not"),
    ("--training.dataset=files", "training.dataset_path = None matches no file; training.dataset = 'files' needs"),
    ("--training.dataset=files --training.dataset_path=/no/*.txt", "training.dataset_path = '/no/*.txt' matches no"),
    ("--model.hf_assets_path=/no/such", "model.hf_assets_path = '/no/such' is not a folder"),
    ("--model.hf_assets_path=.", "model.hf_assets_path = '.' holds no tokenizer.json"),
    ("--experimental.custom_import=no.such", "experimental.custom_import = 'no.such' is not a module"),
    ("--job.custom_config_module=no.such", "job.custom_config_module = 'no.such' cannot be imported"),
    ("--job.custom_config_module=json", "job.custom_config_module = 'json' has no class JobConfig"),
    (
        "--parallelism.enable_async_tensor_parallel",
        "parallelism.enable_async_tensor_parallel = True finds no products to overlap with converter",
    ),
    ("--fault_tolerance.enable", "fault_tolerance.enable = True needs the package torchft"),
]

# Settings that two processes bring to light.
TWO_PROCESSES = [
    (
        "--parallelism.pipeline_parallel_degree=2 --training.local_batch_size=1",
        "parallelism.pipeline_parallel_schedule = '1F1B' needs 2 chunks or more",
    ),
    ("--parallelism.tensor_parallel_degree=3", "parallelism.data_parallel_shard_degree = -1 does not fit 2 process"),
    ("--training.global_batch_size=8", "training.global_batch_size = 8 is not a multiple of training.local_batch_size"),
]

# Tables of a TOML file -> the beginning of the message, and the line of the file that it names.
TABLES = [
    ({"mxnorm": 3}, "mxnorm = 3 is not a table: write [mxnorm] and its settings below", 1),
    ({"training": {"dataloader": 2}}, "training.dataloader = 2 is not a table", 2),
    ({"mxnorm": {"p": True}}, "mxnorm.p = True should be a valid integer", 2),
    ({"mxnorm": {"p": 2.0}}, "mxnorm.p = 2.0 should be a valid integer", 2),
    ({"mxnorm": {"p": "2"}}, "mxnorm.p = '2' should be 1 or 2", 2),
    ({"mxnorm": {"p": 7}}, "mxnorm.p = 7 should be 1 or 2", 2),
    ({"mxnorm": {"q": 2}}, "mxnorm.q is not a setting; the closest is mxnorm.p", 2),
    ({"mxnrom": {"p": 2}}, "mxnrom is not a setting; the closest is mxnorm", 1),
    ({"mxnorm": {"eps": "1e-5"}}, "mxnorm.eps = '1e-5' should be a valid number", 2),
    ({"mxnorm": {"recipe": 8}}, "mxnorm.recipe = 8 should be a valid string", 2),
    ({"mxnorm": {"recipes": "bf16"}}, "mxnorm.recipes = 'bf16' should be a valid dictionary", 2),
    ({"mxnorm": {"recipes": {"wo": 16}}}, "mxnorm.recipes.'wo' = 16 should be a valid string", 1),
    (
        {"mxnorm": {"recipes": {"layers": {"0": "bf16"}}}},
        "mxnorm.recipes = {'layers': {'0': 'bf16'}} holds a table",
        None,
    ),
    (
        {"mxnorm": {"schedule": [{"q": 3}]}},
        "mxnorm.schedule[0] = {'q': 3} has the key q, which does not exist; allowed are from_step, from_share, ",
        None,
    ),
    (
        {"mxnorm": {"schedule": [{"from_step": True}]}},
        "mxnorm.schedule[0].from_step = True should be a valid integ",
        None,
    ),
    (
        {"mxnorm": {"schedule": [{"from_step": 1, "modules": "layers.0"}]}},
        "mxnorm.schedule[0].modules = 'layers.0' should be a list: [\"layers.0\"]",
        None,
    ),
    ({"mxnorm": {"filter_fqns": "output"}}, "mxnorm.filter_fqns = 'output' should be a valid list", 2),
    ({"mxnorm": {"filter_fqns": [3]}}, "mxnorm.filter_fqns[0] = 3 should be a valid string", 2),
    ({"mxnorm": {"hadamard": 1}}, "mxnorm.hadamard = 1 should be a valid boolean", 2),
    ({"model": {"converters": "mxnorm"}}, "model.converters = 'mxnorm' should be a valid list", 2),
    ({"model": {"converters": ["mxnorm", 1]}}, "model.converters[1] = 1 should be a valid string", 2),
    ({"training": {"steps": 3.0}}, "training.steps = 3.0 should be a valid integer", 2),
    ({"training": {"steps": "3"}}, "training.steps = '3' should be a valid integer", 2),
    ({"training": {"steps": True}}, "training.steps = True should be a valid integer", 2),
    ({"training": {"steps": [3]}}, "training.steps = [3] should be a valid integer", None),
    ({"training": {"steps": {"n": 3}}}, "training.steps = {'n': 3} should be a valid integer", None),
    ({"training": {"seq_len": -8}}, "training.seq_len = -8 should be greater than or equal to 1", 2),
    ({"training": {"dataset_path": 3}}, "training.dataset_path = 3 should be a valid string", 2),
    ({"optimizer": {"lr": "1e-3"}}, "optimizer.lr = '1e-3' should be a valid number", 2),
    ({"optimizer": {"lr": True}}, "optimizer.lr = True should be a valid number", 2),
    ({"optimizer": {"learning_rate": 1e-3}}, "optimizer.learning_rate is not a setting", 2),
    ({"checkpoint": {"enable": "yes"}}, "checkpoint.enable = 'yes' should be a valid boolean", 2),
    ({"data": {"installed": 1}}, "data.installed = 1 should be a valid boolean", 2),
    ({"job": {"custom_config_module": "no.such"}}, "job.custom_config_module = 'no.such' cannot be imported", 2),
    ({"job": {"dump_folder": "a\0b"}}, "job.dump_folder = 'a\\x00b' is not the name of a folder", None),
    ({"steps": 3}, "steps is not a setting; the closest is training.steps", 1),
    ({"extends": 3}, "extends = 3 in", None),
    ({"extends": "nowhere.toml"}, "config", None),
]


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """Runs ``mxtrain train`` in an empty folder; returns the message after checking status and leftovers."""
    monkeypatch.chdir(tmp_path)
    for name in ("NGPU", "MXTRAIN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("mxtrain.cli.launch.accelerator_count", lambda: 0)
    monkeypatch.setattr("mxtrain.cli.quiet.hide_library_warnings", lambda: None)

    def refused(config, flags=""):
        (tmp_path / "a.toml").write_text(tomli_w.dumps(config))
        begin = time.process_time()  # not the time of other processes on the same cores
        assert cli.main(["train", "a.toml", *flags.split()]) == 2
        assert time.process_time() - begin < 3
        (line,) = capsys.readouterr().err.splitlines()
        assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]
        prefix, message = line[:16], line[16:]
        assert prefix == "mxtrain: error: "
        return message

    return refused


CONVERTED = {"model": {"converters": ["mxnorm"]}}


@pytest.mark.parametrize("flags, message", FLAGS)
def test_flags(refused, flags, message):
    assert refused(CONVERTED, flags).startswith(message)


@pytest.mark.parametrize("flags, message", TWO_PROCESSES)
def test_flags_with_two_processes(refused, monkeypatch, flags, message):
    monkeypatch.setenv("NGPU", "2")
    assert refused(CONVERTED, flags).startswith(message)


@pytest.mark.parametrize("tables, message, line", TABLES)
def test_tables(refused, tables, message, line):
    found = refused(tables)
    assert found.startswith(message)
    assert line is None or found.endswith(f" (a.toml, line {line})")


HUGE = "x" * 1_000_000


@pytest.mark.parametrize(
    "tables, begin, end",
    [
        ({"training": {"steps": HUGE}}, "training.steps = 'xxx", "xxx' should be a valid integer (a.toml, line 2)"),
        ({"training": {HUGE: 1}}, "training.xxx", "xxx is not a setting"),
        ({"model": {"converters": [HUGE]}}, "model.converters = ['xxx", " (a.toml, line 2)"),
        ({"mxnorm": {"recipe": HUGE}, **CONVERTED}, "mxnorm.recipe = 'xxx", " (a.toml, line 2)"),
        ({"extends": HUGE}, "config 'xxx", "File name too long"),
    ],
    ids=lambda value: "",
)
def test_an_enormous_value_is_cut(refused, tables, begin, end):
    message = refused(tables)
    assert message.startswith(begin) and message.endswith(end) and len(message) < 2100


@pytest.mark.parametrize(
    "flags",
    [
        "--lr_scheduler.total_steps=6 --training.steps=6",
        "--profiling.profile_freq=4 --profiling.profiler_warmup=3 --profiling.profiler_active=1",
    ],
)
def test_numbers_that_just_fit(flags):
    read_settings(flags.split())


def test_a_mistake_in_a_file_that_is_extended_names_that_file(refused, tmp_path, monkeypatch):
    (tmp_path / "bases").mkdir()
    base = tmp_path / "bases" / "base.toml"
    base.write_text("# A base.\n\n[training]\nseq_len = 64\nsteps = 0  # none\n")
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda self: iter([tmp_path / "a.toml"]))
    assert refused({"extends": "bases/base.toml", "training": {"seq_len": 32}}).endswith("(bases/base.toml, line 5)")
    # A flag has no line; it is not blamed on the file.
    assert not refused({"extends": "bases/base.toml"}, "--training.steps=-1").endswith(")")
    base.write_text("[checkpoint]\nenable = true\n")
    with pytest.raises(ConfigError) as error, places(["--job.config_file=bases/base.toml", "--checkpoint.no-enable"]):
        raise ConfigError("checkpoint.enable = False, but")
    assert str(error.value) == "checkpoint.enable = False, but"


def test_a_mistake_is_found_without_pytorch(tmp_path):
    import subprocess

    (tmp_path / "a.toml").write_text("[training]\nsteps = 0\n")
    code = "import sys; from mxtrain import cli; cli.main(['train', 'a.toml']); print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.stdout == "False\n" and process.stderr.count("\n") == 1
