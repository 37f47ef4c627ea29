"""Serve a model over HTTP. The same as `jaxpaged serve`; --help lists the flags."""

from __future__ import annotations

import sys

from jaxpaged.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
