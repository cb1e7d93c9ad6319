"""Fields of a GGUF header that change what a model computes, and their names in transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch_armllm.checkpoint.formats.gguf_header import Header, settable


class Setting(NamedTuple):
    """A field's place in a configuration.

    Attributes:
        names: attributes; those that a configuration has are set.
        neutral: values of the field that ask for nothing of a model without these attributes; None: any.
        whole: the field is an integer.
    """

    names: tuple[str, ...]
    neutral: tuple[Any, ...] | None = ()
    whole: bool = False


_OFF = (0.0, 1.0)
SETTINGS: dict[str, Setting] = {
    "vocab_size": Setting(("vocab_size",), None, True),
    "context_length": Setting(("max_position_embeddings",), None, True),
    "embedding_length": Setting(("hidden_size",), (), True),
    "attention.head_count": Setting(("num_attention_heads",), (0,), True),
    "attention.layer_norm_rms_epsilon": Setting(("rms_norm_eps", "norm_eps", "layer_norm_epsilon")),
    "attention.layer_norm_epsilon": Setting(
        ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
    ),
    "expert_count": Setting(("num_experts", "num_local_experts"), (0,), True),
    "expert_used_count": Setting(("num_experts_per_tok",), (0,), True),
    "expert_shared_count": Setting(("n_shared_experts",), (0,), True),
    "expert_shared_feed_forward_length": Setting(("shared_expert_intermediate_size",), (0,), True),
    "expert_group_count": Setting(("n_group",), (0, 1), True),
    "expert_group_used_count": Setting(("topk_group",), (0, 1), True),
    "expert_weights_scale": Setting(("routed_scaling_factor",), _OFF),
    "expert_weights_norm": Setting(("norm_topk_prob",), (True,)),
    "expert_group_scale": Setting((), _OFF),
    "experts_per_group": Setting((), (0, 1)),
    "leading_dense_block_count": Setting(("first_k_dense_replace",), (0,), True),
    "moe_every_n_layers": Setting((), (0, 1)),
    "interleave_moe_layer_step": Setting((), (0, 1)),
    "moe_latent_size": Setting((), (0,)),
    "logit_scale": Setting(("logit_scale", "logits_scaling"), _OFF),
    "residual_scale": Setting(("residual_multiplier",), _OFF),
    "embedding_scale": Setting(("embedding_multiplier",), _OFF),
    "attn_logit_softcapping": Setting(("attn_logit_softcapping",), (0.0,)),
    "final_logit_softcapping": Setting(("final_logit_softcapping",), (0.0,)),
    "router_logit_softcapping": Setting((), (0.0,)),
    "attention.clamp_kqv": Setting((), (0.0,)),
    "attention.causal": Setting((), (True,)),
    "attention.output_scale": Setting((), _OFF),
    "attention.temperature_length": Setting((), (0,)),
    "attention.temperature_scale": Setting((), (0.0,)),
    "attention.q_lora_rank": Setting((), (0,)),
    "attention.kv_lora_rank": Setting((), (0,)),
    "attention.shared_kv_layers": Setting(("num_kv_shared_layers",), (0,), True),
    "embedding_length_per_layer_input": Setting(("hidden_size_per_layer_input",), (0,), True),
    "shortconv.l_cache": Setting(("conv_L_cache",), (), True),
    "swin_norm": Setting((), (False,)),
    "rescale_every_n_layers": Setting((), (0,)),
    "activation_sparsity_scale": Setting((), (0.0,)),
    "n_deepstack_layers": Setting((), (0,)),
}
IRRELEVANT = ("tensor_data_layout", "pooling_type", "decoder_start_token_id", "use_parallel_residual")
"""Fields that change no output of a causal language model, or that the tensors say as well."""
_SSM = ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count")
READ_BY_TRANSFORMERS: dict[str, tuple[str, ...]] = {
    "mamba": tuple(f"ssm.{name}" for name in _SSM[:-1]),
    "qwen35": (*(f"ssm.{name}" for name in _SSM), "full_attention_interval"),
    "qwen35moe": (*(f"ssm.{name}" for name in _SSM), "full_attention_interval"),
}
"""Fields of one architecture that transformers reads, and that need no correction."""


def apply_settings(config: Any, header: Header) -> None:
    """Sets the attributes of a configuration by the header.

    Raises:
        ValueError: a value is no number, or asks for something that transformers' model has no setting for.
    """
    header.skip(*IRRELEVANT, *READ_BY_TRANSFORMERS.get(header.architecture, ()))
    for field, setting in SETTINGS.items():
        value = header.value(field)
        if value is None:
            continue
        if not isinstance(value, bool):
            value = header.integer(field) if setting.whole else header.number(field)
        own = [name for name in setting.names if settable(config, name)]
        for name in own:
            setattr(config, name, value)
        if not own and setting.neutral is not None and value not in setting.neutral:
            if field == "expert_shared_count" and getattr(config, "shared_expert_intermediate_size", None):
                continue  # the shared experts are one of their joint size
            raise header.unsupported(field, value, config.model_type)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, name, None) == 0.0:
            setattr(config, name, None)
    _feed_forward(config, header)
    _routing(config, header)


def _feed_forward(config: Any, header: Header) -> None:
    """Sets the sizes of layers and experts."""
    dense = header.value("feed_forward_length")
    if isinstance(dense, list):
        if config.model_type != "gemma4_text":
            raise header.unsupported("feed_forward_length", dense, config.model_type)
        _wide_layers(config, header, dense)
    elif header.integer("feed_forward_length"):
        _set_first(config, header, "feed_forward_length", ("intermediate_size", "ffn_hidden_size", "n_inner"))
    if header.integer("expert_feed_forward_length"):
        names = ("moe_intermediate_size", "intermediate_size")
        _set_first(config, header, "expert_feed_forward_length", names)
    if header.integer("expert_chunk_feed_forward_length"):
        raise header.unsupported("expert_chunk_feed_forward_length", "set", config.model_type)


def _wide_layers(config: Any, header: Header, sizes: list[int]) -> None:
    """Sets the sizes of Gemma 4's layers: those that share keys and values may be twice as wide."""
    shared = int(getattr(config, "num_kv_shared_layers", 0) or 0)
    narrow, wide = sizes[: len(sizes) - shared], sizes[len(sizes) - shared :]
    if len(set(narrow)) != 1 or set(wide) != {2 * narrow[0]}:
        raise header.unsupported("feed_forward_length", sizes, config.model_type)
    config.intermediate_size, config.use_double_wide_mlp = narrow[0], True


def _set_first(config: Any, header: Header, field: str, names: tuple[str, ...]) -> None:
    size = header.integer(field)
    for name in names:
        if settable(config, name):
            setattr(config, name, size)
            return
    if field == "feed_forward_length" and (config.model_type == "bloom" and size == 4 * config.hidden_size):
        return
    raise header.unsupported(field, size, config.model_type)


_GATES = {1: "softmax", 2: "sigmoid", 3: "softmax of the chosen"}
"""llama.cpp's functions of routers; 0: the architecture's own."""
_OWN_GATES = {"gpt_oss": (3,), "mixtral": (1, 3), "minimax_m2": (2,)}
"""Functions of transformers' routers by model type.  Others compute a softmax."""


def _routing(config: Any, header: Header) -> None:
    function = header.integer("expert_gating_func")
    if function and function not in _OWN_GATES.get(config.model_type, (1,)):
        raise header.unsupported("expert_gating_func", _GATES.get(function, function), config.model_type)
