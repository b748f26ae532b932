"""The token policy of vlarl.testing, with a config.json that says so."""

import json
from typing import Literal

from vlarl.testing import token_policy


class Config(token_policy.TokenConfig):
    name: Literal["toy_policy"] = "toy_policy"


def recognises(folder):
    path = folder / "config.json"
    return path.is_file() and json.loads(path.read_text()).get("model_type") == "toy"


def spec(cfg, *, needs_value=False):
    return token_policy.spec(cfg, needs_value=needs_value)


def check(cfg, *, needs_value, train):
    token_policy.check(cfg, needs_value=needs_value, train=train)


def load(cfg, *, device, needs_value, train):
    assert not train
    assert not needs_value
    return token_policy.load(cfg, device=device, needs_value=False, train=False)
