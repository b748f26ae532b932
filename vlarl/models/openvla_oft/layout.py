"""Every tensor of a checkpoint by name and shape, worked out from its config.json alone.

Released layout: moojink/openvla-oft@213c5ff, 982 tensors for the 7B model. Torch-free and without
the network's libraries, so that a file can be judged by its header in no time.
"""

from __future__ import annotations

from vlarl.models.openvla_oft.config import PATCH, NetConfig, TowerSize

LM_HEAD = "language_model.lm_head.weight"
"""The stored head: one row per vocabulary id."""
ACTION_ROWS = "language_model.action_rows.weight"
"""What the network has of it: the rows of the 256 action tokens."""

Shapes = dict[str, tuple[int, ...]]


def stored_tensors(config: NetConfig) -> Shapes:
    """Every tensor of the released safetensors files: name -> shape, dead ones and the full head
    included.
    """
    shapes = _projector(config) | _llama(config) | dead_tensors(config)
    for tower, size in _towers(config):
        shapes |= _under(f"vision_backbone.{tower}", _live_tower(size, config.num_patches))
    shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def dead_tensors(config: NetConfig) -> Shapes:
    """Names and shapes of the stored vision tensors that are never built: they never influence the
    features.

    The last block, the final norm and the attention pooling of a tower.
    """
    shapes: Shapes = {}
    for tower, size in _towers(config):
        shapes |= _under(f"vision_backbone.{tower}", _dead_tower(size))
    return shapes


def proprio_tensors(state_dims: int, hidden_size: int) -> Shapes:
    """The state projector, a file of its own: name -> shape."""
    return _under("fc1", _linear(state_dims, hidden_size)) | _under(
        "fc2", _linear(hidden_size, hidden_size)
    )


def l1_tensors(action_dims: int, hidden_size: int) -> Shapes:
    """The L1 regression head, a file of its own: name -> shape."""
    d, wide = hidden_size, hidden_size * action_dims
    shapes = _under("layer_norm1", _norm(wide)) | _under("fc1", _linear(wide, d))
    for i in range(2):
        block = _under("0", _norm(d)) | _under("1", _linear(d, d))
        shapes |= _under(f"mlp_resnet_blocks.{i}.ffn", block)
    shapes |= _under("layer_norm2", _norm(d)) | _under("fc2", _linear(d, action_dims))
    return _under("model", shapes)


def _towers(config: NetConfig) -> tuple[tuple[str, TowerSize], ...]:
    return ("featurizer", config.towers[0]), ("fused_featurizer", config.towers[1])


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _linear(inputs: int, outputs: int) -> Shapes:
    return {"weight": (outputs, inputs), "bias": (outputs,)}


def _norm(size: int) -> Shapes:
    return {"weight": (size,), "bias": (size,)}


def _mlp(size: TowerSize) -> Shapes:
    return _under("fc1", _linear(size.dim, size.mlp)) | _under("fc2", _linear(size.mlp, size.dim))


def _block(size: TowerSize) -> Shapes:
    d = size.dim
    shapes = _under("norm1", _norm(d)) | _under("norm2", _norm(d)) | _under("mlp", _mlp(size))
    shapes |= _under("attn.qkv", _linear(d, 3 * d)) | _under("attn.proj", _linear(d, d))
    if size.layer_scale:
        shapes |= {f"ls{i}.scale_factor": (d,) for i in (1, 2)}
    return shapes


def _live_tower(size: TowerSize, num_patches: int) -> Shapes:
    d = size.dim
    shapes: Shapes = {"pos_embed": (1, num_patches, d)}
    shapes |= {"patch_embed.proj.weight": (d, 3, PATCH, PATCH), "patch_embed.proj.bias": (d,)}
    if size.cls_token:
        shapes["cls_token"] = (1, 1, d)
    if size.registers:
        shapes["reg_token"] = (1, size.registers, d)
    for i in range(size.depth - 1):
        shapes |= _under(f"blocks.{i}", _block(size))
    return shapes


def _dead_tower(size: TowerSize) -> Shapes:
    d = size.dim
    shapes = _under("norm", _norm(d)) | _under(f"blocks.{size.depth - 1}", _block(size))
    if size.attn_pool:
        pool: Shapes = {"latent": (1, 1, d)}
        pool |= _under("q", _linear(d, d)) | _under("kv", _linear(d, 2 * d))
        pool |= _under("proj", _linear(d, d)) | _under("norm", _norm(d)) | _under("mlp", _mlp(size))
        shapes |= _under("attn_pool", pool)
    return shapes


def _projector(config: NetConfig) -> Shapes:
    wide = sum(size.dim for size in config.towers)
    shapes = _under("fc1", _linear(wide, 4 * wide))
    shapes |= _under("fc2", _linear(4 * wide, config.hidden_size))
    shapes |= _under("fc3", _linear(config.hidden_size, config.hidden_size))
    return _under("projector", shapes)


def _llama(config: NetConfig) -> Shapes:
    d, m = config.hidden_size, config.intermediate_size
    kv = d // config.num_heads * config.num_kv_heads
    layer: Shapes = {
        "self_attn.q_proj.weight": (d, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.v_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, d),
        "mlp.gate_proj.weight": (m, d),
        "mlp.up_proj.weight": (m, d),
        "mlp.down_proj.weight": (d, m),
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
    }
    shapes: Shapes = {"embed_tokens.weight": (config.vocab_size, d), "norm.weight": (d,)}
    for i in range(config.num_layers):
        shapes |= _under(f"layers.{i}", layer)
    return _under("language_model.model", shapes)
