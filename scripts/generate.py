"""Run prompts offline. The same as `jaxpaged generate`; --help lists the flags."""

from __future__ import annotations

import sys

from jaxpaged.cli import main

if __name__ == "__main__":
    sys.exit(main(["generate", *sys.argv[1:]]))
