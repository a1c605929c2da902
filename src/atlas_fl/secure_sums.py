"""Secure sums: a server learns the sum of at least three clients' vectors, and nothing else about any of them.

    y_k = Q(x_k) + PRG(b_k) + sum_{l > k} PRG(s_kl) - sum_{l < k} PRG(s_kl)      mod 2^32
    Q(x) = round((x + c) R / 2c)      |x| <= c,  R = floor(2^30 / n)

s_kl is the secret that X25519 and HKDF make of the keys of k and l, b_k the client's own, PRG is ChaCha20. In the sum
the s_kl cancel. b_k and the private key of k are shared by Shamir's scheme, t of n, so that the server can take off the
b_k of a client that is in the sum, or the s_kl of one that left before. Whoever had both would see x_k, so a client
reveals one of the two, once, for the list of survivors that t of the clients have signed.

For example c = 1, R = 4 and x = 0.5, -0.5, 1: Q is 3, 1, 4, the sum 8, and 8 * 2 c / R - 3 c = 1, as it should be.
Every client is off by c / R at most. A value beyond c is refused: it is neither clipped nor wrapped.

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning" (CCS), the variant against
a server that lies, on the complete graph, with t = floor(2 n / 3) + 1. A server and t - 1 clients that tell each other
everything learn the sum of the others and no more; to give two lists of survivors it needs n / 3 clients that help.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey as Verifier
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as new_signer
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jaxtyping import Float64, UInt32

from atlas_fl.errors import DataError, ProtocolError

PRIME = 2**256 + 297
"""Shamir's field: the first prime that holds every secret of 32 bytes."""
LEAST = 3
"""Fewest clients of a sum: with two, each would know the other's vector."""
MOST = 1024
"""Most clients of a sum, so that R is at least 2^20."""
SECRET_BYTES = 32
SHARE_BYTES = 33
PUBLIC_BYTES = 3 * 32 + 8
"""Bytes of a client's keys before the signature."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one sum, which all who take part know before it."""

    clients: tuple[str, ...]
    about: str
    """Run, round, try and tensors: what was said about another sum is refused."""
    bound: float
    """The largest size c of a value."""

    def __post_init__(self) -> None:
        if not LEAST <= len(set(self.clients)) == len(self.clients) <= MOST:
            raise ProtocolError(
                f"a secure sum of {len(self.clients)} clients; allowed: {LEAST} to {MOST}, each once; bring more"
            )

    @property
    def threshold(self) -> int:
        """t: shares that give a secret, and the fewest survivors."""
        return 2 * len(self.clients) // 3 + 1

    @property
    def levels(self) -> int:
        """R: the sum of n values from 0 to R is at most 2^30, so that three of four wrong values are seen to be so."""
        return 2**30 // len(self.clients)

    def digest(self, *parts: object) -> bytes:
        """SHA-256 of these terms and parts, which no other terms or parts have."""
        return sha256(self._root + repr(parts).encode()).digest()

    @cached_property
    def _root(self) -> bytes:
        return sha256(repr((self.clients, self.about, self.bound)).encode()).digest()

    def quantise(self, values: Float64[np.ndarray, " d"]) -> UInt32[np.ndarray, " d"]:
        """Q(x); raises ProtocolError for a value beyond c, and for NaN."""
        sizes = np.abs(values)
        if not (sizes <= self.bound).all():
            raise ProtocolError(
                f"a value of {np.nanmax(sizes):.4g} is beyond the range {self.bound:g} of a secure sum; raise"
                " --secure-range, or lower the learning rate"
            )
        return np.rint((values + self.bound) * (self.levels / (2 * self.bound))).astype(np.uint32)

    def read_sum(self, total: UInt32[np.ndarray, " d"], survivors: int) -> Float64[np.ndarray, " d"]:
        """The sum of so many clients' values; raises ProtocolError where masks are left in it."""
        if total.size and int(total.max()) > survivors * self.levels:
            raise ProtocolError("a secure sum is none: somebody's masks do not fit; the round is lost")
        return total.astype(np.float64) * (2 * self.bound / self.levels) - survivors * self.bound


def split_secret(secret: bytes, *, points: Sequence[int], threshold: int) -> list[bytes]:
    """Shares of this secret, the values at these points of a random polynomial of degree t - 1 that is it at 0."""
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [int.from_bytes(os.urandom(SHARE_BYTES + 16), "big") % PRIME for _ in range(threshold - 1)]
    shares = []
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * point + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def join_secret(shares: Mapping[int, bytes], *, threshold: int) -> bytes:
    """The secret of t shares by point, sum_i y_i prod_j x_j / (x_j - x_i); raises ProtocolError for too few."""
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares of a secret, and {threshold} are needed; the round is lost")
    points = sorted(shares)[:threshold]
    secret = 0
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        secret += int.from_bytes(shares[point], "big") * above * pow(below, -1, PRIME)
    return (secret % PRIME).to_bytes(SHARE_BYTES, "big")[-SECRET_BYTES:]


def stream(key: bytes, size: int) -> UInt32[np.ndarray, " size"]:
    """PRG: so many numbers of 32 bits, ChaCha20's of this key, which is used once."""
    return np.frombuffer(Cipher(ChaCha20(key, bytes(16)), None).encryptor().update(bytes(4 * size)), "<u4")


def _agree(own: X25519PrivateKey, other: bytes, *, use: bytes) -> bytes:
    """The secret of two clients for one use; raises ProtocolError for a key that no client makes."""
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise ProtocolError("a public key of a secure sum is none; nothing was sent: ask who runs the server") from None
    return HKDF(algorithm=SHA256(), length=SECRET_BYTES, salt=None, info=use).derive(shared)


def _refusal(fault: str) -> ProtocolError:
    return ProtocolError(f"in a secure sum the server {fault}; nothing more was sent: ask who runs it")


@dataclass(frozen=True)
class PublicKeys:
    """A client's public keys for masks and for shares, the digest of its b and its examples, with its signature."""

    mask: bytes
    share: bytes
    own: bytes
    examples: int
    signature: bytes

    @staticmethod
    def read(message: bytes) -> "PublicKeys":
        """The keys that a message holds."""
        count = int.from_bytes(message[96:PUBLIC_BYTES], "big")
        return PublicKeys(message[:32], message[32:64], message[64:96], count, message[PUBLIC_BYTES:])


def _is_signed(by: Verifier, message: bytes, signature: bytes) -> bool:
    try:
        by.verify(signature, message, ECDSA(SHA256()))
    except InvalidSignature:
        return False
    return True


def has_signed(terms: Terms, name: str, message: bytes, *, by: Verifier) -> bool:
    """Return whether these are keys that this client has signed for this sum."""
    return _is_signed(by, terms.digest("keys", name, message[:PUBLIC_BYTES]), PublicKeys.read(message).signature)


@dataclass(kw_only=True, eq=False)
class SumClient:
    """One client in one sum. It answers `shares`, `mask`, `confirm` and `reveal` in this order, each once.

    Each raises ProtocolError for a server that does not keep to the protocol, and DataError where it may be a client.
    """

    name: str
    terms: Terms
    signer: EllipticCurvePrivateKey
    verifiers: Mapping[str, Verifier]
    """Everyone's, which the site knows from elsewhere than the server."""
    examples: int = 0
    """Training examples that the weight of its vector follows from."""
    _said: list[str] = field(default_factory=list)
    _mask_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    _share_key: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    _own: bytes = field(default_factory=lambda: os.urandom(SECRET_BYTES))
    _keys: dict[str, PublicKeys] = field(default_factory=dict)
    _all_keys: bytes = b""
    _shares: dict[str, bytes] = field(default_factory=dict)
    _survivors: tuple[str, ...] = ()
    _ciphers: dict[str, ChaCha20Poly1305] = field(default_factory=dict)

    def keys(self) -> bytes:
        """The public keys for everyone, signed."""
        public = [key.public_key().public_bytes_raw() for key in (self._mask_key, self._share_key)]
        message = b"".join([*public, sha256(self._own).digest(), self.examples.to_bytes(8, "big")])
        return message + self.signer.sign(self.terms.digest("keys", self.name, message), ECDSA(SHA256()))

    def shares(self, keys: Mapping[str, bytes]) -> dict[str, bytes]:
        """For each client with keys its shares of b and of the private key, which it alone can read."""
        self._say("shares")
        self._check_names(keys, "keys")
        for name, message in keys.items():
            if not has_signed(self.terms, name, message, by=self.verifiers[name]):
                raise _refusal(f"brings keys of {name} that it has not signed for this sum")
            self._keys[name] = PublicKeys.read(message)
        if keys[self.name][:PUBLIC_BYTES] != self.keys()[:PUBLIC_BYTES]:
            raise _refusal("brings other keys of this client than its own")
        self._all_keys = self.terms.digest("all keys", sorted(keys.items()))
        points = [self.terms.clients.index(name) + 1 for name in keys]
        secrets = (self._own, self._mask_key.private_bytes_raw())
        own, key = (split_secret(one, points=points, threshold=self.terms.threshold) for one in secrets)
        return {name: self._seal(name, a + b) for name, a, b in zip(keys, own, key, strict=True)}

    def mask(self, shares: Mapping[str, bytes], values: Float64[np.ndarray, " d"]) -> UInt32[np.ndarray, " d"]:
        """y: the quantised values under the masks of those whose shares came."""
        self._say("mask")
        self._check_names(shares, "shares")
        if odd := sorted(shares.keys() - self._keys.keys()):
            raise _refusal(f"brings shares of {odd[0]}, which has no keys")
        self._shares = {name: self._open(name, message) for name, message in shares.items()}
        total = self.terms.quantise(values) + stream(self._own, len(values))
        for other in shares:
            if other != self.name:
                key = mask_key(self._mask_key, self.name, self._keys[other].mask, other, terms=self.terms)
                total += _signed(stream(key, len(values)), self.name, other)
        return total

    def confirm(self, survivors: Collection[str]) -> bytes:
        """The signature of the list of those whose y came, with which all others can tell that they got the same."""
        self._say("confirm")
        self._check_names(survivors, "survivors")
        if odd := sorted(set(survivors) - self._shares.keys()):
            raise _refusal(f"says that {odd[0]} survived, which never began")
        self._survivors = tuple(sorted(survivors))
        return self.signer.sign(self._list, ECDSA(SHA256()))

    def reveal(self, signatures: Mapping[str, bytes]) -> dict[str, bytes]:
        """The share of b of every survivor, and of the private key of everyone else: one of the two of each client."""
        self._say("reveal")
        listed = self._list
        signed = [
            name for name in self._survivors if _is_signed(self.verifiers[name], listed, signatures.get(name, b""))
        ]
        if len(signed) < self.terms.threshold:
            raise _refusal(
                f"has {len(signed)} signatures of the list of survivors that it gave this client, and"
                f" {self.terms.threshold} are needed: it gave others another list, or too few answered"
            )
        half = {True: slice(SHARE_BYTES), False: slice(SHARE_BYTES, None)}
        return {name: share[half[name in self._survivors]] for name, share in self._shares.items()}

    @property
    def _list(self) -> bytes:
        return self.terms.digest("survivors", self._all_keys, sorted(self._shares), self._survivors)

    def _say(self, step: str) -> None:
        order = ("shares", "mask", "confirm", "reveal")
        if len(self._said) == len(order) or order[len(self._said)] != step:
            raise _refusal(f"asks for {step} after {' and '.join(self._said) or 'nothing'}")
        self._said.append(step)

    def _check_names(self, names: Collection[str], what: str) -> None:
        least = max(LEAST, self.terms.threshold)
        if len(names) < least or self.name not in names or not set(names) <= set(self.terms.clients):
            raise _refusal(f"brings {what} of {len(names)} clients; allowed: {least} or more of the agreed, with this")

    def _key_with(self, other: str) -> ChaCha20Poly1305:
        if other not in self._ciphers:
            use = self.terms.digest("share", *sorted((self.name, other)))
            self._ciphers[other] = ChaCha20Poly1305(_agree(self._share_key, self._keys[other].share, use=use))
        return self._ciphers[other]

    def _seal(self, to: str, message: bytes) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._key_with(to).encrypt(nonce, message, self._all_keys + f"{self.name}>{to}".encode())

    def _open(self, of: str, message: bytes) -> bytes:
        """The shares in this message; all of them are from clients that were given the same keys."""
        try:
            return self._key_with(of).decrypt(message[:12], message[12:], self._all_keys + f"{of}>{self.name}".encode())
        except (InvalidTag, ValueError):
            raise DataError(
                f"shares of {of} in a secure sum are not for this client and these keys: {of} or the server does not"
                " keep to the protocol; nothing more of this sum was sent"
            ) from None


def mask_key(own: X25519PrivateKey, name: str, other_key: bytes, other: str, *, terms: Terms) -> bytes:
    """s_kl of two clients."""
    return _agree(own, other_key, use=terms.digest("mask", *sorted((name, other))))


def _signed(mask: UInt32[np.ndarray, " d"], name: str, other: str) -> UInt32[np.ndarray, " d"]:
    """The mask as `name` adds it: the other one of the two takes it away."""
    return mask if name < other else np.negative(mask)


def open_sum(
    terms: Terms,
    *,
    keys: Mapping[str, bytes],
    sharers: Collection[str],
    masked: Mapping[str, UInt32[np.ndarray, " d"]],
    revealed: Mapping[str, Mapping[str, bytes]],
) -> Float64[np.ndarray, " d"]:
    """The sum of the survivors' values at the server.

    `sharers` are those whose shares were handed out, the keys of `masked` the survivors, and `revealed` has by client
    what it revealed about each other one. Raises ProtocolError where secrets do not fit, or too few answered.
    """
    if len(masked) < (least := max(LEAST, terms.threshold)):
        raise ProtocolError(f"{len(masked)} of {len(terms.clients)} clients are in the sum, and {least} are needed")
    total = np.zeros_like(next(iter(masked.values())))
    for one in masked.values():
        total += one
    points = {name: place + 1 for place, name in enumerate(terms.clients)}
    for name in sharers:
        shares = {points[by]: told[name] for by, told in revealed.items() if name in told}
        secret, said = join_secret(shares, threshold=terms.threshold), PublicKeys.read(keys[name])
        if name in masked:
            is_right = sha256(secret).digest() == said.own
            total -= stream(secret, len(total))
        else:
            own = X25519PrivateKey.from_private_bytes(secret)
            is_right = own.public_key().public_bytes_raw() == said.mask
            for other in masked if is_right else ():  # they have masks with it, which nobody else takes off
                mask = stream(mask_key(own, name, PublicKeys.read(keys[other]).mask, other, terms=terms), len(total))
                total += _signed(mask, name, other)
        if not is_right:
            raise ProtocolError(f"the shares of {name} do not fit its keys; the round is lost")
    return terms.read_sum(total, len(masked))


STEPS = ("keys", "shares", "mask", "confirm", "reveal")
"""A client's answers, in their order."""


@dataclass(frozen=True, kw_only=True)
class SumResult:
    """A sum and who is in it."""

    total: Float64[np.ndarray, " d"]
    survivors: tuple[str, ...]
    sent_bytes: Mapping[str, tuple[int, int]]
    """By client the bytes up and down beside the masked vector: keys, shares, signatures."""


def sum_in_process(
    terms: Terms, values: Mapping[str, Float64[np.ndarray, " d"]], *, gone: Mapping[str, str] | None = None
) -> SumResult:
    """The sum of a simulation, all messages included; `gone` has who leaves before which step."""
    signers = {name: new_signer(SECP256R1()) for name in terms.clients}
    verifiers = {name: signer.public_key() for name, signer in signers.items()}
    clients = {
        name: SumClient(name=name, terms=terms, signer=signers[name], verifiers=verifiers) for name in terms.clients
    }

    def here(step: str) -> list[str]:
        left = {name for name, last in (gone or {}).items() if STEPS.index(last) <= STEPS.index(step)}
        return [name for name in terms.clients if name not in left]

    keys = {name: clients[name].keys() for name in here("keys")}
    sealed = {name: clients[name].shares(keys) for name in here("shares")}
    opened = {name: {by: told[name] for by, told in sealed.items()} for name in here("mask")}
    masked = {name: clients[name].mask(shares, values[name]) for name, shares in opened.items()}
    signatures = {name: clients[name].confirm(masked) for name in here("confirm")}
    revealed = {name: clients[name].reveal(signatures) for name in here("reveal")}
    total = open_sum(terms, keys=keys, sharers=sealed, masked=masked, revealed=revealed)
    up: Sequence[Mapping[str, Any]] = (keys, sealed, signatures, revealed)
    down: Sequence[Mapping[str, Any]] = (dict.fromkeys(sealed, keys), opened, dict.fromkeys(revealed, signatures))
    sizes = {name: (_size(up, name), _size(down, name)) for name in terms.clients}
    return SumResult(total=total, survivors=tuple(masked), sent_bytes=sizes)


def _size(messages: Sequence[Mapping[str, Any]], name: str) -> int:
    """Bytes of this client's messages."""
    of_client = [message[name] for message in messages if name in message]
    return sum(len(one) if isinstance(one, bytes) else sum(map(len, one.values())) for one in of_client)
