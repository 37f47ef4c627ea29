"""`jaxpaged serve` over the scripted engine, as a process of its own:

    python -m tests.server.serve_scripted '{"step_seconds": 0.01}' --port 0 --shutdown-timeout 1

The first argument is JSON: fields of `Script`, and
  die_at    the step, from 0, at which the engine's thread dies
  hang_at   the step that never ends
  load      "hang" never ends loading; "fail" raises `ModelLoadError`
"""

from __future__ import annotations

import json
import sys
import threading
import time

from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.engine_thread import Progress
from jaxpaged.errors import ModelLoadError
from server import launch, options
from tests.server.scripted import Script, scripted_engine


def main() -> int:
    wish = json.loads(sys.argv[1])
    die_at, hang_at = wish.pop("die_at", None), wish.pop("hang_at", None)
    load = wish.pop("load", None)

    def fail_read(step: int) -> BaseException | None:
        if step == hang_at:
            threading.Event().wait()
        return SystemExit(1) if step == die_at else None

    def build(config: EngineConfig, progress: Progress) -> Engine:
        if load == "fail":
            raise ModelLoadError("The model is broken; take another.")
        if load == "hang":
            progress(3, 8, "decode[8]")
            time.sleep(600)
        return scripted_engine(
            Script(**wish, fail_read=fail_read), config, max_model_len=4096, num_blocks=8192
        )

    chosen = options.read(["scripted", *sys.argv[2:]], {})
    return launch.run(chosen.engine, chosen.server, notes=chosen.notes, build=build)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ModelLoadError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
