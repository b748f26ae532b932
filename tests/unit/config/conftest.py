"""Three small plug-ins, so that composition is tested without a simulator or a network."""

import sys
from types import ModuleType
from typing import Annotated, Literal

import pytest
from pydantic import Field, field_validator, model_validator

from vlarl import registry
from vlarl.config.schema import AlgoSection, EnvSection, Int, PolicySection, Section


class Pond(EnvSection):
    name: Literal["pond"] = "pond"
    tasks: str | list[str] = "all"
    depth: Annotated[float, Field(gt=0)] = 1.0

    @field_validator("tasks")
    @classmethod
    def _known(cls, tasks):
        if tasks == "fly":
            raise ValueError("no task 'fly'; there are: swim, dive")
        return tasks

    @model_validator(mode="after")
    def _is_a_pond(self):
        if self.depth > 50:
            raise ValueError(f"depth: {self.depth:g} m is an ocean")
        return self


class Sea(EnvSection):
    name: Literal["sea"] = "sea"
    salt: float = 3.5


class Adapter(Section):
    rank: Annotated[Int, Field(ge=1)] = 4


class Duck(PolicySection):
    name: Literal["duck"] = "duck"
    adapter: Adapter | None = None


class Herd(AlgoSection):
    name: Literal["herd"] = "herd"
    group_size: Annotated[Int, Field(ge=2)] = 8

    @property
    def episodes_multiple(self):
        return self.group_size


class Alone(AlgoSection):
    name: Literal["alone"] = "alone"
    gamma: float = 0.99


_PLUG_INS = {"env": (Pond, Sea), "policy": (Duck,), "algo": (Herd, Alone)}


@pytest.fixture(autouse=True)
def fake_plug_ins(monkeypatch):
    for kind, classes in _PLUG_INS.items():
        for config in classes:
            name = config.model_fields["name"].default
            module = ModuleType(f"fake_{name}")
            module.Config = config
            monkeypatch.setitem(sys.modules, module.__name__, module)
            monkeypatch.setitem(registry._BUILT_IN[kind], name, module.__name__)


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write("a.yaml", text) -> "a.yaml", relative to the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write
