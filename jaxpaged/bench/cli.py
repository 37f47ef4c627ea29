"""The flags of `jaxpaged bench serve | throughput | latency`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from jaxpaged import flags
from jaxpaged.bench import argument_types
from jaxpaged.bench.metric_names import GOALS, METRICS
from jaxpaged.config import EngineConfig
from jaxpaged.errors import ConfigError

DATASETS = ("random", "sharegpt-like", "prefix_repetition", "custom")
BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
"""Backend -> the endpoint it stands for."""

SERVE_EPILOG = """\
Works against any server with OpenAI's API. TTFT is the time from sending to the first chunk with
choices, E2EL that to the last one, TPOT (E2EL - TTFT) / (output tokens - 1), ITL the gaps between
chunks. Token counts are the server's own (usage). Requests that fail are counted and their errors
shown. Ctrl-C ends the run and prints what there is.
Exit status: 0, 1 when a request failed or the server is not there, 2 for wrong arguments, 130 after
Ctrl-C.
"""

Commands = Any  # argparse has no public name for what add_subparsers returns


def add_parser(commands: Commands) -> None:
    """Add `bench` to the commands of `jaxpaged`."""
    bench = commands.add_parser(
        "bench",
        help="measure a server, or the engine alone",
        description="Measure a server, or the engine alone.",
        allow_abbrev=False,
    )
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    _add_serve(kinds)
    _add_throughput(kinds)
    _add_latency(kinds)


def _add(commands: Commands, name: str, text: str, **options: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **options,
    )
    return parser


def _add_serve(commands: Commands) -> None:
    parser = _add(commands, "serve", "measure a running server", epilog=SERVE_EPILOG)
    parser.set_defaults(command=run_serve)
    _add_server_flags(parser.add_argument_group("server"))
    _add_load_flags(parser.add_argument_group("load"))
    _add_dataset_flags(parser.add_argument_group("prompts"))
    _add_sampling_flags(parser.add_argument_group("requests"))
    _add_result_flags(parser.add_argument_group("results"))


def _add_server_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", help="the server, such as http://host:8000")
    group.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1)")
    group.add_argument(
        "--port", type=argument_types.at_least(1), default=8000, help="(default: 8000)"
    )
    group.add_argument(
        "--backend",
        choices=(*BACKENDS, "vllm"),
        help="openai (text completions) or openai-chat; vllm is openai (default: by --endpoint)",
    )
    group.add_argument(
        "--endpoint", metavar="PATH", help="(default: /v1/completions, or by --backend)"
    )
    group.add_argument(
        "--model", metavar="NAME", help="(default: the first one in the server's /v1/models)"
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="sent as the model, in place of --model"
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="folder, .gguf file, hub id or alias; makes prompts of exact lengths where the "
        "server cannot count tokens (/tokenize)",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="(default: $JAXPAGED_API_KEY or $OPENAI_API_KEY)"
    )
    group.add_argument(
        "--header",
        action=argument_types.Pairs,
        nargs="+",
        default={},
        metavar="NAME=VALUE",
        help="sent along",
    )
    group.add_argument(
        "--ready-check-timeout-sec",
        type=argument_types.not_negative,
        default=0.0,
        metavar="S",
        help="wait so long for a first answer before the run; 0 does not wait (default: 0)",
    )
    group.add_argument(
        "--request-timeout-sec",
        type=argument_types.positive,
        default=600.0,
        metavar="S",
        help="a request fails when the server sends nothing for so long (default: 600)",
    )


def _add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--num-prompts", type=argument_types.at_least(1), default=1000, help="(default: 1000)"
    )
    group.add_argument(
        "--request-rate",
        type=argument_types.positive_or_inf,
        default=math.inf,
        metavar="RPS",
        help="requests per second; inf sends all at once (default: inf)",
    )
    group.add_argument(
        "--burstiness",
        type=argument_types.positive,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of the gaps: 1 is a Poisson process, less is "
        "burstier, more is steadier (default: 1)",
    )
    group.add_argument(
        "--max-concurrency",
        type=argument_types.at_least(1),
        metavar="N",
        help="most requests under way at once",
    )
    group.add_argument(
        "--num-warmups",
        type=argument_types.at_least(0),
        default=0,
        metavar="N",
        help="requests, with prompts of their own, before the run (default: 0)",
    )
    group.add_argument(
        "--ramp-up-strategy",
        choices=("linear", "exponential"),
        help="change the rate from --ramp-up-start-rps to --ramp-up-end-rps during the run",
    )
    group.add_argument(
        "--ramp-up-start-rps", type=argument_types.positive, metavar="RPS", help="its first rate"
    )
    group.add_argument(
        "--ramp-up-end-rps", type=argument_types.positive, metavar="RPS", help="its last rate"
    )
    group.add_argument(
        "--seed", type=argument_types.at_least(0), default=0, help="of all draws (default: 0)"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _add_dataset_flags(group: argparse._ArgumentGroup) -> None:
    def number(name: str, default: int, text: str, *aliases: str, low: int = 1) -> None:
        group.add_argument(
            name,
            *aliases,
            type=argument_types.at_least(low),
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )

    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default="random",
        help="random: equal or uniform lengths; sharegpt-like: lengths of conversations, means 161 "
        "and 338; prefix_repetition: a few shared prefixes; custom: a file (default: random)",
    )
    group.add_argument(
        "--dataset-path",
        metavar="FILE.jsonl",
        help="custom: lines with prompt (text, token ids) or messages, and perhaps output_tokens",
    )
    number("--random-input-len", 1024, "random: prompt tokens", "--input-len")
    number("--random-output-len", 128, "random: output tokens", "--output-len")
    group.add_argument(
        "--random-range-ratio",
        type=argument_types.ratio,
        default=0.0,
        metavar="R",
        help="random: lengths are uniform in [length (1 - R), length (1 + R)] (default: 0)",
    )
    number("--random-prefix-len", 0, "random: further prompt tokens, shared by all", low=0)
    number("--prefix-repetition-prefix-len", 256, "prefix_repetition: tokens of a prefix")
    number("--prefix-repetition-suffix-len", 256, "prefix_repetition: prompt tokens after it")
    number("--prefix-repetition-num-prefixes", 10, "prefix_repetition: different prefixes")
    number("--prefix-repetition-output-len", 128, "prefix_repetition: output tokens")
    number("--custom-output-len", 256, "custom: output tokens of lines that do not say")


def _add_sampling_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--ignore-eos", action="store_true", help="make every output as long as was asked for"
    )
    for name in (
        "temperature",
        "top-p",
        "min-p",
        "frequency-penalty",
        "presence-penalty",
        "repetition-penalty",
    ):
        group.add_argument(
            f"--{name}", type=float, metavar="X", help="(default: not sent; the server decides)"
        )
    group.add_argument("--top-k", type=int, metavar="N", help="(default: not sent)")
    group.add_argument(
        "--extra-body",
        type=flags.json_object,
        default={},
        metavar="JSON",
        help="fields for every request; null leaves one out",
    )


def _add_result_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--goodput",
        action=argument_types.Pairs,
        nargs="+",
        metavar="METRIC:MS",
        help="count requests that meet all of these, such as ttft:200 tpot:50 e2el:5000",
    )
    group.add_argument(
        "--percentile-metrics",
        type=argument_types.some_of(tuple(METRICS)),
        default=tuple(METRICS),
        metavar="NAME,...",
        help="what to print of ttft, tpot, itl and e2el (default: all)",
    )
    group.add_argument(
        "--metric-percentiles",
        type=argument_types.percentiles,
        default=(99.0,),
        metavar="N,...",
        help="(default: 99)",
    )
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--result-dir", metavar="FOLDER", help="(default: the working directory)")
    group.add_argument(
        "--result-filename", metavar="FILE", help="(default: from settings and time)"
    )
    group.add_argument(
        "--save-detailed", action="store_true", help="with every request's own figures and texts"
    )
    group.add_argument(
        "--append-result", action="store_true", help="add a line to the file, do not replace it"
    )
    group.add_argument(
        "--metadata",
        action=argument_types.Pairs,
        nargs="+",
        default={},
        metavar="NAME=VALUE",
        help="saved along",
    )


def _add_throughput(commands: Commands) -> None:
    parser = _add(commands, "throughput", "measure the engine offline, all prompts at once")
    parser.set_defaults(command=run_throughput)
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--num-prompts", type=argument_types.at_least(1), default=1000, help="(default: 1000)"
    )
    group.add_argument(
        "--n", type=argument_types.at_least(1), default=1, help="outputs a prompt (default: 1)"
    )
    _add_dataset_flags(group)
    group.add_argument(
        "--disable-detokenize", action="store_true", help="leave out making text of tokens"
    )
    group.add_argument("--output-json", metavar="FILE", help="where to write the figures")
    flags.add_flags(parser, EngineConfig, "engine")


def _add_latency(commands: Commands) -> None:
    parser = _add(commands, "latency", "measure the engine offline, one batch at a time")
    parser.set_defaults(command=run_latency)
    group = parser.add_argument_group("batch")
    for name, default, text in (
        ("input-len", 32, "prompt tokens"),
        ("output-len", 128, "output tokens"),
        ("batch-size", 8, "prompts"),
        ("n", 1, "outputs a prompt"),
        ("num-iters", 30, "batches that are measured"),
    ):
        group.add_argument(
            f"--{name}",
            type=argument_types.at_least(1),
            default=default,
            metavar="N",
            help=f"{text} (default: {default})",
        )
    group.add_argument(
        "--num-iters-warmup",
        type=argument_types.at_least(0),
        default=10,
        metavar="N",
        help="batches before them (default: 10)",
    )
    group.add_argument(
        "--disable-detokenize", action="store_true", help="leave out making text of tokens"
    )
    group.add_argument("--output-json", metavar="FILE", help="where to write the figures")
    flags.add_flags(parser, EngineConfig, "engine")


# ---------------------------------------------------------------------- commands


def run_serve(args: argparse.Namespace) -> int:
    _choose_endpoint(args)
    if args.base_url is None:
        host = f"[{args.host}]" if ":" in args.host else args.host
        args.base_url = f"http://{host}:{args.port}"
    if args.endpoint.startswith("/v1/"):
        args.base_url = args.base_url.rstrip("/").removesuffix("/v1")
    _check_dataset(args)
    ramp = (args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    if any(ramp) and not all(ramp):
        raise ConfigError(
            "--ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps need each other."
        )
    if args.ramp_up_strategy is not None and math.isfinite(args.request_rate):
        raise ConfigError("--ramp-up-strategy sets the rate; leave out --request-rate.")
    args.goodput = _goals(args.goodput)

    from jaxpaged.bench import serve

    return serve.run(args)


def run_throughput(args: argparse.Namespace) -> int:
    config = EngineConfig.from_dict(flags.given(args, EngineConfig))
    _check_dataset(args)

    from jaxpaged.bench import offline

    return offline.run_throughput(args, config)


def run_latency(args: argparse.Namespace) -> int:
    config = EngineConfig.from_dict(flags.given(args, EngineConfig))

    from jaxpaged.bench import offline

    return offline.run_latency(args, config)


def _choose_endpoint(args: argparse.Namespace) -> None:
    """Backend and endpoint from each other; raises `ConfigError` where they do not fit."""
    if args.backend == "vllm":
        args.backend = "openai"
    if args.endpoint is None:
        args.endpoint = BACKENDS[args.backend or "openai"]
    if not args.endpoint.startswith("/"):
        raise ConfigError(f"--endpoint {args.endpoint}: must begin with /.")
    fits = "openai-chat" if args.endpoint.endswith("/chat/completions") else "openai"
    if args.backend not in (None, fits):
        raise ConfigError(f"--backend {args.backend} does not fit --endpoint {args.endpoint}.")
    args.backend = fits


def _check_dataset(args: argparse.Namespace) -> None:
    if args.dataset_name == "custom" and args.dataset_path is None:
        raise ConfigError("--dataset-name custom needs --dataset-path FILE.jsonl.")
    if args.dataset_name != "custom" and args.dataset_path is not None:
        raise ConfigError("--dataset-path is read with --dataset-name custom only.")


def _goals(pairs: dict[str, str] | None) -> dict[str, float] | None:
    if pairs is None:
        return None
    goals = {}
    for name, text in pairs.items():
        try:
            goals[name] = argument_types.positive(text)
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"--goodput {name}: {error}.") from None
        if name not in GOALS:
            raise ConfigError(f"--goodput {name}: must be one of {', '.join(GOALS)}.")
    return goals
