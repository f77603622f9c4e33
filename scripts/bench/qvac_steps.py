"""Training steps of QVAC Fabric, a fork of llama.cpp, by the C API of its prebuilt library, for peers.py.

    python scripts/bench/qvac_steps.py LIBRARY MODEL.gguf FOLDER

For every line of the standard input the process prints seconds and loss of a step with the sizes of FOLDER's
trial.json on the rows of its rows.json; the first line only waits for the start. qvac.py installs the library
and converts the model; the structures below are those of the headers in its package.

The library has no batches: the rows of a step are joined to one row, and each step updates the adapter. Batch
and micro batch are equal, because no gradient passes from one micro batch to another. Weights are mapped and
not repacked, which is faster here than the default: repacked weights have a slow transposed product.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from ctypes import (
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import Any

from serve import LEARNING_RATE, Measurements, serve

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Rows are padded to a multiple of this number of tokens.
ROW_TOKENS = 256
_F32, _I32, _ERROR, _NO_FLASH_ATTENTION, _MMAP = 0, 26, 4, 0, 1


class ModelParams(Structure):
    """llama_model_params."""

    _fields_ = (
        *((name, c_void_p) for name in ("devices", "tensor_buft_overrides")),
        *((name, c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode", "tensor_read_lazy")),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        *((name, c_void_p) for name in ("progress_callback", "progress_callback_user_data", "kv_overrides")),
        *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host")),
        *((name, c_bool) for name in ("no_alloc", "load_mtp")),
    )


class ContextParams(Structure):
    """llama_context_params."""

    _fields_ = (
        *((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        *((name, c_uint32) for name in ("n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type")),
        *((name, c_int32) for name in ("pooling_type", "attention_type", "flash_attn_type")),
        *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor")),
        *((name, c_float) for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        *((name, c_void_p) for name in ("cb_eval", "cb_eval_user_data")),
        *((name, c_int32) for name in ("type_k", "type_v")),
        ("moe_cache_size", c_size_t),
        *((name, c_void_p) for name in ("abort_callback", "abort_callback_data")),
        *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full")),
        *((name, c_bool) for name in ("kv_unified", "prefetch_weights", "moe_cache_auto")),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
        *((name, c_bool) for name in ("ctx_other_share_compute", "training")),
    )


class Batch(Structure):
    """llama_batch."""

    _fields_ = (
        ("n_tokens", c_int32),
        *((name, c_void_p) for name in ("token", "embd", "pos", "n_seq_id", "seq_id", "logits")),
    )


class OptParams(Structure):
    """llama_opt_params."""

    _fields_ = (
        ("n_ctx_train", c_uint32),
        *(
            (name, c_void_p)
            for name in ("param_filter", "param_filter_ud", "get_opt_pars", "get_opt_pars_ud")
        ),
        ("optimizer_type", c_int32),
        ("checkpoint_path", c_char_p),
        *((name, c_bool) for name in ("load_optimizer_state", "assistant_loss_only")),
    )


class LoraParams(Structure):
    """llama_lora_training_params."""

    _fields_ = (
        ("target_modules", c_uint32),
        ("rank", c_int32),
        *((name, c_float) for name in ("alpha", "dropout", "init_std")),
        ("seed", c_uint32),
    )


class OptimizerParams(Structure):
    """ggml_opt_optimizer_params."""

    _fields_ = tuple(
        (name, c_float)
        for name in ("alpha", "beta1", "beta2", "eps", "weight_decay", "sgd_alpha", "sgd_decay")
    )


def print_errors(level: int, text: bytes, _: object) -> None:
    """Print the library's errors, and nothing else that it logs."""
    if level == _ERROR:
        print(text.decode(errors="replace").strip(), file=sys.stderr, flush=True)


_LOG = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
_PRINT_ERRORS = _LOG(print_errors)


def open_library(path: Path) -> Any:
    """Return the library with the types of its functions, after loading the backend of this processor.

    Raises:
        OSError: the file can't be loaded.
        ValueError: its structures are other ones than those of this file.
    """
    library = ctypes.CDLL(str(path))
    pointer, number = c_void_p, c_int64
    types: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "ggml_backend_load_all_from_path": (None, (c_char_p,)),
        "ggml_get_data": (pointer, (pointer,)),
        "ggml_opt_dataset_data": (pointer, (pointer,)),
        "ggml_opt_dataset_init": (pointer, (c_int32, c_int32, number, number, number, number)),
        "ggml_opt_dataset_labels": (pointer, (pointer,)),
        "ggml_opt_result_init": (pointer, ()),
        "ggml_opt_result_loss": (None, (pointer, ctypes.POINTER(c_double), pointer)),
        "ggml_opt_result_reset": (None, (pointer,)),
        "llama_backend_init": (None, ()),
        "llama_batch_get_one": (Batch, (pointer, c_int32)),
        "llama_context_default_params": (ContextParams, ()),
        "llama_decode": (c_int32, (pointer, Batch)),
        "llama_init_from_model": (pointer, (pointer, ContextParams)),
        "llama_log_set": (None, (_LOG, pointer)),
        "llama_lora_training_init": (pointer, (pointer, pointer, ctypes.POINTER(LoraParams))),
        "llama_model_default_params": (ModelParams, ()),
        "llama_model_load_from_file": (pointer, (c_char_p, ModelParams)),
        "llama_n_ctx": (c_uint32, (pointer,)),
        "llama_opt_default_params": (OptParams, ()),
        "llama_opt_epoch": (None, (pointer, pointer, pointer, pointer, number, pointer, pointer)),
        "llama_opt_init": (None, (pointer, pointer, OptParams)),
    }
    for name, (result, arguments) in types.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_PRINT_ERRORS, None)
    defaults = library.llama_context_default_params()
    fields = ("n_ctx", "n_batch", "n_ubatch", "offload_kqv", "training", "n_samplers")
    if [getattr(defaults, name) for name in fields] != [512, 2048, 512, True, False, 0]:
        raise ValueError(f"{path}: the default settings are other ones than expected")
    library.ggml_backend_load_all_from_path(str(path.with_suffix("")).encode())
    library.llama_backend_init()
    return library


def address(library: Any, name: str) -> int | None:
    """Return the address of a function of the library."""
    return ctypes.cast(getattr(library, name), c_void_p).value


def qvac_steps(
    path: Path, model_path: Path, trial: dict[str, Any], batches: list[list[list[int]]]
) -> Measurements:
    """Run steps of LoRA with AdamW on a mapped GGUF file."""
    library = open_library(path)
    yield ()
    tokens = trial["batch"] * trial["tokens"]
    model_params = library.llama_model_default_params()
    model_params.n_gpu_layers, model_params.load_mode, model_params.use_extra_bufts = 0, _MMAP, False
    model = library.llama_model_load_from_file(str(model_path).encode(), model_params)
    context_params = library.llama_context_default_params()
    context_params.n_ctx = context_params.n_batch = context_params.n_ubatch = tokens
    context_params.n_threads = context_params.n_threads_batch = trial["threads"]
    context_params.type_k = context_params.type_v = _F32
    context_params.flash_attn_type = _NO_FLASH_ATTENTION
    context_params.offload_kqv = context_params.op_offload = False
    context_params.training = True
    context = model and library.llama_init_from_model(model, context_params)
    if not context or library.llama_n_ctx(context) != tokens:
        raise ValueError(f"{model_path} can't be opened with rows of {tokens} tokens")
    # Training doesn't set the number of threads, and keeps that of the last decoded batch.
    if library.llama_decode(context, library.llama_batch_get_one((c_int32 * 1)(batches[0][0][0]), 1)):
        raise ValueError(f"{model_path} can't be run")
    layers = MODULES if isinstance(trial["layers"], str) else trial["layers"]
    targets = sum(1 << MODULES.index(name) for name in layers)
    lora = LoraParams(targets, trial["rank"], trial["alpha"], 0.0, 0.02, 1)
    if not library.llama_lora_training_init(context, model, lora):
        raise ValueError("the adapter can't be made")
    # The function that returns constant settings gets their address; both must outlive the optimizer.
    optimizer = OptimizerParams(LEARNING_RATE, 0.9, 0.999, 1e-8, 0.0, 0.0, 0.0)
    opt_params = library.llama_opt_default_params()
    opt_params.param_filter = address(library, "llama_opt_param_filter_lora")
    opt_params.get_opt_pars = address(library, "ggml_opt_get_constant_optimizer_params")
    opt_params.get_opt_pars_ud = ctypes.addressof(optimizer)
    library.llama_opt_init(context, model, opt_params)
    datasets = [make_dataset(library, batch) for batch in batches]
    result, loss = library.ggml_opt_result_init(), c_double()
    while True:
        for dataset in datasets:
            begin = time.perf_counter()
            library.llama_opt_epoch(context, dataset, result, None, 1, None, None)
            library.ggml_opt_result_loss(result, loss, None)
            library.ggml_opt_result_reset(result)
            yield time.perf_counter() - begin, loss.value


def make_dataset(library: Any, batch: list[list[int]]) -> int:
    """Return a dataset of one row: the batch's rows joined, and the token after each of them."""
    inputs, labels = joined(batch)
    dataset: int = library.ggml_opt_dataset_init(_I32, _I32, len(inputs), len(labels), 1, 1)
    for part, values in (("data", inputs), ("labels", labels)):
        tensor = getattr(library, f"ggml_opt_dataset_{part}")(dataset)
        ctypes.memmove(library.ggml_get_data(tensor), (c_int32 * len(values))(*values), 4 * len(values))
    return dataset


def joined(batch: list[list[int]]) -> tuple[list[int], list[int]]:
    """Return the tokens of all rows but each row's last one, and the tokens that follow them."""
    return [token for row in batch for token in row[:-1]], [token for row in batch for token in row[1:]]


def main() -> None:
    """Serve the steps of a model."""
    library, model, folder = map(Path, sys.argv[1:])
    trial, batches = (json.loads((folder / f"{name}.json").read_text()) for name in ("trial", "rows"))
    serve(lambda: qvac_steps(library, model, trial, batches))


if __name__ == "__main__":
    main()
