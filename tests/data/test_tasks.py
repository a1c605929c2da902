import json
from pathlib import Path

import pytest

from atlas_fl.data.registry import TASKS, find_tasks
from atlas_fl.errors import ConfigError


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({"text": f"t{i}", "label": i % 2}) + "\n" for i in range(20)))
    return str(path)


def test_tasks_come_in_the_order_of_their_names() -> None:
    assert [task.name for task in find_tasks(["trec", "movie", "cola"])] == ["trec", "movie", "cola"]


def test_a_users_task_stands_where_it_is_named_or_at_the_end(own: str) -> None:
    assert [task.name for task in find_tasks(["mine", "movie"], [f"mine={own}"])] == ["mine", "movie"]
    assert [task.name for task in find_tasks(["movie"], [f"mine={own}"])] == ["movie", "mine"]
    assert [task.name for task in find_tasks([], [f"mine={own}"])] == ["mine"]


def test_wrong_names_are_config_errors(own: str) -> None:
    with pytest.raises(ConfigError, match="unknown task 'moive'; did you mean 'movie'"):
        find_tasks(["moive"])
    with pytest.raises(ConfigError, match="task 'movie' is named twice; name it once and raise --clients-per-task"):
        find_tasks(["movie", "trec", "movie"])
    with pytest.raises(ConfigError, match="there is a task 'movie' already; give yours another name"):
        find_tasks(["trec"], [f"movie={own}"])
    with pytest.raises(ConfigError, match="there is a task 'mine' already"):
        find_tasks([], [f"mine={own}", f"mine={own}"])
    with pytest.raises(ConfigError, match="no task is named; known: ag_news, amazon, amazon_ratings, arousal, cifar10"):
        find_tasks([])


def test_the_promised_tasks_are_registered() -> None:
    embedded = {"movie", "amazon", "nyt_sentiment", "tweets", "trec", "pairs", "scramble", "sms"}
    glue = {"sst2", "mrpc", "cola", "qnli", "qqp", "mnli", "rte", "wnli", "stsb"}
    images = {"digits", "fashion_mnist", "cifar10", "cifar100"}
    ratings = {"movie_ratings", "amazon_ratings", "nyt_ratings", "tweet_ratings"}
    federations = {"valence", "arousal", "dominance", "senses", "given_names"}
    federations |= {"editorials_30", "editorials_100", "reviews_30"}
    tones = ("english", "german", "french", "json")
    chats = {f"{topic}_{tone}" for topic in ("types", "reviews", "sms", "definitions", "spans") for tone in tones}
    hub = {"imdb", "ag_news", "yelp", "squad", "e2e", "xsum"}
    assert set(TASKS) == embedded | federations | ratings | glue | hub | images | chats
    assert {name: TASKS[name].metric for name in ("cola", "mrpc", "qqp", "stsb", "mnli")} == {
        "cola": "mcc",
        "mrpc": "f1",
        "qqp": "f1",
        "stsb": "pearson",
        "mnli": "accuracy",
    }
    assert (TASKS["mnli"].num_labels, TASKS["stsb"].num_labels, TASKS["qnli"].max_length) == (3, 1, 256)
