"""What people type who come from other tools, and what it is called here: tables for hints of errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping

from prge.errors import PrgeError, shown

# Settings of verbs, the first that a verb has, with a value where one is meant: what others call it.
_SETTINGS = {
    "data train": (
        "data_dir data_path dataset dataset_name dataset_path datasets file input_file train train_data "
        "train_dataset train_file train_path training_data training_file"
    ),
    "dev": (
        "eval_data eval_dataset eval_file val_data val_file valid validation validation_data validation_file"
    ),
    "test": "test_data test_dataset test_file",
    "out": "export_dir o outfile output output_dir output_folder output_path save_dir save_path save_to",
    "model": (
        "base base_model hf_path m model_id model_name model_name_or_path model_path pretrained "
        "pretrained_model_name_or_path"
    ),
    "revision": "branch commit model_revision",
    "epochs": "epoch max_epochs n_epochs num_epochs num_train_epochs train_epochs",
    "steps": "iterations iters max_iters max_steps n_steps num_iters num_steps num_train_steps",
    "minutes": "max_minutes max_time time time_limit timeout",
    "learning_rate": "lr max_lr peak_lr step_size",
    "schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler",
    "warmup": "num_warmup_steps warmup_iters warmup_ratio warmup_steps",
    "optimizer": "optim",
    "momentum": "adam_beta1 beta1",
    "beta2": "adam_beta2",
    "clip": "grad_clip gradient_clip_val gradient_clipping max_grad_norm max_norm",
    "batch_size": (
        "b batch batchsize bs micro_batch_size mini_batch_size per_device_batch_size "
        "per_device_train_batch_size train_batch_size"
    ),
    "calls batch_size": (
        "accumulation_steps grad_accum grad_accumulation_steps gradient_accumulation "
        "gradient_accumulation_steps"
    ),
    "sequence_length": (
        "block_size cutoff_len max_len max_length max_seq_len max_seq_length max_sequence_length "
        "model_max_length seq_len seq_length sequence_len"
    ),
    "context sequence_length": "c context_length context_size ctx ctx_size max_model_len n_ctx num_ctx",
    "rank": "lora_dim lora_r lora_rank r",
    "alpha": "lora_alpha",
    "target_modules": "lora_modules lora_target lora_target_modules",
    "adapt_layers": "layers_to_transform lora_layers num_layers",
    "quantize=8da4w": "int4 load_in_4bit q4",
    "quantize=8da8w": "int8 load_in_8bit q8",
    "quantize": "bits dtype precision q_bits quant quantization torch_dtype",
    "estimator": "fine_tune_type finetuning_type",
    "evaluate_every": "eval_every eval_freq eval_interval eval_steps steps_per_eval val_interval",
    "checkpoint_every": "checkpoint_steps save_every save_freq save_interval save_steps",
    "patience": "early_stopping early_stopping_patience",
    "train_limit limit": "max_samples max_train_samples n_samples num_samples",
    "dev_limit": "max_eval_samples val_batches",
    "resume": "continue resume_from resume_from_checkpoint",
    "adapter": (
        "adapter_file adapter_name_or_path adapter_path adapters lora_model lora_path lora_weights "
        "peft_model resume_adapter_file"
    ),
    "columns": "column dataset_text_field prompt_column text_column text_field",
    "chat_template": "template",
    "log_to": "report_to",
    "seed": "data_seed random_seed random_state",
    "threads": "cpus n_threads num_threads num_workers t workers",
    "memory": "max_memory max_ram mem memory_limit ram",
    "prompt": "input p question text",
    "system": "sys system_prompt",
    "max_tokens": "gen_length max_gen_tokens max_new_tokens n n_predict num_predict",
    "temperature": "temp",
    "repetition_penalty": "repeat_penalty",
    "host": "address bind ip listen server_host",
    "push": "hub_model_id hub_repo push_to push_to_hub repo repo_id upload upload_repo",
    "format": "export_format outtype",
    "format=merged": "fuse merge merge_and_unload",
    "overwrite": "f force overwrite_output_dir y yes",
    "quiet": "disable_tqdm q silent",
}
# What no verb has a setting for, and verbs that have one: what is said of it.
_TOLD = {
    "`prge publish RUN --out FOLDER --push OWNER/NAME` does that": "hub_model_id hub_token push push_to_hub",
    "adapters are float32; --quantize of `prge tune` and `prge export` is for the frozen weights": (
        "bf16 dtype fp16 fp32 half load_in_4bit load_in_8bit mixed_precision tf32 torch_dtype"
    ),
    "backpropagation goes block by block as it is": (
        "grad_checkpoint gradient_checkpointing use_gradient_checkpointing"
    ),
    "`prge run` trains, `prge eval` scores": "do_eval do_predict do_train",
    "there is none of that here": (
        "deepspeed dropout fsdp lora_dropout neftune_noise_alpha packing weight_decay"
    ),
    "the engine runs on the processor": "cuda device device_map gpu gpus n_gpu ngl",
    "metrics.jsonl of the run folder has every step": "log_every logging_steps steps_per_report",
    "code of a model is never run": "trust_remote_code",
    "adapters are LoRA as it is": "lora peft qlora use_lora use_peft use_qlora",
    "of a prompt and a completion the completion is learnt": (
        "completion_only_loss mask_prompt train_on_inputs"
    ),
    "the best step on development rows is the result": "load_best_model_at_end save_best",
    "PRGE_DEBUG=1 in the environment shows tracebacks": "debug v verbose",
}
_VERBS = {
    "tune": "fine-tune finetune fit lora sft train",
    "export": "compile convert quantize",
    "eval": "evaluate score test",
    "generate": "complete infer inference predict",
    "publish": "fuse merge push save upload",
    "inspect": "info show",
    "android": "adb phone",
}


def setting_meant(key: str, known: Collection[str], written: Callable[[str], str]) -> tuple[str, str]:
    """Which of a verb's settings an unknown one means, and what an error says of it; each may be empty.

    Args:
        key: the unknown setting, with underscores.
        known: the verb's settings.
        written: how a setting is written where the unknown one was found.
    """
    names = _by_their_name(_SETTINGS)
    key = key.lower()

    def same(theirs: str) -> list[tuple[str, str]]:
        words = [word.partition("=") for ours in names.get(theirs, ()) for word in ours.split()]
        return [(name, f"{written(name)} {value}".rstrip()) for name, _, value in words]

    for name, ours in same(key):
        if name in known:
            return name, f"; here it is {ours}"
    for told in _by_their_name(_TOLD).get(key, ()):
        return "", f": {told}"
    near = _nearest(key, known, 0.6)
    for name, ours in [(near, written(near))] if near else same(_nearest(key, names, 0.85)):
        if name in known:
            return name, f"; did you mean {ours}?"
    return "", "".join(f"; other verbs call it {ours}" for _, ours in same(key)[:1])


def verb_error(name: str, verbs: Collection[str], prog: str) -> PrgeError:
    """There is no verb of that name; what it may mean.

    Args:
        name: the unknown verb.
        verbs: those that there are.
        prog: what stands before them, such as `prge android`.
    """
    ours = [verb for verb in _by_their_name(_VERBS).get(name.lower(), ()) if verb in verbs]
    near = next(iter(ours), "") or _nearest(name, verbs, 0.6)
    remedy = f"did you mean `{prog} {near}`?" if near else f"`{prog} --help` lists the verbs"
    return PrgeError(f"there is no verb {shown(name)} of {prog}", remedy=remedy)


def _nearest(name: str, names: Iterable[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, [*names], n=1, cutoff=cutoff)), "")


def _by_their_name(table: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for ours, theirs in table.items():
        for name in theirs.split():
            found.setdefault(name, []).append(ours)
    return found
