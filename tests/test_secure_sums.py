"""Secure sums: the sum to its bound in every pattern of dropouts, nothing else for a coalition, lies found out."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from scipy.stats import chisquare, kstest

from atlas_fl.errors import DataError, ProtocolError
from atlas_fl.secure_sums import (
    PRIME,
    PUBLIC_BYTES,
    SHARE_BYTES,
    STEPS,
    PublicKeys,
    SumClient,
    Terms,
    X25519PrivateKey,
    join_secret,
    mask_key,
    new_signer,
    open_sum,
    split_secret,
    stream,
    sum_in_process,
)


def terms_of(n: int, *, about: str = "run, round 1", bound: float = 8.0) -> Terms:
    return Terms(clients=tuple(f"c{k}" for k in range(n)), about=about, bound=bound)


def values_of(terms: Terms, size: int, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: draw.uniform(-1, 1, size) for name in terms.clients}


class Round:
    """Clients of one sum, with every message that has been sent."""

    def __init__(self, terms: Terms, values: dict[str, np.ndarray], signers: dict | None = None) -> None:
        self.terms, self.values = terms, values
        self.signers = signers or {name: new_signer(SECP256R1()) for name in terms.clients}
        verifiers = {name: signer.public_key() for name, signer in self.signers.items()}
        self.clients = {
            name: SumClient(name=name, terms=terms, signer=self.signers[name], verifiers=verifiers)
            for name in terms.clients
        }
        self.keys = {name: client.keys() for name, client in self.clients.items()}

    def share(self) -> "Round":
        self.sealed = {name: client.shares(self.keys) for name, client in self.clients.items()}
        return self

    def shares_for(self, name: str) -> dict[str, bytes]:
        return {by: told[name] for by, told in self.sealed.items()}

    def mask(self) -> "Round":
        self.share()
        self.masked = {
            name: client.mask(self.shares_for(name), self.values[name]) for name, client in self.clients.items()
        }
        return self

    def reveal(self) -> "Round":
        self.mask()
        self.signatures = {name: client.confirm(self.masked) for name, client in self.clients.items()}
        self.revealed = {name: client.reveal(self.signatures) for name, client in self.clients.items()}
        return self


# the parts


def test_the_field_is_a_prime_above_every_secret() -> None:
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):  # Miller and Rabin
        power = pow(base, odd, PRIME)
        assert power in (1, PRIME - 1) or any((power := power * power % PRIME) == PRIME - 1 for _ in range(twos))
    assert 2**256 < PRIME < 2 ** (8 * SHARE_BYTES)


def test_a_secret_of_three_shares_by_hand() -> None:
    # 1234 + 166 x + 94 x^2 at 1, 2 and 3
    shares = {x: value.to_bytes(SHARE_BYTES, "big") for x, value in ((1, 1494), (2, 1942), (3, 2578))}
    assert int.from_bytes(join_secret(shares, threshold=3), "big") == 1234
    with pytest.raises(ProtocolError, match="2 shares of a secret, and 3 are needed"):
        join_secret({1: shares[1], 2: shares[2]}, threshold=3)


def test_any_t_shares_give_the_secret_and_t_less_one_do_not() -> None:
    secret = bytes(range(224, 256))
    shares = dict(enumerate(split_secret(secret, points=range(1, 8), threshold=5), start=1))
    assert join_secret({x: shares[x] for x in (7, 2, 3, 6, 5)}, threshold=5) == secret
    assert join_secret({x: shares[x] for x in (7, 2, 3, 6)}, threshold=4) != secret


def test_the_stream_is_that_of_rfc_8439() -> None:
    # appendix A.1, test vector 1: key, nonce and counter zero
    assert stream(bytes(32), 4).tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_quantisation_by_hand() -> None:
    terms = terms_of(3, bound=1.0)
    assert terms.levels == 357913941 and terms.threshold == 3
    assert terms.quantise(np.array([-1.0, 1.0, 2 / 357913941 - 1])).tolist() == [0, 357913941, 1]
    total = terms.quantise(np.array([1.0])) + terms.quantise(np.array([1.0])) + terms.quantise(np.array([-1.0]))
    assert terms.read_sum(total, 3) == pytest.approx(1.0)


@pytest.mark.parametrize("value", [8.0001, -9.0, np.nan, np.inf])
def test_a_value_out_of_range_is_refused_and_not_wrapped(value: float) -> None:
    with pytest.raises(ProtocolError, match="beyond the range 8 of a secure sum; raise --secure-range"):
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
            sum_in_process(terms, values, gone=gone)
        return False
    done = sum_in_process(terms, values, gone=gone)
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
        open_sum(made.terms, keys=made.keys, sharers=made.sealed, masked=made.masked, revealed=wrong)


def test_a_sum_with_a_mask_left_in_it_is_none() -> None:
    made = Round(terms_of(4), values_of(terms_of(4), 50)).reveal()
    masked = {**made.masked, "c1": made.masked["c1"] + stream(bytes(32), 50)}
    with pytest.raises(ProtocolError, match="masks do not fit"):
        open_sum(made.terms, keys=made.keys, sharers=made.sealed, masked=masked, revealed=made.revealed)


# what a coalition learns


def attack(made: Round, colluders: list[str], victim: str) -> np.ndarray:
    """What a server that has all messages, and what these clients hold, makes of Q(x) of the victim.

    With less than t shares of the private key it guesses the missing ones.
    """
    terms, points = made.terms, {name: place + 1 for place, name in enumerate(made.terms.clients)}
    known = {points[name]: made.clients[name]._shares[victim] for name in colluders}
    own = {points[by]: told[victim] for by, told in made.revealed.items()}
    halves = {point: share[SHARE_BYTES:] for point, share in known.items()}
    guessed = [point for point in points.values() if point not in halves][: terms.threshold - len(halves)]
    key = join_secret({**halves, **dict.fromkeys(guessed, bytes(SHARE_BYTES))}, threshold=terms.threshold)
    residual = made.masked[victim] - stream(join_secret(own, threshold=terms.threshold), made.masked[victim].size)
    private = X25519PrivateKey.from_private_bytes(key)
    for other in terms.clients:
        if other != victim:
            holder = made.clients[other]._mask_key if other in colluders else private
            name, peer = (other, victim) if other in colluders else (victim, other)
            shared = mask_key(holder, name, PublicKeys.read(made.keys[peer]).mask, peer, terms=terms)
            mask = stream(shared, residual.size)
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
    lists = {name: everyone if place < 3 else everyone[1:] for place, name in enumerate(everyone)}
    signatures = {name: made.clients[name].confirm(lists[name]) for name in everyone[1:]}
    with refused("has 2 signatures of the list of survivors that it gave this client, and 5 are needed"):
        made.clients["c1"].reveal(signatures)
    with refused("has 3 signatures of the list of survivors"):
        made.clients["c4"].reveal(signatures)


def test_one_wrong_signature_does_not_end_a_round() -> None:
    made = Round(terms_of(6), values_of(terms_of(6), 3)).mask()
    signatures = {name: client.confirm(made.masked) for name, client in made.clients.items()}
    revealed = made.clients["c1"].reveal({**signatures, "c3": b"wrong"})
    assert revealed.keys() == set(made.terms.clients)


def test_nobody_reveals_both_secrets_of_a_client() -> None:
    made = Round(terms_of(6), values_of(terms_of(6), 3)).mask()
    everyone = list(made.masked)
    signatures = {name: made.clients[name].confirm(everyone) for name in everyone}
    made.clients["c1"].reveal(signatures)
    with refused("asks for confirm after shares and mask and confirm and reveal"):
        made.clients["c1"].confirm(everyone[1:])
    with refused("asks for reveal after"):
        made.clients["c1"].reveal(signatures)
    with refused("asks for confirm after shares and mask and confirm;"):
        made.clients["c2"].confirm(everyone[1:])


def test_a_list_with_too_few_without_oneself_or_with_strangers_is_refused() -> None:
    made = Round(terms_of(6), values_of(terms_of(6), 3)).mask()
    for client, survivors in (("c0", ["c0", "c1", "c2", "c3"]), ("c1", ["c0", "c2", "c3", "c4", "c5"])):
        with refused("brings survivors of [45] clients; allowed: 5 or more of the agreed, with this"):
            made.clients[client].confirm(survivors)
    with refused("brings survivors of 6 clients"):
        made.clients["c2"].confirm(["c0", "c1", "c2", "c3", "c4", "stranger"])


def test_replayed_keys_are_refused() -> None:
    first = Round(terms_of(4), values_of(terms_of(4), 3))
    again = Round(terms_of(4, about="run, round 2"), values_of(terms_of(4), 3), signers=first.signers)
    with refused("brings keys of c3 that it has not signed for this sum"):
        again.clients["c0"].shares({**again.keys, "c3": first.keys["c3"]})
    # of the same sum, too: another client's, or its own from before it was started again
    twice = Round(first.terms, first.values, signers=first.signers)
    with refused("brings keys of c2 that it has not signed"):
        twice.clients["c0"].shares({**twice.keys, "c2": twice.keys["c3"]})
    with refused("brings other keys of this client than its own"):
        twice.clients["c1"].shares({**twice.keys, "c1": first.keys["c1"]})


def test_shares_made_for_other_keys_or_another_client_are_refused() -> None:
    made = Round(terms_of(4), values_of(terms_of(4), 3)).share()
    moved = {**made.shares_for("c0"), "c2": made.sealed["c2"]["c1"]}
    with pytest.raises(DataError, match="shares of c2 in a secure sum are not for this client and these keys"):
        made.clients["c0"].mask(moved, made.values["c0"])
    without = {name: told for name, told in made.shares_for("c1").items() if name != "c1"}
    with refused("brings shares of 3 clients; allowed: 3 or more of the agreed, with this"):
        made.clients["c1"].mask(without, made.values["c1"])


def test_clients_that_were_given_different_keys_read_no_shares_of_each_other() -> None:
    made = Round(terms_of(5), values_of(terms_of(5), 3))
    fewer = {name: made.keys[name] for name in made.keys if name != "c4"}
    sealed = {name: made.clients[name].shares(fewer if name == "c3" else made.keys) for name in fewer}
    with pytest.raises(DataError, match="shares of c3 in a secure sum are not for this client and these keys"):
        made.clients["c0"].mask({name: told["c0"] for name, told in sealed.items()}, made.values["c0"])


def test_steps_out_of_order_are_refused() -> None:
    made = Round(terms_of(3), values_of(terms_of(3), 3))
    with refused("asks for confirm after nothing"):
        made.clients["c0"].confirm(["c0", "c1", "c2"])


def test_a_key_that_is_no_point_is_refused() -> None:
    made = Round(terms_of(3), values_of(terms_of(3), 3))
    from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
    from cryptography.hazmat.primitives.hashes import SHA256

    zero = bytes(64) + made.keys["c1"][64:PUBLIC_BYTES]  # X25519 with it gives zeros to everyone
    signature = made.signers["c1"].sign(made.terms.digest("keys", "c1", zero), ECDSA(SHA256()))
    with refused("a public key of a secure sum is none"):
        made.clients["c0"].shares({**made.keys, "c1": zero + signature})
