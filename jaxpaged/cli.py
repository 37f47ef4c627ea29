"""The command line: `jaxpaged serve`, `generate`, `bench` and the others. Help and checks of
arguments never import jax.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxpaged import __version__, batch, chat_client, compile_model, flags, jobs, run_batch
from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.bench import cli as bench_cli
from jaxpaged.config import DTYPES, EngineConfig, server_environment
from jaxpaged.errors import EngineDeadError, JaxpagedError
from jaxpaged.replay import cli as replay_cli
from jaxpaged.sampling_params import SamplingParams

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

# --seed is the engine's, as everywhere else.
SAMPLING_CLASHES = {"seed": "sampling"}

GENERATE_EPILOG = """\
Results are JSON lines in the order of the prompts: index, prompt (as the model saw it), text,
token_ids, finish_reason, stop_reason, num_prompt_tokens, num_cached_tokens, and logprobs and
prompt_logprobs where asked. With --n above 1, "outputs" holds every completion. A result is
written as soon as it and all before it are there; a run that ends early keeps them.
With --beam-width every prompt is a beam search, and "outputs" holds its hypotheses, best first,
each with its score. Of the sampling flags --max-tokens, --temperature, --stop-token-ids,
--ignore-eos and those about the text go with it; the model's sampling defaults do not count.
A line of --prompt-file is one of
  {"prompt": "text"}   {"messages": [{"role": "user", "content": "text"}]}
  {"prompt_token_ids": [1, 2, 3]}
and may add "params": {"max_tokens": 5} (sampling fields of that line), "cache_salt": "text" and
"priority": 1 (smaller is sooner, with --scheduling-policy priority).
Sampling defaults come from the model's generation_config where it has one. The word none stands
for None in every field that may be None, as in --max-tokens none.
Exit status: 0, 1 when a request failed or results could not be written, 2 for wrong arguments or
input, 130 after Ctrl-C.
"""

CONVERT_EPILOG = """\
SRC is a folder, a .gguf file, a hub id (or owner/name/FILE.gguf), the alias of the embedded model,
or a folder with an Orbax checkpoint. DST appears whole or not at all: it holds config.json, the
tokenizer, and the weights under their Hugging Face names, on which any mesh can load them.
Exit status: 0, 1 when writing failed, 2 for wrong arguments or a broken SRC, 130 after Ctrl-C,
143 after SIGTERM.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. `argv` is without the program's name. Returns the exit status."""
    if sys.stderr is None:  # closed by 2>&-; messages and progress then go nowhere
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["serve"]:  # has its own way of reading them
        return _guarded(lambda: run_serve(words[1:]))
    args = build_parser().parse_args(words)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("jaxpaged").setLevel(logging.INFO)
    status = _guarded(lambda: args.command(args))
    if status != 0 and getattr(args, "EngineConfig.num_processes", 1) != 1:
        # The others may wait for this process in the middle of a step, and at its usual exit JAX
        # would wait for them. They see its connections close.
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError):
                stream.flush()
        os._exit(status)
    return status


def _guarded(command: Callable[[], int]) -> int:
    """The command's status, or that of the error it ends with, which is told."""
    try:
        return command()
    except EngineDeadError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except batch.OutputError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    except JaxpagedError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader left (| head)
        return EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxpaged", description="Paged LLM inference for JAX.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"jaxpaged {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="serve a model over HTTP, with OpenAI's API")
    generate = commands.add_parser(
        "generate",
        help="run prompts offline, all at once, and write JSON lines",
        usage="jaxpaged generate [--prompt TEXT ... | --prompt-file FILE.jsonl] [--chat] [flags]",
        description="Run prompts offline with continuous batching and write JSON lines.",
        epilog=GENERATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_input_flags(generate)
    flags.add_flags(generate, SamplingParams, "sampling", clashes=SAMPLING_CLASHES)
    flags.add_flags(generate, BeamSearchParams, "beam search", only=jobs.BEAM_FIELDS)
    flags.add_flags(generate, EngineConfig, "engine")
    generate.set_defaults(command=run_generate)
    convert = commands.add_parser(
        "convert",
        help="write a model's weights as Orbax or safetensors",
        description="Write a model's weights as an Orbax checkpoint or as safetensors.",
        epilog=CONVERT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_convert_flags(convert)
    convert.set_defaults(command=run_convert)
    compile_model.add_parser(commands)
    bench_cli.add_parser(commands)
    run_batch.add_parser(commands)
    chat_client.add_parser(commands)
    replay_cli.add_parser(commands)
    return parser


def _add_convert_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="the model")
    parser.add_argument("dst", metavar="DST", help="a new or empty folder")
    parser.add_argument(
        "--to",
        choices=("orbax", "safetensors"),
        help="what to write (default: orbax, and safetensors where SRC is Orbax)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="type of the weights; auto keeps them, quantised ones become float32 (default: auto)",
    )
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="most bytes of one safetensors file, such as 500MB or 2GiB (default: 5GB)",
    )
    parser.add_argument(
        "--revision", metavar="NAME", help="branch, tag or commit of a hub id (default: the hub's)"
    )
    parser.add_argument(
        "--disable-progress", action="store_true", help="no progress bar (default: False)"
    )


def _add_input_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input and output")
    source = group.add_mutually_exclusive_group()
    source.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt; may be given several times. Without --prompt and --prompt-file, prompts "
        "are read from standard input, one a line",
    )
    source.add_argument(
        "--prompt-file", metavar="FILE.jsonl", help="prompts as JSON lines; - is standard input"
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="send each prompt as a user's message through the model's chat template",
    )
    group.add_argument(
        "--out", metavar="FILE.jsonl", help="where results go (default: standard output)"
    )


def run_serve(words: Sequence[str]) -> int:
    from server import option_help, options  # the one door from this package to that one

    text = option_help.asked(words)
    if text is not None:
        sys.stdout.write(text)
        return 0
    chosen = options.read(words, server_environment())

    from server import launch  # brings the web framework: only once all else is right

    return launch.run(chosen.engine, chosen.server, notes=chosen.notes)


def run_generate(args: argparse.Namespace) -> int:
    settings = flags.given(args, EngineConfig)
    config = EngineConfig.from_dict(settings)  # raises for values out of range
    params = flags.given(args, SamplingParams) | flags.given(args, BeamSearchParams)
    jobs.check_params(params)  # likewise
    work = _read_jobs(args, params)
    if not work:
        raise jobs.InputError("there are no prompts: the input is empty.")
    speaks = config.process_id == 0  # all processes compute the results, one of them tells
    if speaks:
        batch.check_out(args.out, args.prompt_file)
    else:
        settings["disable_progress"] = True
        logging.getLogger("jaxpaged").setLevel(logging.WARNING)

    from jaxpaged import LLM  # imports jax, which takes a second: only once all else is right

    settings.pop("model", None)
    with _stdout_for_results_only(config.num_processes):
        opened = LLM(config.model, **settings)
    with opened as llm, batch.ResultWriter(args.out) as results:
        start = time.perf_counter()
        outputs = batch.run_jobs(
            llm,
            work,
            params,
            use_tqdm=speaks and not config.disable_progress,
            on_finished=results.add if speaks else lambda place, output: None,
        )
        seconds = time.perf_counter() - start
        stats = llm.stats()
    if speaks:
        sys.stderr.write(batch.summary(outputs, stats, seconds) + "\n")
    failed = any(c.finish_reason == "error" for output in outputs for c in output.outputs)
    return EXIT_FAILED if failed else 0


def run_convert(args: argparse.Namespace) -> int:
    from jaxpaged import convert  # not for --help: it brings numpy, TensorStore, tokenizers

    try:
        with _terminated_by_exception():
            convert.convert(
                args.src,
                args.dst,
                dtype=args.dtype,
                to=args.to,
                max_shard_size=args.max_shard_size,
                revision=args.revision,
                progress=not args.disable_progress,
            )
    except convert.ConvertError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return 0


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """SIGTERM raises `SystemExit`, so that what was begun is cleaned up as after Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return

    def leave(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one is not to stop the cleaning
        sys.exit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except SystemExit:  # after the progress bar's last line
        sys.stderr.write("terminated\n")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _read_jobs(args: argparse.Namespace, params: dict[str, Any]) -> list[jobs.Job]:
    if args.prompt is not None:
        return jobs.jobs_from_texts(args.prompt, chat=args.chat)
    if args.prompt_file is None:
        return jobs.jobs_from_lines(_read_stdin(), chat=args.chat)
    if args.prompt_file == "-":
        return jobs.jobs_from_jsonl(_read_stdin(), chat=args.chat, params=params)
    try:
        data = Path(args.prompt_file).read_bytes()
    except OSError as error:
        raise jobs.InputError(f"--prompt-file {args.prompt_file}: {error.strerror}.") from error
    return jobs.jobs_from_jsonl(data, chat=args.chat, params=params)


def _read_stdin() -> bytes:
    if sys.stdin is None:
        raise jobs.InputError(
            "there are no prompts: standard input is closed; use --prompt or --prompt-file."
        )
    if sys.stdin.isatty():
        sys.stderr.write("Reading prompts, one a line; Ctrl-D ends them.\n")
    try:
        return sys.stdin.buffer.read()
    except OSError as error:
        raise jobs.InputError(f"standard input: {error.strerror or error}.") from error


@contextmanager
def _stdout_for_results_only(num_processes: int) -> Iterator[None]:
    """Standard output goes to standard error: the library by which processes talk greets there, in
    C++, when they first do.
    """
    if num_processes == 1 or sys.stdout is None:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    sys.exit(main())
