"""Which key of the configuration a wrong one may stand for. Free of JAX."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Hashable, Iterable, Mapping
from functools import cache
from typing import Any

Path = tuple[str, ...]
"""A key with its sections, from the top: `("optimizer", "learning_rate")`."""

MOST = 4
"""How many keys are suggested at most: a name that more sections have says nothing."""
NEAR = 0.75
"""The similarity from which on a key of the same section is suggested: no hint is better than a wrong one."""
NEAR_ELSEWHERE = 0.85
"""The similarity from which on a key of another section is suggested."""


def _by_name(places: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Returns the keys for each name; `places` has the names, with spaces between them, by the keys."""
    return {name: tuple(keys.split()) for keys, names in places.items() for name in names.split()}


OF_OTHERS = _by_name(
    {
        "model.attention model.grouped_product": "ops_implementation",
        "mesh": "gang",
        "accumulation_steps": (
            "grad_accumulation grad_accumulation_steps gradient_accumulation gradient_accumulation_steps micro_batch_size"
        ),
        "anomalies.non_finite": "anomaly_detection apply_training_hooks",
        "checkpoint": "checkpoint_manager",
        "checkpoint.keep_best": "keep_best_n_checkpoints load_best_model_at_end",
        "checkpoint.keep_best checkpoint.keep_model_only": "keep_best_n_models",
        "checkpoint.keep_every_steps": "keep_checkpoint_every_n_steps",
        "checkpoint.keep_model_only": "save_only_model save_optimizer_state",
        "checkpoint.model_every_steps checkpoint.keep_model_only": "save_model_only",
        "checkpoint.model_limit": "keep_last_n_models",
        "checkpoint.save_after_epochs": "checkpoint_after_n_data_epochs",
        "checkpoint.save_after_step": "checkpoint_after_n_steps",
        "checkpoint.save_at_end": "do_last_save",
        "checkpoint.save_epochs": "checkpoint_every_n_data_epochs",
        "checkpoint.save_minutes": "save_interval_minutes",
        "checkpoint.save_steps": "checkpoint_every_n_steps checkpoint_interval save_interval",
        "checkpoint.save_steps checkpoint.save_epochs": "save_strategy",
        "checkpoint.save_total_limit": "keep_last_n_checkpoints max_to_keep",
        "checkpoint.start_from init_from": (
            "ckpt_path load_checkpoint_path load_from_checkpoint load_path resume_checkpoint_dir resume_from_checkpoint"
        ),
        "data.collator": "use_data_collactor use_data_collator",
        "data.columns": "text_keys",
        "data.dataset": "data_reader dataset_name dataset_train train_dataloader train_dataset",
        "data.eval_fraction": "test_size validation_split validation_split_percentage",
        "data.examples": "data_type train_on_inputs",
        "data.ignore_columns": "extra_strip_keys ids_to_pop_from_dataset remove_unused_columns",
        "data.mixture": "enable_multisource multisource_datasets_type source_name",
        "data.on_error": "silent_exception",
        "data.packing": "dyn_bsz pack_sequences rmpad rmpad_with_pos_ids",
        "data.paths": "data_files data_path train_file train_files train_path",
        "data.sequence_length": (
            "block_size cutoff_len max_length max_seq_len max_seq_length max_sequence_length seq_len seq_length"
        ),
        "data.shuffle": "shuffle_train_dataset",
        "data.sources": "channel_loss source_name_keys",
        "data.tokenizer": "text_tokenizer tokenizer_name tokenizer_name_or_path tokenizer_path chat_template",
        "data.truncation": "truncation_mode truncation_side",
        "distributions.every_steps": "weight_distribution_log_steps",
        "distributions.pattern": "weight_distribution_pattern",
        "driver.console_hosts": "log_all_workers",
        "driver.watchdog.save_s": "save_timeout_seconds",
        "dtype": "amp amp_dtype bf16 enable_mixed_precision fp16 mixed_precision torch_dtype",
        "evaluation": "validator",
        "evaluation.after_epochs": "validate_after_n_data_epochs",
        "evaluation.after_step": "eval_delay validate_after_n_steps",
        "evaluation.at_start": "eval_on_start validate_at_start",
        "evaluation.batch_size": "eval_batch_size per_device_eval_batch_size",
        "evaluation.every_epochs": "eval_epochs validate_every_n_data_epochs",
        "evaluation.every_steps": (
            "eval_every eval_interval eval_steps evaluation_steps val_check_interval validate_every_n_steps"
        ),
        "evaluation.every_steps evaluation.every_epochs": "do_eval eval_strategy evaluation_strategy",
        "evaluation.max_batches": "limit_val_batches max_eval_batches max_evaluation_steps per_epoch_evaluation_steps",
        "evaluation.score.lower_better": "greater_is_better lower_score_better",
        "evaluation.score.metrics": "metric_for_best_model score_metric score_metric_descriptor score_metric_name",
        "evaluation.score.patience": "early_stopping_patience",
        "evaluation.units": "eval_dataset eval_path valid_data_readers valid_units benchmarks",
        "frozen preference.reference": "reference_model",
        "gc_every_steps": "garbage_collector gc_every_n_steps gc_steps",
        "global_batch_size": ("batch_size device_train_batch_size per_device_train_batch_size total_batch_size train_batch_size"),
        "hosts.count": "nnodes num_hosts num_nodes world_size",
        "hosts.devices_per_host": "devices gpus nproc_per_node num_devices num_gpus",
        "init_from": "prev_checkpoint_dir",
        "lora": "lora_config train_architecture",
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.new_tokens": "resize_token_embeddings",
        "lora.rank": "lora_r lora_rank",
        "lora.targets": "lora_target_modules lora_targets target_modules",
        "lora.whole": "lora_modules_to_save modules_to_save",
        "loss.label_smoothing": "label_smoothing_factor",
        "loss.label_smoothing loss.z_loss_weight loss.ignore_index": "loss_config",
        "loss.load_balancing_weight": "aux_loss_enabled",
        "loss_scale.initial": "fp16_loss_scaler init_scale",
        "loss_scale.initial loss_scale.minimum": "fp16_loss_scale",
        "loss_scale.minimum": "min_scale",
        "max_num_data_epochs": "epochs max_epochs n_epochs num_epochs num_train_epochs",
        "max_num_steps": (
            "max_iters max_steps max_training_steps num_steps num_train_steps per_epoch_training_steps steps "
            "total_steps train_steps"
        ),
        "mesh.context": (
            "context_parallel_size context_parallelism cp_size sequence_parallel_size ulysses_parallel_size ulysses_size"
        ),
        "mesh.data": "data_parallel_replicate_size data_parallel_size dp_replicate_size dp_size",
        "mesh.data mesh.fsdp": "data_parallel_mode data_parallelism fsdp_mode hsdp",
        "mesh.data mesh.fsdp mesh.expert mesh.context mesh.tensor": "sharding_axis_dims step_partition_spec",
        "mesh.expert": "ep_size expert_parallel_size",
        "mesh.fsdp": "data_parallel_shard_size dp_shard_size enable_full_shard fsdp_config fsdp_size",
        "mesh.pipeline": "pipeline_parallel_size pipeline_parallelism pp_size",
        "mesh.tensor": "tensor_parallel_size tp_size",
        "metrics.per_parameter_grad_norm": "log_grad_norms",
        "metrics.running_means": "mean_accuracy mean_loss",
        "model": "config_overrides model_config arch config_path",
        "model.attention": "attn_implementation default_sdpa",
        "model.fp8": (
            "enable_float8 enable_float8_linear enable_fp8 float8 fp8_format fp8_recipe quantization use_fp8 "
            "use_qwix_quantization"
        ),
        "model.grouped_product": "moe_implementation",
        "model.pretrained init_from": "base_model model_name model_name_or_path model_path pretrained_model_name_or_path",
        "model.remat": (
            "activation_checkpointing activation_recomputation compiled_region_activation_memory_budget "
            "enable_activation enable_activation_offload enable_async_activation enable_gradient_checkpointing "
            "gradient_checkpointing offload_config remat_policy activation_offload_modules"
        ),
        "name": "experiment_name resume_if_possible run_name step_start_point wandb_name",
        "optimizer.arguments": "extra_optimizer_kwargs optim_args",
        "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2 muon_momentum",
        "optimizer.eps": "adam_epsilon epsilon muon_eps",
        "optimizer.groups": "frozen_parameters muon_lr no_decay_modules no_decay_params param_groups vit_lr",
        "optimizer.learning_rate": "lr",
        "optimizer.max_grad_norm": "clip_grad clip_grad_norm grad_clip gradient_clip_val gradient_clipping",
        "optimizer.moment_dtype": "tx_mu_dtype",
        "optimizer.name": "optim optimizer_name optimizer_type amsgrad",
        "optimizer.offload": "cpu_offload enable_fsdp_offload offload_optimizer optimizer_memory_host_offload",
        "optimizer.schedule.cycle_factor": "lr_mul",
        "optimizer.schedule.cycle_growth": "cycle_mul",
        "optimizer.schedule.cycle_steps": "cycle_len",
        "optimizer.schedule.decay_ratio": "lr_decay_ratio",
        "optimizer.schedule.final_factor": "final_lr final_lr_scale learning_rate_end lr_min min_lr",
        "optimizer.schedule.name": "custom_scheduler lr_decay_style lr_scheduler lr_scheduler_type scheduler",
        "optimizer.schedule.start_factor": "lr_start start_lr start_lr_scale",
        "optimizer.schedule.warmup_ratio": "lr_warmup_ratio",
        "optimizer.schedule.warmup_ratio optimizer.schedule.hold_steps": "stage_ratio",
        "optimizer.schedule.warmup_steps": "lr_warmup_steps warmup warmup_iters",
        "optimizer.schedule.warmup_steps profile.warmup_steps": "num_warmup_steps",
        "optimizer.weight_decay optimizer.groups": "muon_weight_decay",
        "pipeline.microbatches": "num_pipeline_microbatches",
        "pipeline.repeats": "circular_repeat num_pipeline_repeats virtual_pipeline_model_parallel_size",
        "pipeline.schedule": "pipeline_parallel_schedule pipeline_schedule",
        "previews.every_steps": "generation_interval",
        "previews.greedy": "generation_do_sample",
        "previews.num_tokens": "generation_max_new_tokens",
        "previews.prompts": "generation_prompts",
        "previews.temperature": "generation_temperature",
        "previews.top_k": "generation_top_k",
        "previews.top_p": "generation_top_p",
        "profile.folder": "profile_trace_dir",
        "profile.hosts": "profile_rank0_only",
        "profile.record_steps": "enable_profiling num_active_steps num_record_steps profile_end_step",
        "profile.skip_steps": "num_skip_steps profile_start_step skip_n_steps",
        "profile.wait_steps": "wait_n_steps",
        "pruning.pruner pruning.pattern": "pruning_module",
        "publish_every_epochs": "publish_metrics_every_n_data_epochs",
        "publish_every_steps": (
            "log_every log_every_n_steps log_interval log_steps logging_steps publish_metrics_after_n_data_epochs "
            "publish_metrics_after_n_steps publish_metrics_every_n_steps report_steps sync_and_compute_metrics"
        ),
        "recorder_folders": "metrics_dir tb_dir",
        "recorders": "loggers metric_recorder metric_recorders report_to tensorboard use_wandb wandb",
        "recorders tracking.mlflow": "report_metrics",
        "seed": "data_seed generation_seed random_seed rng_bag shuffle_seed_train",
        "storage": "checkpoint_dir out_dir output_dir save_dir save_directory",
        "time_limit": "max_time training_time_limit",
    }
)
"""Our keys, by the name that a setting has in another program: EasyDeL, fairseq2, VeOmni, the Trainer of Hugging Face."""
NOT_OURS = frozenset(
    (
        *("bsz_warmup_ratio", "decoders", "encoders", "hf_save_epochs", "hf_save_steps", "mode", "num_threads", "train", "type"),
        *("unit", "version"),
    )
)
"""Names of theirs that are like keys of ours, and mean other things."""

VALUES_ELSEWHERE = {
    "dtype": dict.fromkeys(
        ("fp8", "float8", "e4m3", "float8_e4m3", "float8_e4m3fn", "int8"),
        "products of 8 bits are `model.fp8: current`, beside `dtype: bfloat16`",
    ),
    "mesh": {"auto": "`gangway plan CONFIG --meshes` tries those that the hosts allow, and proposes one"},
}
"""What to do in place of a value that another program has for a key, by key and value."""


def near(root: type, section: str, here: Iterable[str], name: str) -> list[str]:
    """Returns the keys of `root`, such as `optimizer.learning_rate`, that `name` in a section may stand for; none if there is no
    good guess. `section` is the key of the section, empty at the top, and `here` are its names.

    In this order: keys of this very name in other sections, and those that have this name in another program; similar ones of the
    section; similar ones of other sections."""
    name, keys = name.lstrip("-").replace("-", "_"), all_keys(root)
    exact = [".".join(key) for key in keys if key[-1] == name and len(key) > 1]
    known = {".".join(key) for key in keys}
    of_others = [key for key in OF_OTHERS.get(name.lower(), ()) if key in known]
    if found := list(dict.fromkeys([*(exact if len(exact) <= MOST else ()), *of_others])):
        return found
    if name in NOT_OURS:
        return []
    if similar := difflib.get_close_matches(name, [*here], 1, NEAR):
        return [f"{section}.{similar[0]}".lstrip(".")]
    elsewhere = difflib.get_close_matches(name, {key[-1] for key in keys}, 1, NEAR_ELSEWHERE)
    return [".".join(key) for key in keys if key[-1] in elsewhere][:MOST]


def did_you_mean(keys: Iterable[str]) -> str:
    """Returns `did you mean a?`, or `did you mean a, b or c?`; empty without keys."""
    *others, last = [*keys] or [""]
    return f"did you mean {', '.join(others)}{' or ' if others else ''}{last}?" if last else ""


@cache
def all_keys(cls: Hashable) -> tuple[Path, ...]:
    """Returns the keys of a class of the configuration, and of the sections in it; not of sections in lists and mappings."""
    keys: list[Path] = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # mypy: a dataclass is hashable if it is frozen
        section = section_of(hints[field.name])
        keys += [(field.name,), *((field.name, *rest) for rest in (all_keys(section) if section else ()))]
    return tuple(keys)


def section_of(hint: Any) -> type | None:
    """Returns the dataclass among the arms of a type; None if there is none."""
    return next((arm for arm in arms(hint) if isinstance(arm, type) and dataclasses.is_dataclass(arm)), None)


def arms(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, or the one type."""
    if typing.get_origin(hint) is typing.Annotated:
        return arms(typing.get_args(hint)[0])
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
