"""The hub of models and data sets: whether it answers, before its own client tries for half a minute."""

from urllib.error import HTTPError
from urllib.request import urlopen

REACH_SECONDS = 5


def hub_fault() -> str | None:
    """The reason why the hub cannot be reached; None where it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        with urlopen(constants.ENDPOINT, timeout=REACH_SECONDS):
            return None
    except HTTPError:
        return None  # an answer, whatever it says
    except OSError as error:
        return str(getattr(error, "reason", error))
