"""Certificates for tests, from an authority of their own, as the PEM files that flags name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import trustme


class Files(NamedTuple):
    """A certificate with its key, and the authority that has signed it."""

    certificate: str
    key: str
    authority: str

    def flags(self) -> dict[str, str]:
        return {"tls_cert": self.certificate, "tls_key": self.key, "tls_ca": self.authority}


class Authority:
    """A certificate authority that writes into one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        directory.mkdir(exist_ok=True)
        self._authority.cert_pem.write_to_path(directory / "ca.pem")

    @property
    def pem(self) -> bytes:
        return self._authority.cert_pem.bytes()

    def issue(self, name: str, *hosts: str, days: int = 1, started_days_ago: int = 1) -> Files:
        """Write NAME.pem and NAME.key for these hosts, over files of these names."""
        now = datetime.now(UTC)
        made = self._authority.issue_cert(
            *hosts,
            not_before=now - timedelta(days=started_days_ago),
            not_after=now + timedelta(days=days),
        )
        files = Files(
            *(str(self._directory / end) for end in (f"{name}.pem", f"{name}.key", "ca.pem"))
        )
        chain = b"".join(part.bytes() for part in made.cert_chain_pems)
        for path, data in ((files.certificate, chain), (files.key, made.private_key_pem.bytes())):
            # As certbot and kubelets do it: a file is whole from its first moment on.
            fresh = Path(f"{path}.new")
            fresh.write_bytes(data)
            fresh.replace(path)
        return files
