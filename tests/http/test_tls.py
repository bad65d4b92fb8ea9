"""HTTPS: what servers and clients take for files, whom they trust, and files that are renewed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import trustme
from aiohttp import web

from kvflow.http.listening import bound_socket, listening_on, url_of
from kvflow.http.tls import ClientContext, ServerContext, shake_hands
from kvflow.protocols.errors import LostError, MisuseError, WireError
from kvflow.protocols.wire.ranks import PoolShape, RankInfo
from kvflow.serve.http.metrics import RoleMetrics
from kvflow.serve.http.registry import registry_app
from kvflow.transports.control.registry import RankTable, RegistryClient
from tests.certificates import Authority, Files
from tests.fakes.servers import answers

HOST = "127.0.0.1"
RANK = RankInfo(0, 1, 7, "tcp://127.0.0.1:5", "local", "m", PoolShape(16, 8, 1024, 2))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def files(authority: Authority) -> Files:
    return authority.issue("server", HOST)


@asynccontextmanager
async def serving(files: Files, app: web.Application | None = None) -> AsyncIterator[str]:
    """Yield the https:// URL of a server that says hello, or of an application."""
    if app is None:
        app = web.Application()
        app.router.add_route("*", "/", answers("hello"))
    made = bound_socket(HOST, 0, "--port")
    context = ServerContext(files.certificate, files.key)
    async with listening_on(app, made, context):
        yield url_of(made, HOST, context)


async def said(url: str, context: ssl.SSLContext | bool, method: str = "GET") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.request(method, url) as answer,
    ):
        return answer.status, await answer.text()


async def test_a_client_that_trusts_the_authority_is_answered(files: Files) -> None:
    async with serving(files) as url:
        assert url.startswith("https://127.0.0.1:")
        assert await said(url, ClientContext(files.authority)) == (200, "hello")


async def test_a_client_refuses_another_authority_and_another_name(
    authority: Authority, files: Files, tmp_path: Path
) -> None:
    Authority(tmp_path / "other")
    async with serving(files) as url:
        for context in (
            ClientContext(str(tmp_path / "other/ca.pem")),
            ClientContext(),  # the system's authorities
            ClientContext(files.authority, "another.example"),
        ):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await said(url, context)


async def test_a_name_serves_in_place_of_the_host(authority: Authority) -> None:
    files = authority.issue("named", "fleet.example")
    async with serving(files) as url:
        with pytest.raises(aiohttp.ClientConnectorCertificateError, match="mismatch"):
            await said(url, ClientContext(files.authority))
        assert await said(url, ClientContext(files.authority, "fleet.example")) == (200, "hello")


async def test_a_certificate_can_be_trusted_by_itself(files: Files) -> None:
    async with serving(files) as url:
        assert await said(url, ClientContext(files.certificate)) == (200, "hello")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_plain_http_is_told_what_the_port_speaks(files: Files, method: str) -> None:
    async with serving(files) as url:
        plain = url.replace("https", "http")
        status, text = await said(plain, True, method)
        assert status == 400 and "use an https:// URL" in text
        assert await said(url, ClientContext(files.authority)) == (200, "hello")


async def test_bytes_that_are_neither_end_the_connection(files: Files) -> None:
    async with serving(files) as url:
        port = int(url.rpartition(":")[2])
        for noise in (b"\0" * 64, b"DELETE / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\nGET /"):
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(noise)
            writer.write_eof()
            try:
                await asyncio.wait_for(reader.read(), 10)
            except ConnectionResetError:
                pass
            finally:
                writer.transport.abort()
        assert await said(url, ClientContext(files.authority)) == (200, "hello")


async def serial_of(url: str, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection gets."""
    _, writer = await asyncio.open_connection(
        HOST, int(url.rpartition(":")[2]), ssl=context, server_hostname=HOST
    )
    found = writer.get_extra_info("peercert")
    writer.transport.abort()
    return str(found["serialNumber"])


async def test_a_renewed_certificate_is_used_by_the_next_connection(
    authority: Authority, files: Files
) -> None:
    client = ClientContext(files.authority)
    async with serving(files) as url, aiohttp.ClientSession() as session:
        async with session.get(url, ssl=client) as answer:
            assert await answer.text() == "hello"
        before = await serial_of(url, client)
        assert await serial_of(url, client) == before
        authority.issue("server", HOST)
        assert await serial_of(url, client) != before
        # The connection that was there goes on.
        async with session.get(url, ssl=client) as answer:
            assert await answer.text() == "hello"


async def test_half_of_a_renewed_pair_changes_nothing_until_the_other_half_comes(
    authority: Authority, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    client = ClientContext(files.authority)
    async with serving(files) as url:
        before = await serial_of(url, client)
        old_key = Path(files.key).read_bytes()
        authority.issue("server", HOST)
        new_key = Path(files.key).read_bytes()
        Path(files.key).write_bytes(old_key)
        assert await serial_of(url, client) == before
        assert await serial_of(url, client) == before
        complaints = [one for one in caplog.records if one.levelno == logging.ERROR]
        assert len(complaints) == 1 and "is not the key of" in complaints[0].getMessage()
        Path(files.key).write_bytes(new_key)
        assert await serial_of(url, client) != before


async def test_a_renewed_authority_is_trusted_by_the_next_connection(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "1"), Authority(tmp_path / "2")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(first.pem)
    client = ClientContext(str(trusted))
    async with serving(second.issue("server", HOST)) as url:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await said(url, client)
        trusted.write_bytes(first.pem + second.pem)
        assert await said(url, client) == (200, "hello")


def test_an_old_version_of_tls_is_refused(files: Files) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError):
        shake_hands(ServerContext(files.certificate, files.key), old)


def _without(path: str) -> None:
    Path(path).unlink()


def _no_pem(path: str) -> None:
    Path(path).write_bytes(b"\xff\0 no PEM")


def _damaged(path: str) -> None:
    text = Path(path).read_text()
    Path(path).write_text(text.replace("\nMI", "\nXX", 1))


def _encrypted(path: str) -> None:
    Path(path).write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")


@pytest.mark.parametrize(
    ("spoil", "which", "why"),
    [
        (_without, 0, "--tls-cert .*server.pem: No such file or directory"),
        (_without, 1, "--tls-key .*server.key: No such file or directory"),
        (_no_pem, 0, "--tls-cert .*: there is no certificate in PEM format"),
        (_no_pem, 1, "--tls-key .*: there is no private key in PEM format"),
        (_damaged, 0, "--tls-cert .*server.pem, --tls-key .*server.key: "),
        (_encrypted, 1, "--tls-key .*: the key is encrypted; store it without a password"),
    ],
)
def test_unusable_files_are_refused(
    files: Files, spoil: Callable[[str], None], which: int, why: str
) -> None:
    spoil(files[which])
    with pytest.raises(MisuseError, match=f"^{why}"):
        ServerContext(files.certificate, files.key)


@pytest.mark.parametrize("kind", [trustme.KeyType.ECDSA, trustme.KeyType.RSA])
def test_a_key_of_another_certificate_is_refused(
    files: Files, tmp_path: Path, kind: trustme.KeyType
) -> None:
    key = tmp_path / "other.key"
    trustme.CA().issue_cert(HOST, key_type=kind).private_key_pem.write_to_path(key)
    with pytest.raises(MisuseError, match=r"other.key is not the key of .*server.pem"):
        ServerContext(files.certificate, str(key))


@pytest.mark.parametrize(
    ("days", "started_days_ago", "why"),
    [(-1, 2, "certificate has expired"), (2, -1, "certificate is not yet valid")],
)
def test_dates_that_do_not_fit_are_refused(
    authority: Authority, days: int, started_days_ago: int, why: str
) -> None:
    files = authority.issue("old", HOST, days=days, started_days_ago=started_days_ago)
    with pytest.raises(MisuseError, match=f"--tls-cert .*old.pem: {why}"):
        ServerContext(files.certificate, files.key)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_without, "No such file or directory"),
        (_no_pem, "there is no certificate in PEM format"),
        (_damaged, ""),
    ],
)
def test_an_unusable_authority_is_refused(
    files: Files, spoil: Callable[[str], None], why: str
) -> None:
    spoil(files.authority)
    with pytest.raises(MisuseError, match=f"^--tls-ca .*ca.pem: {why}"):
        ClientContext(files.authority)


def test_an_authority_that_has_expired_is_refused(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    ClientContext(files.authority)
    monkeypatch.setattr("kvflow.http.tls.time.time", lambda: 2.0**36)  # in the year 4147
    with pytest.raises(MisuseError, match=r"^--tls-ca .*ca.pem: certificate has expired$"):
        ClientContext(files.authority)


async def test_without_a_file_the_certificates_of_the_system_are_trusted(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", files.authority)
    async with serving(files) as url:
        assert await said(url, ClientContext()) == (200, "hello")


async def test_a_registry_is_asked_by_https(files: Files, tmp_path: Path) -> None:
    Authority(tmp_path / "other")
    table = RankTable()
    table.put(RANK)
    async with serving(files, registry_app(table, RoleMetrics())) as url:
        place = url.removeprefix("https://")
        found: list[RankInfo] = list(
            await RegistryClient(tls=ClientContext(files.authority)).resolve(place)
        )
        assert found == table.all()
        with pytest.raises(LostError, match=f"{url}/ranks: .*certificate verify failed"):
            await RegistryClient(tls=ClientContext(str(tmp_path / "other/ca.pem"))).resolve(place)
        with pytest.raises(WireError, match=r"answered 400: 'plain HTTP .*use an https:// URL'"):
            await RegistryClient().resolve(place)
