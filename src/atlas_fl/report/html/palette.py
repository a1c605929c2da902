"""Colours of charts: those of series and of kinds of messages, in a light and a dark theme.

Each colour is moved until it stands out from the ground of its theme. Figures as files have the light theme.
"""

from collections.abc import Mapping

# Okabe and Ito (2008) without yellow and black, then four of Tol's muted scheme: safe for every common deficiency.
TASK_COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#999933", "#332288", "#44AA99"),
)
KIND_COLOURS = {
    "adapter": "#0072B2",
    "head": "#56B4E9",
    "fingerprint": "#CC79A7",
    "weights": "#009E73",
    "activation": "#D55E00",
    "gradient": "#E69F00",
    "label": "#882255",
    "mask": "#999933",
    "control": "#888888",
    "correction": "#661100",
    "features": "#332288",
    "halves": "#DDCC77",
    "report": "#117733",
    "frozen": "#44AA99",
}

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "ground": "#ffffff",
        "panel": "#f5f6f8",
        "ink": "#1c2127",
        "faint": "#59616b",
        "line": "#d5d9de",
        "accent": "#0063a0",
        "warning": "#a33f00",
        "empty": "#eceef1",
    },
    "dark": {
        "ground": "#14181d",
        "panel": "#1d232a",
        "ink": "#e8ebee",
        "faint": "#a3adb8",
        "line": "#39424c",
        "accent": "#6cb8f0",
        "warning": "#ff9d66",
        "empty": "#262d35",
    },
}
"""By theme and name: the ground, what lies on it, and the inks."""
LEAST_CONTRAST = 3.0
"""Contrast of graphics with the ground (WCAG 2.1, 1.4.11)."""
STEP = 0.05


def colour(index: int) -> str:
    """The CSS variable of a task, a method or another series, by its place."""
    return f"var(--series-{index % len(TASK_COLOURS)})"


def kind_colour(kind: str) -> str:
    """The CSS variable of a kind of message."""
    return f"var(--kind-{kind})"


def colour_variables() -> str:
    """The style sheet that sets the variables of both themes; paper is light."""
    light, dark = (_variables(theme) for theme in ("light", "dark"))
    return (
        f":root{{color-scheme:light dark;{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )


def series_colours(theme: str) -> dict[str, str]:
    """The colours of series and kinds of messages in a theme, by the name of their variable."""
    ground = THEMES[theme]["ground"]
    series = {f"series-{index}": value for index, value in enumerate(TASK_COLOURS)}
    kinds = {f"kind-{kind}": value for kind, value in KIND_COLOURS.items()}
    return {name: contrasting(value, ground=ground) for name, value in (series | kinds).items()}


def theme_colours(theme: str) -> dict[str, str]:
    """All colours of a theme, by the name of their variable."""
    return {**THEMES[theme], **series_colours(theme)}


def _variables(theme: str) -> str:
    return "".join(f"--{name}:{value};" for name, value in theme_colours(theme).items())


def contrasting(value: str, *, ground: str, least: float = LEAST_CONTRAST) -> str:
    """The colour, moved towards black or white, away from the ground, until it has this contrast with it."""
    end = 0 if luminance(ground) > 0.18 else 255
    parts = _parts(value)
    while contrast(_hex(parts), ground) < least:
        parts = [part + STEP * (end - part) for part in parts]
    return _hex(parts)


def contrast(first: str, second: str) -> float:
    """The contrast ratio of WCAG 2: from 1 to 21."""
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def luminance(value: str) -> float:
    """The relative luminance of WCAG 2: 0 of black, 1 of white."""
    shares = [part / 255 for part in _parts(value)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _parts(value: str) -> list[float]:
    return [float(int(value[place : place + 2], 16)) for place in (1, 3, 5)]


def _hex(parts: list[float]) -> str:
    return "#" + "".join(f"{round(part):02x}" for part in parts)
