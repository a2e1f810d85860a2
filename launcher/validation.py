"""Turns pydantic's validation errors into one line that names the setting to use instead. Torch-free.

An unknown key is looked up in this order: names that other codebases use for one of our settings, settings of the same name in
another group, and settings with a similar name, the nearest group first.
"""

import difflib
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "training.optimizer.lr": ("learning_rate", "max_lr", "peak_lr", "base_lr"),
    "training.optimizer.clip_norm": ("grad_clip", "clip_grad", "clip_grad_norm", "max_grad_norm", "max_norm", "gradient_clipping"),
    "training.optimizer.betas": ("beta1", "beta2", "adam_beta1", "adam_beta2"),
    "training.optimizer.eps": ("epsilon", "adam_eps", "adam_epsilon"),
    "training.optimizer.weight_decay": ("wd",),
    "training.schedule.kind": ("lr_scheduler", "lr_scheduler_type", "lr_decay_style", "scheduler"),
    "training.schedule.warmup_steps": ("warmup", "warmup_iters", "num_warmup_steps", "lr_warmup_iters", "lr_warmup_steps"),
    "training.schedule.decay_steps": ("lr_decay_steps", "lr_decay_iters", "cooldown_steps"),
    "training.schedule.decay_shape": ("decay_type", "lr_decay_type", "lr_wsd_decay_style", "cooldown_type"),
    "training.schedule.final_lr": ("min_lr", "lr_min", "end_lr"),
    "training.steps": ("max_steps", "num_steps", "total_steps", "train_iters", "max_iters", "num_train_steps", "iterations"),
    "training.sequence_length": (
        "seq_len", "seq_length", "context", "max_seq_len", "max_seq_length", "block_size", "context_length", "ctx_len",
    ),
    "training.micro_batch_size": (
        "micro_batch", "per_device_batch_size", "per_device_train_batch_size", "train_micro_batch_size_per_gpu",
        "local_batch_size", "device_batch_size",
    ),
    "training.global_batch_tokens": ("global_batch_size", "tokens_per_batch", "total_batch_size", "train_batch_size"),
    "training.compute_dtype": ("dtype", "precision", "bf16", "fp16", "mixed_precision", "param_dtype"),
    "training.recompute": (
        "gradient_checkpointing", "activation_checkpointing", "activation_checkpoint", "recompute_granularity", "remat",
    ),
    "training.offload_kv": (
        "kv_offload", "offload_keys", "offload_activations", "activation_offloading", "enable_activation_offloading",
        "cpu_offloading", "cpu_offload",
    ),
    "training.cuda_graphs": ("cuda_graph", "enable_cuda_graph", "cudagraphs"),
    "training.checkpoint.every": ("save_interval", "save_every", "save_steps", "checkpoint_interval", "checkpoint_every"),
    "training.checkpoint.keep_last": ("save_total_limit", "keep_latest_k", "max_checkpoints"),
    "training.evaluation.every": ("eval_interval", "eval_every", "eval_steps", "evaluation_interval"),
    "training.evaluation.tokens": ("eval_tokens", "eval_iters"),
    "training.log_every": ("log_interval", "logging_steps", "log_freq", "print_every"),
    "training.initial_weights": ("init_from", "load", "resume_from", "resume_from_checkpoint", "pretrained", "load_path"),
    "training.batch_size_warmup": ("rampup_batch_size", "batch_warmup"),
    "training.sequence_length_warmup": ("seq_len_warmup", "seqlen_warmup", "curriculum"),
    "layout.tensor": ("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size",
                      "tensor_parallel_degree"),
    "layout.pipeline": ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size",
                        "pipeline_parallel_degree"),
    "layout.context": ("cp", "cp_size", "context_parallel", "context_parallel_size", "context_parallel_degree",
                       "sequence_parallel_size", "ulysses_size"),
    "layout.data": ("dp", "dp_size", "data_parallel", "data_parallel_size", "data_parallel_degree", "world_size", "num_gpus"),
    "layout.zero": ("zero_stage", "stage", "zero_optimization"),
    "layout.timeout_s": ("timeout", "nccl_timeout", "distributed_timeout_minutes", "ddp_timeout"),
    "model.d_model": ("hidden_size", "n_embd", "dim", "embed_dim", "hidden_dim"),
    "model.n_layers": ("num_layers", "n_layer", "num_hidden_layers", "depth"),
    "model.norm_eps": ("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon"),
    "model.tie_embeddings": ("tie_word_embeddings", "tied_embeddings", "untie_embeddings_and_output_weights"),
    "model.init_std": ("initializer_range", "init_method_std"),
    "data.path": ("dataset", "data_path", "dataset_path", "train_data", "data_dir", "dataset_name"),
    "data.tokenizer": ("tokenizer_path", "tokenizer_model", "tokenizer_name"),
    "data.workers": ("num_workers", "dataloader_num_workers"),
    "directory": ("output_dir", "out_dir", "save_dir", "run_dir", "save"),
    "name": ("run_name", "exp_name", "experiment_name", "job_name"),
}  # fmt: skip
"""Settings, and what Megatron-LM, torchtitan, fla/flame, nanoGPT, DeepSpeed and transformers call them."""

SEVERAL: dict[str, tuple[str, ...]] = {
    "batch_size": ("training.global_batch_tokens", "training.micro_batch_size"),
    "batch": ("training.global_batch_tokens", "training.micro_batch_size"),
    "gradient_accumulation_steps": ("training.global_batch_tokens", "training.micro_batch_size"),
    "gradient_accumulation": ("training.global_batch_tokens", "training.micro_batch_size"),
    "accumulation_steps": ("training.global_batch_tokens", "training.micro_batch_size"),
    "num_microbatches": ("training.global_batch_tokens", "training.micro_batch_size"),
    "epochs": ("training.steps", "training.global_batch_tokens"),
    "num_train_epochs": ("training.steps", "training.global_batch_tokens"),
    "max_tokens": ("training.steps", "training.global_batch_tokens"),
    "total_tokens": ("training.steps", "training.global_batch_tokens"),
    "train_tokens": ("training.steps", "training.global_batch_tokens"),
}
"""Names for which no single setting stands, and the settings that say the same together."""


def first_problem(error: ValidationError, root: type[BaseModel], *, words: bool = True) -> str:
    """The first problem with the values of a `root`, in one line, and how many more there are.

    An unknown key comes with the key that was probably meant. words: whether values can be set as key=value on the command line.
    """
    # a misspelt key that is required is also a missing one: the misspelling says more
    problems = sorted(error.errors(), key=lambda p: p["type"] not in ("extra_forbidden", "invalid_key"))
    first = problems[0]
    location, model, known = _place([str(part) for part in first["loc"]], root)
    key = ".".join(location)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        hint = _meant(location, known, root)
        text = f"unknown key {key}; " + (f"did you mean {hint}?" if hint else f"known here: {', '.join(known)}")
    elif first["type"] == "missing":
        text = f"{key} is missing; set it in the file" + (f" or as {key}=VALUE" if words else "")
    elif first["type"] in ("union_tag_invalid", "union_tag_not_found"):
        context = first["ctx"]
        name = context["discriminator"].strip("'")
        tags = [tag.strip(" '") for tag in context.get("expected_tags", "").split(",")]
        close = difflib.get_close_matches(context.get("tag", ""), tags, n=1)
        hint = f"did you mean {close[0]}? known: " if close else "known: "
        text = f"{key}.{name}={context.get('tag', 'nothing')}: no such {name}; {hint}{', '.join(tags)}"
    elif first["type"] in ("model_type", "dict_type", "model_attributes_type"):
        text = f"{key}={first['input']!r}: expected a group of settings" + _group_hint(key, model, first["input"])
    elif first["type"] in ("tuple_type", "list_type"):
        text = f"{key}={first['input']!r}: expected a list, as [...]"
    elif isinstance(first["input"], dict):
        text = f"{key}: {message}"
    else:
        text = f"{key}={first['input']!r}: {message}"
    return text + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def likely_setting(key: str, root: type[BaseModel]) -> str | None:
    """The setting that an unknown key probably means; None: nothing is near."""
    return _meant(key.split("."), [], root)


def _meant(location: list[str], known: list[str], root: type[BaseModel]) -> str | None:
    """The setting that an unknown key probably means, with its groups; None: nothing is near."""
    leaf, prefix = location[-1], "".join(f"{part}." for part in location[:-1])
    name = leaf.lower().replace("-", "_")
    settings = _all_settings(root)
    if several := [key for key in SEVERAL.get(name, ()) if key in settings]:
        return " and ".join(several)
    for key, others in OTHER_NAMES.items():
        if name in others and key in settings:
            return key
    same = [key for key in settings if key.rpartition(".")[2] == name]
    if len(same) == 1:
        return same[0]
    # `lr` written one group too high or too low: those that share the most groups with what was written
    if under := [key for key in same if key.startswith(prefix)]:
        return under[0]
    words = set(name.split("_"))
    if len(fuller := [key for key in known if len(words) > 1 and words < set(key.split("_"))]) == 1:
        return prefix + fuller[0]
    if close := difflib.get_close_matches(name, known, n=1, cutoff=0.65):
        return prefix + close[0]
    leaves = {key.rpartition(".")[2]: key for key in reversed(settings)}
    if close := difflib.get_close_matches(name, leaves, n=1, cutoff=0.8):
        return leaves[close[0]]
    return None


def _all_settings(root: type[BaseModel], prefix: str = "") -> list[str]:
    """Every setting of a configuration by its groups, as training.optimizer.lr; without those of dictionaries and lists."""
    found = []
    for name, field in root.model_fields.items():
        found.append(prefix + name)
        models = [c for c in _classes(field.annotation) if issubclass(c, BaseModel)]
        if get_origin(field.annotation) in (dict, tuple, list):
            continue
        for model in models:
            found += [key for key in _all_settings(model, f"{prefix}{name}.") if key not in found]
    return found


def _group_hint(key: str, model: type[BaseModel] | None, value: Any) -> str:
    """How to write a group of settings, with the setting in it that takes such a value, if one does."""
    if model is None:
        return ""
    for name, field in model.model_fields.items():
        if isinstance(value, str) and value in get_args(field.annotation) and get_origin(field.annotation) is Literal:
            return f"; did you mean {key}.{name}={value}?"
    return (
        f"; set its settings one by one, as {key}.{next(iter(model.model_fields))}=VALUE (known: {', '.join(model.model_fields)})"
    )


def _place(location: list[str], root: type[BaseModel]) -> tuple[list[str], type[BaseModel] | None, list[str]]:
    """The keys of a problem's location, without the tags that pydantic puts in for the kinds of a choice; the class of the value
    there, if it is a group; the keys that are known beside the last one."""
    keys: list[str] = []
    model: Any = root
    last: Any = root  # the class of the value at the end of the keys
    kinds: dict[str, Any] = {}
    named = False  # whether the next part is a key of a dictionary
    for number, part in enumerate(location):
        if part in kinds and not named:
            model, kinds = kinds[part], {}
            last = model
            continue
        keys.append(part)
        if named:
            named = False
            last = model
            continue
        if model is None or part not in model.model_fields:
            last = None
            continue
        annotation = model.model_fields[part].annotation
        models = [c for c in _classes(annotation) if issubclass(c, BaseModel)]
        last = models[0] if models else None
        if number == len(location) - 1:
            continue
        named = get_origin(annotation) is dict
        kinds = {c.model_fields["kind"].default: c for c in models} if len(models) > 1 else {}
        model = last
    return keys, last, list(model.model_fields) if model is not None else []


def _classes(annotation: Any) -> list[type]:
    if isinstance(annotation, type):
        return [annotation]
    return [found for part in get_args(annotation) for found in _classes(part)]
