"""Why a server cannot be reached, told before gRPC hides it: one TLS handshake with what Python itself brings.

gRPC tries a refused certificate again for ever and names no reason. Under TLS 1.3 a server refuses a client's
certificate after the client has finished its handshake, so the probe also waits for the server's first byte.
"""

import socket
import ssl

from atlas_fl.errors import ConfigError, ProtocolError
from atlas_fl.io.certs import CERT, KEY, Certs

SECONDS = 10.0
"""Longest wait of each step."""
CLOSED = "it closes the connection at once"


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of `host:port`, or of `[::1]:port`; raises `ConfigError` for anything else."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ConfigError(f"{address!r} is no address of a server; write host:port, such as fed.example.org:8470")
    return host, int(port)


def probe(host: str, port: int, certs: Certs) -> str | None:
    """None where the server is there and takes this certificate; else why it may be worth trying again.

    Raises `ProtocolError` for what no second try mends: a host that nobody knows, and a certificate that either end
    refuses. A server that closes the connection once the handshake is over refuses the certificate, as gRPC's does
    without another word, or is just ending; so this is looked at twice.
    """
    for _ in range(2):
        if (reason := _handshake(host, port, certs)) != CLOSED:
            return reason
    raise ProtocolError(_refused(host, port, certs, CLOSED))


def _handshake(host: str, port: int, certs: Certs) -> str | None:
    try:
        with (
            socket.create_connection((host, port), timeout=SECONDS) as plain,
            _context(certs).wrap_socket(plain, server_hostname=host) as secure,
        ):
            return None if secure.recv(1) else CLOSED
    except ssl.SSLCertVerificationError as error:
        raise ProtocolError(
            f"the certificate of {host}:{port} is refused here: {error.verify_message}; the server's must be made for"
            f" {host!r} (`atlas certs make --server {host}`) by the authority of {certs.folder}"
        ) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError, TimeoutError) as error:
        return _words(error)
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in reason:
            raise ProtocolError(_refused(host, port, certs, reason)) from None
        raise ProtocolError(
            f"{host}:{port} does not speak TLS as an ATLAS server does ({reason}); check host and port"
        ) from None
    except socket.gaierror as error:
        raise ProtocolError(f"host {host!r} is unknown ({error.strerror}); check the address of the server") from None
    except OSError as error:
        return _words(error)


def _context(certs: Certs) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certs.ca.decode())
    context.load_cert_chain(certs.folder / CERT, certs.folder / KEY)
    context.set_alpn_protocols(["h2"])
    return context


def _words(error: OSError) -> str:
    return str(error.strerror or error)


def _refused(host: str, port: int, certs: Certs, reason: str) -> str:
    return (
        f"the server at {host}:{port} refuses the certificate {certs.folder / CERT} ({reason}); it must be made by the"
        " server's own authority and not be expired: ask for a new folder of `atlas certs make`"
    )
