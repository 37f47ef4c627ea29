"""How many stream chunks the server sends in a second when the engine takes no time.

    python scripts/bench_server.py [--streams 64] [--tokens 400] [--rounds 3] [--chat] [--wait 0]
                                   [--profile FILE] [--out FILE]

Starts `jaxpaged serve` over the null engine (`scripts/host/null_device.py`: the real scheduler,
packing, detokenizer and server, and a device that computes nothing) as a process of its own, and
reads `--streams` completions (or chats) of `--tokens` tokens at once, each token a chunk. The
client looks for the beginnings of chunks only, so that the server is what is measured.

Told are chunks a second of wall time, and the CPU time of the event loop's thread and of the whole
process: the former is what "chunks a second on one core beside the engine's thread" means where the
machine is shared with others. --wait is the seconds that each step takes on the device.
--profile writes a cProfile of the event loop's thread there, and slows it down.
The last line of the output is JSON, which --out writes to a file as well.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from bench_report import provenance, publish

from jaxpaged.bench.wire import Client, WireError

ROOT = Path(__file__).resolve().parent.parent
_TICK = os.sysconf("SC_CLK_TCK")


def serve(argv: list[str]) -> int:
    """The server's process: `--serve PORT WAIT PROFILE`."""
    import cProfile

    from host.null_device import Sizes, null_engine, null_tokenizer

    from jaxpaged.config import EngineConfig
    from jaxpaged.engine import Engine
    from server import launch, options

    port, wait, profile = argv[0], float(argv[1]), argv[2]

    def build(config: EngineConfig, progress: Any) -> Engine:
        sizes = Sizes(max_num_seqs=256)
        engine = null_engine(sizes, tokenizer=null_tokenizer())
        if wait:
            programs: Any = engine.runner.programs
            programs.seconds = wait
        return engine

    words = ["null", "--port", port, "--disable-uvicorn-access-log", "--disable-log-stats"]
    chosen = options.read(words, {})
    if not profile:
        return launch.run(chosen.engine, chosen.server, build=build)
    profiler = cProfile.Profile()
    code = profiler.runcall(launch.run, chosen.engine, chosen.server, build=build)
    profiler.dump_stats(profile)
    return code


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of the process's threads: the event loop's, and of all."""
    found = {"loop": 0.0, "all": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        seconds = (int(fields[11]) + int(fields[12])) / _TICK
        found["all"] += seconds
        if int(task.name) == pid:
            found["loop"] += seconds
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


async def until_ready(client: Client, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with status {process.returncode}")
        try:
            if (await client.request("GET", "/ready")).status == 200:
                return
        except WireError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the server was not ready within a minute")


class Counter:
    """Counts the chunks with choices in the bytes of one stream."""

    mark = re.compile(rb'"choices":\[\{')

    def __init__(self) -> None:
        self.chunks = 0
        self._tail = b""

    def feed(self, data: bytes, _: float) -> None:
        text = self._tail + data
        self.chunks += len(self.mark.findall(text))
        # A mark that is cut in two is found with the next bytes, and a whole one only once.
        self._tail = text[-11:] if not self.mark.search(text[-11:]) else b""


async def one_round(client: Client, args: argparse.Namespace, turn: int) -> tuple[int, float]:
    """Chunks received, and the seconds that it took."""
    counters = [Counter() for _ in range(args.streams)]

    async def stream(index: int) -> None:
        fields: dict[str, Any] = {
            "max_tokens": args.tokens,
            "ignore_eos": True,
            "stream": True,
            "seed": turn * args.streams + index,
        }
        path, text = "/v1/completions", "abc" * 5
        if args.chat:
            path = "/v1/chat/completions"
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = [5 + turn, index + 2, *range(20, 40)]
        body = msgspec.json.encode(fields)
        answer = await client.request("POST", path, body, on_data=counters[index].feed)
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {answer.body.decode()}")

    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index in range(args.streams):
            tasks.create_task(stream(index))
    return sum(counter.chunks for counter in counters), time.perf_counter() - start


async def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    port = free_port()
    command = [sys.executable, __file__, "--serve", str(port), str(args.wait), args.profile or ""]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL)
    client = Client(f"http://127.0.0.1:{port}", {}, timeout=60)
    rounds = []
    try:
        await until_ready(client, process)
        await one_round(client, args, 0)
        for turn in range(1, args.rounds + 1):
            before = thread_seconds(process.pid)
            chunks, seconds = await one_round(client, args, turn)
            used = {k: v - before[k] for k, v in thread_seconds(process.pid).items()}
            rounds.append({"chunks": chunks, "seconds": seconds, **used})
        await client.close()
    finally:
        process.terminate()
        process.wait(30)
    return rounds


def main(argv: list[str]) -> int:
    if argv[:1] == ["--serve"]:
        return serve(argv[1:])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat", action="store_true", help="chats instead of completions")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds of a step on the device")
    parser.add_argument("--profile", metavar="FILE", help="of cProfile")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    rounds = asyncio.run(measure(args))
    print(f"{'':8}{'chunks':>10}{'wall':>12}{'event loop':>14}{'process':>12}")
    print(f"{'':8}{'':>10}{'chunks/s':>12}{'us a chunk':>14}{'us a chunk':>12}")
    for number, found in enumerate(rounds, start=1):
        each = [1e6 * found[name] / found["chunks"] for name in ("loop", "all")]
        print(
            f"{number:<8}{found['chunks']:>10.0f}{found['chunks'] / found['seconds']:>12.0f}"
            f"{each[0]:>14.1f}{each[1]:>12.1f}"
        )
    report = provenance("server", "bench_server.py", argv)
    report["rounds"] = rounds
    report["chunks_per_second"] = statistics.median(r["chunks"] / r["seconds"] for r in rounds)
    report["chunks_per_loop_second"] = statistics.median(
        r["chunks"] / max(r["loop"], 1e-9) for r in rounds
    )
    print()
    publish(report, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
