"""Examples that a test knows to be images."""

from atlas_fl.data.task import Examples, Images


def as_images(examples: Examples) -> Images:
    assert isinstance(examples, Images)
    return examples
