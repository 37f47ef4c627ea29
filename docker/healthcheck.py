"""Exit status 0 if the server in this container is ready for requests, else 1 with the reason.

It finds the server by the variables that the server reads: JAXPAGED_PORT, and whether
JAXPAGED_SSL_CERTFILE is set.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT = 5.0


def main() -> int:
    scheme = "https" if os.environ.get("JAXPAGED_SSL_CERTFILE") else "http"
    url = f"{scheme}://127.0.0.1:{os.environ.get('JAXPAGED_PORT') or 8000}/ready"
    # The certificate is for the name that clients use, which is not 127.0.0.1.
    context = ssl._create_unverified_context() if scheme == "https" else None
    # Not through a proxy that may be set for the server's downloads.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=TIMEOUT):
            return 0
    except urllib.error.HTTPError as error:
        with error:
            reason = f"{error.code} {error.read(500).decode(errors='replace')}"
    except OSError as error:
        reason = str(error)
    sys.stderr.write(f"{url}: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
