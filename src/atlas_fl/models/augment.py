"""Images moved and mirrored, as they are for training: random crops of a padded image, and horizontal flips."""

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.functional import pad


def augment(
    pixels: Shaped[Tensor, "n height width channels"], *, padding: int, flip: bool, generator: torch.Generator
) -> Shaped[Tensor, "n height width channels"]:
    """New images of the same size: each cropped somewhere out of itself with a black border, and mirrored or not.

    `padding` is the border in pixels, 0 for no crop; with `flip` every second image on average is mirrored, left to
    right. All draws come from the generator, which is one of the CPU wherever the images lie: give it the client and
    the step, `torch_generator(seed, "augment", client, round, step)`, and they are the same in every run.
    """
    count, height, width, _ = pixels.shape
    # both are drawn in any case, so that one setting does not change what the other does
    shift = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=generator).to(pixels.device)
    mirrored = (torch.rand(count, 1, generator=generator) < 0.5).to(pixels.device) & flip
    across = torch.arange(width, device=pixels.device)
    rows = shift[0] + torch.arange(height, device=pixels.device)  # (n, height)
    columns = shift[1] + torch.where(mirrored, across.flip(0), across)  # (n, width)
    bordered = pad(pixels, (0, 0, padding, padding, padding, padding))
    image = torch.arange(count, device=pixels.device)[:, None, None]
    return bordered[image, rows[:, :, None], columns[:, None, :]]
