"""Names of methods that people override in EasyDeL, fairseq2, VeOmni and the Trainer of Hugging Face, and what takes their place
here. `trainers.overrides` refuses such a method."""

from __future__ import annotations

from collections.abc import Mapping


def _by_name(places: Mapping[str, str]) -> dict[str, str]:
    """Returns the place of each name; `places` has the names, with spaces between them, by their place."""
    return {name: place for place, names in places.items() for name in names.split()}


_EVENT = "it is an event of a callback; add a `Callback` in post_init (`add_callback`), or "
_HOOK = "it is a hook of the trainer; override it in a subclass of BaseTrainer, or "

INSTEAD_OF_A_METHOD = _by_name(
    {
        "define the loss in a task (`Task.loss`), or return a step of your own from configure_functions": (
            "train_step training_step _train_step _training_step compute_loss _compute_loss process_batch criterion loss_fn "
            "compute_loss_context_manager _execute_train_step _run_step _do_run_step"
        ),
        "override forward_backward, which makes the gradients of a micro-batch; the loss is that of a task": (
            "forward_backward_step _forward_backward backward"
        ),
        "there is one loop; override on_epoch_begin, on_epoch_end, on_step_start or on_step_end": (
            "_train_epoch train_epoch _run_epoch _run_training_loop _training_loop training_loop _inner_training_loop train_loop "
            "_do_run _run_post_step _repeat_step _handle_end_of_data_epoch on_train_epoch_start on_train_epoch_end"
        ),
        "override train": "fit run _fit",
        "override on_training_start": "start_training_hook on_train_start on_fit_start _prepare_for_training",
        _EVENT + "override on_training_start": "on_train_begin",
        "override on_training_end": "_finalize_training finish end_training_hook on_fit_end _prepare_training_output _stop",
        _EVENT + "override on_training_end": "on_train_end",
        _EVENT + "override on_step_start": "on_step_begin",
        "override on_step_start": "on_batch_begin on_batch_start on_train_batch_start",
        "override on_step_end": "on_batch_end on_train_batch_end",
        "override on_micro_step": "on_substep_end on_micro_step_end on_micro_batch_end",
        "override on_evaluation_start": "start_evaluation_hook on_validation_start on_evaluate_start",
        _EVENT + "override on_evaluation_start": "on_evaluate_begin",
        "override on_evaluation_end": "on_validation_end on_evaluate_end",
        _EVENT + "override on_evaluation_end": "on_evaluate",
        _EVENT + "name a recorder in `recorders`": "on_publish",
        "override on_step_end, which may change and add metrics; name a recorder in `recorders` to write them elsewhere": (
            "log log_metrics on_log _log _maybe_log_save_evaluate _setup_initial_metrics _setup_static_metrics "
            "create_progress_bar _publish_metrics"
        ),
        _EVENT + "override build_checkpoint_manager": "on_save on_save_checkpoint",
        _EVENT + "let the error pass: it ends training": "on_exception",
        "override build_checkpoint_manager, or save_pretrained; the section `checkpoint` says when to save": (
            "save_model save_checkpoint _save _save_state _save_checkpoint _save_optimizer_and_scheduler _should_save_checkpoint "
            "_manage_checkpoint_limit _rotate_checkpoints _save_rng_state store_flos"
        ),
        "override build_checkpoint_manager, or load_pretrained; a run of the same name resumes by itself": (
            "load_checkpoint _load_checkpoint _load_from_checkpoint _try_resume_from_checkpoint _maybe_restore_state "
            "_load_best_model load_trainer_state _load_optimizer_and_scheduler"
        ),
        "the state of a run is in its checkpoints; carry more in a variable of the model, or in the optimizer": (
            "state_dict load_state_dict"
        ),
        "override prepare_batch, which gets the state, or preprocess_batch, which runs ahead on the host": (
            "_preprocess_batch_input _prepare_inputs _prepare_input prepare_inputs get_batch_samples batch_generator "
            "_get_next_batch _read_next_batches"
        ),
        "override preforward, which is traced, or preprocess_batch, which runs ahead on the host": "pre_forward",
        "override postforward; a loss from the outputs of the model is that of the task (`Task.loss`)": "post_forward",
        "override build_collator or build_data_collate_info": (
            "create_grain_collect_function create_tfds_collect_function create_collect_function build_collaten_fn_kwargs "
            "build_collate_fn build_collate_fn_kwargs build_data_collator data_collator collate_fn get_collate_fn collator "
            "_get_collator_with_removed_columns"
        ),
        "override configure_dataloaders; `data.dataset` names the data": (
            "get_train_dataloader get_eval_dataloader get_test_dataloader train_dataloader eval_dataloader val_dataloader "
            "test_dataloader _configure_dataloaders build_training_dataloader build_training_dataset build_dataset "
            "build_train_dataset build_dataloader build_dataloaders _build_data _build_dataset _build_dataloader "
            "_configure_grain_dataloader _configure_tfds_dataloader create_grain_dataloader _get_dataloader num_examples"
        ),
        "set `data.shuffle`, or override configure_dataloaders": "_get_train_sampler _get_eval_sampler",
        "define build_model in a task (`Task.build_model`), or override configure_model": (
            "build_model _build_model build_foundation_model _configure_model _configure_state model_init call_model_init "
            "_build_parallelized_model build_parallelize_model _wrap_model create_model get_model init_model"
        ),
        "override the property `optimizer`, or name one in `optimizer.name`": (
            "build_optimizer _build_optimizer create_optimizer configure_optimizer configure_optimizers get_optimizer "
            "get_optimizer_cls_and_kwargs create_optimizer_and_scheduler _build_optimizer_and_scheduler tx optimizer_step"
        ),
        "override the property `scheduler`, or name one in `optimizer.schedule.name`": (
            "build_scheduler create_scheduler lr_scheduler build_lr_scheduler _build_lr_scheduler configure_scheduler "
            "get_scheduler custom_scheduler"
        ),
        "override build_param_groups": "get_decay_parameter_names get_param_groups param_groups_fn create_param_groups",
        "override freeze_module": "freeze_parameters freeze_layers",
        "set `optimizer.max_grad_norm`, or override forward_backward": (
            "_clip_grad_norm clip_grad_norm clip_gradients configure_gradient_clipping _get_grad_norm"
        ),
        "override build_pruner, which may change the parameters after each update": "on_optimizer_step on_pre_optimizer_step",
        "override evaluate or eval, or return an eval_step_fn of your own from configure_functions": (
            "evaluation_loop prediction_loop _run_evaluation _eval_epoch _evaluate eval_step evaluation_step evaluate_step "
            "validation_step test_step _execute_eval_step validate _validate _pre_validate _maybe_evaluate"
        ),
        "define predictions in a task (`Task.predictions`), and override build_evaluation_metrics": (
            "predict predict_step prediction_step preprocess_logits_for_metrics"
        ),
        "override calculate_metrics, which gets means, or build_evaluation_metrics, which gets predictions": (
            "compute_metrics metric_calculator _compute_metrics build_metrics"
        ),
        "set `evaluation.every_steps` or `evaluation.every_epochs`": "_should_run_evaluation _should_evaluate",
        "override build_early_stopper": "early_stopper should_stop early_stopping _should_stop _early_stop",
        "override configure_functions": (
            "_configure_functions build_functions create_functions _ensure_functions_compiled compile_aot"
        ),
        "set `anomalies`": "apply_training_hooks _handle_training_interruption",
        "set `distributions`": "log_weight_distribution",
        "override build_pruner, or set `pruning`": "pruning_module",
        "call add_callback in post_init": (
            "_init_callbacks init_callbacks build_callbacks create_callbacks configure_callbacks get_callbacks"
        ),
        "override post_init": (
            "_setup setup init_distributed _init_distributed initialize_trainer_utils _initialize_attributes on_init_end "
            "_build_training_context"
        ),
        "add the callback `trainers.callbacks.hugging_face.HuggingFaceExport`": (
            "_save_to_torch _create_hf_model_config push_to_hub create_model_card _save_readme save_information"
        ),
        "define flops_per_token in a task (`Task.flops_per_token`)": (
            "floating_point_ops calculate_number_total_flops _calculate_flops"
        ),
        "define it in a task, which may have it": "set_step_nr",
        "override on_epoch_begin": "set_data_epoch_nr",
        "return the metrics as parts of the loss (`Loss.parts`)": "prepare_metric_bag process_metric_values",
    }
)
"""What to do instead of a method of another system's trainer (or unit), by its name."""

INSTEAD_OF_AN_EVENT = _by_name(
    {
        _HOOK + "use the event on_train_begin": "on_training_start",
        "the event is on_train_begin": "on_init_end on_train_start on_fit_start on_training_begin setup",
        _HOOK + "use the event on_train_end": "on_training_end",
        "the event is on_train_end": "on_fit_end on_training_finish teardown",
        "the event is on_epoch_begin": "on_epoch_start on_train_epoch_start",
        "the event is on_epoch_end": "on_train_epoch_end",
        _HOOK + "use the event on_step_begin": "on_step_start",
        "the event is on_step_begin": "on_batch_begin on_batch_start on_train_batch_start",
        "the event is on_step_end": "on_batch_end on_train_batch_end on_optimizer_step on_pre_optimizer_step",
        _HOOK + "use the event on_step_end": "on_micro_step",
        "a micro-batch has no event; override on_micro_step of the trainer, or use the event on_step_end": "on_substep_end",
        "the event is on_publish": "on_log on_metrics",
        _HOOK + "use the event on_evaluate_begin": "on_evaluation_start",
        "the event is on_evaluate_begin": "on_evaluate_start on_validation_start on_eval_begin on_eval_start",
        _HOOK + "use the event on_evaluate": "on_evaluation_end",
        "the event is on_evaluate": (
            "on_evaluate_end on_validation_end on_eval_end on_prediction_step on_predict on_validation_batch_end"
        ),
        "the event is on_save": "on_save_checkpoint on_checkpoint on_push_begin on_save_end",
        "the event is on_exception": "on_error on_train_error on_interrupt",
        "a callback only observes; override it in a subclass of BaseTrainer": (
            "preprocess_batch prepare_batch preforward postforward forward_backward calculate_metrics"
        ),
    }
)
"""What to do instead of a method of another system's callback, or of a hook, in a callback, by its name."""

INSTEAD_OF_A_TASK_METHOD = _by_name(
    {
        "the loss of a batch is `loss(model, batch)`": (
            "compute_loss loss_fn criterion forward train_step training_step forward_step process_batch"
        ),
        "an evaluation calls `loss` too, in evaluation mode; return metrics as parts of it (`Loss.parts`)": (
            "eval_step evaluation_step validation_step valid_step test_step compute_metrics metrics"
        ),
        "the model is made by `build_model(rngs)`": "configure_model model create_model get_model init_model build",
        "what a model predicts is `predictions(model, batch)`": "predict predict_step prediction_step",
        "the optimizer is that of the section `optimizer`, or of the trainer's property `optimizer`": (
            "configure_optimizers optimizer create_optimizer"
        ),
        "data are read by `data.dataset`, or by a trainer's configure_dataloaders": (
            "train_dataloader val_dataloader load_dataset configure_dataloaders"
        ),
    }
)
"""What to do instead of a method of another system's task, by its name."""
