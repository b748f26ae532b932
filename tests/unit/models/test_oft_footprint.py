"""What the network takes, against counts by hand and against what PyTorch really keeps."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from vlarl.models.openvla_oft.config import RELEASED, NetConfig, TowerSize
from vlarl.models.openvla_oft.footprint import PROMPT_TOKENS, Use, footprint
from vlarl.models.openvla_oft.net import SHARD_UNITS, OftNet

USE = Use(
    num_slots=56,
    num_images=1,
    state_dims=0,
    value_width=0,
    stop_token=True,
    held=4,
    compute=2,
)
STORED, DEAD, HEAD = 7_541_237_184, 43_080_480, 32064 * 4096
"""Numbers in the released files, those never built, and the head, of which 256 rows are built."""
BUILT = STORED - DEAD - HEAD + 256 * 4096
LAYER = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
VALUE_HEAD = 4096 * 512 + 512 + 512 * 128 + 128 + 128
SMALL = NetConfig(
    towers=(
        TowerSize(
            dim=48,
            depth=4,
            heads=4,
            mlp=192,
            cls_token=True,
            registers=4,
            layer_scale=True,
            attn_pool=False,
        ),
        TowerSize(
            dim=64,
            depth=3,
            heads=4,
            mlp=240,
            cls_token=False,
            registers=0,
            layer_scale=False,
            attn_pool=True,
        ),
    ),
    image_size=112,
    hidden_size=128,
    intermediate_size=344,
    num_layers=6,
    num_heads=4,
    num_kv_heads=4,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_positions=2048,
    vocab_size=512,
    first_action_id=256,
    pad_id=0,
)


def test_the_7b_by_hand():
    found = footprint(RELEASED, USE)
    assert BUILT == 7_367_871_136
    assert found.parameters == BUILT
    assert found.weights == found.trained == 4 * BUILT
    assert found.largest == LAYER == 202_383_360
    # 56 ids of 2 bytes and 56 log-probs of 4.
    assert found.stored == 56 * 6


def test_the_7b_as_it_is_built():
    with torch.device("meta"):
        net = OftNet(RELEASED, num_slots=56, stop_id=2, value_width=1)
    units = [m for m in net.modules() if isinstance(m, SHARD_UNITS)]
    inside = [sum(p.numel() for p in unit.parameters()) for unit in units]
    found = footprint(RELEASED, replace(USE, value_width=1))
    assert found.parameters == sum(p.numel() for p in net.parameters())
    assert found.largest == max(inside)
    assert found.root == found.parameters - sum(inside)


def test_the_value_head_stays_float32():
    plain, valued = footprint(RELEASED, replace(USE, held=2)), replace(USE, held=2, value_width=1)
    found = footprint(RELEASED, valued)
    assert found.parameters - plain.parameters == VALUE_HEAD
    assert found.weights - plain.weights == 4 * VALUE_HEAD
    assert found.trained == 2 * BUILT + 4 * VALUE_HEAD
    assert found.stored == plain.stored + 4


def test_adapters_alone_are_trained():
    use = replace(USE, held=2, lora_rank=32, targets=("q_proj", "down_proj"))
    found = footprint(RELEASED, use)
    each = 32 * (4096 + 4096) + 32 * (11008 + 4096)
    assert found.parameters == BUILT + 32 * each
    assert found.trained == 4 * 32 * each
    assert found.weights == 2 * BUILT + found.trained


def test_frozen_towers_are_not_trained():
    vision = 303_230_976 + 427_680_704 - DEAD
    found = footprint(RELEASED, replace(USE, freeze_vision=True))
    assert found.weights == 4 * BUILT
    assert found.trained == 4 * (BUILT - vision)


def test_a_state_token_brings_its_projector():
    found = footprint(RELEASED, replace(USE, state_dims=8))
    assert found.parameters - BUILT == 8 * 4096 + 4096 + 4096 * 4096 + 4096
    assert found.trained == found.weights == 4 * found.parameters


def kept_by_autograd(net: nn.Module, run) -> int:
    """Bytes of everything the graph holds on to, parameters and their views left out."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    held: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()  # alive, so that no address is used twice
    del output
    return sum(held.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_those_that_autograd_keeps(dtype):
    """Narrower than the 7B, so what is small there weighs more here."""
    torch.manual_seed(0)
    n, use = 4, replace(USE, compute=dtype.itemsize)
    net = OftNet(SMALL, num_slots=56, stop_id=2).to(dtype)
    pixels = torch.randn(n, 6, SMALL.image_size, SMALL.image_size)
    ids = torch.randint(0, 512, (n, PROMPT_TOKENS))

    def run():
        logits = net(pixels, ids, None, None).logits.view(n, 8, 7, 256) / 1.6
        logp = logits.log_softmax(-1)
        return logp.gather(-1, torch.zeros(n, 8, 7, 1).long()), (logp.exp() * logp).sum(-1)

    estimated = n * footprint(SMALL, use).everything
    assert estimated == pytest.approx(kept_by_autograd(net, run), rel=0.05)
