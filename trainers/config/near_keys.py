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
NEAR_ELSEWHERE = 0.85
"""The similarity from which on a key of another section is suggested."""


def _by_name(places: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Returns the keys for each name; `places` has the names, with spaces between them, by the keys."""
    return {name: tuple(keys.split()) for keys, names in places.items() for name in names.split()}


OF_OTHERS = _by_name(
    {
        "accumulation_steps": "gradient_accumulation gradient_accumulation_steps grad_accumulation_steps micro_batch_size",
        "anomalies.non_finite": "anomaly_detection grad_check apply_training_hooks",
        "checkpoint.keep_best": "keep_best_n_checkpoints load_best_model_at_end",
        "checkpoint.keep_every_steps": "keep_checkpoint_every_n_steps",
        "checkpoint.keep_model_only": "save_optimizer_state save_only_model",
        "checkpoint.model_every_steps checkpoint.keep_model_only": "save_model_only",
        "checkpoint.model_limit": "keep_last_n_models",
        "checkpoint.save_after_epochs": "checkpoint_after_n_data_epochs",
        "checkpoint.save_after_step": "checkpoint_after_n_steps",
        "checkpoint.save_at_end": "do_last_save",
        "checkpoint.save_epochs": "checkpoint_every_n_data_epochs",
        "checkpoint.save_steps": "checkpoint_every_n_steps save_interval checkpoint_interval",
        "checkpoint.save_steps checkpoint.save_epochs": "save_strategy",
        "checkpoint.save_total_limit": "keep_last_n_checkpoints max_to_keep",
        "checkpoint.start_from init_from": "resume_from_checkpoint resume_checkpoint_dir load_checkpoint_path "
        "load_from_checkpoint",
        "data.dataset": "dataset_train train_dataset dataset_name train_dataloader",
        "data.eval_fraction": "validation_split validation_split_percentage test_size",
        "data.ignore_columns": "ids_to_pop_from_dataset remove_unused_columns",
        "data.packing": "pack_sequences",
        "data.paths": "train_file train_files data_files data_path",
        "data.sequence_length": "max_sequence_length max_seq_length max_length max_seq_len seq_length seq_len block_size "
        "cutoff_len",
        "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
        "data.truncation": "truncation_mode truncation_side",
        "distributions.every_steps": "weight_distribution_log_steps",
        "distributions.pattern": "weight_distribution_pattern",
        "driver.console_hosts": "log_all_workers",
        "dtype": "amp_dtype bf16 fp16 mixed_precision torch_dtype",
        "evaluation.after_epochs": "validate_after_n_data_epochs",
        "evaluation.after_step": "validate_after_n_steps eval_delay",
        "evaluation.at_start": "validate_at_start eval_on_start",
        "evaluation.batch_size": "eval_batch_size per_device_eval_batch_size",
        "evaluation.every_epochs": "validate_every_n_data_epochs",
        "evaluation.every_steps": "evaluation_steps eval_steps eval_interval eval_every validate_every_n_steps "
        "val_check_interval",
        "evaluation.every_steps evaluation.every_epochs": "eval_strategy evaluation_strategy",
        "evaluation.max_batches": "max_evaluation_steps per_epoch_evaluation_steps limit_val_batches max_eval_batches",
        "evaluation.score.lower_better": "lower_score_better greater_is_better",
        "evaluation.score.metrics": "score_metric metric_for_best_model",
        "evaluation.score.patience": "early_stopping_patience",
        "evaluation.units": "valid_units valid_data_readers eval_dataset",
        "global_batch_size": "total_batch_size batch_size train_batch_size per_device_train_batch_size device_train_batch_size",
        "hosts.count": "num_hosts num_nodes nnodes world_size",
        "hosts.devices_per_host": "num_gpus gpus nproc_per_node num_devices devices",
        "lora.alpha": "lora_alpha",
        "lora.dropout": "lora_dropout",
        "lora.rank": "lora_rank lora_r",
        "lora.whole": "modules_to_save lora_modules_to_save",
        "lora.new_tokens": "resize_token_embeddings",
        "lora.targets": "lora_targets target_modules lora_target_modules",
        "loss.label_smoothing": "label_smoothing_factor",
        "loss.label_smoothing loss.z_loss_weight loss.ignore_index": "loss_config",
        "loss_scale.initial": "fp16_loss_scaler init_scale",
        "loss_scale.minimum": "min_scale",
        "max_num_data_epochs": "num_train_epochs num_epochs epochs max_epochs n_epochs",
        "max_num_steps": "max_steps max_training_steps train_steps num_steps num_train_steps total_steps steps max_iters "
        "per_epoch_training_steps",
        "mesh.context": "context_parallel_size cp_size context_parallelism sequence_parallel_size ulysses_parallel_size",
        "mesh.data": "data_parallel_replicate_size data_parallel_size dp_size",
        "mesh.expert": "expert_parallel_size ep_size",
        "mesh.fsdp": "data_parallel_shard_size fsdp_size",
        "mesh.data mesh.fsdp mesh.expert mesh.context mesh.tensor": "step_partition_spec sharding_axis_dims",
        "mesh.pipeline": "pipeline_parallel_size pp_size pipeline_parallelism",
        "mesh.tensor": "tensor_parallel_size tp_size",
        "metrics.per_parameter_grad_norm": "log_grad_norms",
        "metrics.running_means": "mean_loss mean_accuracy",
        "model.fp8": "use_fp8 enable_fp8 fp8_recipe fp8_format float8 enable_float8 enable_float8_linear "
        "quantization use_qwix_quantization",
        "model.pretrained init_from": "model_name model_path model_name_or_path pretrained_model_name_or_path base_model",
        "model.remat": "activation_checkpointing gradient_checkpointing activation_recomputation remat_policy",
        "name": "run_name wandb_name step_start_point resume_if_possible experiment_name",
        "optimizer.arguments": "extra_optimizer_kwargs optim_args",
        "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
        "optimizer.eps": "adam_epsilon epsilon",
        "optimizer.groups": "frozen_parameters param_groups",
        "optimizer.learning_rate": "lr",
        "optimizer.max_grad_norm": "clip_grad grad_clip gradient_clipping gradient_clip_val clip_grad_norm",
        "optimizer.moment_dtype": "tx_mu_dtype",
        "optimizer.offload": "optimizer_memory_host_offload offload_optimizer cpu_offload",
        "optimizer.name": "optim optimizer_name optimizer_type",
        "optimizer.schedule.decay_ratio": "lr_decay_ratio",
        "optimizer.schedule.final_factor": "learning_rate_end lr_min min_lr",
        "optimizer.schedule.name": "scheduler custom_scheduler lr_scheduler lr_scheduler_type lr_decay_style",
        "optimizer.schedule.start_factor": "lr_start",
        "optimizer.schedule.warmup_ratio": "lr_warmup_ratio",
        "optimizer.schedule.warmup_steps": "lr_warmup_steps warmup_iters warmup",
        "optimizer.schedule.warmup_steps profile.warmup_steps": "num_warmup_steps",
        "pipeline.microbatches": "num_pipeline_microbatches",
        "pipeline.repeats": "num_pipeline_repeats circular_repeat virtual_pipeline_model_parallel_size",
        "pipeline.schedule": "pipeline_schedule pipeline_parallel_schedule",
        "profile.record_steps": "num_active_steps",
        "profile.skip_steps": "skip_n_steps",
        "profile.wait_steps": "wait_n_steps",
        "pruning.pruner pruning.pattern": "pruning_module",
        "publish_every_epochs": "publish_metrics_every_n_data_epochs",
        "publish_every_steps": "log_steps logging_steps report_steps log_interval log_every_n_steps log_every "
        "sync_and_compute_metrics "
        "publish_metrics_every_n_steps publish_metrics_after_n_steps publish_metrics_after_n_data_epochs",
        "recorders": "report_to use_wandb loggers",
        "seed": "shuffle_seed_train data_seed random_seed",
        "storage": "output_dir save_directory save_dir checkpoint_dir out_dir",
        "time_limit": "training_time_limit max_time",
    }
)
"""Our keys, by the name that a setting has in another program: EasyDeL, fairseq2, VeOmni, the Trainer of Hugging Face."""

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
    if similar := difflib.get_close_matches(name, [*here], 1):
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
