"""Secure sums: the sum to its bound in every pattern of dropouts, nothing else for a coalition, lies found out."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, generate_private_key
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from scipy.stats import chisquare, kstest

from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.secure_sums import (
    CLAIM_BYTES,
    COMMIT_BYTES,
    PRIME,
    SECRET_BYTES,
    SHARE_BYTES,
    SLACK,
    STEPS,
    Identity,
    KeyBook,
    Messages,
    PublicKey,
    SumClient,
    SumResult,
    Terms,
    join_secrets,
    open_sum,
    run_sum,
    split_secret,
    stream,
    sum_in_process,
)

KEY = COMMIT_BYTES + CLAIM_BYTES
"""Where the key begins in a client's first message."""


def terms_of(n: int, *, about: str = "run, round 1", bound: float = 8.0) -> Terms:
    return Terms(clients=tuple(f"c{k}" for k in range(n)), about=about, bound=bound)


def values_of(terms: Terms, size: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.uniform(-1, 1, size) for name in terms.clients}


def vectors(values: dict[str, np.ndarray]) -> dict[str, Callable[[object], np.ndarray]]:
    return {name: lambda _, one=one: one for name, one in values.items()}  # type: ignore[misc]


class Run:
    """Who takes part in the sums of a run."""

    def __init__(self, n: int, name: str = "run") -> None:
        self.signers = {f"c{k}": generate_private_key(SECP256R1()) for k in range(n)}
        self.book = KeyBook(run=name, verifier=lambda client, _: self.signers[client].public_key())
        self.identities = {
            client: Identity(name=client, book=self.book, signer=signer, examples=10)
            for client, signer in self.signers.items()
        }


class Round:
    """Clients of one sum, with every message that has been sent."""

    def __init__(self, terms: Terms, values: dict[str, np.ndarray], run: Run | None = None) -> None:
        self.terms, self.values = terms, values
        self.run = run or Run(len(terms.clients))
        self.clients = {
            name: SumClient(identity=self.run.identities[name], terms=terms, vector=vector)
            for name, vector in vectors(values).items()
        }
        self.keys = {name: client.answer("keys", {})[""] for name, client in self.clients.items()}

    def share(self) -> "Round":
        self.shares = {name: client.answer("shares", self.keys) for name, client in self.clients.items()}
        return self

    def shares_for(self, name: str) -> dict[str, bytes]:
        return {by: told[name] for by, told in self.shares.items() if by != name}

    def mask(self) -> "Round":
        self.share()
        said = {name: client.answer("mask", self.shares_for(name))[""] for name, client in self.clients.items()}
        self.masked = {name: np.frombuffer(one, "<u4") for name, one in said.items()}
        return self

    def confirm(self, name: str, survivors: list[str] | None = None) -> Messages:
        return self.clients[name].answer("confirm", dict.fromkeys(survivors or self.masked, b"survived"))

    def lists_for(self, name: str, lists: dict[str, Messages]) -> dict[str, bytes]:
        return {by: told[name] for by, told in lists.items() if by != name and name in told}

    def reveal(self) -> "Round":
        self.mask()
        lists = {name: self.confirm(name) for name in self.clients}
        self.revealed = {name: one.answer("reveal", self.lists_for(name, lists)) for name, one in self.clients.items()}
        return self

    def open(self, **other: object) -> np.ndarray:
        given = {
            "commits": {name: message[:COMMIT_BYTES] for name, message in self.keys.items()},
            "sealed": {name: told[name] for name, told in self.shares.items()},
            "masked": self.masked,
            "revealed": self.revealed,
        }
        return open_sum(self.terms, **{**given, **other})  # type: ignore[arg-type]


def sum_of(terms: Terms, values: dict[str, np.ndarray], gone: dict[str, str]) -> SumResult:
    """The sum where these clients leave before these steps."""
    run = Run(len(terms.clients))
    clients = {
        name: SumClient(identity=run.identities[name], terms=terms, vector=vector)
        for name, vector in vectors(values).items()
    }

    def ask(step: str, told: Mapping[str, Messages]) -> dict[str, Messages]:
        left = {name for name, last in gone.items() if STEPS.index(last) <= STEPS.index(step)}
        return {name: clients[name].answer(step, heard) for name, heard in told.items() if name not in left}

    return run_sum(terms, run.book, ask, size=len(values["c0"]))


# the parts


def test_the_field_is_a_prime_above_every_secret() -> None:
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin
        power = pow(base, odd, PRIME)
        assert power in (1, PRIME - 1) or any((power := power * power % PRIME) == PRIME - 1 for _ in range(twos))
    assert 2 ** (8 * SECRET_BYTES) < PRIME < 2 ** (8 * SHARE_BYTES)


def test_a_secret_of_three_shares_by_hand() -> None:
    # 1234 + 166 x + 94 x^2 at 1, 2 and 3, and twice of it
    shares = {
        x: [(times * value).to_bytes(SHARE_BYTES, "big") for times in (1, 2)]
        for x, value in enumerate((1494, 1942, 2578), 1)
    }
    assert [int.from_bytes(secret, "big") for secret in join_secrets(shares, threshold=3)] == [1234, 2468]
    with pytest.raises(ProtocolError, match="2 shares of a secret, and 3 are needed"):
        join_secrets({1: shares[1], 2: shares[2]}, threshold=3)


def join_secret(shares: dict[int, bytes], *, threshold: int) -> bytes:
    (secret,) = join_secrets({point: [share] for point, share in shares.items()}, threshold=threshold)
    return secret


def test_any_t_shares_give_the_secret_and_t_less_one_do_not() -> None:
    secret = bytes(range(240, 256))
    shares = dict(enumerate(split_secret(secret, points=range(1, 8), threshold=5), start=1))
    assert join_secret({x: shares[x] for x in (7, 2, 3, 6, 5)}, threshold=5) == secret
    assert join_secret({x: shares[x] for x in (7, 2, 3, 6)}, threshold=4) != secret


def test_the_stream_is_that_of_the_standard() -> None:
    # AES-128 of a block of zeros under a key of zeros (FIPS 197, AESAVS), the first block of counter mode
    assert stream(bytes(16), 4).tobytes().hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"


def test_quantisation_by_hand() -> None:
    terms = terms_of(3, bound=1.0)
    assert terms.levels == 357913941 and terms.threshold == 3
    assert terms.quantise(np.array([-1.0, 1.0, 2 / 357913941 - 1])).tolist() == [0, 357913941, 1]
    total = terms.quantise(np.array([1.0])) + terms.quantise(np.array([1.0])) + terms.quantise(np.array([-1.0]))
    assert terms.read_sum(total, 3) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [8.0001, -9.0, np.nan, np.inf])
def test_a_value_out_of_range_is_refused_and_not_wrapped(value: float) -> None:
    with pytest.raises(DataError, match="beyond the range 8 of a secure sum; raise --secure-range"):
        terms_of(4).quantise(np.array([0.0, value]))


@pytest.mark.parametrize("n", [2, 1025])
def test_a_sum_of_too_few_or_too_many_is_refused(n: int) -> None:
    with pytest.raises(ProtocolError, match=f"a secure sum of {n} clients; allowed: 3 to 1024"):
        terms_of(n)


# the sum


def check_pattern(seed: int) -> bool:
    """Whether a random pattern of dropouts left enough for a sum, which then is right to c / R of each client."""
    draw = np.random.default_rng(seed)
    terms = terms_of(int(draw.integers(3, 9)), bound=float(draw.uniform(1, 20)))
    values = values_of(terms, int(draw.integers(1, 30)), seed)
    gone = {name: STEPS[draw.integers(5)] for name in terms.clients if draw.random() < 0.15}
    here = {step: sum(STEPS.index(last) > STEPS.index(step) for last in gone.values()) for step in STEPS}
    here = {step: len(terms.clients) - len(gone) + count for step, count in here.items()}
    if here["reveal"] < terms.threshold:
        with pytest.raises(ProtocolError):
            sum_of(terms, values, gone)
        return False
    done = sum_of(terms, values, gone)
    assert len(done.survivors) == here["mask"]
    wanted = np.sum([values[name] for name in done.survivors], axis=0)
    assert np.abs(done.total - wanted).max() <= len(done.survivors) * terms.bound / terms.levels * (1 + 1e-6)
    return True


def test_the_sum_is_right_to_its_bound_in_random_patterns_of_dropouts() -> None:
    assert 5 < sum(check_pattern(seed) for seed in range(20)) < 20


@pytest.mark.slow
def test_the_sum_is_right_to_its_bound_in_a_thousand_patterns_of_dropouts() -> None:
    assert 300 < sum(check_pattern(seed) for seed in range(1000, 2000)) < 950


def test_wrong_shares_lose_the_round_and_give_no_sum() -> None:
    made = Round(terms_of(4), values_of(terms_of(4), 5)).reveal()
    wrong = {name: {**told, "c1": bytes(SHARE_BYTES)} for name, told in made.revealed.items()}
    with pytest.raises(ProtocolError, match="the shares of c1 do not fit its keys; the round is lost"):
        made.open(revealed=wrong)


def test_a_sum_with_a_mask_left_in_it_is_none() -> None:
    made = Round(terms_of(4), values_of(terms_of(4), 50)).reveal()
    masked = {**made.masked, "c1": made.masked["c1"] + stream(bytes(16), 50)}
    with pytest.raises(ProtocolError, match="masks do not fit"):
        made.open(masked=masked)


def test_noise_is_in_the_sum_in_units_and_may_take_it_beyond_its_range() -> None:
    terms = replace(terms_of(4), slack=SLACK)
    values = {name: np.array([-8.0, -8.0, 8.0, 0.5]) for name in terms.clients}
    noise = {name: np.array([-5, 100, 10**8, -(10**8)]).astype(np.uint32) for name in terms.clients}
    found = sum_in_process(terms, vectors(values), size=4, examples=dict.fromkeys(terms.clients, 1), noise=noise)
    # R is 2^28 and the unit 2 * 8 / 2^28 = 2^-24, by hand
    assert found.total == pytest.approx(
        [-32 - 20 / 2**24, -32 + 400 / 2**24, 32 + 4e8 / 2**24, 2 - 4e8 / 2**24], abs=5 / 2**24
    )
    odd = {**noise, "c1": np.full(4, 2**30).astype(np.uint32)}
    with pytest.raises(ProtocolError, match="masks do not fit"):
        sum_in_process(terms, vectors(values), size=4, examples=dict.fromkeys(terms.clients, 1), noise=odd)


@pytest.mark.parametrize("step", STEPS)
def test_what_is_no_answer_leaves_its_client_out_and_the_others_have_their_sum(step: str) -> None:
    made = Round(terms_of(4), values_of(terms_of(4), 5))
    made.clients = {
        name: SumClient(identity=made.run.identities[name], terms=made.terms, vector=vector)
        for name, vector in vectors(made.values).items()
    }

    def ask(asked: str, told: dict[str, Messages]) -> dict[str, Messages]:
        said = {name: dict(made.clients[name].answer(asked, heard)) for name, heard in told.items()}
        if asked == step:
            said["c2"] = {peer: message[:-1] for peer, message in said["c2"].items()}
            said["c2"].pop("c0", None)
        return said

    done = run_sum(made.terms, made.run.book, ask, size=5)  # type: ignore[arg-type]
    assert set(done.survivors) == set(made.terms.clients) - ({"c2"} if step in STEPS[:3] else set())
    assert done.total == pytest.approx(sum(made.values[name] for name in done.survivors), abs=1e-6)


# what a coalition learns


def attack(made: Round, colluders: list[str], victim: str) -> np.ndarray:
    """What a server that has all messages, and what these clients hold, makes of Q(x) of the victim.

    With less than t shares of the key of its seeds it guesses the missing ones, and takes zeros for the seeds.
    """
    terms, points = made.terms, {name: place + 1 for place, name in enumerate(made.terms.clients)}
    known = {points[name]: made.clients[name]._shares[victim] for name in colluders}
    own = {points[by]: told[victim] for by, told in made.revealed.items()}
    halves = {point: share[SHARE_BYTES:] for point, share in known.items()}
    guessed = [point for point in points.values() if point not in halves][: terms.threshold - len(halves)]
    key = join_secret({**halves, **dict.fromkeys(guessed, bytes(SHARE_BYTES))}, threshold=terms.threshold)
    residual = made.masked[victim] - stream(join_secret(own, threshold=terms.threshold), made.masked[victim].size)
    others = sorted({*terms.clients} - {victim})
    try:
        seeds = AESGCM(key).decrypt(bytes(12), made.shares[victim][victim], None)
    except InvalidTag:
        seeds = bytes(SECRET_BYTES * len(others))
    for place, other in enumerate(others):
        seed = seeds[SECRET_BYTES * place :][:SECRET_BYTES]
        mask = stream(made.clients[other]._seeds[victim] if other in colluders else seed, residual.size)
        residual = residual - mask if victim < other else residual + mask
    return residual


def uniform_p(numbers: np.ndarray) -> float:
    """The smaller p of a chi-square test of the upper byte and a Kolmogorov-Smirnov test of the numbers."""
    counts = np.bincount(numbers >> 24, minlength=256)
    return min(chisquare(counts).pvalue, kstest(numbers / 2**32, "uniform").pvalue)


def test_a_server_and_t_less_one_clients_see_uniform_numbers_and_with_one_more_the_vector() -> None:
    terms = terms_of(7)
    made = Round(terms, values_of(terms, 20_000)).reveal()
    assert terms.threshold == 5
    wanted = terms.quantise(made.values["c6"])
    assert (attack(made, ["c0", "c1", "c2", "c3", "c4"], "c6") == wanted).all()
    residual = attack(made, ["c0", "c1", "c2", "c3"], "c6")
    assert (residual != wanted).mean() > 0.999
    assert uniform_p(residual) > 1e-6
    assert uniform_p(made.masked["c6"]) > 1e-6
    assert uniform_p(wanted) < 1e-12  # the tests can fail


# a server that lies


def refused(match: str) -> pytest.RaisesExc:
    return pytest.raises(ProtocolError, match=match)


def test_different_lists_of_survivors_are_found_out() -> None:
    made = Round(terms_of(6), values_of(terms_of(6), 3)).mask()
    everyone = list(made.masked)
    lists = {name: made.confirm(name, everyone if name < "c3" else everyone[1:]) for name in everyone[1:]}
    with refused("has 2 confirmations of the list of survivors that it gave this client, and 5 are needed"):
        made.clients["c1"].answer("reveal", made.lists_for("c1", lists))
    with refused("has 3 confirmations of the list of survivors"):
        made.clients["c4"].answer("reveal", made.lists_for("c4", lists))


def test_one_wrong_confirmation_does_not_end_a_round_and_another_client_s_counts_for_nothing() -> None:
    made = Round(terms_of(6), values_of(terms_of(6), 3)).mask()
    lists = {name: made.confirm(name) for name in made.clients}
    heard = {**made.lists_for("c1", lists), "c3": b"wrong"}
    assert made.clients["c1"].answer("reveal", heard).keys() == set(made.terms.clients)
    moved = {
        **made.lists_for("c2", lists),
        "c3": lists["c4"]["c2"],
        "c0": lists["c2"]["c0"],
    }  # one moved, one sent back
    with refused("has 4 confirmations of the list"):
        made.clients["c2"].answer("reveal", moved)


def test_nobody_reveals_both_secrets_of_a_client() -> None:
    made = Round(terms_of(6), values_of(terms_of(6), 3)).mask()
    everyone = list(made.masked)
    lists = {name: made.confirm(name) for name in everyone}
    made.clients["c1"].answer("reveal", made.lists_for("c1", lists))
    with refused("asks for confirm after keys and shares and mask and confirm and reveal"):
        made.confirm("c1", everyone[1:])
    with refused("asks for reveal after"):
        made.clients["c1"].answer("reveal", made.lists_for("c1", lists))
    with refused("asks for confirm after keys and shares and mask and confirm;"):
        made.confirm("c2", everyone[1:])


def test_a_list_with_too_few_without_oneself_or_with_strangers_is_refused() -> None:
    made = Round(terms_of(6), values_of(terms_of(6), 3)).mask()
    for client, survivors in (("c0", ["c0", "c1", "c2", "c3"]), ("c1", ["c0", "c2", "c3", "c4", "c5"])):
        with refused("brings survivors of [45] clients; allowed: 5 or more of the agreed, with this"):
            made.confirm(client, survivors)
    with refused("brings survivors of 6 clients"):
        made.confirm("c2", ["c0", "c1", "c2", "c3", "c4", "stranger"])


def test_keys_that_their_client_has_not_signed_for_this_run_are_refused() -> None:
    run = Run(4)
    made = Round(terms_of(4), values_of(terms_of(4), 3), run)
    other = Run(4, "another run")
    other.signers.update(run.signers)
    earlier = Identity(name="c3", book=other.book, signer=run.signers["c3"], examples=10)
    with refused("brings keys of c3 that it has not signed for this run"):
        made.clients["c0"].answer("shares", {**made.keys, "c3": made.keys["c3"][:KEY] + earlier.public})
    with refused("brings keys of c2 that it has not signed"):
        made.clients["c1"].answer("shares", {**made.keys, "c2": made.keys["c3"]})
    count = KEY + 32 + 7  # the last byte of the number of examples, which its weight follows from
    more = made.keys["c3"][:count] + b"\xff" + made.keys["c3"][count + 1 :]
    with refused("brings keys of c3 that it has not signed"):
        made.clients["c2"].answer("shares", {**made.keys, "c3": more})


def test_replayed_keys_are_found_out() -> None:
    run, terms = Run(4), terms_of(4)
    first = Round(terms, values_of(terms, 3), run)
    again = Round(terms, values_of(terms, 3), run)  # of the same round, after the server was started again
    with refused("brings other keys of this client than its own"):
        again.clients["c3"].answer("shares", {**again.keys, "c3": first.keys["c3"]})
    shares = {
        name: again.clients[name].answer("shares", {**again.keys, "c3": first.keys["c3"]})
        for name in ("c0", "c1", "c2")
    }
    heard = {by: told["c0"] for by, told in shares.items() if by != "c0"}
    late = Round(terms, values_of(terms, 3), run)
    late.share()
    with pytest.raises(DataError, match="shares of c3 in a secure sum are not for this client and these keys"):
        again.clients["c0"].answer("mask", {**heard, "c3": late.shares["c3"]["c0"]})


def test_each_sum_has_other_masks_although_keys_are_of_the_run() -> None:
    run, terms = Run(3), terms_of(3)
    made = [Round(terms, values_of(terms, 50), run).mask() for _ in range(2)]
    seeds = [{*one._seeds.values()} for each in made for one in each.clients.values()]
    assert len(set.union(*seeds)) == 2 * 3
    assert not (made[0].masked["c0"] == made[1].masked["c0"]).any()


def test_shares_made_for_other_keys_or_another_client_are_refused() -> None:
    made = Round(terms_of(4), values_of(terms_of(4), 3)).share()
    moved = {**made.shares_for("c0"), "c2": made.shares["c2"]["c1"]}
    with pytest.raises(DataError, match="shares of c2 in a secure sum are not for this client and these keys"):
        made.clients["c0"].answer("mask", moved)
    few = dict(list(made.shares_for("c1").items())[:1])
    with refused("brings shares of 2 clients; allowed: 3 or more of the agreed, with this"):
        made.clients["c1"].answer("mask", few)


def test_clients_that_were_given_different_keys_read_no_shares_of_each_other() -> None:
    made = Round(terms_of(5), values_of(terms_of(5), 3))
    fewer = {name: made.keys[name] for name in made.keys if name != "c4"}
    shares = {name: made.clients[name].answer("shares", fewer if name == "c3" else made.keys) for name in fewer}
    with pytest.raises(DataError, match="shares of c3 in a secure sum are not for this client and these keys"):
        made.clients["c0"].answer("mask", {name: told["c0"] for name, told in shares.items() if name != "c0"})


def test_steps_out_of_order_are_refused() -> None:
    made = Round(terms_of(3), values_of(terms_of(3), 3))
    with refused("asks for confirm after keys;"):
        made.clients["c0"].answer("confirm", {})
    with refused("asks for all after keys;"):
        made.clients["c0"].answer("all", {})


def test_a_key_that_is_no_point_is_refused() -> None:
    run = Run(3)
    made = Round(terms_of(3), values_of(terms_of(3), 3), run)
    zero = PublicKey(bytes(32), 10)  # X25519 with it gives zeros to everyone
    signature = run.signers["c1"].sign(run.book.signed("c1", zero), ECDSA(SHA256()))
    said = bytes(32) + (10).to_bytes(8, "big") + len(signature).to_bytes(1, "big") + signature
    with refused("brings a public key of c1 that is none"):
        made.clients["c0"].answer("shares", {**made.keys, "c1": made.keys["c1"][:KEY] + said})
