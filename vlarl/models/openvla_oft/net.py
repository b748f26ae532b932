"""OpenVLA-OFT as one module: frames and prompt in, logits of all action tokens of a chunk out, in
one pass.

Source: moojink/openvla-oft@213c5ff prismatic/extern/hf/modeling_prismatic.py with the bidirectional
Llama of moojink/transformers-openvla-oft@bc339d9. Sequence: [BOS] [patches] [state?] [prompt
without BOS] [C*A slots] [</s>?]. Every token attends to every token that is not padding.
Differences: of the head only the 256 action rows exist; padding sits in front of the prompt, so
that the rows to read are one slice; logits and values are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from vlarl.errors import RunFailed
from vlarl.models.openvla_oft.config import NUM_BINS, NetConfig
from vlarl.models.openvla_oft.vision import Projector, VisionBackbone
from vlarl.models.value_head import ValueHead, reset_linear

# The value head is a unit of its own, since it may have another dtype than the rest.
SHARD_UNITS = (LlamaDecoderLayer, Block, ValueHead)


class OftOutput(NamedTuple):
    """A NamedTuple, since FSDP finds the tensors of tuples but not those of a dataclass.

    logits: [n, C*A, 256] float32 over the action tokens, None unless asked for. value: [n, V]
    float32 or None. action: [n, C, A] normalised actions of an L1 head, or None.
    """

    logits: Tensor | None
    value: Tensor | None
    action: Tensor | None


class Rotary(LlamaRotaryEmbedding):
    """RoPE whose frequencies stay float32 when the module is cast; optionally rounded to bfloat16
    first.

    Rounding is what RLinf's `model.to(bfloat16)` does: up to 0.4 rad of angle error at position
    340.
    """

    def __init__(self, config: LlamaConfig, *, round_bf16: bool) -> None:
        super().__init__(config)
        self.round_bf16 = round_bf16
        self.rebuild(self.inv_freq.device)

    def rebuild(self, device: torch.device) -> None:
        """Compute the frequencies anew on a device."""
        with torch.device("cpu"):
            freq, _ = self.compute_default_rope_parameters(self.config)
        if self.round_bf16:
            freq = freq.to(torch.bfloat16).float()
        self.inv_freq = freq.to(device)
        self.original_inv_freq = self.inv_freq

    def _apply(self, fn, recurse=True):
        moved = fn(self.inv_freq)
        self.rebuild(moved.device)
        return self


def build_llama(config: NetConfig, *, rope_bf16: bool) -> LlamaModel:
    """A Llama in which every token sees every token."""
    llama_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        pad_token_id=config.pad_id,
        use_cache=False,
    )
    # Both flags: the first decides about the mask transformers builds, the second about the
    # kernel's own causal mode. Versions differ in which one counts, hence `check_bidirectional`.
    llama_config.is_causal = False
    llama = LlamaModel(llama_config)
    llama.set_attn_implementation("sdpa")
    for layer in llama.layers:
        assert isinstance(layer, LlamaDecoderLayer)
        layer.self_attn.is_causal = False
    llama.rotary_emb = Rotary(llama_config, round_bf16=rope_bf16)
    return llama


class LanguageModel(nn.Module):
    """The decoder and the rows of its head that belong to action tokens."""

    def __init__(self, config: NetConfig, *, rope_bf16: bool) -> None:
        super().__init__()
        self.model = build_llama(config, rope_bf16=rope_bf16)
        self.action_rows = nn.Linear(config.hidden_size, NUM_BINS, bias=False)

    def rebuild_rotary(self, device: torch.device) -> None:
        """Make the RoPE frequencies, which no checkpoint stores, on a device."""
        rotary = self.model.rotary_emb
        assert isinstance(rotary, Rotary)
        rotary.rebuild(device)


class ProprioProjector(nn.Module):
    """[n, S] normalised state -> [n, D], one token."""

    def __init__(self, state_dims: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dims, hidden_size)
        self.fc2 = nn.Linear(hidden_size, hidden_size)

    def reset(self, seed: int) -> None:
        """Fresh weights that depend on the seed alone: N(0, 0.02), bias 0."""
        reset_linear(self, seed)

    def forward(self, state: Tensor) -> Tensor:
        """The state token."""
        return self.fc2(F.gelu(self.fc1(state)))


class L1Block(nn.Module):
    """x + ReLU(Linear(LayerNorm(x)))."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, size), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as x."""
        return x + self.ffn(x)


class L1Mlp(nn.Module):
    """Names as in the reference's MLPResNet."""

    def __init__(self, in_size: int, size: int, action_dims: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(in_size)
        self.fc1 = nn.Linear(in_size, size)
        self.mlp_resnet_blocks = nn.ModuleList(L1Block(size) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(size)
        self.fc2 = nn.Linear(size, action_dims)

    def forward(self, x: Tensor) -> Tensor:
        """From [..., in_size] to [..., action_dims]."""
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class L1Head(nn.Module):
    """[n, C*A, D] hidden states -> [n, C, A] normalised actions. Regression: there is nothing to
    sample.
    """

    def __init__(self, hidden_size: int, action_dims: int) -> None:
        super().__init__()
        self.action_dims = action_dims
        self.model = L1Mlp(hidden_size * action_dims, hidden_size, action_dims)

    def forward(self, hidden: Tensor) -> Tensor:
        """One action from the A hidden states of its slots."""
        n, slots, size = hidden.shape
        return self.model(hidden.reshape(n, slots // self.action_dims, self.action_dims * size))


class OftNet(nn.Module):
    """The whole network; the only module a policy calls, so that sharding hooks see every forward.

    num_slots: C*A. stop_id: id of `</s>`, or None to leave the stop token out. value_width: V, 0 =
    no value head. state_dims: S, 0 = no state token. l1_dims: A of an L1 head, 0 = none.
    value_detach: keep the value loss from reaching the backbone.
    """

    def __init__(
        self,
        config: NetConfig,
        *,
        num_slots: int,
        stop_id: int | None,
        value_width: int = 0,
        state_dims: int = 0,
        l1_dims: int = 0,
        rope_bf16: bool = False,
        value_detach: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.num_slots = num_slots
        self.stop_id = stop_id
        self.value_detach = value_detach
        hidden = config.hidden_size
        self.vision_backbone = VisionBackbone(config.towers, config.image_size)
        self.projector = Projector(sum(tower.dim for tower in config.towers), hidden)
        self.language_model = LanguageModel(config, rope_bf16=rope_bf16)
        self.proprio_projector = ProprioProjector(state_dims, hidden) if state_dims else None
        self.l1_head = L1Head(hidden, l1_dims) if l1_dims else None
        self.value_head = ValueHead(hidden, value_width) if value_width else None

    def forward(
        self,
        pixels: Tensor,
        ids: Tensor,
        keep: Tensor | None,
        state: Tensor | None,
        *,
        with_actions: bool = True,
        with_value: bool = True,
    ) -> OftOutput:
        """One pass.

        pixels: [n, 6k, s, s] normalised. ids: [n, L] prompt: BOS first, padding after it, the rest
        flush right. keep: [n, L] bool, False on padding; None when there is none. state: [n, S]
        normalised, or None.
        """
        hidden = self.read_hidden(pixels, ids, keep, state)
        logits = action = value = None
        if with_actions and self.l1_head is not None:
            action = self.l1_head(hidden).float()
        elif with_actions:
            logits = self.language_model.action_rows(hidden).float()
        if with_value and self.value_head is not None:
            first = hidden[:, 0].detach() if self.value_detach else hidden[:, 0]
            value = self.value_head(first)
        return OftOutput(logits, value, action)

    def read_hidden(
        self, pixels: Tensor, ids: Tensor, keep: Tensor | None, state: Tensor | None
    ) -> Tensor:
        """[n, C*A, D] final hidden states that predict the action tokens.

        They are read one position early: from the last prompt token to the last slot but one.
        """
        llama = self.language_model.model
        text = llama.embed_tokens(ids)
        visual = [self.projector(self.vision_backbone(pixels.to(text.dtype)))]
        if self.proprio_projector is not None:
            assert state is not None
            visual.append(self.proprio_projector(state.to(text.dtype))[:, None])
        tail = [text.new_zeros(len(ids), self.num_slots, text.shape[-1])]
        if self.stop_id is not None:
            stop = ids.new_full((len(ids), 1), self.stop_id)
            tail.append(llama.embed_tokens(stop))
        sequence = torch.cat([text[:, :1], *visual, text[:, 1:], *tail], dim=1)
        length = sequence.shape[1]
        first = length - sum(part.shape[1] for part in tail) - 1
        mask = None
        positions = torch.arange(length, device=ids.device)[None]
        if keep is not None:
            front = keep.new_ones(len(ids), 1 + sum(part.shape[1] for part in visual))
            back = keep.new_ones(len(ids), length - first - 1)
            row = torch.cat([front, keep[:, 1:], back], dim=1)
            positions = row.cumsum(1) - 1
            mask = row[:, None, None, :]
        out = llama(
            inputs_embeds=sequence, attention_mask=mask, position_ids=positions, use_cache=False
        )
        return out.last_hidden_state[:, first : first + self.num_slots]


@torch.no_grad()
def check_bidirectional(net: OftNet) -> str:
    """Prove on the loaded weights that the first token sees the last one, and that it does not see
    padding; returns what was found, for results to quote.

    Raises RunFailed when attention is causal: some versions of transformers ignore the request
    silently, and a policy then acts like an untrained one.
    """
    llama = net.language_model.model
    weight = llama.embed_tokens.weight
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 8, net.config.hidden_size, generator=generator).to(weight)
    tokens[1, :-1] = tokens[0, :-1]
    unpadded = llama(inputs_embeds=tokens, use_cache=False).last_hidden_state[:, 0]
    keep = torch.ones(2, 1, 1, 8, dtype=torch.bool, device=weight.device)
    masked = llama(inputs_embeds=tokens, attention_mask=keep, use_cache=False).last_hidden_state[
        :, 0
    ]
    keep[..., -1] = False
    padded = llama(inputs_embeds=tokens, attention_mask=keep, use_cache=False).last_hidden_state[
        :, 0
    ]
    if torch.equal(unpadded[0], unpadded[1]) or torch.equal(masked[0], masked[1]):
        raise RunFailed(
            "attention of the language model is causal, but OpenVLA-OFT needs it bidirectional: "
            "this version of transformers ignores `is_causal=False`; install the one that "
            "pyproject.toml names"
        )
    if not torch.equal(padded[0], padded[1]):
        raise RunFailed(
            "the language model attends to padding: this version of transformers ignores a 4-D "
            "mask; install the one that pyproject.toml names"
        )
    return "bidirectional, blind to padding"
