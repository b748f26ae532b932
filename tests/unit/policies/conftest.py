"""Checkpoints rebuilt from seeds (tests/golden/oft/README.md) and tiny ones of our own."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from vlarl.batch import Observation
from vlarl.models.openvla_oft.checkpoint import write_json, write_sharded
from vlarl.models.openvla_oft.tiny import TinySizes, init_tiny, train_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "oft"
PROMPTS = (
    "Push the button from above",
    "open the drawer",
    "reach the goal",
    "close the drawer by its handle",
)
SMALL = TinySizes(
    hidden=32,
    mlp=48,
    layers=2,
    heads=2,
    vision_dim=16,
    vision_depth=1,
    vision_heads=2,
    vision_mlp=24,
)


def golden_weight(shape: list[int], kind: str, seed: int) -> torch.Tensor:
    """The weight rule of tests/golden/oft/README.md."""
    z = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape, dtype=np.float32)
    f = np.float32
    if kind == "scale":
        w = f(0.75) + f(0.25) * np.clip(f(0.5) * z, f(-1), f(1))
    elif kind == "table":
        w = f(0.5) * z
    elif kind == "bias":
        w = f(0.1) * z
    elif kind == "norm":
        w = f(1) + f(0.1) * z
    elif kind == "head":
        w = f(1.2 / math.sqrt(64)) * z
        w[31744:32000] = f(2 / math.sqrt(64)) * z[31744:32000]
    else:
        assert kind == "matrix", kind
        w = f(1 / math.sqrt(math.prod(shape[1:]))) * z
    return torch.from_numpy(w)


@pytest.fixture(scope="session")
def golden_value_head():
    """golden_value_head(level): tensors of the "chunk" or "action" level head, by file name."""
    entries = json.loads((GOLDEN / "keys.json").read_text())["value_head"]

    def make(level: str) -> dict[str, torch.Tensor]:
        return {
            e["name"]: golden_weight(e[f"shape_{level}_level"], e["kind"], 30260 + e["index"])
            for e in entries
        }

    return make


@pytest.fixture(scope="session")
def golden():
    return dict(np.load(GOLDEN / "golden.npz"))


@pytest.fixture(scope="session")
def golden_names():
    return json.loads((GOLDEN / "keys.json").read_text())["tensors"]


@pytest.fixture(scope="session")
def golden_folder(tmp_path_factory, golden_names, golden_value_head):
    """The rebuilt checkpoint, in shards, with a tokenizer whose ids do not matter and an
    action-level value head."""
    folder = tmp_path_factory.mktemp("golden") / "oft"
    folder.mkdir()
    config = json.loads((GOLDEN / "config.json").read_text())
    towers = json.loads((GOLDEN / "keys.json").read_text())["towers"]
    sizes = {
        name: {
            "dim": t["dim"],
            "depth": t["depth"],
            "heads": t["heads"],
            "mlp": t["mlp_hidden"],
            "cls_token": t["cls_token"],
            "registers": t["register_tokens"],
            "layer_scale": t["layer_scale"],
            "attn_pool": t["attn_pool"],
        }
        for name, t in towers.items()
    }
    write_json(folder / "config.json", {**config, "vlarl": {"towers": sizes}})
    for name in ("dataset_statistics.json", "preprocessor_config.json"):
        shutil.copyfile(GOLDEN / name, folder / name)
    train_tokenizer(PROMPTS, 400).save(str(folder / "tokenizer.json"))
    tensors = {
        t["name"]: golden_weight(t["shape"], t["kind"], 20260 + t["index"]) for t in golden_names
    }
    write_sharded(tensors, folder, max_shard_bytes=5_000_000)
    save_file(golden_value_head("action"), folder / "value_head.safetensors")
    return folder


@pytest.fixture(scope="session")
def metaworld_statistics():
    return {
        "action": {
            "q01": [-0.9, -0.8, -0.7, -1.0],
            "q99": [0.9, 0.6, 1.0, 1.0],
            "min": [-1.0, -1.0, -1.0, -1.0],
            "max": [1.0, 1.0, 1.0, 1.0],
            "mask": [True, True, True, False],
        },
        "proprio": {"q01": [-0.5] * 4, "q99": [0.5] * 4, "min": [-1.0] * 4, "max": [1.0] * 4},
    }


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory, metaworld_statistics):
    """A fresh tiny checkpoint with 4 numbers per action."""
    folder = tmp_path_factory.mktemp("tiny") / "ckpt"
    init_tiny(
        folder,
        prompts=PROMPTS,
        statistics=metaworld_statistics,
        key="metaworld",
        action_dims=4,
        sizes=SMALL,
        max_shard_bytes=150_000,
    )
    return folder


@pytest.fixture(scope="session")
def make_obs():
    """make_obs(n, seed): n rows, two cameras of 64 x 48 noise, 4 state numbers, prompts of
    different lengths."""

    def make(n: int, seed: int = 0, prompts=PROMPTS) -> Observation:
        g = torch.Generator().manual_seed(seed)
        frames = [
            torch.randint(0, 256, (n, 64, 48, 3), generator=g).to(torch.uint8) for _ in range(2)
        ]
        return Observation(
            images={"front": frames[0], "wrist": frames[1]},
            state=torch.randn(n, 4, generator=g) * 0.3,
            instruction=tuple((list(prompts) * n)[:n]),
        )

    return make
