"""Documents that repeat facts of the code must repeat all of them, and rightly."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.cli import build_parser
from jaxpaged.config import CLIENT_KEYS, EngineConfig
from jaxpaged.sampling_params import SamplingParams
from server.routes import ROUTES
from server.settings import ServerConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
SERVER = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")


def rows(cls: type) -> dict[str, str]:
    """Field name -> default, as the table under the heading that names `cls` has them."""
    page = SERVER if cls is ServerConfig else CONFIGURATION
    section = page.split(f": `{cls.__name__}`\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", section, re.MULTILINE))


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams, BeamSearchParams, ServerConfig])
def test_every_field_is_listed_with_its_default(cls: type) -> None:
    assert rows(cls) == {
        field.name: "required" if field.default is dataclasses.MISSING else repr(field.default)
        for field in dataclasses.fields(cls)
    }


def test_every_environment_variable_is_listed() -> None:
    source = (ROOT / "jaxpaged" / "config.py").read_text(encoding="utf-8")
    read = set(re.findall(r'environ\.get\("(\w+)"', source))
    for path in (ROOT / "pallas_kernels" / "native").glob("*.h"):
        read |= set(re.findall(r'getenv\("(\w+)"', path.read_text(encoding="utf-8")))
    listed = set(re.findall(r"^\| `([A-Z]+|[A-Z]+_\w+)` \|", CONFIGURATION, re.MULTILINE))
    assert read
    assert read | set(CLIENT_KEYS) | {"JAXPAGED_CONFIG"} == listed


def test_every_endpoint_is_listed() -> None:
    section = SERVER.split("## Endpoints\n")[1].split("\n## ")[0]
    for route in ROUTES:
        shown = re.sub(r"\{(\w+):path\}", r"{\1}", route.path.rstrip("/") or "/")
        known = shown.replace("{response_id}", "{id}").replace("{name}", "...")
        parts = known.split("/{id}/")  # what is below a stored response is summed up
        assert f"`{parts[0]}`" in section, route.path


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_between_files_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """Names of all flags of a command and the commands below it."""
    found: set[str] = set()
    for action in parser._actions:
        found |= {name.lstrip("-").replace("-", "_") for name in action.option_strings}
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found |= options_of(below)
    return found


def test_flags_in_the_readme_exist() -> None:
    known = {field.name for field in dataclasses.fields(ServerConfig)}
    known |= {"config", "fix", "budget"} | options_of(build_parser())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    used = set(re.findall(r"(?<![\w=-])--([a-z][a-z-]+)", readme))  # XLA_FLAGS=--... is XLA's
    assert len(used) > 5
    assert {flag.replace("-", "_") for flag in used} <= known | {f"no_{name}" for name in known}
