"""`jaxpaged serve`: flags, environment, file, and who wins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxpaged.cli import main
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError
from jaxpaged.flags import flag_name
from server import foreign_flags, option_help
from server.options import HIDDEN, Options, field_homes, read
from server.settings import ServerConfig

FOREIGN = sorted(foreign_flags.FLAGS)


def options(*words: str, **environment: str) -> Options:
    return read(words, environment)


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_nothing_given_is_all_defaults() -> None:
    assert options() == Options(EngineConfig(), ServerConfig(), ())


def test_the_flags_of_both_classes() -> None:
    words = "models/m --max-model-len 8k -tp 2 --dtype half --port 9 --no-enable-prefix-caching"
    found = options(*words.split(), "--allowed-origins", '["https://a", "https://b"]')
    assert found.engine.model == "models/m"
    assert found.engine.max_model_len == 8000
    assert found.engine.tensor_parallel_size == 2
    assert found.engine.dtype == "float16"
    assert not found.engine.enable_prefix_caching
    assert found.server.port == 9
    assert found.server.allowed_origins == ("https://a", "https://b")
    assert found.notes == ()


@pytest.mark.parametrize(
    "words",
    [
        "--served-model-name a b",
        "--served-model-name a,b",
        '--served-model-name ["a","b"]',
        "--served-model-name a --served-model-name b",
        "--served_model_name=a,b",
    ],
)
def test_lists_are_written_in_every_usual_way(words: str) -> None:
    assert options("m", *words.split()).server.served_model_name == ("a", "b")


def test_a_list_does_not_swallow_the_model() -> None:
    with pytest.raises(ConfigError, match="--served-model-name takes all the words .* MODEL first"):
        options("--served-model-name", "a", "models/m")
    assert options("--served-model-name", "a,b").server.served_model_name == ("a", "b")
    assert options("--served-model-name", "a", "b", MODEL="m").engine.model == "m"


def test_the_model_is_given_once() -> None:
    assert options("--model", "m").engine.model == "m"
    assert options("m", "--model", "m").engine.model == "m"
    with pytest.raises(ConfigError, match="two models are given: 'm' and --model 'n'"):
        options("m", "--model", "n")


def test_precedence(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        "model: from-file\nmax-num-seqs: 1\nmax_model_len: 8k\nport: 1\nmax-n: 1\nmax-tools: 1\n",
    )
    found = options("--config", name, "--port", "3", PORT="2", MAX_N="2", MAX_NUM_SEQS="2")
    assert (found.server.port, found.server.max_n, found.server.max_tools) == (3, 2, 1)
    assert (found.engine.max_num_seqs, found.engine.max_model_len) == (2, 8000)
    assert found.engine.model == "from-file"
    assert options(CONFIG=name).server.port == 1
    assert options("other", CONFIG=name).engine.model == "other"


def test_values_of_the_environment() -> None:
    found = options(
        ENABLE_PREFIX_CACHING="False",
        ENFORCE_EAGER="1",
        API_KEY="alice:a,b",
        DEFAULT_CHAT_TEMPLATE_KWARGS='{"enable_thinking": false}',
        DECODE_BUCKETS="8,16",
        MAX_NUM_SEQS="none",
        SHUTDOWN_TIMEOUT="2.5",
    )
    assert not found.engine.enable_prefix_caching
    assert found.engine.enforce_eager
    assert found.server.api_key == ("alice:a", "b")
    assert found.server.default_chat_template_kwargs == {"enable_thinking": False}
    assert found.engine.decode_buckets == (8, 16)
    assert found.engine.max_num_seqs is None
    assert found.server.shutdown_timeout == 2.5


def test_values_of_the_file(tmp_path: Path) -> None:
    name = write(
        tmp_path,
        "served-model-name: [a, b]\napi-key: alice:k\nenforce-eager: true\n"
        "default_chat_template_kwargs: {enable_thinking: false}\nmax-num-seqs: null\n"
        "max-request-bytes: 1MiB\nport: '7'\n",
    )
    found = options("--config", name)
    assert found.server.served_model_name == ("a", "b")
    assert found.server.api_key == ("alice:k",)
    assert found.engine.enforce_eager
    assert found.server.default_chat_template_kwargs == {"enable_thinking": False}
    assert found.server.max_request_bytes == 2**20
    assert found.server.port == 7


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert options("--config", write(tmp_path, "# nothing\n")) == options()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max-nun-seqs: 1\n", "unknown key 'max-nun-seqs'. Did you mean max-num-seqs?"),
        ("port: 1\nport_: [\n", "not YAML in line"),
        ("- port\n", "expected lines of the form `flag: value`"),
        ("max-n: 1\nmax_n: 2\n", "the key 'max_n' is there twice"),
        ("port: x\n", "port: expected an integer, got 'x'"),
        ("enable-prefix-caching: 'maybe'\n", "expected true or false, got 'maybe'"),
        ("config: other.yaml\n", "unknown key 'config'"),
        ("quantization: awq\n", "quantization in .* is not supported yet"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        options("--config", write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config .*: No such file"):
        options("--config", str(tmp_path / "missing.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"host: \xe9\n")
    with pytest.raises(ConfigError, match="not a text in UTF-8"):
        options("--config", str(tmp_path / "latin.yaml"))


def test_a_file_that_is_no_yaml_does_not_show_its_keys(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        options("--config", write(tmp_path, 'api-key: "s3cret\nport: 1\n'))
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--prot 1", "unknown flag --prot. Did you mean --port?"),
        ("--confg f", "Did you mean --config?"),
        ("--swap-spaec 4", "Did you mean --swap-space?"),
        ("a b", "unexpected argument 'b': there is one MODEL"),
        ("--port x", "argument --port: expected an integer, got 'x'"),
        ("--port", "argument --port: expected one argument"),
        ("--port 70000", "port must be an integer in"),
        ("--max-model-len 1", "max_model_len must be"),
        ("--max-mod 8", "unknown flag --max-mod"),
        ("--allowed-origins [1]", "expected a JSON list of texts"),
        ("--api-key [s3cret", "not a JSON list"),
    ],
)
def test_mistakes_on_the_command_line(words: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        options(*words.split())
    assert "s3cret" not in str(error.value)


def test_mistakes_in_the_environment() -> None:
    with pytest.raises(ConfigError, match="JAXPAGED_PORT: expected an integer, got 'x'"):
        options(PORT="x")
    with pytest.raises(ConfigError, match="JAXPAGED_ENFORCE_EAGER: expected true or false"):
        options(ENFORCE_EAGER="maybe")


def test_unknown_variables_are_told_once_with_the_nearest() -> None:
    (note,) = options(MAX_NUM_SEQ="4", SOMETHING_ELSE="5").notes
    assert "JAXPAGED_MAX_NUM_SEQ (did you mean JAXPAGED_MAX_NUM_SEQS?)" in note
    assert "JAXPAGED_SOMETHING_ELSE" in note


def test_what_kubernetes_sets_is_no_setting() -> None:
    found = options(
        SERVICE_HOST="10.0.0.1",
        SERVICE_PORT="8000",
        SERVICE_PORT_HTTP="8000",
        PORT="tcp://10.0.0.1:8000",
        PORT_8000_TCP="tcp://10.0.0.1:8000",
        PORT_8000_TCP_ADDR="10.0.0.1",
    )
    assert found.server.port == 8000
    (note,) = found.notes
    assert "JAXPAGED_PORT=tcp://10.0.0.1:8000 is ignored: Kubernetes" in note


# ---------------------------------------------------------------------- flags of vLLM


def test_old_flags_are_accepted_with_one_warning_each() -> None:
    words = "m --swap-space 4 --disable-log-requests --guided-decoding-backend=auto"
    words += " --api-server-count 2 --use-v2-block-manager --port 1"
    notes = options(*words.split()).notes
    assert len(notes) == 5
    for name in ("swap-space", "disable-log-requests", "guided-decoding-backend"):
        assert any(note.startswith(f"--{name} has no effect: ") for note in notes), name


@pytest.mark.parametrize("name", FOREIGN)
def test_every_foreign_flag_answers(name: str) -> None:
    flag = foreign_flags.FLAGS[name]
    assert name.replace("-", "_") not in field_homes(), "it is a setting of ours"
    assert not flag.why.endswith(".")
    words = [f"--{name}", "something"] if flag.takes_value else [f"--{name}"]
    if flag.same is None:
        (note,) = options("m", *words).notes
        assert note == f"--{name} has no effect: {flag.why}."
        return
    with pytest.raises(ConfigError, match="not supported yet") as error:
        options("m", *words)
    assert flag.why in str(error.value)
    for value in flag.same:
        (note,) = options("m", f"--{name}={value}").notes
        assert "that is what happens anyway" in note
    if not flag.takes_value:
        assert "anyway" in options("m", f"--no-{name}").notes[0]


def test_short_names_of_foreign_flags() -> None:
    assert len(options("m", "-pp", "1", "-q", "none", "-dp=1", "-O3").notes) == 4
    with pytest.raises(ConfigError, match="--quantization is not supported yet"):
        options("m", "-q", "awq")


def test_foreign_keys_of_a_file(tmp_path: Path) -> None:
    name = write(tmp_path, "swap-space: 4\nenable-lora: false\npipeline_parallel_size: 1\n")
    notes = options("--config", name).notes
    assert [note.partition(" in ")[0] for note in notes] == [
        "swap-space",
        "enable-lora",
        "pipeline-parallel-size",
    ]


# ---------------------------------------------------------------------- help


def test_help_is_short_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 100
    for name in field_homes():
        assert flag_name(name) in text


def test_every_setting_is_in_one_group() -> None:
    listed = [name for _, names in option_help.GROUPS.values() for name in names]
    assert sorted(listed) == sorted(field_homes())
    for cls, names in option_help.GROUPS.values():
        assert {field_homes()[name] for name in names} == {cls}
    assert {f.name for f in dataclasses.fields(EngineConfig)} & HIDDEN == HIDDEN


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("memory", ["--max-model-len", "--block-size", "Tokens in one KV block"]),
        ("max-num-seqs", ["--max-num-seqs N", "Sequences running at once"]),
        ("--max_num_seqs", ["--max-num-seqs N"]),
        ("no-enable-prefix-caching", ["--no-enable-prefix-caching"]),
        ("ServerConfig", ["--port", "--api-key"]),
        ("swap-space", ["is vLLM's: a preempted request is computed again"]),
        ("all", ["--log-level", "--block-size"]),
    ],
)
def test_help_about_a_part(name: str, words: list[str]) -> None:
    text = option_help.asked([f"--help={name}"])
    assert text is not None
    assert all(word in text for word in words)
    assert ("--port" in text) == (name in ("all", "ServerConfig"))


def test_help_about_nothing_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=memry"]) == 2
    assert "Did you mean --help=memory?" in capsys.readouterr().err


def test_help_comes_before_mistakes() -> None:
    assert option_help.asked(["--port", "x", "-h"]) == option_help.overview()
    assert option_help.asked(["--port", "x"]) is None


def test_the_environment_reaches_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAXPAGED_PORT", "-5")
    monkeypatch.setenv("JAXPAGED_HOST", "")  # empty is unset
    assert main(["serve"]) == 2
    assert "port must be an integer in [0, 65535], got -5" in capsys.readouterr().err


def test_the_key_of_another_server_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxpaged.config import server_environment

    monkeypatch.setenv("VLLM_API_KEY", "a:b,c")
    assert server_environment()["API_KEY"] == json.dumps(["vllm:a:b,c"])
    assert read([], server_environment()).server.api_key == ("vllm:a:b,c",)
    monkeypatch.setenv("JAXPAGED_API_KEY", "mine")
    assert read([], server_environment()).server.api_key == ("mine",)
