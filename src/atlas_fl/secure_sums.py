"""Secure sums: a server learns the sum of at least three clients' vectors, and nothing else about any of them.

    y_k = Q(x_k) + PRG(b_k) + sum_{l > k} PRG(s_kl) - sum_{l < k} PRG(s_kl)      mod 2^32
    Q(x) = round((x + c) R / 2c)      |x| <= c,  R = floor(2^30 / n)

s_kl is what HKDF makes of the secret of k and l, which X25519 gives once a run, and of the keys of this sum; b_k is the
client's own, PRG is AES-128 in counter mode. In the sum the s_kl cancel. b_k, and a key under which the server has the
s_kl of k, are shared by Shamir's scheme, t of n, so that the server can take off the b_k of a client that is in the
sum, or the s_kl of one that left before. Whoever had both would see x_k, so a client reveals one of the two, once, for
the list of survivors that t of the clients have confirmed to it.

For example c = 1, R = 4 and x = 0.5, -0.5, 1: Q is 3, 1, 4, the sum 8, and 8 * 2 c / R - 3 c = 1, as it should be.
Every client is off by c / R at most. A value beyond c is refused: it is neither clipped nor wrapped.

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning" (CCS), the variant against
a server that lies, on the complete graph, with t = floor(2 n / 3) + 1. Instead of a new key of a client for each sum
its s_kl of that sum are shared. A server and c < t clients that tell each other everything learn one sum of t - c or
more of the others; to give two lists of survivors it needs n / 3 clients that help. Each client claims with its keys
what it began with and how many it wants in the sum (`claims_that_hold`), to all alike: masks follow from the claims.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from jaxtyping import Float64, UInt32

from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.frozen import Frozen

PRIME = 2**128 + 51
"""Shamir's field: the first prime that holds every secret of 16 bytes."""
SLACK = 2**29
"""How far noise may take a sum beyond its range on either side, of 2^32: half of all wrong values are seen then."""
LEAST = 3
"""Fewest clients of a sum: with two, each would know the other's vector."""
MOST = 1024
"""Most clients of a sum, so that R is at least 2^20."""
SECRET_BYTES = 16
SHARE_BYTES = 17
COMMIT_BYTES = 32
CLAIM_BYTES = 66
"""Digests of the tensors that all clients of a sum begin with (32), and of all that a client shares (32); how many it
wants in the sum that begin with the latter (2)."""
STEPS = ("keys", "shares", "mask", "confirm", "reveal")
"""A client's answers, in their order."""
Messages: TypeAlias = Mapping[str, bytes]
"""By the client that they are from, or for; "" for everyone."""
Vector: TypeAlias = Callable[[Mapping[str, int]], Float64[np.ndarray, " d"]]
"""A client's vector, given the training examples of those who have sent keys."""
Noise: TypeAlias = UInt32[np.ndarray, " d"]
"""A client's share of the noise in a sum, in units."""
Ask: TypeAlias = Callable[[str, Mapping[str, Messages]], Mapping[str, Messages]]
"""(step, by client what it is told) -> by client that answers what it says."""


class Terms(Frozen):
    """The terms of one sum, which all who take part know before it."""

    clients: tuple[str, ...]
    about: str
    """Run, round and tensors: what was said about another sum is refused."""
    bound: float
    """The largest size c of a value."""
    slack: int = 0
    """How far noise may take the sum of the integers beyond its range."""

    def __post_init__(self) -> None:
        if not LEAST <= len(set(self.clients)) == len(self.clients) <= MOST:
            raise ProtocolError(
                f"a secure sum of {len(self.clients)} clients; allowed: {LEAST} to {MOST}, each once; bring more"
            )

    @property
    def threshold(self) -> int:
        """t: shares that give a secret, and the fewest survivors."""
        return 2 * len(self.clients) // 3 + 1

    def check_enough(self, clients: Collection[str], what: str) -> None:
        """Raise ProtocolError where so few clients give no sum."""
        if len(clients) < (least := max(LEAST, self.threshold)):
            raise ProtocolError(f"{len(clients)} of {len(self.clients)} clients {what}, and {least} are needed")

    @property
    def levels(self) -> int:
        """R: the sum of n values from 0 to R is at most 2^30, so that three of four wrong values are seen to be so."""
        return 2**30 // len(self.clients)

    @property
    def unit(self) -> float:
        """2 c / R, of which a value is a multiple."""
        return 2 * self.bound / self.levels

    def digest(self, *parts: object) -> bytes:
        """SHA-256 of these terms and parts, which no other terms or parts have."""
        return sha256(repr((self.clients, self.about, self.bound, *parts)).encode()).digest()

    def quantise(self, values: Float64[np.ndarray, " d"]) -> UInt32[np.ndarray, " d"]:
        """Q(x); raises DataError for a value beyond c, and for NaN."""
        if not (-self.bound <= values.min(initial=0.0) and values.max(initial=0.0) <= self.bound):
            raise DataError(
                f"a value of {np.nanmax(np.abs(values)):.4g} is beyond the range {self.bound:g} of a secure sum; raise"
                " --secure-range, or lower the learning rate"
            )
        return np.rint((values + self.bound) * (self.levels / (2 * self.bound))).astype(np.uint32)

    def read_sum(self, total: UInt32[np.ndarray, " d"], survivors: int) -> Float64[np.ndarray, " d"]:
        """The sum of so many clients' values; raises ProtocolError where masks are left in it."""
        raised = total + np.uint32(self.slack)  # a sum below 0 is one of nearly 2^32
        if raised.max(initial=0) > survivors * self.levels + 2 * self.slack:
            raise ProtocolError("a secure sum is none: somebody's masks do not fit; the round is lost")
        return (raised - float(self.slack)) * self.unit - survivors * self.bound


def split_secret(secret: bytes, *, points: Sequence[int], threshold: int) -> list[bytes]:
    """Shares of this secret, the values at these points of a random polynomial of degree t - 1 that is it at 0."""
    coefficients = [int.from_bytes(os.urandom(2 * SHARE_BYTES), "big") % PRIME for _ in range(threshold - 1)]
    shares = []
    for point in points:
        value = 0
        for coefficient in coefficients:
            value = value * point + coefficient
        shares.append(((value * point + int.from_bytes(secret, "big")) % PRIME).to_bytes(SHARE_BYTES, "big"))
    return shares


def join_secrets(shares: Mapping[int, Sequence[bytes]], *, threshold: int) -> list[bytes]:
    """The secrets of which each of t points has a share, sum_i y_i prod_j x_j / (x_j - x_i); raises ProtocolError."""
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares of a secret, and {threshold} are needed; the round is lost")
    points = sorted(shares)[:threshold]
    secrets = [0] * len(shares[points[0]])
    for point in points:
        above, below = 1, 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        weight = above * pow(below, -1, PRIME) % PRIME
        for place, share in enumerate(shares[point]):
            secrets[place] += weight * int.from_bytes(share, "big")
    return [(secret % PRIME).to_bytes(SHARE_BYTES, "big")[-SECRET_BYTES:] for secret in secrets]


def stream(seed: bytes, size: int) -> UInt32[np.ndarray, " size"]:
    """PRG: so many numbers of 32 bits, those of AES in counter mode under this seed, which is used once."""
    return np.frombuffer(Cipher(AES(seed), CTR(bytes(16))).encryptor().update(bytes(4 * size)), "<u4")


def add_mask(total: UInt32[np.ndarray, " d"], seed: bytes, *, minus: bool = False) -> None:
    """Add this mask to the total in its place, or take it away."""
    (np.subtract if minus else np.add)(total, stream(seed, len(total)), out=total)


def _refusal(fault: str) -> ProtocolError:
    return ProtocolError(f"in a secure sum the server {fault}; nothing more was sent: ask who runs it")


class PublicKey(NamedTuple):
    """A client's public key of a run, and its training examples, from which the weight of its vector follows."""

    public: bytes
    examples: int


@dataclass(kw_only=True, eq=False)
class KeyBook:
    """Public keys of the clients of a run; each signature is checked once."""

    run: str
    verifier: Callable[[str, bytes], ec.EllipticCurvePublicKey]
    """(client, its certificate) -> the key of its signatures, known from elsewhere than the server; raises
    ProtocolError."""
    _known: dict[tuple[str, bytes], PublicKey] = field(default_factory=dict)

    def signed(self, name: str, key: PublicKey) -> bytes:
        """The message that a client signs, once a run."""
        return repr((self.run, name, *key)).encode()

    def read(self, name: str, message: bytes) -> PublicKey:
        """The key behind the claim in a client's message: X25519's (32), examples (8), signature's size (1), both."""
        said = message[COMMIT_BYTES + CLAIM_BYTES :]
        if (name, said) not in self._known:
            key = PublicKey(said[:32], int.from_bytes(said[32:40], "big"))
            end = 41 + int.from_bytes(said[40:41], "big")
            try:
                self.verifier(name, said[end:]).verify(said[41:end], self.signed(name, key), ec.ECDSA(SHA256()))
            except InvalidSignature:
                raise _refusal(f"brings keys of {name} that it has not signed for this run") from None
            self._known[name, said] = key
        return self._known[name, said]


@dataclass(kw_only=True, eq=False)
class Identity:
    """A client in all sums of a run."""

    name: str
    book: KeyBook
    signer: ec.EllipticCurvePrivateKey
    certificate: bytes = b""
    examples: int = 0
    _private: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    _secrets: dict[tuple[str, bytes], bytes] = field(default_factory=dict)

    @cached_property
    def public(self) -> bytes:
        """The public key for everyone, signed."""
        key = PublicKey(self._private.public_key().public_bytes_raw(), self.examples)
        signature = self.signer.sign(self.book.signed(self.name, key), ec.ECDSA(SHA256()))
        head = key.public + key.examples.to_bytes(8, "big") + len(signature).to_bytes(1, "big")
        return head + signature + self.certificate

    def secret_with(self, other: str, public: bytes) -> bytes:
        """The secret of two clients in this run; raises ProtocolError for a key that no client makes."""
        if (other, public) not in self._secrets:
            try:
                shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
            except ValueError:
                raise _refusal(f"brings a public key of {other} that is none") from None
            self._secrets[other, public] = shared
        return self._secrets[other, public]


@dataclass(kw_only=True, eq=False)
class SumClient:
    """One client in one sum: it takes `STEPS` in their order, each once.

    Each raises ProtocolError for a server that does not keep to the protocol, and DataError where it may be a client.
    """

    identity: Identity
    terms: Terms
    vector: Vector
    noise: Noise | None = None
    claim: bytes = bytes(CLAIM_BYTES)
    """The model that it began with, as the others have to see it (`claims_that_hold`)."""
    survivors: tuple[str, ...] = ()
    """Clients whose y came."""
    _list: bytes = b""
    _said: int = 0
    _own: bytes = field(default_factory=lambda: os.urandom(SECRET_BYTES))
    _key: bytes = field(default_factory=lambda: os.urandom(SECRET_BYTES))
    _keys: dict[str, PublicKey] = field(default_factory=dict)
    _messages: Messages = field(default_factory=dict)
    """The messages that came with the keys of all members."""
    _channels: dict[str, bytes] = field(default_factory=dict)
    """By other client the key of what both seal for each other."""
    _seeds: dict[str, bytes] = field(default_factory=dict)
    """By other client the seed of the mask of both."""
    _shares: dict[str, bytes] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The client's."""
        return self.identity.name

    @property
    def examples(self) -> dict[str, int]:
        """Training examples of the clients whose keys came, which these have signed."""
        return {name: key.examples for name, key in self._keys.items()}

    def answer(self, step: str, told: Messages) -> Messages:
        """The answer to this step."""
        if STEPS[self._said : self._said + 1] != (step,):
            raise _refusal(f"asks for {step} after {' and '.join(STEPS[: self._said]) or 'nothing'}")
        self._said += 1
        steps = (self._public, self._share, self._mask, self._confirm, self._reveal)
        return steps[STEPS.index(step)](told)

    def _public(self, _: Messages) -> Messages:
        """For everyone the digest of b, the claim, and the public key."""
        return {"": sha256(self._own).digest() + self.claim + self.identity.public}

    def _share(self, keys: Messages) -> Messages:
        """For each client its shares of b and of the key, which it alone can read; for the server the sealed seeds."""
        self._check_names(keys, "keys")
        self._keys = {name: self.identity.book.read(name, message) for name, message in keys.items()}
        if keys[self.name] != self._public({})[""]:
            raise _refusal("brings other keys of this client than its own")
        self._messages = keys
        # with b's digest of each, which no other sum has, and its claim, which so is the same to all
        everyone = self.terms.digest(sorted(keys.items()))
        points = [self.terms.clients.index(name) + 1 for name in keys]
        own, key = (split_secret(one, points=points, threshold=self.terms.threshold) for one in (self._own, self._key))
        sealed = {}
        for name, a, b in zip(keys, own, key, strict=True):
            if name == self.name:
                self._shares[name] = a + b
                continue
            secret = self.identity.secret_with(name, self._keys[name].public)
            made = HKDF(algorithm=SHA256(), length=48, salt=None, info=everyone).derive(secret)
            self._channels[name], self._seeds[name] = made[:32], made[32:]
            sealed[name] = self._seal(name, a + b)
        seeds = b"".join(self._seeds[name] for name in sorted(self._seeds))
        return {**sealed, self.name: AESGCM(self._key).encrypt(bytes(12), seeds, None)}

    def _mask(self, shares: Messages) -> Messages:
        """For the server y: the quantised vector under the masks of those whose shares came."""
        self._check_names({*shares, self.name}, "shares")
        for name, message in shares.items():
            try:
                self._shares[name] = self._open(name, message)
            except (KeyError, InvalidTag):
                raise DataError(
                    f"shares of {name} in a secure sum are not for this client and these keys: {name} or the server"
                    " does not keep to the protocol; nothing more of this sum was sent"
                ) from None
        self._check_claims(self._shares)
        total = self.terms.quantise(self.vector(self.examples))
        if self.noise is not None:
            total += self.noise
        add_mask(total, self._own)
        for other in shares:
            add_mask(total, self._seeds[other], minus=other < self.name)
        return {"": total.astype("<u4").tobytes()}

    def _confirm(self, survivors: Messages) -> Messages:
        """For each survivor the list of them, sealed: so all can tell that they got the same."""
        self._check_names(survivors, "survivors")
        if odd := sorted(survivors.keys() - self._shares.keys()):
            raise _refusal(f"says that {odd[0]} survived, which never began")
        self._check_claims(survivors)
        self.survivors = tuple(sorted(survivors))
        self._list = self.terms.digest(sorted(self._shares), self.survivors)
        return {name: self._seal(name, self._list) for name in self.survivors if name != self.name}

    def _reveal(self, lists: Messages) -> Messages:
        """For the server the share of b of every survivor, and that of the key of each other client: one of the two."""
        confirmed = 1
        for name, message in lists.items():
            try:
                confirmed += name in self.survivors and self._open(name, message) == self._list
            except (KeyError, InvalidTag):
                continue
        if confirmed < self.terms.threshold:
            raise _refusal(
                f"has {confirmed} confirmations of the list of survivors that it gave this client, and"
                f" {self.terms.threshold} are needed: it gave others another list, or too few answered"
            )
        half = {True: slice(SHARE_BYTES), False: slice(SHARE_BYTES, None)}
        return {name: share[half[name in self.survivors]] for name, share in self._shares.items()}

    def _check_names(self, names: Collection[str], what: str) -> None:
        least = max(LEAST, self.terms.threshold)
        if len(names) < least or self.name not in names or not set(names) <= set(self.terms.clients):
            raise _refusal(f"brings {what} of {len(names)} clients; allowed: {least} or more of the agreed, with this")

    def _check_claims(self, names: Collection[str]) -> None:
        if odd := {*names}.difference(claims_that_hold({name: self._messages[name] for name in names})):
            raise DataError(
                f"in a secure sum {min(odd)} began with another model than most, or too few for its --secure began with"
                " its own and are left; nothing more of this sum was sent: bring back who left, or ask who runs the"
                " server"
            )

    def _seal(self, to: str, message: bytes) -> bytes:
        # a key is of two clients and one sum, in which each sends the other one message a step
        return AESGCM(self._channels[to]).encrypt(self._nonce(self.name < to), message, None)

    def _open(self, of: str, message: bytes) -> bytes:
        return AESGCM(self._channels[of]).decrypt(self._nonce(of < self.name), message, None)

    def _nonce(self, is_first: bool) -> bytes:
        """A nonce of this direction and of `shares`, which `mask` opens, or `confirm`, which `reveal` opens."""
        return bytes([is_first, self._said // 2, *bytes(10)])


def claims_that_hold(messages: Messages) -> list[str]:
    """The clients among these that began with what most began with, each of them with as many as it claims.

    `messages` are those of `keys`. Out of a sum of clients that began with different models the server could read
    updates: with a head of zeros an adapter has no gradient.
    """
    claims = {name: message[COMMIT_BYTES:][:CLAIM_BYTES] for name, message in messages.items()}
    common = Counter(claim[:32] for claim in claims.values()).most_common(1)
    counts = Counter(claim[:64] for claim in claims.values())
    return [
        name
        for name, claim in claims.items()
        if claim[:32] == common[0][0] and counts[claim[:64]] >= int.from_bytes(claim[64:], "big")
    ]


def open_sum(
    terms: Terms,
    *,
    commits: Messages,
    sealed: Messages,
    masked: Mapping[str, UInt32[np.ndarray, " d"]],
    revealed: Mapping[str, Messages],
) -> Float64[np.ndarray, " d"]:
    """The sum of the survivors' values at the server.

    `commits` are the digests of b of who has sent keys, `sealed` the seeds of those whose shares were handed out, the
    keys of `masked` the survivors, and `revealed` has by client what it revealed about each other one. Raises
    ProtocolError where secrets do not fit.
    """
    total = reduce(np.add, masked.values())
    names = sorted(commits)
    shares = {terms.clients.index(by) + 1: [told[name] for name in sealed] for by, told in revealed.items()}
    for name, secret in zip(sealed, join_secrets(shares, threshold=terms.threshold), strict=True):
        is_right = name not in masked or sha256(secret).digest() == commits[name]
        try:
            seeds = b"" if name in masked else AESGCM(secret).decrypt(bytes(12), sealed[name], None)
        except InvalidTag:
            is_right = False
        if not is_right:
            raise ProtocolError(f"the shares of {name} do not fit its keys; the round is lost")
        if name in masked:
            add_mask(total, secret, minus=True)
            continue
        for place, other in enumerate(other for other in names if other != name):
            if other in masked:  # they have masks with it, which nobody else takes off
                add_mask(total, seeds[SECRET_BYTES * place :][:SECRET_BYTES], minus=name > other)
    return terms.read_sum(total, len(masked))


class SumResult(Frozen):
    """A sum and who is in it."""

    total: Float64[np.ndarray, " d"]
    survivors: tuple[str, ...]
    examples: Mapping[str, int]
    """By client that has sent keys how many it has."""
    sent_bytes: Mapping[str, tuple[int, int]]
    """By client the bytes up and down beside the masked vector."""


def run_sum(terms: Terms, book: KeyBook, ask: Ask, *, size: int) -> SumResult:
    """The sum of vectors of this size, of who takes all steps up to `mask`; raises ProtocolError where it is lost.

    What a client says that is no answer leaves it out.
    """
    sizes = {way: Counter[str]() for way in ("up", "down")}
    begun = dict[str, bytes]()

    def take(step: str, told: Mapping[str, Messages], parts: Collection[str] | None = None) -> dict[str, Messages]:
        answers = {}
        for name, said in ask(step, told).items():
            wanted = {peer for peer in told if peer != name} if parts is None else {*parts}
            if said.keys() == wanted and fits(step, name, said):
                answers[name] = said
                sizes["up"][name] += sum(map(len, said.values())) if step != "mask" else 0
            sizes["down"][name] += sum(map(len, told[name].values()))
        terms.check_enough(answers, f"have answered {step}")
        begun.update({name: said[""] for name, said in answers.items() if step == "keys"})
        if step in STEPS[:3]:  # with the rest the others would give no sum
            answers = {name: answers[name] for name in claims_that_hold({name: begun[name] for name in answers})}
            terms.check_enough(answers, f"have answered {step} with as many of one start as their --secure asks for")
        return answers

    def fits(step: str, name: str, said: Messages) -> bool:
        if step in ("mask", "reveal"):
            return {*map(len, said.values())} == {4 * size if step == "mask" else SHARE_BYTES}
        try:
            return step != "keys" or bool(book.read(name, said[""]))
        except ProtocolError:
            return False

    def others(said: Mapping[str, Messages]) -> dict[str, Messages]:
        """By client what the others say to it."""
        return {name: {peer: one[name] for peer, one in said.items() if peer != name} for name in said}

    keys = {name: said[""] for name, said in take("keys", {name: {} for name in terms.clients}, ("",)).items()}
    shares = take("shares", dict.fromkeys(keys, keys), keys)
    masked = take("mask", others(shares), ("",))
    lists = take("confirm", dict.fromkeys(masked, dict.fromkeys(masked, b"survived")))
    revealed = take("reveal", others(lists), shares)
    total = open_sum(
        terms,
        commits={name: message[:COMMIT_BYTES] for name, message in keys.items()},
        sealed={name: said[name] for name, said in shares.items()},
        masked={name: np.frombuffer(said[""], "<u4") for name, said in masked.items()},
        revealed=revealed,
    )
    return SumResult(
        total=total,
        survivors=tuple(masked),
        examples={name: book.read(name, message).examples for name, message in keys.items()},
        sent_bytes={name: (sizes["up"][name], sizes["down"][name]) for name in terms.clients},
    )


def sum_in_process(
    terms: Terms, values: Mapping[str, Vector], *, size: int, examples: Mapping[str, int], noise: Mapping[str, Noise]
) -> SumResult:
    """The sum of the vectors of those here, all messages included, with their shares of the noise."""
    signers = {name: ec.generate_private_key(ec.SECP256R1()) for name in values}
    book = KeyBook(run=terms.about, verifier=lambda name, _: signers[name].public_key())
    clients = {}
    for name, vector in values.items():
        identity = Identity(name=name, book=book, signer=signers[name], examples=examples[name])
        clients[name] = SumClient(identity=identity, terms=terms, vector=vector, noise=noise.get(name))

    def ask(step: str, told: Mapping[str, Messages]) -> dict[str, Messages]:
        return {name: clients[name].answer(step, heard) for name, heard in told.items() if name in clients}

    return run_sum(terms, book, ask, size=size)
