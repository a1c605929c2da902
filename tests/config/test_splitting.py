import pytest

from atlas_fl.config.schema import cut_setting

TEXT = "cpu_2gb=2,movie=auto,movie-1=none,trec-0=3"


@pytest.mark.parametrize(
    ("client", "device", "expected"),
    [
        ("movie-0", "cpu_2gb", "auto"),  # the task goes before the device
        ("movie-1", "cpu_2gb", "none"),  # and the client before both
        ("trec-0", "cpu_2gb", "3"),
        ("trec-1", "cpu_2gb", "2"),
        ("trec-1", "laptop_8gb", "none"),
    ],
)
def test_a_client_is_cut_by_the_nearest_of_its_names(client: str, device: str, expected: str) -> None:
    assert cut_setting(TEXT, client=client, task=client.split("-")[0], device=device) == expected


@pytest.mark.parametrize("word", ["none", "auto", "4"])
def test_one_word_is_for_all(word: str) -> None:
    assert cut_setting(word, client="movie-0", task="movie", device="cpu_2gb") == word
