#!/usr/bin/env python3
"""Exit with 0 if the role in this container answers /livez, by HTTP or HTTPS as its settings say.

It verifies no certificate: it asks its own container, whose certificate names other hosts.
"""

import os
import ssl
import sys
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    scheme = "https" if os.environ.get("KVFLOW_TLS_CERT") else "http"
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    url = f"{scheme}://127.0.0.1:{os.environ.get('KVFLOW_PORT', '8000')}/livez"
    try:
        with opener.open(url, timeout=TIMEOUT_S):
            return 0
    except OSError as error:
        sys.stderr.write(f"{url}: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
