"""The rules of the house that a reader cannot see at a glance: who imports whom, and what."""

from __future__ import annotations

import ast
import codecs
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("jaxpaged", "pallas_kernels", "server")

BASE = {"errors", "checks", "config", "sampling_params", "beam_params", "outputs", "progress"}
MODEL_SIDE = BASE | {"sharding", "weights", "models"}
ENGINE_SIDE = MODEL_SIDE | {"core", "text", "device", "metrics"}
COMMANDS = {"jobs", "batch", "convert", "bench", "run_batch", "replay"}
COMMANDS |= {"chat_client", "chat_connection", "compile_model"}
COMMAND_SIDE = ENGINE_SIDE | COMMANDS | {"engine", "async_engine", "llm", "flags", "cli"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "checks": set(),
    "progress": set(),
    "outputs": set(),
    "config": {"errors", "checks"},
    "sampling_params": {"errors", "checks"},
    "beam_params": {"errors", "checks", "sampling_params"},
    "sharding": BASE,
    "metrics": BASE,
    "weights": BASE | {"sharding"},
    "models": BASE | {"sharding", "weights"},
    "core": BASE,
    "text": BASE | {"weights"},
    "device": MODEL_SIDE | {"core"},
    "completion": ENGINE_SIDE,
    "beam_search": BASE,
    "beam_request": ENGINE_SIDE | {"beam_search"},
    "intake": ENGINE_SIDE | {"completion", "beam_search", "beam_request"},
    "observer": ENGINE_SIDE | {"completion", "beam_request"},
    "record": ENGINE_SIDE | {"completion", "beam_request", "engine", "observer"},
    "recording": ENGINE_SIDE | {"completion", "beam_request"},
    "engine_results": ENGINE_SIDE
    | {"completion", "beam_search", "beam_request", "observer", "recording"},
    "engine": ENGINE_SIDE
    | {"engine_results"}
    | {"completion", "beam_search", "beam_request", "intake", "observer", "recording"},
    "ahead_of_time": ENGINE_SIDE,
    "blueprint": ENGINE_SIDE | {"ahead_of_time"},
    "startup": ENGINE_SIDE | {"ahead_of_time", "blueprint", "engine", "intake", "record"},
    "compile_model": ENGINE_SIDE | {"flags", "blueprint", "startup"},
    "training": BASE | {"sharding", "weights", "models"},
    "llm": ENGINE_SIDE | {"engine", "intake", "startup", "training"},
    "request_stream": BASE | {"intake"},
    "engine_thread": ENGINE_SIDE | {"engine", "startup"},
    "async_engine": ENGINE_SIDE | {"engine", "intake", "engine_thread", "request_stream"},
    "flags": BASE,
    "convert": BASE | {"weights", "text", "models"},
    "jobs": BASE,
    "batch": BASE | {"llm", "jobs"},
    "bench": ENGINE_SIDE | {"flags", "jobs", "llm", "engine", "async_engine"},
    "run_batch": ENGINE_SIDE | {"flags", "async_engine", "engine_thread", "jobs", "batch"},
    "chat_client": BASE | {"chat_connection"},
    "chat_connection": BASE | {"bench"},
    "replay": ENGINE_SIDE | {"engine", "flags", "record", "startup"},
    "cli": COMMAND_SIDE,
    "__init__": COMMAND_SIDE,
    "__main__": COMMAND_SIDE,
}
"""Module or subpackage of jaxpaged -> those of jaxpaged that it may import (itself always)."""
MAY_IMPORT_SERVER = {"cli", "run_batch"}
"""They open the server's door, inside a function."""
HEAVY = {"jax", "jaxlib", "flax", "orbax", "torch"}
NO_JAX = {
    "core",
    "text",
    "__init__",
    "cli",
    "flags",
    "metrics",
    "async_engine",
    "engine_thread",
    "request_stream",
    *COMMANDS,
    *BASE,
}
"""Parts of jaxpaged that start fast and run without an accelerator's libraries."""


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(path: Path) -> str:
    """jaxpaged/core/pool.py -> core; jaxpaged/cli.py -> cli."""
    return path.relative_to(ROOT / "jaxpaged").parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything that is imported anywhere in `tree`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_when_loaded(tree: ast.Module) -> Iterator[str]:
    """Those that run when the module is imported: neither in functions nor for type checkers."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)
        waiting.extend(ast.iter_child_nodes(node))


def violations_of_direction(path: Path, tree: ast.Module) -> list[str]:
    part = part_of(path)
    assert part in ALLOWED, f"{name_of(path)}: give {part!r} its place in ALLOWED"
    found = []
    for name in imports(tree):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        wrong = (
            (top == "jaxpaged" and target in ALLOWED and target not in {part, *ALLOWED[part]})
            or (top == "server" and part not in MAY_IMPORT_SERVER)
            or (top in {"scripts", "tests"})
            or (top == "pallas_kernels" and part != "device")
        )
        if wrong:
            found.append(name)
    return found


@pytest.mark.parametrize("path", python_files("jaxpaged"), ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    assert violations_of_direction(path, parse(path)) == []


@pytest.mark.parametrize(
    ("part", "source", "wrong"),
    [
        ("core/pool.py", "from jaxpaged.device import runner", ["jaxpaged.device.runner"]),
        ("core/pool.py", "from jaxpaged import llm", ["jaxpaged.llm"]),
        ("models/llama.py", "def f():\n    import jaxpaged.device.step", ["jaxpaged.device.step"]),
        ("weights/a.py", "from jaxpaged.models import llama", ["jaxpaged.models.llama"]),
        ("engine.py", "import pallas_kernels.decode", ["pallas_kernels.decode"]),
        ("engine.py", "from server import app", ["server.app"]),
        ("cli.py", "def f():\n    from server import app", []),
        ("device/step.py", "import pallas_kernels.decode", []),
        ("device/step.py", "from jaxpaged.core.plan import Plan\nimport jax", []),
    ],
)
def test_the_direction_check_sees(part: str, source: str, wrong: list[str]) -> None:
    assert violations_of_direction(ROOT / "jaxpaged" / part, ast.parse(source)) == wrong


def test_pallas_kernels_import_nothing_of_ours() -> None:
    for path in python_files("pallas_kernels"):
        tops = {name.partition(".")[0] for name in imports(parse(path))}
        assert not tops & {"jaxpaged", "server", "scripts", "tests"}, name_of(path)


def test_host_side_modules_load_no_jax() -> None:
    paths = [p for p in python_files("jaxpaged") if part_of(p) in NO_JAX]
    for path in paths + python_files("server"):
        tops = {name.partition(".")[0] for name in imports_when_loaded(parse(path))}
        assert not tops & HEAVY, name_of(path)


def test_core_and_server_import_no_jax_even_later() -> None:
    for path in python_files("jaxpaged/core", "server"):
        tops = {name.partition(".")[0] for name in imports(parse(path))}
        assert not tops & HEAVY, name_of(path)


def test_no_private_jax_modules() -> None:
    for path in python_files(*PACKAGES, "scripts", "tests"):
        names = [n for n in imports(parse(path)) if n.startswith("jax._src")]
        assert names == [], name_of(path)


def test_no_torch_in_the_product() -> None:
    for path in python_files(*PACKAGES):
        tops = {name.partition(".")[0] for name in imports(parse(path))}
        assert "torch" not in tops, name_of(path)


def test_no_print_outside_scripts() -> None:
    for path in python_files(*PACKAGES):
        calls = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Call))
        lines = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]
        assert lines == [], name_of(path)


def test_environment_is_read_in_config_only() -> None:
    for path in python_files(*PACKAGES):
        if path == ROOT / "jaxpaged" / "config.py":
            continue
        lines = [
            node.lineno
            for node in ast.walk(parse(path))
            if (isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb"})
            or (isinstance(node, ast.alias) and node.name in {"environ", "getenv"})
        ]
        assert lines == [], name_of(path)


def test_every_folder_of_code_is_a_package() -> None:
    # Without __init__.py a folder is left out of the wheel, though it works from the checkout.
    for package in PACKAGES:
        for path in python_files(package):
            assert (path.parent / "__init__.py").is_file(), name_of(path.parent)


# Where and how this was made is no concern of its users, and package registries are reached as
# the user's pip is set up. The words are in rot13, so that this file passes its own check.
UNWANTED_WORDS = [
    codecs.decode(word, "rot13")
    for word in ("/jbex/", "funerq/", "fvggvat", "jbexcynpr", "clcv.bet", "clgubaubfgrq")
]
UNWANTED = re.compile("|".join(rf"(?<!\w){re.escape(w)}" for w in UNWANTED_WORDS), re.IGNORECASE)


def project_files() -> Iterator[Path]:
    made = {"build", "dist", "out"}
    for top in sorted(ROOT.iterdir()):
        if top.is_file():
            yield top
        elif top.name == ".ci" or (top.name[0] != "." and top.name not in made):
            for path in top.rglob("*"):
                if path.is_file() and not {"__pycache__", ".git"} & set(path.parts):
                    yield path


def test_no_file_mentions_where_it_was_made() -> None:
    files = list(project_files())
    assert ROOT / "README.md" in files
    assert ROOT / ".ci" / "run" in files
    found = []
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        found += [f"{name_of(path)}: {match.group()}" for match in UNWANTED.finditer(text)]
    assert found == []


@pytest.mark.parametrize("word", UNWANTED_WORDS)
def test_the_mention_check_sees(word: str) -> None:
    assert UNWANTED.search(f"look ({word}a.md)")
    assert not UNWANTED.search(f"un{word}")


def modules(folder: str) -> list[str]:
    names = []
    for path in python_files(folder):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts).removesuffix(".__init__"))
    return names


def heavy_modules_after(code: str) -> str:
    script = f"import sys\n{code}\nsys.stderr.write(repr(sorted({HEAVY!r} & set(sys.modules))))"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stderr.splitlines()[-1]


@pytest.mark.parametrize("folder", ["jaxpaged/core", "jaxpaged/text"])
def test_importing_the_host_side_brings_no_jax(folder: str) -> None:
    names = ["jaxpaged", "jaxpaged.cli", "jaxpaged.batch", *modules(folder)]
    assert len(names) > 3, "nothing was found to import"
    assert heavy_modules_after("import " + ", ".join(names)) == "[]"


@pytest.mark.parametrize("part", sorted(MAY_IMPORT_SERVER))
def test_the_server_is_imported_where_it_is_needed_only(part: str) -> None:
    path = ROOT / "jaxpaged" / f"{part}.py"
    assert "server" not in {n.partition(".")[0] for n in imports_when_loaded(parse(path))}


def test_importing_the_server_brings_no_jax() -> None:
    names = modules("server")
    assert "server.app" in names
    assert heavy_modules_after("import " + ", ".join(names)) == "[]"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["generate", "--n=x"],
        ["convert", "--help"],
        ["serve", "--help"],
        ["serve", "--help=all"],
        ["serve", "--port=x"],
        ["serve", "--port=-1"],
        ["bench", "serve", "--help"],
        ["bench", "throughput", "--help"],
        ["bench", "latency", "--block-size=0"],
        ["run-batch", "--help"],
        ["chat", "--help"],
        ["replay", "--help"],
        ["replay", "no-such-file"],
    ],
)
def test_help_and_usage_errors_bring_no_jax(arguments: list[str]) -> None:
    code = f"""
from jaxpaged.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
sys.stderr.write("\\n")"""
    assert heavy_modules_after(code) == "[]"


def test_the_heavy_modules_are_seen_when_they_are_there() -> None:
    assert heavy_modules_after("import jax.numpy") == "['jax', 'jaxlib']"
