"""`python -m jaxpaged` is the command `jaxpaged`."""

from __future__ import annotations

import sys

from jaxpaged.cli import main

sys.exit(main())
