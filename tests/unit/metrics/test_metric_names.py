"""docs/metrics.md names every metric that the code writes."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENTED = set(
    re.findall(
        r"`((?:train|rollout|env|eval|time|sft)/[^`*]+)`", (ROOT / "docs/metrics.md").read_text()
    )
)


def written():
    """Names in the sources, with what is filled in at run time spelled out."""
    names = set()
    for file in (ROOT / "vlarl").rglob("*.py"):
        text = file.read_text()
        text = re.sub(r'"""[\s\S]*?"""', "", text)
        names |= set(re.findall(r'f?"((?:train|rollout|env|eval|time|sft)/[^"\s]+)"', text))
        names |= {f"time/{phase}" for phase in re.findall(r'clock\("(\w+)"\)', text)}
        names |= {
            f"{p}/{m}" for m in re.findall(r'f"\{prefix\}/(\w+)"', text) for p in ("sft", "sft/val")
        }
    filled = {
        "env/success_once/{task}": ["env/success_once/<task>"],
        "eval/success_once/{t}": ["eval/success_once/<task>"],
        "train/{g['name']}/lr": ["train/actor/lr", "train/critic/lr"],
        "time/{phase}": [],
    }
    return {full for name in names for full in filled.get(name, [name])} - {"sft/val"}  # a prefix


def test_every_metric_is_documented():
    assert written() - DOCUMENTED == set()


def test_every_documented_metric_is_written():
    assert DOCUMENTED - written() == set()
